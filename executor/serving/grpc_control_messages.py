"""From the executor's types to the messages of `inflight.v1.Control`."""

from __future__ import annotations

from datetime import timedelta
from typing import assert_never

from batch_manager import WaitCode, WaitReason
from batch_manager.iteration_table import IterationRow
from batch_manager.kv import OwnerKind
from batch_manager.plan import Phase
from executor.api import kv_cache
from executor.api.errors import InvalidRequestError
from executor.api.kv_ledger import KvLedger, PinnedPrefix
from executor.api.receipt import RequestReceipt
from executor.api.role import InstanceRole
from executor.api.stats import IterationStats
from executor.live_limits import LiveLimits
from executor.serving.grpc_messages import FINISH_REASONS
from protos.inflight.v1 import control_pb2 as pb

_OWNER_KINDS = {kind: pb.KvOwnerKind.Value(f"KV_OWNER_KIND_{kind.name}") for kind in OwnerKind}
ROLES = {role: pb.InstanceRole.Value(f"INSTANCE_ROLE_{role.name}") for role in InstanceRole}
_PHASES = {Phase.CONTEXT: pb.PHASE_CONTEXT, Phase.GENERATION: pb.PHASE_GENERATION}


def role_of(request: pb.ChangeRoleRequest) -> InstanceRole:
    """Raises `InvalidRequestError` where it names none."""
    for role, value in ROLES.items():
        if request.role == value:
            return role
    names = ", ".join(map(pb.InstanceRole.Name, ROLES.values()))
    raise InvalidRequestError(f"role is {request.role}; it must be one of {names}", field="role")


def iteration_message(stats: IterationStats) -> pb.IterationStatsResponse:
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


def limits_message(limits: LiveLimits) -> pb.Limits:
    return pb.Limits(
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_queue_size=limits.max_queue_size,
        max_queued_tokens=limits.max_queued_tokens,
    )


def row_message(row: IterationRow) -> pb.IterationTableRow:
    return pb.IterationTableRow(
        iteration=row.iteration,
        executor_request_id=row.request,
        phase=_PHASES[row.phase],
        num_computed_tokens=row.num_computed_tokens,
        num_tokens_with_spec=row.num_tokens_with_spec,
        reused_tokens=row.reused_tokens,
        num_scheduled_tokens=row.num_scheduled_tokens,
        blocks=row.blocks,
    )


def wait_reason_message(reason: WaitReason) -> pb.WaitReason:
    return pb.WaitReason(
        code=_wait_code(reason.code),
        needed=reason.needed,
        available=reason.available,
        holders=reason.holders,
        behind=reason.behind,
    )


def output_receipt_message(output_index: int, receipt: RequestReceipt) -> pb.OutputReceipt:
    """The receipt of an output, which to the executor is a request of one sequence."""
    (sequence,) = receipt.sequences
    return pb.OutputReceipt(
        output_index=output_index,
        executor_request_id=receipt.request_id,
        finish_reason=FINISH_REASONS[sequence.finish_reason],
        error=receipt.error,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_generated_tokens=sequence.num_generated_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_reused_tokens=sequence.num_reused_tokens,
        num_recomputed_tokens=sequence.num_recomputed_tokens,
        num_transferred_tokens=sequence.num_transferred_tokens,
        num_draft_tokens=sequence.num_draft_tokens,
        num_accepted_draft_tokens=sequence.num_accepted_draft_tokens,
        pauses=[
            pb.OutputPause(
                iteration=pause.iteration,
                reason=_wait_code(pause.reason),
                beneficiary=pause.beneficiary,
                num_lost_tokens=pause.num_lost_tokens,
            )
            for pause in sequence.pauses
        ],
        block_seconds=sequence.block_seconds,
        queue_seconds=sequence.queue_seconds,
        paused_seconds=sequence.paused_seconds,
        total_seconds=sequence.total_seconds,
    )


def _wait_code(code: WaitCode) -> pb.WaitCode:
    value: pb.WaitCode = pb.WaitCode.Value(f"WAIT_CODE_{code.name}")
    return value


def pin_duration(request: pb.PinPrefixRequest) -> timedelta | None:
    """How long to keep a pin; `None`: until it is undone.

    Raises:
        InvalidRequestError: not a positive number, or longer than a `timedelta` can say.
    """
    if not request.HasField("seconds"):
        return None
    if not 0 < request.seconds < timedelta.max.total_seconds():
        raise InvalidRequestError(
            f"seconds is {request.seconds}; it must be above 0 and finite, or not set", field="seconds"
        )
    return timedelta(seconds=request.seconds)


def kv_ledger_message(ledger: KvLedger) -> pb.KvLedgerResponse:
    return pb.KvLedgerResponse(
        counts=pb.KvBlockCounts(**ledger.counts._asdict()),
        entries=[
            pb.KvLedgerEntry(
                block_id=entry.block_id,
                owner_kind=_OWNER_KINDS[entry.kind],
                owner=entry.owner,
                owner_id=entry.owner_id,
                iteration=entry.iteration,
                call=entry.call,
            )
            for entry in ledger.entries
        ],
        lost_block_ids=ledger.lost_blocks,
        host=pb.KvTier(max_num_blocks=ledger.host.num_blocks, used_num_blocks=ledger.host.used_blocks),
        disk=pb.KvTier(max_num_blocks=ledger.disk.num_blocks, used_num_blocks=ledger.disk.used_blocks),
        transfers=pb.KvTransferCounts(
            offloaded=ledger.offloaded_blocks,
            onboarded=ledger.onboarded_blocks,
            failed=ledger.failed_transfers,
            failed_by_kind=[
                pb.KvTransferFailures(kind=kind, count=count) for kind, count in sorted(ledger.failures_by_kind.items())
            ],
        ),
        pins=[kv_pin_message(pin) for pin in ledger.pins],
        max_pinned_blocks=ledger.max_pinned_blocks,
        quarantined_blocks=ledger.quarantined_blocks,
    )


def kv_pin_message(pin: PinnedPrefix) -> pb.KvPin:
    return pb.KvPin(
        pin_id=pin.pin_id, num_tokens=pin.num_tokens, block_ids=pin.block_ids, seconds_left=pin.seconds_left
    )


def kv_event_message(event: kv_cache.KVCacheEvent) -> pb.KvEventsResponse:
    message = pb.KvEventsResponse(event_id=event.event_id, window_size=event.window_size)
    match event.data:
        case kv_cache.KVCacheCreatedData(num_blocks):
            message.created.num_blocks_per_cache_level.extend(num_blocks)
        case kv_cache.KVCacheStoredData(parent_hash, blocks):
            message.stored.CopyFrom(
                pb.KvBlocksStored(parent_hash=parent_hash, blocks=[_stored_block(block) for block in blocks])
            )
        case kv_cache.KVCacheRemovedData(block_hashes):
            message.removed.block_hashes.extend(block_hashes)
        case kv_cache.KVCacheUpdatedData(block_hash, cache_level, priority):
            message.updated.CopyFrom(
                pb.KvBlockUpdated(block_hash=block_hash, cache_level=_change(cache_level), priority=_change(priority))
            )
        case kv_cache.KVCacheOverflowData(num_lost_events):
            message.overflow.num_lost_events = num_lost_events
        case _:
            assert_never(event.data)
    return message


def _stored_block(block: kv_cache.KVCacheStoredBlockData) -> pb.KvStoredBlock:
    return pb.KvStoredBlock(
        block_hash=block.block_hash,
        token_ids=[token.token_id for token in block.tokens],
        lora_id=block.lora_id,
        cache_level=block.cache_level,
        priority=block.priority,
    )


def _change(change: kv_cache.KVCacheEventDiffInt | None) -> pb.KvChange | None:
    return None if change is None else pb.KvChange(old_value=change.old_value, new_value=change.new_value)
