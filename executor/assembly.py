"""Makes the parts of an Executor out of its configuration, cheap checks first: loading an engine may take minutes."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from batch_manager import BatchManager, KvCacheManager
from engine_build.engine_dir import EngineDirectory
from executor.api.config import ExecutorConfig
from executor.api.decoding import DecodingConfig, LookaheadDecodingConfig
from executor.debug_tensors import DebugTensors
from executor.engines.device_options import device_options
from executor.engines.interface import Engine, EngineSpec
from executor.engines.open import engine_spec, kv_cache_dtype, open_engine, pool_memory
from executor.guided_decoding import open_guided_decoding
from executor.kv_tiers import open_mover
from executor.kv_upkeep import KvUpkeep
from executor.loop import ExecutorLoop
from executor.model_runner import ModelRunner
from executor.pool_size import PoolSize, pool_size
from executor.receipts import Receipts
from executor.sampling import Sampler
from executor.scheduler_config import batch_manager_config, kv_cache_manager_config, open_scheduler
from executor.speculation import Drafter, StepCost
from executor.stats import StatsLimits, StatsRecorder
from executor.step import Step
from executor.transfer.endpoint import TransferEndpoint
from executor.transfer.handover import Handover
from executor.transfer.open import open_endpoint, open_network

if TYPE_CHECKING:
    from executor.sampling.grammar_compiler import GrammarCompiler

_logger = logging.getLogger(__name__)


class Parts(NamedTuple):
    """What an Executor is made of; nothing runs yet."""

    spec: EngineSpec
    pool_size: PoolSize
    engine: Engine
    batch_manager: BatchManager
    kv: KvCacheManager
    kv_upkeep: KvUpkeep
    stats: StatsRecorder
    receipts: Receipts
    debug_tensors: DebugTensors | None
    grammars: GrammarCompiler | None
    transfers: TransferEndpoint | None
    loop: ExecutorLoop


def assemble(manifest: EngineDirectory, config: ExecutorConfig, resources: ExitStack) -> Parts:
    """Load the engine, allocate the pools, warm up.

    Args:
        manifest: of the engine.
        config: validated.
        resources: gets what releases the parts, also of those that were made before one failed.

    Raises:
        EngineDirectoryError: the plan is damaged, or not for this machine.
        InvalidRequestError, UnsupportedFeatureError: a field is wrong for this engine, or refused, by name.
        OSError: `trace_path` cannot be written, or an address not be listened at.
    """
    kv_fields, transceiver = config.kv_cache_config, config.cache_transceiver_config
    spec = engine_spec(manifest, kv_fields.kv_cache_dtype)
    kv_dtype = kv_cache_dtype(manifest, kv_fields.kv_cache_dtype)
    scheduling = batch_manager_config(config, spec)
    options = device_options(config)
    size = pool_size(kv_fields, spec, scheduling.max_batch_size, pool_memory(manifest, options))
    for line in size.reason.splitlines():
        _logger.info(line)
    debug_tensors = None if config.debug_config is None else DebugTensors(config.debug_config)
    grammars = None
    if config.guided_decoding_config is not None:
        grammars = open_guided_decoding(config.guided_decoding_config, manifest, spec.vocab_size)
        resources.callback(grammars.shutdown)
    network = None if transceiver is None else open_network(transceiver, kv_dtype)

    started = time.monotonic()
    engine = open_engine(
        manifest,
        num_blocks=size.num_blocks,
        kv_cache_dtype=kv_fields.kv_cache_dtype,
        num_threads=config.num_threads,
        deterministic=config.deterministic,
        options=options,
    )
    resources.callback(engine.close)
    engine.warm_up()
    _logger.info("engine ready after %.1f s", time.monotonic() - started)

    mover = open_mover(engine, size.host_blocks, size.disk_blocks, kv_fields.disk_cache_dir)
    if mover is not None:
        resources.callback(mover.close)
    kv_config = kv_cache_manager_config(config, size, spec)
    batch_manager, kv, trace = open_scheduler(scheduling, kv_config, config.trace_path, redact=config.trace_redact)
    if trace is not None:
        resources.callback(trace.close)
    kv_upkeep = KvUpkeep(batch_manager, kv, mover)
    limits = StatsLimits(
        config.iter_stats_max_iterations, config.request_stats_max_iterations, config.iteration_table_max_rows
    )
    stats = StatsRecorder(batch_manager, kv, kv_upkeep, spec, config.batching_type, limits)
    transfers = None
    if transceiver is not None and network is not None:
        transfers = open_endpoint(transceiver, network, engine, manifest, kv_dtype, kv, batch_manager)
        resources.callback(transfers.close)
    drafter = Drafter(_default_lookahead(config.decoding_config), StepCost(engine.padded_rows))
    step = Step(ModelRunner(engine, scheduling.min_rows_per_sequence), Sampler(spec.vocab_size), debug_tensors)
    receipts = Receipts(config.receipts_max_requests)
    loop = ExecutorLoop(batch_manager, kv_upkeep, step, drafter, stats, receipts, Handover(transfers))
    return Parts(
        spec,
        size,
        engine,
        batch_manager,
        kv,
        kv_upkeep,
        stats,
        receipts,
        debug_tensors,
        grammars,
        transfers,
        loop,
    )


def _default_lookahead(config: DecodingConfig | None) -> LookaheadDecodingConfig | None:
    """What requests draft with that bring no configuration of their own."""
    if config is None:
        return None
    if config.lookahead_decoding_config is None and config.decoding_mode is not None:
        return LookaheadDecodingConfig() if config.decoding_mode.isLookahead() else None
    return config.lookahead_decoding_config
