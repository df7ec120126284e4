from protos.inflight.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InstanceRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INSTANCE_ROLE_UNSPECIFIED: _ClassVar[InstanceRole]
    INSTANCE_ROLE_CONTEXT: _ClassVar[InstanceRole]
    INSTANCE_ROLE_GENERATION: _ClassVar[InstanceRole]
    INSTANCE_ROLE_BOTH: _ClassVar[InstanceRole]

class HealthState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEALTH_STATE_UNSPECIFIED: _ClassVar[HealthState]
    HEALTH_STATE_SERVING: _ClassVar[HealthState]
    HEALTH_STATE_STALLED: _ClassVar[HealthState]
    HEALTH_STATE_DRAINING: _ClassVar[HealthState]
    HEALTH_STATE_PAUSED: _ClassVar[HealthState]

class WaitCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_CODE_UNSPECIFIED: _ClassVar[WaitCode]
    WAIT_CODE_NEXT_ITERATION: _ClassVar[WaitCode]
    WAIT_CODE_KV_RESERVATION: _ClassVar[WaitCode]
    WAIT_CODE_KV_CAPACITY: _ClassVar[WaitCode]
    WAIT_CODE_PAUSE_HEADROOM: _ClassVar[WaitCode]
    WAIT_CODE_TOKEN_BUDGET: _ClassVar[WaitCode]
    WAIT_CODE_BATCH_SIZE: _ClassVar[WaitCode]
    WAIT_CODE_BEAM_WIDTH: _ClassVar[WaitCode]
    WAIT_CODE_STATIC_BATCH: _ClassVar[WaitCode]
    WAIT_CODE_PREFIX_DEFERRED: _ClassVar[WaitCode]
    WAIT_CODE_ADAPTER_PAGES: _ClassVar[WaitCode]
    WAIT_CODE_FAIR_SHARE: _ClassVar[WaitCode]
    WAIT_CODE_KV_LOADING: _ClassVar[WaitCode]
    WAIT_CODE_REMOTE_KV: _ClassVar[WaitCode]
    WAIT_CODE_GRAMMAR: _ClassVar[WaitCode]
    WAIT_CODE_PAUSED_BY_OPERATOR: _ClassVar[WaitCode]
    WAIT_CODE_DRAINING: _ClassVar[WaitCode]

class KvOwnerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_OWNER_KIND_UNSPECIFIED: _ClassVar[KvOwnerKind]
    KV_OWNER_KIND_REQUEST: _ClassVar[KvOwnerKind]
    KV_OWNER_KIND_QUARANTINE: _ClassVar[KvOwnerKind]
    KV_OWNER_KIND_LEASE: _ClassVar[KvOwnerKind]
    KV_OWNER_KIND_TRANSFER: _ClassVar[KvOwnerKind]
    KV_OWNER_KIND_STEP: _ClassVar[KvOwnerKind]
    KV_OWNER_KIND_TREE: _ClassVar[KvOwnerKind]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_CONTEXT: _ClassVar[Phase]
    PHASE_GENERATION: _ClassVar[Phase]
INSTANCE_ROLE_UNSPECIFIED: InstanceRole
INSTANCE_ROLE_CONTEXT: InstanceRole
INSTANCE_ROLE_GENERATION: InstanceRole
INSTANCE_ROLE_BOTH: InstanceRole
HEALTH_STATE_UNSPECIFIED: HealthState
HEALTH_STATE_SERVING: HealthState
HEALTH_STATE_STALLED: HealthState
HEALTH_STATE_DRAINING: HealthState
HEALTH_STATE_PAUSED: HealthState
WAIT_CODE_UNSPECIFIED: WaitCode
WAIT_CODE_NEXT_ITERATION: WaitCode
WAIT_CODE_KV_RESERVATION: WaitCode
WAIT_CODE_KV_CAPACITY: WaitCode
WAIT_CODE_PAUSE_HEADROOM: WaitCode
WAIT_CODE_TOKEN_BUDGET: WaitCode
WAIT_CODE_BATCH_SIZE: WaitCode
WAIT_CODE_BEAM_WIDTH: WaitCode
WAIT_CODE_STATIC_BATCH: WaitCode
WAIT_CODE_PREFIX_DEFERRED: WaitCode
WAIT_CODE_ADAPTER_PAGES: WaitCode
WAIT_CODE_FAIR_SHARE: WaitCode
WAIT_CODE_KV_LOADING: WaitCode
WAIT_CODE_REMOTE_KV: WaitCode
WAIT_CODE_GRAMMAR: WaitCode
WAIT_CODE_PAUSED_BY_OPERATOR: WaitCode
WAIT_CODE_DRAINING: WaitCode
KV_OWNER_KIND_UNSPECIFIED: KvOwnerKind
KV_OWNER_KIND_REQUEST: KvOwnerKind
KV_OWNER_KIND_QUARANTINE: KvOwnerKind
KV_OWNER_KIND_LEASE: KvOwnerKind
KV_OWNER_KIND_TRANSFER: KvOwnerKind
KV_OWNER_KIND_STEP: KvOwnerKind
KV_OWNER_KIND_TREE: KvOwnerKind
PHASE_UNSPECIFIED: Phase
PHASE_CONTEXT: Phase
PHASE_GENERATION: Phase

class ServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfoResponse(_message.Message):
    __slots__ = ("schema_revision", "version", "engine_dir", "uptime_seconds", "limits", "tokens_per_block", "kv_bytes_per_block", "role", "transfer_address")
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_DIR_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    schema_revision: int
    version: str
    engine_dir: str
    uptime_seconds: float
    limits: Limits
    tokens_per_block: int
    kv_bytes_per_block: int
    role: InstanceRole
    transfer_address: str
    def __init__(self, schema_revision: _Optional[int] = ..., version: _Optional[str] = ..., engine_dir: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., tokens_per_block: _Optional[int] = ..., kv_bytes_per_block: _Optional[int] = ..., role: _Optional[_Union[InstanceRole, str]] = ..., transfer_address: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_batch_size", "max_num_tokens", "max_queue_size", "max_queued_tokens")
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_batch_size: int
    max_num_tokens: int
    max_queue_size: int
    max_queued_tokens: int
    def __init__(self, max_batch_size: _Optional[int] = ..., max_num_tokens: _Optional[int] = ..., max_queue_size: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ...) -> None: ...

class ModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfoResponse(_message.Message):
    __slots__ = ("name", "vocab_size", "num_layers", "num_kv_heads", "head_size", "max_input_len", "max_seq_len", "end_ids", "has_tokenizer", "has_chat_template")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    END_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    max_input_len: int
    max_seq_len: int
    end_ids: _containers.RepeatedScalarFieldContainer[int]
    has_tokenizer: bool
    has_chat_template: bool
    def __init__(self, name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., max_input_len: _Optional[int] = ..., max_seq_len: _Optional[int] = ..., end_ids: _Optional[_Iterable[int]] = ..., has_tokenizer: bool = ..., has_chat_template: bool = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("num_unfinished_requests", "latest_iteration")
    NUM_UNFINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LATEST_ITERATION_FIELD_NUMBER: _ClassVar[int]
    num_unfinished_requests: int
    latest_iteration: IterationStatsResponse
    def __init__(self, num_unfinished_requests: _Optional[int] = ..., latest_iteration: _Optional[_Union[IterationStatsResponse, _Mapping]] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ("state", "seconds_since_progress", "num_unfinished_requests")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNFINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    state: HealthState
    seconds_since_progress: float
    num_unfinished_requests: int
    def __init__(self, state: _Optional[_Union[HealthState, str]] = ..., seconds_since_progress: _Optional[float] = ..., num_unfinished_requests: _Optional[int] = ...) -> None: ...

class IterationStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class IterationStatsResponse(_message.Message):
    __slots__ = ("iteration", "iteration_latency_ms", "engine_latency_ms", "num_active_requests", "num_queued_requests", "num_completed_requests", "num_scheduled_requests", "num_context_requests", "num_generation_requests", "num_paused_requests", "num_context_tokens", "max_num_blocks", "free_num_blocks", "used_num_blocks", "reused_blocks", "missed_blocks")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    ITERATION_LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATION_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAUSED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    iteration: int
    iteration_latency_ms: float
    engine_latency_ms: float
    num_active_requests: int
    num_queued_requests: int
    num_completed_requests: int
    num_scheduled_requests: int
    num_context_requests: int
    num_generation_requests: int
    num_paused_requests: int
    num_context_tokens: int
    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    reused_blocks: int
    missed_blocks: int
    def __init__(self, iteration: _Optional[int] = ..., iteration_latency_ms: _Optional[float] = ..., engine_latency_ms: _Optional[float] = ..., num_active_requests: _Optional[int] = ..., num_queued_requests: _Optional[int] = ..., num_completed_requests: _Optional[int] = ..., num_scheduled_requests: _Optional[int] = ..., num_context_requests: _Optional[int] = ..., num_generation_requests: _Optional[int] = ..., num_paused_requests: _Optional[int] = ..., num_context_tokens: _Optional[int] = ..., max_num_blocks: _Optional[int] = ..., free_num_blocks: _Optional[int] = ..., used_num_blocks: _Optional[int] = ..., reused_blocks: _Optional[int] = ..., missed_blocks: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[OutputExplanation]
    def __init__(self, outputs: _Optional[_Iterable[_Union[OutputExplanation, _Mapping]]] = ...) -> None: ...

class OutputExplanation(_message.Message):
    __slots__ = ("output_index", "executor_request_id", "wait_reason")
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_REASON_FIELD_NUMBER: _ClassVar[int]
    output_index: int
    executor_request_id: int
    wait_reason: WaitReason
    def __init__(self, output_index: _Optional[int] = ..., executor_request_id: _Optional[int] = ..., wait_reason: _Optional[_Union[WaitReason, _Mapping]] = ...) -> None: ...

class WaitReason(_message.Message):
    __slots__ = ("code", "needed", "available", "holders", "behind")
    CODE_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    code: WaitCode
    needed: int
    available: int
    holders: _containers.RepeatedScalarFieldContainer[int]
    behind: int
    def __init__(self, code: _Optional[_Union[WaitCode, str]] = ..., needed: _Optional[int] = ..., available: _Optional[int] = ..., holders: _Optional[_Iterable[int]] = ..., behind: _Optional[int] = ...) -> None: ...

class ReceiptRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ReceiptResponse(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[OutputReceipt]
    def __init__(self, outputs: _Optional[_Iterable[_Union[OutputReceipt, _Mapping]]] = ...) -> None: ...

class OutputReceipt(_message.Message):
    __slots__ = ("output_index", "executor_request_id", "finish_reason", "error", "num_prompt_tokens", "num_generated_tokens", "num_computed_tokens", "num_reused_tokens", "num_recomputed_tokens", "num_transferred_tokens", "num_draft_tokens", "num_accepted_draft_tokens", "pauses", "block_seconds", "queue_seconds", "paused_seconds", "total_seconds")
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAUSES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    output_index: int
    executor_request_id: int
    finish_reason: _inference_pb2.FinishReason
    error: str
    num_prompt_tokens: int
    num_generated_tokens: int
    num_computed_tokens: int
    num_reused_tokens: int
    num_recomputed_tokens: int
    num_transferred_tokens: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    pauses: _containers.RepeatedCompositeFieldContainer[OutputPause]
    block_seconds: float
    queue_seconds: float
    paused_seconds: float
    total_seconds: float
    def __init__(self, output_index: _Optional[int] = ..., executor_request_id: _Optional[int] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., error: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_reused_tokens: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ..., num_transferred_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., pauses: _Optional[_Iterable[_Union[OutputPause, _Mapping]]] = ..., block_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., paused_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ...) -> None: ...

class OutputPause(_message.Message):
    __slots__ = ("iteration", "reason", "beneficiary", "num_lost_tokens")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BENEFICIARY_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    iteration: int
    reason: WaitCode
    beneficiary: int
    num_lost_tokens: int
    def __init__(self, iteration: _Optional[int] = ..., reason: _Optional[_Union[WaitCode, str]] = ..., beneficiary: _Optional[int] = ..., num_lost_tokens: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpdateLimitsRequest(_message.Message):
    __slots__ = ("max_batch_size", "max_num_tokens", "max_queue_size", "max_queued_tokens")
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_batch_size: int
    max_num_tokens: int
    max_queue_size: int
    max_queued_tokens: int
    def __init__(self, max_batch_size: _Optional[int] = ..., max_num_tokens: _Optional[int] = ..., max_queue_size: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ...) -> None: ...

class UpdateLimitsResponse(_message.Message):
    __slots__ = ("limits",)
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: Limits
    def __init__(self, limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class ChangeRoleRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: InstanceRole
    def __init__(self, role: _Optional[_Union[InstanceRole, str]] = ...) -> None: ...

class ChangeRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvEventsResponse(_message.Message):
    __slots__ = ("event_id", "window_size", "created", "stored", "removed", "updated", "overflow")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    WINDOW_SIZE_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    event_id: int
    window_size: int
    created: KvCacheCreated
    stored: KvBlocksStored
    removed: KvBlocksRemoved
    updated: KvBlockUpdated
    overflow: KvEventsOverflow
    def __init__(self, event_id: _Optional[int] = ..., window_size: _Optional[int] = ..., created: _Optional[_Union[KvCacheCreated, _Mapping]] = ..., stored: _Optional[_Union[KvBlocksStored, _Mapping]] = ..., removed: _Optional[_Union[KvBlocksRemoved, _Mapping]] = ..., updated: _Optional[_Union[KvBlockUpdated, _Mapping]] = ..., overflow: _Optional[_Union[KvEventsOverflow, _Mapping]] = ...) -> None: ...

class KvCacheCreated(_message.Message):
    __slots__ = ("num_blocks_per_cache_level",)
    NUM_BLOCKS_PER_CACHE_LEVEL_FIELD_NUMBER: _ClassVar[int]
    num_blocks_per_cache_level: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_blocks_per_cache_level: _Optional[_Iterable[int]] = ...) -> None: ...

class KvBlocksStored(_message.Message):
    __slots__ = ("parent_hash", "blocks")
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    parent_hash: int
    blocks: _containers.RepeatedCompositeFieldContainer[KvStoredBlock]
    def __init__(self, parent_hash: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[KvStoredBlock, _Mapping]]] = ...) -> None: ...

class KvStoredBlock(_message.Message):
    __slots__ = ("block_hash", "token_ids", "lora_id", "cache_level", "priority")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LORA_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_LEVEL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    block_hash: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    lora_id: int
    cache_level: int
    priority: int
    def __init__(self, block_hash: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., lora_id: _Optional[int] = ..., cache_level: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class KvBlocksRemoved(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class KvBlockUpdated(_message.Message):
    __slots__ = ("block_hash", "cache_level", "priority")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    CACHE_LEVEL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    block_hash: int
    cache_level: KvChange
    priority: KvChange
    def __init__(self, block_hash: _Optional[int] = ..., cache_level: _Optional[_Union[KvChange, _Mapping]] = ..., priority: _Optional[_Union[KvChange, _Mapping]] = ...) -> None: ...

class KvChange(_message.Message):
    __slots__ = ("old_value", "new_value")
    OLD_VALUE_FIELD_NUMBER: _ClassVar[int]
    NEW_VALUE_FIELD_NUMBER: _ClassVar[int]
    old_value: int
    new_value: int
    def __init__(self, old_value: _Optional[int] = ..., new_value: _Optional[int] = ...) -> None: ...

class KvEventsOverflow(_message.Message):
    __slots__ = ("num_lost_events",)
    NUM_LOST_EVENTS_FIELD_NUMBER: _ClassVar[int]
    num_lost_events: int
    def __init__(self, num_lost_events: _Optional[int] = ...) -> None: ...

class KvLedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvLedgerResponse(_message.Message):
    __slots__ = ("counts", "entries", "lost_block_ids", "host", "disk", "transfers", "pins", "max_pinned_blocks", "quarantined_blocks")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    MAX_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    counts: KvBlockCounts
    entries: _containers.RepeatedCompositeFieldContainer[KvLedgerEntry]
    lost_block_ids: _containers.RepeatedScalarFieldContainer[int]
    host: KvTier
    disk: KvTier
    transfers: KvTransferCounts
    pins: _containers.RepeatedCompositeFieldContainer[KvPin]
    max_pinned_blocks: int
    quarantined_blocks: int
    def __init__(self, counts: _Optional[_Union[KvBlockCounts, _Mapping]] = ..., entries: _Optional[_Iterable[_Union[KvLedgerEntry, _Mapping]]] = ..., lost_block_ids: _Optional[_Iterable[int]] = ..., host: _Optional[_Union[KvTier, _Mapping]] = ..., disk: _Optional[_Union[KvTier, _Mapping]] = ..., transfers: _Optional[_Union[KvTransferCounts, _Mapping]] = ..., pins: _Optional[_Iterable[_Union[KvPin, _Mapping]]] = ..., max_pinned_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ...) -> None: ...

class KvBlockCounts(_message.Message):
    __slots__ = ("free", "used", "cached", "leased")
    FREE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    free: int
    used: int
    cached: int
    leased: int
    def __init__(self, free: _Optional[int] = ..., used: _Optional[int] = ..., cached: _Optional[int] = ..., leased: _Optional[int] = ...) -> None: ...

class KvLedgerEntry(_message.Message):
    __slots__ = ("block_id", "owner_kind", "owner", "owner_id", "iteration", "call")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_KIND_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    owner_kind: KvOwnerKind
    owner: str
    owner_id: int
    iteration: int
    call: str
    def __init__(self, block_id: _Optional[int] = ..., owner_kind: _Optional[_Union[KvOwnerKind, str]] = ..., owner: _Optional[str] = ..., owner_id: _Optional[int] = ..., iteration: _Optional[int] = ..., call: _Optional[str] = ...) -> None: ...

class KvTier(_message.Message):
    __slots__ = ("max_num_blocks", "used_num_blocks")
    MAX_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    max_num_blocks: int
    used_num_blocks: int
    def __init__(self, max_num_blocks: _Optional[int] = ..., used_num_blocks: _Optional[int] = ...) -> None: ...

class KvTransferCounts(_message.Message):
    __slots__ = ("offloaded", "onboarded", "failed", "failed_by_kind")
    OFFLOADED_FIELD_NUMBER: _ClassVar[int]
    ONBOARDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    FAILED_BY_KIND_FIELD_NUMBER: _ClassVar[int]
    offloaded: int
    onboarded: int
    failed: int
    failed_by_kind: _containers.RepeatedCompositeFieldContainer[KvTransferFailures]
    def __init__(self, offloaded: _Optional[int] = ..., onboarded: _Optional[int] = ..., failed: _Optional[int] = ..., failed_by_kind: _Optional[_Iterable[_Union[KvTransferFailures, _Mapping]]] = ...) -> None: ...

class KvTransferFailures(_message.Message):
    __slots__ = ("kind", "count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    count: int
    def __init__(self, kind: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class KvPin(_message.Message):
    __slots__ = ("pin_id", "num_tokens", "block_ids", "seconds_left")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    num_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    seconds_left: float
    def __init__(self, pin_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., seconds_left: _Optional[float] = ...) -> None: ...

class PinPrefixRequest(_message.Message):
    __slots__ = ("token_ids", "cache_salt_id", "seconds")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt_id: int
    seconds: float
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., cache_salt_id: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class PinPrefixResponse(_message.Message):
    __slots__ = ("pin",)
    PIN_FIELD_NUMBER: _ClassVar[int]
    pin: KvPin
    def __init__(self, pin: _Optional[_Union[KvPin, _Mapping]] = ...) -> None: ...

class UnpinPrefixRequest(_message.Message):
    __slots__ = ("pin_id",)
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    def __init__(self, pin_id: _Optional[int] = ...) -> None: ...

class UnpinPrefixResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class IterationTableRequest(_message.Message):
    __slots__ = ("first_iteration",)
    FIRST_ITERATION_FIELD_NUMBER: _ClassVar[int]
    first_iteration: int
    def __init__(self, first_iteration: _Optional[int] = ...) -> None: ...

class IterationTableResponse(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[IterationTableRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[IterationTableRow, _Mapping]]] = ...) -> None: ...

class IterationTableRow(_message.Message):
    __slots__ = ("iteration", "executor_request_id", "phase", "num_computed_tokens", "num_tokens_with_spec", "reused_tokens", "num_scheduled_tokens", "blocks")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_WITH_SPEC_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    iteration: int
    executor_request_id: int
    phase: Phase
    num_computed_tokens: int
    num_tokens_with_spec: int
    reused_tokens: int
    num_scheduled_tokens: int
    blocks: int
    def __init__(self, iteration: _Optional[int] = ..., executor_request_id: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., num_computed_tokens: _Optional[int] = ..., num_tokens_with_spec: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., num_scheduled_tokens: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...
