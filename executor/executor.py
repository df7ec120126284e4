"""The Executor: requests in, responses out, an engine and its KV cache in between."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import numpy as np

from batch_manager import BatchManager, IterationRow, RefusalReason, RequestRefused
from batch_manager import Request as ScheduledState
from batch_manager.kv import KvCacheManager
from engine_build.engine_dir import EngineDirectory
from executor.api.config import ExecutorConfig, ModelType
from executor.api.errors import DuplicateRequestError, InvalidRequestError, QueueFullError, RequestError
from executor.api.request import Request
from executor.api.response import Response
from executor.api.stats import IterationStats, RequestStatsPerIteration
from executor.api.support import check_supported
from executor.engines.open import engine_spec, open_engine
from executor.live_request import LiveRequest, ResponseListener
from executor.loop import ExecutorLoop
from executor.model_runner import ModelRunner
from executor.pool_size import available_memory, pool_size
from executor.response_queue import ResponseQueue
from executor.sampling import Sampler, SamplingSpec
from executor.sampling_spec import sampling_spec
from executor.scheduler_config import batch_manager_config, kv_cache_manager_config
from executor.speculation import Drafter
from executor.stats import StatsRecorder

_logger = logging.getLogger(__name__)


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
        """
        if isinstance(model_type, ExecutorConfig):
            model_type, executor_config = ModelType.DECODER_ONLY, model_type
        if model_type is not ModelType.DECODER_ONLY:
            raise InvalidRequestError(
                f"model_type is {model_type.name}; only DECODER_ONLY is offered", field="model_type"
            )
        self.config = executor_config or ExecutorConfig()
        check_supported(self.config, "executor_config")

        self.engine_dir = Path(model_path)
        self.manifest = EngineDirectory.open(self.engine_dir)
        kv = self.config.kv_cache_config
        self.spec = engine_spec(self.manifest, kv.kv_cache_dtype)
        scheduling = batch_manager_config(self.config, self.spec)
        self.pool_size = pool_size(kv, self.spec, scheduling.max_batch_size, available_memory())
        _logger.info(self.pool_size.reason)

        started = time.monotonic()
        self._engine = open_engine(
            self.manifest,
            num_blocks=self.pool_size.num_blocks,
            kv_cache_dtype=kv.kv_cache_dtype,
            num_threads=self.config.num_threads,
            deterministic=self.config.deterministic,
        )
        self._engine.warm_up()
        _logger.info("engine ready after %.1f s", time.monotonic() - started)

        blocks = KvCacheManager(kv_cache_manager_config(self.config, self.pool_size.num_blocks, self.spec))
        self._batch_manager = BatchManager(scheduling, blocks)
        self._stats = StatsRecorder(
            self._batch_manager,
            blocks,
            max_iterations=self.config.iter_stats_max_iterations,
            max_request_iterations=self.config.request_stats_max_iterations,
            max_table_rows=self.config.iteration_table_max_rows,
        )
        self._responses = ResponseQueue()
        self._ids = itertools.count(1)
        self._loop = ExecutorLoop(
            self._batch_manager,
            ModelRunner(self._engine, scheduling.min_rows_per_sequence),
            Sampler(self.spec.vocab_size),
            Drafter(self.config.decoding_config and self.config.decoding_config.lookahead_decoding_config),
            self._stats,
        )
        self._is_shut_down = False
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
        request.validate()
        self._check_against_engine(request)
        request_id = next(self._ids)
        live = LiveRequest(request_id, request, listener or self._responses.put, self.spec.tokens_per_block)
        sequences = [
            self._sequence(request_id if index == 0 else next(self._ids), request, index)
            for index in range(request.num_sequences)
        ]
        if listener is None:
            self._responses.open(request_id)
        try:
            self._loop.submit(live, sequences)
        except RequestRefused as refusal:
            self._responses.discard(request_id)
            raise _request_error(refusal) from None
        except RequestError:
            self._responses.discard(request_id)
            raise
        return request_id

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """Queue several requests; the first refusal is raised and those before it stay queued."""
        return [self.enqueue_request(request) for request in requests]

    def cancel_request(self, id: int) -> None:
        """End a request. It gets exactly one final response: `CANCELLED`, or the one it was about to get anyway."""
        self._loop.cancel(id)

    def await_responses(
        self,
        id: int | Sequence[int] | timedelta | None = None,
        timeout: timedelta | None = None,
        *,
        ids: Sequence[int] | None = None,
    ) -> list[Response] | list[list[Response]]:
        """Responses that are ready, waiting for the first.

        Args:
            id: one request: a list of its responses. Several: a list of lists. None, or a `timedelta` meant as
                timeout: those of any request.
            timeout: how long to wait; `None` waits as long as it takes.

        Returns:
            Empty lists after a timeout.

        Raises:
            InvalidRequestError: a request is unknown, or its final response was taken before.
        """
        if isinstance(id, timedelta):
            id, timeout = None, id
        seconds = None if timeout is None else timeout.total_seconds()
        wanted = id if ids is None else ids
        if wanted is None:
            return self._responses.take_any(seconds)
        if isinstance(wanted, int):
            return self._responses.take(wanted, seconds)
        return self._responses.take_each(wanted, seconds)

    def get_num_responses_ready(self, id: int | None = None) -> int:
        return self._responses.num_ready(id)

    def can_enqueue_requests(self) -> bool:
        return not self._is_shut_down

    # -- looking inside -----------------------------------------------------------------------------------------------

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Iterations since the last call, as many as `iter_stats_max_iterations` allows."""
        return self._stats.take_iterations()

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """Per-request statistics since the last call; off unless `request_stats_max_iterations` is set."""
        return self._stats.take_request_stats()

    def iteration_table(self) -> list[IterationRow]:
        """Who ran in each iteration and how far it came; off unless `iteration_table_max_rows` is set."""
        return list(self._stats.table())

    @property
    def last_progress(self) -> float:
        """`time.monotonic()` when the last iteration finished."""
        return self._loop.last_progress

    @property
    def num_unfinished_requests(self) -> int:
        return self._loop.num_live

    # -- life

    def shutdown(self) -> None:
        """Stop the loop and release the engine. Requests that have not ended get an error response."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._loop.stop()
            self._engine.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- from a request to what the scheduler and the sampler need

    def _check_against_engine(self, request: Request) -> None:
        spec = self.spec
        num_prompt_tokens = len(request.input_token_ids)
        if num_prompt_tokens > spec.max_input_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens; the engine's max_input_len is {spec.max_input_len}",
                field="input_token_ids",
            )
        if num_prompt_tokens + request.max_tokens > spec.max_seq_len:
            raise InvalidRequestError(
                f"prompt ({num_prompt_tokens}) and max_tokens ({request.max_tokens}) make "
                f"{num_prompt_tokens + request.max_tokens} tokens; the engine's max_seq_len is {spec.max_seq_len}",
                field="max_tokens",
            )
        _check_token_ids("input_token_ids", request.input_token_ids, spec.vocab_size)

    def _sequence(self, sequence_id: int, request: Request, index: int) -> tuple[ScheduledState, SamplingSpec]:
        stop_words = request.stop_words or []
        scheduled = ScheduledState(
            sequence_id,
            request.input_token_ids,
            request.max_tokens,
            end_id=request.effective_end_id,
            stop_token_ids=[word[0] for word in stop_words if len(word) == 1],
            stop_words=[word for word in stop_words if len(word) > 1],
            min_new_tokens=request.sampling_config.min_tokens or 0,
            priority=request.priority,
            tenant=request.tenant,
            arrival_time=time.monotonic(),
            allotted_time=request.allotted_time_seconds,
            cache_salt=request.cache_salt_id,
            retention=request.kv_cache_retention_config,
        )
        return scheduled, sampling_spec(request, self.config, self.spec.vocab_size, sequence_index=index)


def _check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    try:
        ids = np.asarray(token_ids)
    except (ValueError, OverflowError):
        ids = np.empty(0, object)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequestError(f"{name} must be a list of integers", field=name)
    wrong = (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        at = int(wrong.argmax())
        raise InvalidRequestError(f"{name}[{at}] is {ids[at]}; token ids are in [0, {vocab_size})", field=name)


def _request_error(refusal: RequestRefused) -> RequestError:
    if refusal.reason in (RefusalReason.QUEUE_FULL_REQUESTS, RefusalReason.QUEUE_FULL_TOKENS):
        return QueueFullError(str(refusal))
    if refusal.reason is RefusalReason.DUPLICATE_ID:
        return DuplicateRequestError(str(refusal))
    return InvalidRequestError(str(refusal))
