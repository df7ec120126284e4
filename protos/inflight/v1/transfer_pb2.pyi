from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPEN_OUTCOME_UNSPECIFIED: _ClassVar[OpenOutcome]
    OPEN_OUTCOME_OPENED: _ClassVar[OpenOutcome]
    OPEN_OUTCOME_NOT_THERE: _ClassVar[OpenOutcome]
    OPEN_OUTCOME_REFUSED: _ClassVar[OpenOutcome]

class CloseOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLOSE_OUTCOME_UNSPECIFIED: _ClassVar[CloseOutcome]
    CLOSE_OUTCOME_RECEIVED: _ClassVar[CloseOutcome]
    CLOSE_OUTCOME_FAILED: _ClassVar[CloseOutcome]
    CLOSE_OUTCOME_CANCELLED: _ClassVar[CloseOutcome]
OPEN_OUTCOME_UNSPECIFIED: OpenOutcome
OPEN_OUTCOME_OPENED: OpenOutcome
OPEN_OUTCOME_NOT_THERE: OpenOutcome
OPEN_OUTCOME_REFUSED: OpenOutcome
CLOSE_OUTCOME_UNSPECIFIED: CloseOutcome
CLOSE_OUTCOME_RECEIVED: CloseOutcome
CLOSE_OUTCOME_FAILED: CloseOutcome
CLOSE_OUTCOME_CANCELLED: CloseOutcome

class ModelIdentity(_message.Message):
    __slots__ = ("config_digest", "weights_digest", "compute_dtype")
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    config_digest: bytes
    weights_digest: bytes
    compute_dtype: str
    def __init__(self, config_digest: _Optional[bytes] = ..., weights_digest: _Optional[bytes] = ..., compute_dtype: _Optional[str] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("dtype", "tokens_per_block", "head_size", "num_layers", "num_kv_heads", "first_layer", "last_layer", "first_head", "last_head")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    LAST_HEAD_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    tokens_per_block: int
    head_size: int
    num_layers: int
    num_kv_heads: int
    first_layer: int
    last_layer: int
    first_head: int
    last_head: int
    def __init__(self, dtype: _Optional[str] = ..., tokens_per_block: _Optional[int] = ..., head_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., first_head: _Optional[int] = ..., last_head: _Optional[int] = ...) -> None: ...

class MemoryRegion(_message.Message):
    __slots__ = ("address", "bytes_per_block", "num_blocks")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    address: int
    bytes_per_block: int
    num_blocks: int
    def __init__(self, address: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class PoolMemory(_message.Message):
    __slots__ = ("transport", "metadata", "regions")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    metadata: bytes
    regions: _containers.RepeatedCompositeFieldContainer[MemoryRegion]
    def __init__(self, transport: _Optional[str] = ..., metadata: _Optional[bytes] = ..., regions: _Optional[_Iterable[_Union[MemoryRegion, _Mapping]]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("instance_id", "identity", "layout", "memory")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    instance_id: bytes
    identity: ModelIdentity
    layout: KvLayout
    memory: PoolMemory
    def __init__(self, instance_id: _Optional[bytes] = ..., identity: _Optional[_Union[ModelIdentity, _Mapping]] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., memory: _Optional[_Union[PoolMemory, _Mapping]] = ...) -> None: ...

class GeneratedLogProb(_message.Message):
    __slots__ = ("log_prob", "top_token_ids", "top_log_probs")
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    log_prob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, log_prob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class ContextState(_message.Message):
    __slots__ = ("instance_id", "address", "context_id", "identity", "layout", "num_tokens", "prompt_digest", "log_probs", "block_ids")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    instance_id: bytes
    address: str
    context_id: int
    identity: ModelIdentity
    layout: KvLayout
    num_tokens: int
    prompt_digest: bytes
    log_probs: _containers.RepeatedCompositeFieldContainer[GeneratedLogProb]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, instance_id: _Optional[bytes] = ..., address: _Optional[str] = ..., context_id: _Optional[int] = ..., identity: _Optional[_Union[ModelIdentity, _Mapping]] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., num_tokens: _Optional[int] = ..., prompt_digest: _Optional[bytes] = ..., log_probs: _Optional[_Iterable[_Union[GeneratedLogProb, _Mapping]]] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("instance_id", "context_id", "prompt_digest", "identity", "layout", "first_token", "rank", "num_ranks")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    instance_id: bytes
    context_id: int
    prompt_digest: bytes
    identity: ModelIdentity
    layout: KvLayout
    first_token: int
    rank: int
    num_ranks: int
    def __init__(self, instance_id: _Optional[bytes] = ..., context_id: _Optional[int] = ..., prompt_digest: _Optional[bytes] = ..., identity: _Optional[_Union[ModelIdentity, _Mapping]] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., first_token: _Optional[int] = ..., rank: _Optional[int] = ..., num_ranks: _Optional[int] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("outcome", "reason", "begin_token", "end_token", "block_ids", "checksums", "blocks_per_checksum", "is_complete", "lease_ms", "memory")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    outcome: OpenOutcome
    reason: str
    begin_token: int
    end_token: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    blocks_per_checksum: int
    is_complete: bool
    lease_ms: int
    memory: PoolMemory
    def __init__(self, outcome: _Optional[_Union[OpenOutcome, str]] = ..., reason: _Optional[str] = ..., begin_token: _Optional[int] = ..., end_token: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., blocks_per_checksum: _Optional[int] = ..., is_complete: bool = ..., lease_ms: _Optional[int] = ..., memory: _Optional[_Union[PoolMemory, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("instance_id", "context_ids")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_IDS_FIELD_NUMBER: _ClassVar[int]
    instance_id: bytes
    context_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, instance_id: _Optional[bytes] = ..., context_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("ended_context_ids",)
    ENDED_CONTEXT_IDS_FIELD_NUMBER: _ClassVar[int]
    ended_context_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ended_context_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("instance_id", "context_id", "rank", "num_ranks", "outcome")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    instance_id: bytes
    context_id: int
    rank: int
    num_ranks: int
    outcome: CloseOutcome
    def __init__(self, instance_id: _Optional[bytes] = ..., context_id: _Optional[int] = ..., rank: _Optional[int] = ..., num_ranks: _Optional[int] = ..., outcome: _Optional[_Union[CloseOutcome, str]] = ...) -> None: ...

class CloseResponse(_message.Message):
    __slots__ = ("was_leased",)
    WAS_LEASED_FIELD_NUMBER: _ClassVar[int]
    was_leased: bool
    def __init__(self, was_leased: bool = ...) -> None: ...

class FindRequest(_message.Message):
    __slots__ = ("token_ids", "cache_salt_id", "identity", "layout")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt_id: int
    identity: ModelIdentity
    layout: KvLayout
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., cache_salt_id: _Optional[int] = ..., identity: _Optional[_Union[ModelIdentity, _Mapping]] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ...) -> None: ...

class FindResponse(_message.Message):
    __slots__ = ("num_tokens", "state")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    state: ContextState
    def __init__(self, num_tokens: _Optional[int] = ..., state: _Optional[_Union[ContextState, _Mapping]] = ...) -> None: ...
