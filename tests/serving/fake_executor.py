"""An executor without an engine: keeps the promises of `ServedExecutor` and returns tokens at once."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from batch_manager import Pause, UnknownRequestError, WaitCode, WaitReason
from batch_manager.iteration_table import IterationRow
from batch_manager.kv import BlockCounts, LedgerEntry, OwnerKind, TierStats
from batch_manager.plan import Phase
from batch_manager.request import FinishReason
from executor.api.errors import (
    EngineStepError,
    InvalidRequestError,
    PinQuotaExceededError,
    QueueFullError,
    ReceiptNotFoundError,
    RequestError,
)
from executor.api.kv_cache import KVCacheEvent, KVCacheEventManager
from executor.api.kv_ledger import KvLedger, PinnedPrefix
from executor.api.receipt import RequestReceipt, SequenceReceipt
from executor.api.request import Request
from executor.api.response import Response, Result, Usage
from executor.api.role import InstanceRole
from executor.api.stats import InflightBatchingStats, IterationStats, KvCacheStats
from executor.engines.interface import EngineSpec
from executor.live_limits import LiveLimits
from executor.transfer.stats import TransferStats

Listener = Callable[[list[Response]], None]


@dataclass
class _Live:
    request_id: int
    request: Request
    listener: Listener
    generated: int = 0


def echo(request: Request, position: int) -> int:
    """The prompt, over and over: the token at a position of the output."""
    return request.input_token_ids[position % len(request.input_token_ids)]


class FakeExecutor:
    """Every iteration gives each live request its next token.

    `hold()` stops the iterations, as a stuck engine would; `step_seconds` paces them.
    """

    spec = EngineSpec(
        vocab_size=258,
        num_layers=2,
        num_kv_heads=2,
        head_size=16,
        tokens_per_block=16,
        max_batch_size=64,
        max_num_tokens=1024,
        max_input_len=4096,
        max_seq_len=8192,
        kv_bytes_per_block=4096,
    )
    longest_sequence = spec.max_seq_len
    engine_dir = Path("/nowhere/fake-engine")

    def __init__(
        self,
        next_token: Callable[[Request, int], int] = echo,
        *,
        step_seconds: float = 0.0,
        max_queue_size: int | None = None,
        fail_at: int | None = None,
    ) -> None:
        self.requests: list[Request] = []
        """All that were ever queued, oldest first."""
        self.cancelled: list[int] = []
        self.kv_events: list[KVCacheEvent] | None = None
        """What the next reader gets; `None`: events are not recorded."""
        self.pins: list[PinnedPrefix] = []
        self.role = InstanceRole.BOTH
        self.transfer_address: str | None = None
        self.transfer_stats: TransferStats | None = None
        self.cpu_seconds = 0.0
        """What the loop's thread has used."""
        self.last_progress = time.monotonic()
        self._next_token = next_token
        self._step_seconds = step_seconds
        self._max_queue_size = max_queue_size
        self._fail_at = fail_at
        self._live: dict[int, _Live] = {}
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        self._held = False
        self._held_by_operator = False
        self.limits = LiveLimits(self.spec.max_batch_size, self.spec.max_num_tokens, max_queue_size, None)
        self._stopped = False
        self._iteration = 0
        self._stats: list[IterationStats] = []
        self._rows: list[IterationRow] = []
        self._receipts: dict[int, RequestReceipt] = {}
        self._thread = threading.Thread(target=self._run, name="fake-executor", daemon=True)
        self._thread.start()

    # -- ServedExecutor

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._live)

    def enqueue_request(self, request: Request, *, listener: Listener) -> int:
        request.validate()
        self._check(request)
        with self._changed:
            if self._max_queue_size is not None and len(self._live) >= self._max_queue_size:
                raise QueueFullError(f"{len(self._live)} requests wait; max_queue_size is {self._max_queue_size}")
            request_id = next(self._ids)
            self._live[request_id] = _Live(request_id, request, listener)
            self.requests.append(request)
            self._changed.notify()
        return request_id

    def cancel_request(self, request_id: int) -> None:
        with self._changed:
            live = self._live.pop(request_id, None)
            self.cancelled.append(request_id)
        if live is not None:
            live.listener([self._response(live, [], FinishReason.CANCELLED)])

    @property
    def is_paused(self) -> bool:
        return self._held_by_operator

    def change_role(self, role: InstanceRole) -> None:
        if self.transfer_address is None:
            raise InvalidRequestError("a role needs a cache_transceiver_config", field="role")
        self.role = role

    def get_transfer_stats(self) -> TransferStats | None:
        return self.transfer_stats

    def pause(self) -> None:
        self._held_by_operator = True
        self.hold()

    def resume(self) -> None:
        self._held_by_operator = False
        self.release()

    def change_limits(self, limits: LiveLimits) -> None:
        if limits.max_batch_size > self.spec.max_batch_size:
            raise InvalidRequestError("max_batch_size is too large", field="max_batch_size")
        self.limits = limits

    def explain_request(self, request_id: int) -> WaitReason | None:
        if request_id not in self._live:
            raise UnknownRequestError(f"request {request_id} is not live")
        return WaitReason(WaitCode.BATCH_SIZE, 1, 0, (7, 8), 9) if self._held else None

    def get_receipt(self, request_id: int) -> RequestReceipt:
        if request_id not in self._receipts:
            raise ReceiptNotFoundError(f"no receipt of request {request_id}")
        return self._receipts[request_id]

    def get_kv_cache_event_manager(self) -> KVCacheEventManager | None:
        return None if self.kv_events is None else KVCacheEventManager(self._take_kv_events)

    def kv_ledger(self) -> KvLedger:
        entries = (
            LedgerEntry(0, OwnerKind.REQUEST, "request 7", 7, 5, "allocate"),
            LedgerEntry(1, OwnerKind.REQUEST, "request 7", 7, 5, "allocate"),
            LedgerEntry(3, OwnerKind.TREE, "tree", None, None, None),
        )
        return KvLedger(
            counts=BlockCounts(free=7, used=2, cached=1, leased=0),
            entries=entries,
            lost_blocks=(),
            host=TierStats(20, 4),
            disk=TierStats(0, 0),
            offloaded_blocks=5,
            onboarded_blocks=2,
            failed_transfers=1,
            failures_by_kind={"damaged": 1},
            quarantined_blocks=0,
            pins=tuple(self.pins),
            max_pinned_blocks=2,
        )

    def pin_prefix(
        self,
        input_token_ids: Sequence[int],
        *,
        cache_salt_id: int | None = None,  # noqa: ARG002
        duration: timedelta | None = None,
    ) -> PinnedPrefix:
        if self.pins:
            raise PinQuotaExceededError("pinned already")
        left = None if duration is None else duration.total_seconds()
        self.pins.append(PinnedPrefix(1, len(input_token_ids) // 16 * 16, (3,), left))
        return self.pins[0]

    def unpin_prefix(self, pin_id: int) -> None:
        if [pin.pin_id for pin in self.pins] != [pin_id]:
            raise InvalidRequestError(f"pin {pin_id} is not there", field="pin_id")
        self.pins.clear()

    def _take_kv_events(self, _seconds: float | None) -> list[KVCacheEvent]:
        taken, self.kv_events = list(self.kv_events or ()), []
        return taken

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        with self._changed:
            taken, self._stats = self._stats, []
        return taken

    def iteration_table(self) -> list[IterationRow]:
        return list(self._rows)

    # -- what tests do to it

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify()

    def shutdown(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    # -- the loop

    def _check(self, request: Request) -> None:
        length = len(request.input_token_ids)
        if length > self.spec.max_input_len:
            raise InvalidRequestError(f"the prompt has {length} tokens; max_input_len is 4096", field="input_token_ids")
        if length + request.max_tokens > self.spec.max_seq_len:
            raise InvalidRequestError("prompt and max_tokens exceed max_seq_len", field="max_tokens")
        if not all(0 <= token_id < self.spec.vocab_size for token_id in request.input_token_ids):
            raise InvalidRequestError("input_token_ids holds an id out of range", field="input_token_ids")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or (self._live and not self._held))
                if self._stopped:
                    return
                by_listener: dict[Listener, list[Response]] = defaultdict(list)
                scheduled = list(self._live.values())
                for live in scheduled:
                    by_listener[live.listener].append(self._step(live))
                self._note(scheduled)
            for listener, responses in by_listener.items():
                listener(responses)
            self.last_progress = time.monotonic()
            self.cpu_seconds = time.thread_time()
            if self._step_seconds:
                time.sleep(self._step_seconds)

    def _step(self, live: _Live) -> Response:
        if live.generated == self._fail_at:
            del self._live[live.request_id]
            return Response(live.request_id, error=_step_error())
        token_id = self._next_token(live.request, live.generated)
        live.generated += 1
        reason = FinishReason.NOT_FINISHED
        if token_id == live.request.end_id:
            reason = FinishReason.END_ID
        elif [token_id] in (live.request.stop_words or []):
            reason = FinishReason.STOP_WORDS
        elif live.generated == live.request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not FinishReason.NOT_FINISHED:
            del self._live[live.request_id]
        return self._response(live, [token_id], reason)

    def _response(self, live: _Live, token_ids: list[int], reason: FinishReason) -> Response:
        done = reason is not FinishReason.NOT_FINISHED
        result = Result(
            is_final=done,
            is_sequence_final=done,
            output_token_ids=[token_ids],
            finish_reasons=[reason],
            usage=Usage(len(live.request.input_token_ids), live.generated, 0),
        )
        if live.request.output_config.return_log_probs:
            result.log_probs = [[-0.25] * len(token_ids)]
        if live.request.output_config.return_prompt_log_probs:
            result.prompt_log_probs = [-0.5] * (len(live.request.input_token_ids) - 1)
        if done:
            self._receipts[live.request_id] = _receipt(live, reason)
        return Response(live.request_id, result)

    def _note(self, scheduled: list[_Live]) -> None:
        self._iteration += 1
        contexts = [live for live in scheduled if live.generated == 1]
        self._stats.append(
            IterationStats(
                timestamp="11-30-2026 12:00:00.250000",
                iter=self._iteration,
                num_active_requests=len(self._live),
                num_completed_requests=len(scheduled) - len(self._live),
                kv_cache_stats=KvCacheStats(max_num_blocks=100, free_num_blocks=100 - len(scheduled)),
                inflight_batching_stats=InflightBatchingStats(
                    num_scheduled_requests=len(scheduled),
                    num_context_requests=len(contexts),
                    num_gen_requests=len(scheduled) - len(contexts),
                ),
            )
        )
        del self._stats[:-1000]
        if len(self._rows) < 10_000:
            for live in scheduled:
                length = len(live.request.input_token_ids) + live.generated - 1
                first = live.generated == 1
                self._rows.append(
                    IterationRow(
                        self._iteration,
                        live.request_id,
                        Phase.CONTEXT if first else Phase.GENERATION,
                        0 if first else length - 1,
                        length,
                        0,
                        length if first else 1,
                        length // self.spec.tokens_per_block + 1,
                    )
                )


def _receipt(live: _Live, reason: FinishReason) -> RequestReceipt:
    length = len(live.request.input_token_ids)
    pause = Pause(iteration=4, reason=WaitCode.KV_CAPACITY, beneficiary=9, num_lost_tokens=3)
    sequence = SequenceReceipt(
        0, reason, length, live.generated, length + live.generated, 1, 2, 3, 5, 4, (pause,), 0.5, 0.25, 0.125, 1.5
    )
    return RequestReceipt(live.request_id, None, (sequence,), "")


def _step_error() -> RequestError:
    return EngineStepError("the engine failed on this step")
