"""In-flight batching: who runs in each iteration, and with which KV blocks. Pure logic, no engine."""

from batch_manager.config import (
    BatchManagerConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    WaitingQueuePolicy,
)
from batch_manager.errors import (
    InvalidConfigError,
    InvalidSampledTokensError,
    PlanningFailedError,
    RefusalReason,
    RequestRefused,
    StepOrderError,
    UnknownRequestError,
)
from batch_manager.iteration_table import IterationRow, iteration_rows
from batch_manager.kv import KvCacheConfig, KvCacheManager
from batch_manager.manager import BatchManager
from batch_manager.plan import BlockCopy, IterationPlan, Phase, Progress, ScheduledRequest
from batch_manager.reasons import WaitCode, WaitReason
from batch_manager.receipt import Pause, Receipt
from batch_manager.request import FinishReason, Request, RequestState

__all__ = [
    "BatchManager",
    "BatchManagerConfig",
    "BlockCopy",
    "CapacitySchedulerPolicy",
    "ContextChunkingPolicy",
    "FinishReason",
    "InvalidConfigError",
    "InvalidSampledTokensError",
    "IterationPlan",
    "IterationRow",
    "KvCacheConfig",
    "KvCacheManager",
    "Pause",
    "Phase",
    "PlanningFailedError",
    "Progress",
    "Receipt",
    "RefusalReason",
    "Request",
    "RequestRefused",
    "RequestState",
    "ScheduledRequest",
    "StepOrderError",
    "UnknownRequestError",
    "WaitCode",
    "WaitReason",
    "WaitingQueuePolicy",
    "iteration_rows",
]
