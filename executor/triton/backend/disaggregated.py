"""The model `disaggregated_serving_bls`: a request's context on one model, its generation on another.

```
client ──► row ──► context model ──── first token, context_phase_params
 ▲                    │ when streaming, the token is sent at once
 │                    ▼
 └──────────────── generation model   its answer begins with the first token again, which a stream leaves out
```
Rows of a request go their ways side by side; `calls.py` joins what comes of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from executor.triton.backend.calls import CallError, JoinedCall
from executor.triton.backend.responses import error_response, send_final
from executor.triton.backend.rows import RowError, request_parameters, tensors_by_name
from executor.triton.backend.runtime import tidy_up
from executor.triton.backend.settings import ParameterError, Settings

_PARAMETERS = frozenset({"context_model_name", "generation_model_name"})
_NEEDED = ("output_ids", "sequence_length", "finish_reason", "prefix_ids", "batch_index")
"""Outputs that are asked for, whether or not the client wants them."""
_OF_THE_CONTEXT = {"return_context_logits": "context_logits"}
"""What only the context model can tell: its answer is kept for the last response."""
_CANCELLED = 5
_MAX_IN_PROGRESS = 256
_WATCH_SECONDS = 0.1


class TritonPythonModel:
    """One instance of the model, for many requests at once."""

    def initialize(self, args: dict[str, str]) -> None:
        tidy_up()
        try:
            settings = Settings(args, _PARAMETERS)
            self._context = settings.text("context_model_name", "context")
            self._generation = settings.text("generation_model_name", "generation")
        except ParameterError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._is_decoupled = settings.is_decoupled
        self._is_batched = settings.config["max_batch_size"] > 0
        self._threads = ThreadPoolExecutor(_MAX_IN_PROGRESS, thread_name_prefix="disaggregated")
        self._calls: set[JoinedCall] = set()
        self._calls_lock = threading.Lock()
        self._stopping = threading.Event()
        self._watch = threading.Thread(target=self._watch_calls, name="cancellation", daemon=True)
        self._watch.start()

    def execute(self, requests: list[Any]) -> None:
        """Start all of them; each answers by itself."""
        for request in requests:
            try:
                tensors, num_rows = tensors_by_name(request, self._is_batched)
            except RowError as error:
                send_final(request.get_response_sender(), error_response("INVALID_ARGUMENT", str(error)))
                continue
            if "stop" in tensors and tensors["stop"].any():
                self._stop(request)
                continue
            call = JoinedCall(request, num_rows, self._is_decoupled)
            with self._calls_lock:
                self._calls.add(call)
            parameters = request_parameters(request)
            for row in range(num_rows):
                values = {name: tensor[row : row + 1] for name, tensor in tensors.items()}
                self._threads.submit(self._answer, call, row, values, parameters)

    def finalize(self) -> None:
        self._stopping.set()
        self._threads.shutdown()
        self._watch.join(timeout=5)

    def _answer(self, call: JoinedCall, row: int, tensors: dict[str, Any], parameters: dict[str, Any]) -> None:
        try:
            self._run(call, row, tensors, parameters)
        except CallError as error:
            call.fail(error.args[0])
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must end
            call.fail(pb_utils.TritonError(f"{self._context}, {self._generation}: {error}"))
        with self._calls_lock:
            call.num_running -= 1
            if not call.num_running:
                self._calls.remove(call)

    def _run(self, call: JoinedCall, row: int, tensors: dict[str, Any], parameters: dict[str, Any]) -> None:
        [context] = self._call(self._context, "context_only", call, tensors, parameters)
        params = context.pop("context_phase_params", None)
        if params is None:
            call.end_row(row, context)  # its first token was the last, or it was stopped
            return
        if call.is_stopped:
            call.end_row(row, _with_reason(context, _CANCELLED))
            return
        streams = "streaming" in tensors and bool(tensors["streaming"].any())
        kept = {name: context[name] for name in _OF_THE_CONTEXT.values() if name in context}
        none_yet = {name: values[:, :0] for name, values in kept.items()}
        if streams:
            call.send(row, _with_reason({**context, **none_yet}, 0))
        inputs = {name: values for name, values in tensors.items() if name not in _OF_THE_CONTEXT}
        inputs["context_phase_params"] = params
        is_first, is_last = streams, False
        for outputs in self._call(self._generation, "generation_only", call, inputs, parameters):
            is_last = bool(outputs["finish_reason"].any())
            rest = _without_first_token(outputs) if is_first else outputs
            is_first = False
            if is_last:
                call.end_row(row, {**rest, **kept})
            elif rest["sequence_length"].any():
                call.send(row, {**rest, **none_yet})
        if not is_last:
            raise RuntimeError("the generation ended without a finish reason")

    def _call(
        self, model: str, request_type: str, call: JoinedCall, tensors: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """The responses of a model to one row, each as its outputs by name."""
        outputs = set(_NEEDED) | call.wanted
        if request_type == "context_only":
            outputs.add("context_phase_params")
        inner = pb_utils.InferenceRequest(
            model_name=model,
            requested_output_names=sorted(outputs),
            inputs=[pb_utils.Tensor(name, values) for name, values in tensors.items()],
            request_id=call.inner_id,
            timeout=call.remaining_microseconds(time.monotonic()),
            parameters={**parameters, "request_type": request_type},
        )
        answers = inner.exec(decoupled=True) if self._is_decoupled else [inner.exec()]
        for answer in answers:
            if answer.has_error():
                raise CallError(answer.error())
            found = {tensor.name(): np.array(tensor.as_numpy()) for tensor in answer.output_tensors()}
            if found:  # Triton closes a stream with an empty response
                yield found

    def _stop(self, request: Any) -> None:
        """Answer a request to stop others with an empty response; those end soon with what they have."""
        sender, request_id = request.get_response_sender(), request.request_id()
        if not request_id:
            message = "stop is set, but the request has no id; give it the id of the request to stop"
            send_final(sender, error_response("INVALID_ARGUMENT", message))
            return
        for call in self._open_calls():
            if call.request_id == request_id:
                call.is_stopped = True
        send_final(sender, pb_utils.InferenceResponse([]))

    def _open_calls(self) -> list[JoinedCall]:
        with self._calls_lock:
            return list(self._calls)

    def _watch_calls(self) -> None:
        while not self._stopping.wait(_WATCH_SECONDS):
            self._stop_calls()

    def _stop_calls(self) -> None:
        """Stop what was asked to, and what nobody listens to any more.

        Each time anew, for a call may just be on its way from the one model to the other.

        Not a loop in the thread's function, which would keep a call while it waits.
        """
        for call in self._open_calls():
            if call.has_ended or call.is_abandoned():
                call.is_stopped = True  # its rows that still run have nobody to tell
            if call.is_stopped:
                for model in (self._context, self._generation):
                    answer = _stop_request(model, call.inner_id).exec(decoupled=self._is_decoupled)
                    if self._is_decoupled:
                        list(answer)


def _stop_request(model: str, request_id: str) -> Any:
    """Asks a model to end the requests of an id."""
    zero = np.zeros((1, 1), np.int32)
    values = {"input_ids": zero, "input_lengths": zero, "request_output_len": zero, "stop": np.ones((1, 1), bool)}
    return pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=["output_ids"],
        inputs=[pb_utils.Tensor(name, value) for name, value in values.items()],
        request_id=request_id,
    )


def _with_reason(outputs: Mapping[str, Any], finish_reason: int) -> dict[str, Any]:
    return {**outputs, "finish_reason": np.array([[finish_reason]], np.int32)}


def _without_first_token(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs of a streamed response `[1, 1, n]`, as they are after its first token, which has been sent already."""
    rest = dict(outputs)
    rest["output_ids"] = outputs["output_ids"][..., 1:]
    rest["sequence_length"] = np.maximum(outputs["sequence_length"] - 1, 0)
    rest["prefix_ids"] = outputs["output_ids"][..., :1]
    if "output_log_probs" in outputs:
        rest["output_log_probs"] = outputs["output_log_probs"][..., 1:]
    return rest
