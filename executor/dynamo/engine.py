"""Our Executor as an engine of Dynamo's worker, which owns registration, endpoints, signals and draining.

```
 Dynamo's frontend ──request plane──► dynamo Worker (Rust) ──► ExecutorEngine.generate
                                          │ cancelled ──────────► abort           │ GenerationService
                                          │                                       ▼
 Dynamo's router ◄──event plane──── KvEventPublisher ◄── KvEventFeed ◄──── Executor
                                    SnapshotPublisher ◄── StatsFeed ◄──────────┘
```
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, PushSource
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm.exceptions import DynamoException, EngineShutdown, InvalidArgument, Unknown

from executor.api.errors import ErrorCode, RequestError
from executor.api.kv_cache import KVCacheEvent
from executor.api.role import InstanceRole
from executor.api.stats import IterationStats
from executor.dynamo.chunks import context_chunk, delta_chunk, ended_chunk, final_chunk
from executor.dynamo.handover import Ended, from_json
from executor.dynamo.kv_event_batches import KvEventBatches
from executor.dynamo.requests import read_request
from executor.serving.events import Delta, Finished
from executor.serving.generation import GenerationService
from executor.serving.generation_request import GenerationRequest
from executor.serving.interface import ServedExecutor
from executor.serving.kv_event_feed import KvEventFeed
from executor.serving.stats_feed import StatsFeed

_LAST_CHUNKS_SECONDS = 0.25
"""Between the end of the last request and that of the connections, which Dynamo's worker cuts without a look at what is
still on its way through them."""


class ExecutorEngine(LLMEngine):  # type: ignore[misc]
    """Serves an executor to Dynamo. The executor outlives it."""

    def __init__(
        self,
        executor: ServedExecutor,
        end_ids: Sequence[int],
        model_directory: str,
        model_name: str,
        num_blocks: int,
        role: InstanceRole,
        drain_seconds: float,
        on_ready: Callable[[int], None],
        on_broken: Callable[[], None],
    ) -> None:
        """Bind.

        Args:
            executor: records KV cache events.
            end_ids: the model's end tokens.
            model_directory: what the frontend reads, see `model_directory.py`.
            model_name: shown to clients.
            num_blocks: of the KV pool.
            role: which part of the requests it does.
            drain_seconds: how long open requests may go on when the worker is to end.
            on_ready: called with the worker's id right before it is found by others.
            on_broken: called when the executor has stopped by itself and can serve nobody.
        """
        self._executor = executor
        self._end_ids = tuple(end_ids)
        self._model_directory = model_directory
        self._model_name = model_name
        self._num_blocks = num_blocks
        self._role = role
        self._drain_seconds = drain_seconds
        self._on_ready = on_ready
        self._on_broken = on_broken
        self._worker_id = 0
        self._service: GenerationService | None = None
        self._stats: StatsFeed | None = None
        self._kv_events: KvEventFeed | None = None
        self._request_ids: dict[str, str] = {}
        """Of live requests: by Dynamo's id, ours. A migrated request may come back with an id that it had before."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        """Not used: the command line makes engine and configuration (`executor dynamo-worker`)."""
        raise NotImplementedError("use executor dynamo-worker")

    async def start(self, worker_id: int) -> EngineConfig:
        """Begin to take requests; called on the event loop that serves them."""
        self._worker_id = worker_id
        self._service = GenerationService(self._executor, None, end_ids=self._end_ids)
        self._stats = StatsFeed(self._executor)
        events = self._executor.get_kv_cache_event_manager()
        self._kv_events = None if events is None else KvEventFeed(events)
        spec = self._executor.spec
        limits = self._executor.limits
        return EngineConfig(
            model=self._model_directory,
            served_model_name=self._model_name,
            llm=LlmRegistration(
                context_length=spec.max_seq_len,
                kv_cache_block_size=spec.tokens_per_block,
                total_kv_blocks=self._num_blocks,
                max_num_seqs=limits.max_batch_size,
                max_num_batched_tokens=limits.max_num_tokens,
            ),
        )

    async def on_endpoint_ready(self, endpoint: Any) -> None:  # noqa: ARG002
        self._on_ready(self._worker_id)

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """One request's chunks. Leaving the generator cancels what has not ended."""
        normalize_request_token_ids(request)
        try:
            wanted = read_request(request, self._role)
            if self._role is InstanceRole.GENERATION:
                handed = from_json(request.get("prefill_result") or {})
                if not isinstance(handed, Ended) and wanted.max_tokens == len(handed.first_gen_tokens):
                    handed = Ended("length", handed.first_gen_tokens)
                if isinstance(handed, Ended):
                    yield ended_chunk(handed, len(request["token_ids"]))
                    return
                wanted.context_phase_params = handed
            async for chunk in self._generate(wanted, context.id()):
                yield chunk
        except RequestError as error:
            if error.code is ErrorCode.UNAVAILABLE and self._service is not None and not self._service.is_draining:
                self._on_broken()
            raise _dynamo_error(error) from error

    async def _generate(self, wanted: GenerationRequest, dynamo_id: str) -> AsyncGenerator[dict[str, Any], None]:
        assert self._service is not None
        context = Delta(0, "", [])
        """Of a context instance: the first token. It leaves with what is handed on, in the one chunk that is read."""
        try:
            with await self._service.start(wanted) as stream:
                self._request_ids[dynamo_id] = stream.accepted.request_id
                async for event in stream:
                    if isinstance(event, Delta):
                        if self._role is InstanceRole.CONTEXT:
                            context.absorb(event)
                        else:
                            yield delta_chunk(event)
                    elif isinstance(event, Finished):
                        yield (
                            context_chunk(context, event) if self._role is InstanceRole.CONTEXT else final_chunk(event)
                        )
        finally:
            self._request_ids.pop(dynamo_id, None)

    async def abort(self, context: Any) -> None:
        """The client has gone, or the frontend has cancelled."""
        request_id = self._request_ids.get(context.id())
        if request_id is not None and self._service is not None:
            self._service.abort(request_id)

    async def is_quiescent(self) -> bool:
        """Whether nothing is running, so that a worker that drains may end."""
        return self._service is None or not self._service.num_live_requests

    async def cleanup(self) -> None:
        """Let open requests end, then stop. Dynamo's worker itself waits for those of context workers only."""
        if self._service is not None:
            await self._service.drain(self._drain_seconds)
            await asyncio.sleep(_LAST_CHUNKS_SECONDS)
            self._service.close()
        if self._stats is not None:
            self._stats.close()
        if self._kv_events is not None:
            self._kv_events.close()

    async def health_check_payload(self) -> dict[str, Any] | None:
        """A prompt of one token, for probes of an idle worker; none where requests need a context from elsewhere."""
        if self._role is InstanceRole.GENERATION:
            return None
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=self._end_ids[0] if self._end_ids else 0)
        return payload

    # What routers are told

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [] if self._kv_events is None else [PushSource(on_ready=self._publish_kv_events)]

    def _publish_kv_events(self, publisher: Any) -> None:
        assert self._kv_events is not None
        batches = KvEventBatches(self._executor.spec.tokens_per_block)

        def publish(events: Sequence[KVCacheEvent]) -> None:
            if batch := batches.take(events):
                publisher.publish_batch(batch)

        self._kv_events.add_listener(publish)

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        assert self._stats is not None

        def publish(iterations: Sequence[IterationStats]) -> None:
            blocks = iterations[-1].kv_cache_stats
            if blocks is not None:
                publisher.publish(
                    0,
                    ComponentSnapshot(
                        kv_used_blocks=blocks.used_num_blocks,
                        kv_total_blocks=blocks.max_num_blocks,
                        gpu_cache_usage=blocks.used_num_blocks / blocks.max_num_blocks,
                        dp_rank=0,
                        kv_cache_hit_rate=blocks.cache_hit_rate,
                    ),
                )

        self._stats.add_listener(publish)


def _dynamo_error(error: RequestError) -> DynamoException:
    """The kind of error by which the frontend decides: the client's fault, another worker's turn, or ours."""
    match error.code:
        case ErrorCode.INVALID_ARGUMENT | ErrorCode.UNIMPLEMENTED:
            return InvalidArgument(error.message)
        case ErrorCode.UNAVAILABLE:
            return EngineShutdown(error.message)
        case _:
            return Unknown(error.message)
