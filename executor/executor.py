"""The Executor: requests in, responses out, an engine and its KV cache in between."""

from __future__ import annotations

import atexit
import copy
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import overload

from batch_manager import IterationRow, RequestRefused, WaitReason
from engine_build.engine_dir import EngineDirectory
from executor.api.config import ExecutorConfig, ModelType
from executor.api.errors import InvalidRequestError, RequestError, UnsupportedFeatureError
from executor.api.kv_cache import KVCacheEventManager
from executor.api.kv_ledger import KvLedger, PinnedPrefix
from executor.api.receipt import RequestReceipt
from executor.api.request import Request
from executor.api.response import Response
from executor.api.role import InstanceRole
from executor.api.stats import DebugTensorsPerIteration, IterationStats, RequestStatsPerIteration
from executor.assembly import assemble
from executor.kv_account import KvAccount
from executor.kv_events import KvEventSource
from executor.live_limits import LiveLimits, change_limits, current_limits
from executor.live_request import ResponseListener
from executor.request_intake import RequestIntake, Submission, request_error
from executor.response_queue import ResponseQueue
from executor.transfer.intake import ContextIntake
from executor.transfer.stats import TransferStats


class Executor:
    """Runs one engine.

    Construction loads the engine, allocates the KV pool and warms up; the executor takes requests when it returns.
    Safe to use from any thread. Use it as a context manager, or call `shutdown`.
    """

    def __init__(
        self,
        model_path: str | Path,
        model_type: ModelType | ExecutorConfig = ModelType.DECODER_ONLY,
        executor_config: ExecutorConfig | None = None,
    ) -> None:
        """Load an engine directory.

        Args:
            model_path: what `engine-build` wrote.
            model_type: `DECODER_ONLY`; a configuration given in its place is taken as one.
            executor_config: how to run it.

        Raises:
            EngineDirectoryError: the directory is missing, damaged, or of another format version or target.
            InvalidRequestError, UnsupportedFeatureError: a configuration field is wrong or refused, by name.
            OSError: `trace_path` cannot be written.
        """
        if isinstance(model_type, ExecutorConfig):
            executor_config = model_type
        else:
            _check_model(model_path, model_type)
        self.config = config = executor_config or ExecutorConfig()
        config.validate()

        self.engine_dir = Path(model_path)
        self.manifest = EngineDirectory.open(self.engine_dir)
        with ExitStack() as resources:
            parts = assemble(self.manifest, config, resources)
            if parts.transfers is not None:
                parts.transfers.start(parts.loop.batch_manager_lock, parts.loop.wake)
            self._resources = resources.pop_all()
        self.spec = parts.spec
        self.pool_size = parts.pool_size
        self._engine = parts.engine
        self._batch_manager, self._kv, self._kv_upkeep = parts.batch_manager, parts.kv, parts.kv_upkeep
        self._stats, self._receipts = parts.stats, parts.receipts
        self._debug_tensors, self._grammars, self._transfers = parts.debug_tensors, parts.grammars, parts.transfers
        self._loop = parts.loop
        self._kv_account = KvAccount(self._kv, self._kv_upkeep, self._loop.batch_manager_lock)
        self._contexts = ContextIntake(config.cache_transceiver_config, self._transfers)
        self._intake = RequestIntake(config, self.spec, self._grammars, self._contexts)
        self._responses = ResponseQueue()
        self._ids = itertools.count(1)
        self._is_shut_down = False
        self._is_paused = False
        atexit.register(self.shutdown)  # the interpreter must not go under the feet of a loop that computes
        self._loop.start()

    # -- requests ---------------------------------------------------------------------------------------------------

    def enqueue_request(self, request: Request, *, listener: ResponseListener | None = None) -> int:
        """Queue a request and return its id.

        Args:
            request: checked here; it must not be changed afterwards.
            listener: gets the request's responses, on the loop's thread, instead of `await_responses`.

        Raises:
            RequestError: of the kind that says what is wrong, with the field at fault.
        """
        return self._enqueue([request], listener)[0]

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """Queue several requests and return their ids: all of them, or, when one is refused, none.

        Raises:
            RequestError: as `enqueue_request`, for the first request that is wrong.
        """
        return self._enqueue(requests, None)

    def _enqueue(self, requests: Sequence[Request], listener: ResponseListener | None) -> list[int]:
        submissions: list[Submission] = []
        for request in requests:
            submissions.append(
                self._intake.accept(request, next(self._ids), lambda: next(self._ids), listener or self._responses.put)
            )
        ids = [submission.live.request_id for submission in submissions]
        if listener is None:
            for request_id in ids:
                self._responses.open(request_id)
        try:
            self._loop.submit(submissions)
        except (RequestRefused, RequestError) as error:
            for request_id in ids:
                self._responses.discard(request_id)
            raise request_error(error) if isinstance(error, RequestRefused) else error from None
        return ids

    def cancel_request(self, id: int) -> None:
        """End a request. It gets exactly one final response: `CANCELLED`, or the one it was about to get anyway."""
        self._loop.cancel(id)

    @overload
    def await_responses(
        self, id: int | timedelta | None = None, timeout: timedelta | None = None
    ) -> list[Response]: ...

    @overload
    def await_responses(self, id: Sequence[int], timeout: timedelta | None = None) -> list[list[Response]]: ...

    @overload
    def await_responses(self, *, ids: Sequence[int], timeout: timedelta | None = None) -> list[list[Response]]: ...

    def await_responses(
        self,
        id: int | Sequence[int] | timedelta | None = None,
        timeout: timedelta | None = None,
        *,
        ids: Sequence[int] | None = None,
    ) -> list[Response] | list[list[Response]]:
        """Responses that are ready, waiting for the first.

        Args:
            id: one request: a list of its responses. Several: a list of lists, once each has some; a request whose
                final response was taken before has an error response. None, or a `timedelta` meant as timeout: those
                of any request.
            timeout: how long to wait; `None` waits as long as it takes, or until the executor is shut down.
            ids: several requests.

        Returns:
            Empty lists after a timeout.

        Raises:
            InvalidRequestError: the one request is unknown, or its final response was taken before; `timeout` is no
                `timedelta`.
            ExecutorShutDownError: the executor is shut down, and every response has been taken.
        """
        if isinstance(id, timedelta):
            id, timeout = None, id
        if not isinstance(timeout, timedelta | None):
            raise InvalidRequestError(f"timeout is {timeout!r}; it must be a timedelta, or None", field="timeout")
        seconds = None if timeout is None else timeout.total_seconds()
        wanted = id if ids is None else ids
        if wanted is None:
            return self._responses.take_any(seconds)
        if isinstance(wanted, int):
            return self._responses.take(wanted, seconds)
        return self._responses.take_each(wanted, seconds)

    def get_num_responses_ready(self, id: int | None = None) -> int:
        """Responses that `await_responses` would give at once, of one request or of all."""
        return self._responses.num_ready(id)

    def can_enqueue_requests(self) -> bool:
        return not self._is_shut_down

    # -- looking inside ---------------------------------------------------------------------------------------------

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Iterations since the last call, as many as `iter_stats_max_iterations` allows."""
        return self._stats.take_iterations()

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """Per-request statistics since the last call; off unless `request_stats_max_iterations` is set."""
        return self._stats.take_request_stats()

    def get_latest_debug_tensors(self) -> list[DebugTensorsPerIteration]:
        """Tensors of the iterations since the last call, as `debug_config` asks for them; else none."""
        return [] if self._debug_tensors is None else self._debug_tensors.take()

    def get_kv_cache_event_manager(self) -> KVCacheEventManager | None:
        """Where KV cache events come from; `None` unless `kv_cache_config.event_buffer_max_size` is set.

        Each event is handed out once, whichever manager it is taken from.
        """
        if not self.config.kv_cache_config.event_buffer_max_size:
            return None
        window_size = self._kv.config.attention_window or self.spec.max_seq_len
        loop = self._loop
        source = KvEventSource(self._kv, loop.batch_manager_lock, lambda: loop.is_stopping, window_size)
        return KVCacheEventManager(source.take)

    def explain_request(self, id: int) -> WaitReason | None:
        """Why a request's first sequence waits, or did not advance in the last iteration; `None`: it did (not
        upstream's).

        Raises:
            UnknownRequestError: the request has ended, or never was.
        """
        with self._loop.batch_manager_lock:
            return self._batch_manager.explain(id)

    def get_receipt(self, id: int) -> RequestReceipt:
        """What a request cost that has ended: tokens, pauses and time; at hand when its final response is (not
        upstream's).

        Raises:
            ReceiptNotFoundError: it lives, never was, or is not among the last `receipts_max_requests` that ended.
        """
        return self._receipts.get(id)

    def iteration_table(self) -> list[IterationRow]:
        """Who ran in each iteration and how far it came; off unless `iteration_table_max_rows` is set."""
        return self._stats.table()

    @property
    def longest_sequence(self) -> int:
        """Tokens, prompt and output, that one request may have: the engine's, or fewer if the KV pool is smaller."""
        # The last token's keys and values are never computed.
        return min(self.spec.max_seq_len, self.pool_size.num_blocks * self.spec.tokens_per_block + 1)

    @property
    def last_progress(self) -> float:
        """`time.monotonic()` when the last iteration finished."""
        return self._loop.last_progress

    @property
    def num_unfinished_requests(self) -> int:
        return self._loop.num_unfinished

    def kv_ledger(self) -> KvLedger:
        """Who holds which KV block, what the tiers hold, what is pinned (not upstream's). O(blocks)."""
        return self._kv_account.ledger()

    def pin_prefix(
        self, input_token_ids: Sequence[int], *, cache_salt_id: int | None = None, duration: timedelta | None = None
    ) -> PinnedPrefix:
        """Keep what is cached of a prompt's beginning in the pool, whole blocks of it (not upstream's).

        Args:
            input_token_ids: the prefix; requests that computed it have run before.
            cache_salt_id: theirs.
            duration: for how long; `None`: until `unpin_prefix`.

        Raises:
            InvalidRequestError: nothing of the prefix is in the pool, or an argument is wrong.
            PinQuotaExceededError: `kv_cache_config.max_pinned_fraction` of the pool would be exceeded.
        """
        return self._kv_account.pin(input_token_ids, cache_salt_id, duration)

    def unpin_prefix(self, pin_id: int) -> None:
        """Undo `pin_prefix` (not upstream's). Raises `InvalidRequestError` when there is no such pin (any more)."""
        self._kv_account.unpin(pin_id)

    # -- changing how it runs ---------------------------------------------------------------------------------------

    @property
    def limits(self) -> LiveLimits:
        """The limits in force."""
        with self._loop.batch_manager_lock:
            return current_limits(self._batch_manager)

    def change_limits(self, limits: LiveLimits) -> None:
        """Go on with other limits; what runs or waits is not lost (not upstream's).

        Raises:
            InvalidRequestError: a limit is beyond the engine's, or too small for a live request; nothing has changed.
        """
        with self._loop.batch_manager_lock:
            change_limits(self._batch_manager, limits, self.spec)

    def pause(self) -> None:
        """Run no iteration until `resume`: requests are still taken and keep what they hold, their allotted time goes
        on (not upstream's)."""
        with self._loop.batch_manager_lock:
            self._batch_manager.pause()
            self._is_paused = True

    def resume(self) -> None:
        """Undo `pause`."""
        with self._loop.batch_manager_lock:
            self._batch_manager.resume()
            self._is_paused = False

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    # -- other instances --------------------------------------------------------------------------------------------

    @property
    def role(self) -> InstanceRole:
        """Which requests are taken: `BOTH` without a `cache_transceiver_config`, but for those that need one."""
        return self._contexts.role

    def change_role(self, role: InstanceRole) -> None:
        """Take other requests from now on; those that were taken go on, and leased contexts stay (not upstream's).

        Raises:
            InvalidRequestError: the executor was opened without a `cache_transceiver_config`.
        """
        self._contexts.change_role(role)

    @property
    def transfer_address(self) -> str | None:
        """HOST:PORT where other instances ask for contexts; `None` without a `cache_transceiver_config`."""
        return None if self._transfers is None else self._transfers.address

    def get_transfer_stats(self) -> TransferStats | None:
        """What was exchanged with other instances so far; `None` without a `cache_transceiver_config`."""
        if self._transfers is None:
            return None
        with self._loop.batch_manager_lock:
            return copy.deepcopy(self._transfers.stats)

    # -- life -------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Stop the loop and release the engine. Requests that have not ended get an error response.

        Raises:
            TraceWriteError: some of the trace could not be written; everything is released nevertheless.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        atexit.unregister(self.shutdown)
        self._loop.stop()
        self._responses.close()
        self._resources.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()


def _check_model(model_path: object, model_type: object) -> None:
    """What upstream's other constructors took is refused by name."""
    if isinstance(model_path, bytes | bytearray | memoryview):
        raise UnsupportedFeatureError(
            "engine_buffer is not supported: an engine is opened from its directory", field="engine_buffer"
        )
    if isinstance(model_type, str | Path):
        raise UnsupportedFeatureError(
            "encoder_model_path is not supported: only decoder-only models are offered", field="encoder_model_path"
        )
    if model_type is not ModelType.DECODER_ONLY:
        name = model_type.name if isinstance(model_type, ModelType) else repr(model_type)
        raise InvalidRequestError(f"model_type is {name}; only DECODER_ONLY is offered", field="model_type")
