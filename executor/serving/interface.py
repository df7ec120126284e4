"""What the serving layer needs from an Executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from batch_manager import WaitReason
from batch_manager.iteration_table import IterationRow
from executor.api.kv_cache import KVCacheEventManager
from executor.api.kv_ledger import KvLedger, PinnedPrefix
from executor.api.receipt import RequestReceipt
from executor.api.request import Request
from executor.api.response import Response
from executor.api.role import InstanceRole
from executor.api.stats import IterationStats
from executor.engines.interface import EngineSpec
from executor.live_limits import LiveLimits
from executor.transfer.stats import TransferStats


class ServedExecutor(Protocol):
    """An `executor.Executor`, or anything that keeps its promises (tests serve one without an engine)."""

    @property
    def spec(self) -> EngineSpec: ...
    @property
    def engine_dir(self) -> Path: ...
    @property
    def longest_sequence(self) -> int:
        """Tokens, prompt and output, that one request may have."""
        ...

    @property
    def last_progress(self) -> float:
        """`time.monotonic()` when the last iteration finished."""
        ...

    @property
    def is_paused(self) -> bool: ...
    @property
    def limits(self) -> LiveLimits: ...
    @property
    def num_unfinished_requests(self) -> int: ...

    def enqueue_request(self, request: Request, *, listener: Callable[[list[Response]], None]) -> int:
        """Queue a request; the listener is called on another thread, at most once an iteration."""
        ...

    def cancel_request(self, request_id: int, /) -> None:
        """Idempotent, from any thread; exactly one final response follows unless the request had ended."""
        ...

    def change_limits(self, limits: LiveLimits) -> None:
        """Raises `InvalidRequestError`, and changes nothing, when a limit cannot be kept."""
        ...

    @property
    def role(self) -> InstanceRole: ...
    @property
    def transfer_address(self) -> str | None:
        """HOST:PORT where other instances ask for contexts; `None`: it exchanges none."""
        ...

    def change_role(self, role: InstanceRole) -> None:
        """Take other requests from now on. Raises `InvalidRequestError` where no contexts are exchanged."""
        ...

    def get_transfer_stats(self) -> TransferStats | None:
        """What was exchanged with other instances so far; `None`: it exchanges nothing."""
        ...

    def pause(self) -> None:
        """Run no iteration until `resume`."""
        ...

    def resume(self) -> None: ...

    def explain_request(self, request_id: int, /) -> WaitReason | None:
        """Why a request waits; `None`: it advanced. Raises `batch_manager.UnknownRequestError` when it has ended."""
        ...

    def get_receipt(self, request_id: int, /) -> RequestReceipt:
        """What a request cost; raises `ReceiptNotFoundError` while it lives and when too many have ended since."""
        ...

    def get_kv_cache_event_manager(self) -> KVCacheEventManager | None:
        """Where KV cache events come from; `None`: they are not recorded."""
        ...

    def get_latest_iteration_stats(self) -> Sequence[IterationStats]:
        """Iterations since the last call."""
        ...

    def kv_ledger(self) -> KvLedger:
        """Who holds which KV block. O(blocks)."""
        ...

    def pin_prefix(
        self, input_token_ids: Sequence[int], *, cache_salt_id: int | None = None, duration: timedelta | None = None
    ) -> PinnedPrefix:
        """Raises `RequestError` when nothing is cached of it, or too much is pinned."""
        ...

    def unpin_prefix(self, pin_id: int, /) -> None:
        """Raises `InvalidRequestError` when there is no such pin."""
        ...

    def iteration_table(self) -> Sequence[IterationRow]:
        """The rows recorded so far, oldest first."""
        ...
