"""In-flight batching executor: the names of `tensorrt_llm.bindings.executor`, on engines built by `engine-build`."""

from importlib.metadata import version

from batch_manager.request import FinishReason
from executor.api import kv_cache
from executor.api.config import (
    BatchingType,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    DebugConfig,
    DynamicBatchConfig,
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    LogitsPostProcessorConfig,
    ModelType,
    SchedulerConfig,
)
from executor.api.decoding import (
    DecodingConfig,
    DecodingMode,
    EagleConfig,
    ExternalDraftTokensConfig,
    LookaheadDecodingConfig,
    SpeculativeDecodingConfig,
    SpeculativeDecodingFastLogitsInfo,
)
from executor.api.errors import (
    DuplicateRequestError,
    EngineStepError,
    ErrorCode,
    ExecutorShutDownError,
    InvalidRequestError,
    PinQuotaExceededError,
    QueueFullError,
    ReceiptNotFoundError,
    RequestError,
    UnsupportedFeatureError,
    WrongRoleError,
)
from executor.api.guided import GuidedDecodingConfig, GuidedDecodingParams
from executor.api.kv_cache_config import (
    CacheTransceiverBackendType,
    CacheTransceiverConfig,
    KvCacheConfig,
    KvCacheRetentionConfig,
    KvCacheTransferMode,
    RuntimeDefaults,
)
from executor.api.kv_ledger import KvLedger, PinnedPrefix
from executor.api.model_inputs import LoraConfig, MropeConfig, MultimodalInput, PeftCacheConfig, PromptTuningConfig
from executor.api.parallel import CommunicationMode, CommunicationType, OrchestratorConfig, ParallelConfig
from executor.api.receipt import RequestReceipt, SequenceReceipt
from executor.api.request import AdditionalModelOutput, ContextPhaseParams, OutputConfig, Request, RequestType
from executor.api.response import (
    AdditionalOutput,
    KvCacheMetrics,
    RequestPerfMetrics,
    Response,
    Result,
    SpeculativeDecodingMetrics,
    TimingMetrics,
    Usage,
)
from executor.api.role import InstanceRole
from executor.api.sampling_config import SamplingConfig
from executor.api.stats import (
    DebugTensorsPerIteration,
    DisServingRequestStats,
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStage,
    RequestStats,
    RequestStatsPerIteration,
    SpecDecodingStats,
    StaticBatchingStats,
)
from executor.executor import Executor

__version__ = version("inflight-executor")

__all__ = [
    "AdditionalModelOutput",
    "AdditionalOutput",
    "BatchingType",
    "CacheTransceiverBackendType",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "CommunicationMode",
    "CommunicationType",
    "ContextChunkingPolicy",
    "ContextPhaseParams",
    "DebugConfig",
    "DebugTensorsPerIteration",
    "DecodingConfig",
    "DecodingMode",
    "DisServingRequestStats",
    "DuplicateRequestError",
    "DynamicBatchConfig",
    "EagleConfig",
    "EngineStepError",
    "ErrorCode",
    "Executor",
    "ExecutorConfig",
    "ExecutorShutDownError",
    "ExtendedRuntimePerfKnobConfig",
    "ExternalDraftTokensConfig",
    "FinishReason",
    "GuidedDecodingConfig",
    "GuidedDecodingParams",
    "InflightBatchingStats",
    "InstanceRole",
    "InvalidRequestError",
    "IterationStats",
    "KvCacheConfig",
    "KvCacheMetrics",
    "KvCacheRetentionConfig",
    "KvCacheStats",
    "KvCacheTransferMode",
    "KvLedger",
    "LogitsPostProcessorConfig",
    "LookaheadDecodingConfig",
    "LoraConfig",
    "ModelType",
    "MropeConfig",
    "MultimodalInput",
    "OrchestratorConfig",
    "OutputConfig",
    "ParallelConfig",
    "PeftCacheConfig",
    "PinQuotaExceededError",
    "PinnedPrefix",
    "PromptTuningConfig",
    "QueueFullError",
    "ReceiptNotFoundError",
    "Request",
    "RequestError",
    "RequestPerfMetrics",
    "RequestReceipt",
    "RequestStage",
    "RequestStats",
    "RequestStatsPerIteration",
    "RequestType",
    "Response",
    "Result",
    "RuntimeDefaults",
    "SamplingConfig",
    "SchedulerConfig",
    "SequenceReceipt",
    "SpecDecodingStats",
    "SpeculativeDecodingConfig",
    "SpeculativeDecodingFastLogitsInfo",
    "SpeculativeDecodingMetrics",
    "StaticBatchingStats",
    "TimingMetrics",
    "UnsupportedFeatureError",
    "Usage",
    "WrongRoleError",
    "__version__",
    "kv_cache",
]
