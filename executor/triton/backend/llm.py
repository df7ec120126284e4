"""The model `tensorrt_llm`: hands requests to the Executor's process and its answers to Triton.

```
Triton ── execute() ──► rows ──► link ──► executor process
                                  │
clients ◄── response senders ◄─ lanes ◄─┴─ events, stats    link's thread
             is_cancelled? ───────── cancel                  cancellation thread
```
What tensors mean is decided by the Executor's process; here they are only taken apart.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import triton_python_backend_utils as pb_utils

from executor.triton.backend.lanes import Lanes
from executor.triton.backend.link import Link, LinkError
from executor.triton.backend.live import Batch, LiveBatches
from executor.triton.backend.metrics import Metrics
from executor.triton.backend.responses import error_response, send_final
from executor.triton.backend.rows import RowError, request_parameters, row_values, tensors_by_name
from executor.triton.backend.runtime import server_process, tidy_up
from executor.triton.backend.settings import ParameterError, string_parameters
from executor.triton.backend.wire import FrameWriter, frame


class TritonPythonModel:
    """One instance of the model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Connect to the Executor's process, which may have to load the engine first.

        Raises:
            TritonModelException: one line that says what is wrong.
        """
        tidy_up()
        config = json.loads(args["model_config"])
        self._is_decoupled: bool = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._is_batched = config["max_batch_size"] > 0
        parameters = string_parameters(config)
        self._live = LiveBatches()
        self._lanes = Lanes(self._deliver)
        self._stopping = threading.Event()
        self._metrics = Metrics(args["model_name"], args["model_version"])
        settings = {
            "server_process": server_process(),
            "model_name": args["model_name"],
            "model_version": args["model_version"],
            "max_batch_size": config["max_batch_size"],
            "decoupled": self._is_decoupled,
            "queue": config.get("dynamic_batching", {}),
            "parameters": parameters,
        }
        try:
            worker = _required(parameters, "executor_worker_path")
            period = _milliseconds(parameters, "cancellation_check_period_ms", 100)
            self._link = Link([worker, "triton-worker"], settings, self._on_frame, self._on_lost)
        except (LinkError, ParameterError) as error:
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from None
        self._watch = threading.Thread(target=self._watch_clients, args=[period], name="cancellation", daemon=True)
        self._watch.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand all of them over in one frame. Answers are sent by the link's thread."""
        writer = FrameWriter()
        rows: list[dict[str, Any]] = []
        batches: list[Batch] = []
        cancelled: list[int] = []
        for request in requests:
            try:
                tensors, num_rows = tensors_by_name(request, self._is_batched)
                if "stop" in tensors and tensors["stop"].any():
                    cancelled += self._stop(request)
                    continue
                parameters = request_parameters(request)
                timeout = request.timeout()
                keys = self._live.reserve(num_rows)
                values = [row_values(tensors, index, writer) for index in range(num_rows)]
            except RowError as error:
                send_final(request.get_response_sender(), error_response("INVALID_ARGUMENT", str(error)))
                continue
            batch = Batch(request, keys, self._is_decoupled)
            self._live.add(batch, [bool(row.get("streaming", False)) for row in values])
            batches.append(batch)
            rows += (
                {"key": key, "timeout_us": timeout, "parameters": parameters, "tensors": row}
                for key, row in zip(keys, values, strict=True)
            )
        if rows or cancelled:
            try:
                self._link.send(writer.frame({"submit": rows, "cancel": cancelled}))
            except LinkError as error:
                for batch in batches:
                    self._live.fail(batch, "UNAVAILABLE", str(error))

    def finalize(self) -> None:
        """Disconnect; the Executor's process ends when all instances have."""
        self._stopping.set()
        self._link.close()
        self._lanes.close()
        self._watch.join(timeout=5)

    def _stop(self, request: Any) -> list[int]:
        """Answer a request to stop others with an empty response; returns the rows to cancel."""
        sender = request.get_response_sender()
        request_id = request.request_id()
        if not request_id:
            message = "stop is set, but the request has no id; give it the id of the request to stop"
            send_final(sender, error_response("INVALID_ARGUMENT", message))
            return []
        keys = self._live.keys_of(request_id)
        send_final(sender, pb_utils.InferenceResponse([]))
        return keys

    def _on_frame(self, header: dict[str, Any], body: memoryview) -> None:
        if "events" in header:
            self._lanes.put(header["events"], body)
        for key, code, message in header.get("errors", ()):
            batch = self._live.batch_of(key)
            if batch is not None:
                self._cancel([other for other in self._live.fail(batch, code, message) if other != key])
        if "stats" in header:
            self._metrics.update(header["stats"])
        if "transfers" in header:
            self._metrics.count_transfers(header["transfers"])
        if "lengths" in header:
            self._metrics.observe_lengths(header["lengths"])

    def _deliver(self, events: list[list[Any]], body: memoryview) -> None:
        self._cancel(self._live.deliver(events, body))

    def _on_lost(self, reason: str) -> None:
        for batch in self._live.snapshot():
            self._live.fail(batch, "UNAVAILABLE", reason)

    def _watch_clients(self, period: float) -> None:
        while not self._stopping.wait(period):
            self._cancel_abandoned()

    def _cancel_abandoned(self) -> None:
        """Cancel what nobody listens to any more. Asking Triton takes microseconds and holds up no other batch.

        Not a loop in the thread's function: it would keep its last batch, and Triton waits for every sender to be gone
        before it unloads a model.
        """
        for batch in self._live.snapshot():
            if batch.is_abandoned():
                self._cancel(self._live.fail(batch, "CANCELLED", "the client cancelled the request"))

    def _cancel(self, keys: list[int]) -> None:
        if keys:
            try:
                self._link.send(frame({"submit": [], "cancel": keys}))
            except LinkError:
                return  # a process that is gone has nothing to cancel


def _required(parameters: dict[str, str], name: str) -> str:
    if name not in parameters:
        raise ParameterError(f"parameter {name} is not set; `executor triton-repo` fills it in")
    return parameters[name]


def _milliseconds(parameters: dict[str, str], name: str, default: int) -> float:
    """In seconds."""
    value = parameters.get(name, str(default))
    try:
        milliseconds = int(value)
    except ValueError:
        milliseconds = 0
    if milliseconds < 1:
        raise ParameterError(f"parameter {name} is {value!r}; it must be a number of milliseconds, at least 1")
    return milliseconds / 1000
