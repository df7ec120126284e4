"""The service `inflight.v1.Control`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import version

import grpc

from batch_manager.plan import Phase
from executor.api.stats import IterationStats
from executor.serving.generation import GenerationService
from executor.serving.grpc_messages import SCHEMA_REVISION
from executor.serving.progress import ProgressMonitor
from executor.serving.stats_feed import StatsFeed
from protos.inflight.v1 import control_pb2 as pb

_PHASES = {Phase.CONTEXT: pb.PHASE_CONTEXT, Phase.GENERATION: pb.PHASE_GENERATION}


@dataclass(frozen=True, slots=True)
class ServedLimits:
    """What the executor was configured with, within what the engine was built for."""

    max_batch_size: int
    max_num_tokens: int


class ControlServicer:
    """Describes a server. Method names are the .proto file's."""

    def __init__(
        self,
        generation: GenerationService,
        progress: ProgressMonitor,
        stats: StatsFeed,
        *,
        limits: ServedLimits,
        model_name: str,
    ) -> None:
        self._generation = generation
        self._executor = generation.executor
        self._progress = progress
        self._stats = stats
        self._limits = limits
        self._model_name = model_name
        self._started = time.monotonic()

    async def ServerInfo(  # noqa: N802 - the .proto file's name
        self, _request: pb.ServerInfoRequest, _context: grpc.aio.ServicerContext
    ) -> pb.ServerInfoResponse:
        spec = self._executor.spec
        return pb.ServerInfoResponse(
            schema_revision=SCHEMA_REVISION,
            version=version("inflight-executor"),
            engine_dir=str(self._executor.engine_dir),
            uptime_seconds=time.monotonic() - self._started,
            max_batch_size=self._limits.max_batch_size,
            max_num_tokens=self._limits.max_num_tokens,
            tokens_per_block=spec.tokens_per_block,
            kv_bytes_per_block=spec.kv_bytes_per_block,
        )

    async def ModelInfo(  # noqa: N802 - the .proto file's name
        self, _request: pb.ModelInfoRequest, _context: grpc.aio.ServicerContext
    ) -> pb.ModelInfoResponse:
        spec = self._executor.spec
        tokenizer = self._generation.tokenizer
        return pb.ModelInfoResponse(
            name=self._model_name,
            vocab_size=spec.vocab_size,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            max_input_len=spec.max_input_len,
            max_seq_len=spec.max_seq_len,
            end_ids=self._generation.end_ids,
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
        )

    async def Load(  # noqa: N802 - the .proto file's name
        self, _request: pb.LoadRequest, _context: grpc.aio.ServicerContext
    ) -> pb.LoadResponse:
        self._stats.refresh()
        latest = self._stats.latest
        return pb.LoadResponse(
            num_unfinished_requests=self._executor.num_unfinished_requests,
            latest_iteration=None if latest is None else _iteration_message(latest),
        )

    async def Health(  # noqa: N802 - the .proto file's name
        self, _request: pb.HealthRequest, _context: grpc.aio.ServicerContext
    ) -> pb.HealthResponse:
        if self._generation.is_draining:
            state = pb.HEALTH_STATE_DRAINING
        elif self._progress.is_stalled:
            state = pb.HEALTH_STATE_STALLED
        else:
            state = pb.HEALTH_STATE_SERVING
        return pb.HealthResponse(
            state=state,
            seconds_since_progress=self._progress.seconds_since_progress(),
            num_unfinished_requests=self._executor.num_unfinished_requests,
        )

    async def IterationStats(  # noqa: N802 - the .proto file's name
        self, _request: pb.IterationStatsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        with self._stats.subscribe() as subscription:
            async for stats in subscription:
                await context.write(_iteration_message(stats))

    async def IterationTable(  # noqa: N802 - the .proto file's name
        self, request: pb.IterationTableRequest, _context: grpc.aio.ServicerContext
    ) -> pb.IterationTableResponse:
        return pb.IterationTableResponse(
            rows=[
                pb.IterationTableRow(
                    iteration=row.iteration,
                    executor_request_id=row.request,
                    phase=_PHASES[row.phase],
                    num_computed_tokens=row.num_computed_tokens,
                    num_tokens_with_spec=row.num_tokens_with_spec,
                    reused_tokens=row.reused_tokens,
                    num_scheduled_tokens=row.num_scheduled_tokens,
                    blocks=row.blocks,
                )
                for row in self._executor.iteration_table()
                if row.iteration >= request.first_iteration
            ]
        )


def _iteration_message(stats: IterationStats) -> pb.IterationStatsResponse:
    message = pb.IterationStatsResponse(
        iteration=stats.iter,
        iteration_latency_ms=stats.iter_latency_ms,
        engine_latency_ms=stats.engine_latency_ms,
        num_active_requests=stats.num_active_requests,
        num_queued_requests=stats.num_queued_requests,
        num_completed_requests=stats.num_completed_requests,
    )
    batch = stats.inflight_batching_stats
    if batch is not None:
        message.num_scheduled_requests = batch.num_scheduled_requests
        message.num_context_requests = batch.num_context_requests
        message.num_generation_requests = batch.num_gen_requests
        message.num_paused_requests = batch.num_paused_requests
        message.num_context_tokens = batch.num_ctx_tokens
    cache = stats.kv_cache_stats
    if cache is not None:
        message.max_num_blocks = cache.max_num_blocks
        message.free_num_blocks = cache.free_num_blocks
        message.used_num_blocks = cache.used_num_blocks
        message.reused_blocks = cache.reused_blocks
        message.missed_blocks = cache.missed_blocks
    return message
