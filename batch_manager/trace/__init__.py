"""Record what is asked of a BatchManager and what it decides; replay it and compare."""

from batch_manager.trace.clock import InstantClock, ManualClock
from batch_manager.trace.errors import TraceError, TraceFormatError, TraceVersionError, TraceWriteError
from batch_manager.trace.observed import ObservedBatchManager, Observer
from batch_manager.trace.observed_kv import KvCall, ObservedKvCacheManager
from batch_manager.trace.reader import TraceReader
from batch_manager.trace.recorder import TraceRecorder, TraceWriter
from batch_manager.trace.replay import Difference, Replay, ReplayResult, replay

__all__ = [
    "Difference",
    "InstantClock",
    "KvCall",
    "ManualClock",
    "ObservedBatchManager",
    "ObservedKvCacheManager",
    "Observer",
    "Replay",
    "ReplayResult",
    "TraceError",
    "TraceFormatError",
    "TraceReader",
    "TraceRecorder",
    "TraceVersionError",
    "TraceWriteError",
    "TraceWriter",
    "replay",
]
