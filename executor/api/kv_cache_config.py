"""The KV cache: its size, what is kept, what moves between instances.

Names, order and defaults follow `tensorrt_llm.bindings.executor`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass
from enum import IntEnum

from batch_manager.kv import KvCacheRetentionConfig as BlockRetentionConfig
from batch_manager.kv.retention import MAX_PRIORITY, MIN_PRIORITY
from executor.api.errors import InvalidRequestError
from executor.api.parallel import ONE_DEVICE
from executor.api.role import InstanceRole
from executor.api.support import accepted, addition, refused, refused_members
from executor.transfer.peer import TransferNetwork

_NO_FILES = "blocks are not written to files"


class KvCacheTransferMode(IntEnum):
    """Where blocks go when they leave the device."""

    DRAM = 0
    GDS = 1
    POSIX_DEBUG_FALLBACK = 2


@dataclass(frozen=True, slots=True)
class KvCacheRetentionConfig(BlockRetentionConfig):
    """How long a request's blocks are worth keeping; see `batch_manager.kv.KvCacheRetentionConfig`."""

    transfer_mode: KvCacheTransferMode = refused(KvCacheTransferMode.DRAM, _NO_FILES)
    directory: str | None = refused(None, _NO_FILES)


@dataclass(slots=True)
class RuntimeDefaults:
    """What a checkpoint says about the cache, for fields that are not set."""

    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None


@dataclass(slots=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    """Tokens the pool holds; rounded up to whole blocks."""
    max_attention_window: list[int] | None = refused(None, "the window is the model's own")
    sink_token_length: int | None = refused(None, "attention sinks are not offered")
    free_gpu_memory_fraction: float | None = None
    """Part of the memory that is free: by default 0.3 of main memory, or 0.9 of what a GPU has left beside the engine's
    weights and steps. The pool is no larger than what `max_batch_size` sequences of `max_seq_len` tokens can use."""
    host_cache_size: int | None = None
    """Bytes of main memory for blocks that leave the pool; `None` or 0: none."""
    onboard_blocks: bool = accepted(True, "blocks found below the pool are always brought back to it")
    cross_kv_cache_fraction: float | None = refused(None, "only decoder-only models are offered")
    secondary_offload_min_priority: int | None = None
    """Retention priority below which blocks are dropped instead of offloaded; `None`: 30."""
    event_buffer_max_size: int = 0
    """Events kept for `get_kv_cache_event_manager`; 0: no events."""
    _: KW_ONLY
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = refused(False, "managed memory is not used")
    attention_dp_events_gather_period_ms: int = refused(5, ONE_DEVICE)
    runtime_defaults: InitVar[RuntimeDefaults | None] = None
    kv_cache_dtype: str | None = addition(None)
    """`None`: as the plan computes; 8 bits, with a scale for each token and head: `"uint8"` with target `openvino`,
    `"int8"` or `"float8_e4m3fn"` with `reference`. Plans of TensorRT have theirs built in."""
    disk_cache_size: int | None = addition(None)
    """Bytes of a file for blocks that leave main memory, or the pool where there is no `host_cache_size`; `None` or 0:
    no file."""
    disk_cache_dir: str | None = addition(None)
    """Where that file is, one directory for each executor; it is removed at shutdown."""
    max_pinned_fraction: float = addition(0.25)
    """Of the pool's blocks, how many `Executor.pin_prefix` may keep there."""

    def __post_init__(self, runtime_defaults: RuntimeDefaults | None) -> None:
        if runtime_defaults is not None:
            self.fill_empty_fields_from_runtime_defaults(runtime_defaults)

    def validate(self) -> None:
        """Raise `InvalidRequestError` naming the first field that is wrong whatever the engine is."""
        for name in ("host_cache_size", "disk_cache_size", "event_buffer_max_size"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise _wrong(name, f"is {value}; it must be 0 or more")
        priority = self.secondary_offload_min_priority
        if priority is not None and not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise _wrong(
                "secondary_offload_min_priority", f"is {priority}; it must be in [{MIN_PRIORITY}, {MAX_PRIORITY}]"
            )
        if not 0 <= self.max_pinned_fraction <= 1:
            raise _wrong("max_pinned_fraction", f"is {self.max_pinned_fraction}; it must be in [0, 1]")
        if self.disk_cache_size and self.disk_cache_dir is None:
            raise _wrong("disk_cache_dir", "is not set; disk_cache_size needs a directory")
        if not self.enable_block_reuse and (self.host_cache_size or self.disk_cache_size):
            raise _wrong(
                "enable_block_reuse", "is off; nothing would be found again in host_cache_size or disk_cache_size"
            )

    def fill_empty_fields_from_runtime_defaults(self, runtime_defaults: RuntimeDefaults) -> None:
        """Take over what is not set here."""
        if self.max_attention_window is None:
            self.max_attention_window = runtime_defaults.max_attention_window
        if self.sink_token_length is None:
            self.sink_token_length = runtime_defaults.sink_token_length


def _wrong(name: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"kv_cache_config.{name} {what}", field=f"kv_cache_config.{name}")


@refused_members(MPI="NIXL carries blocks", UCX="NIXL carries blocks, over UCX")
class CacheTransceiverBackendType(IntEnum):
    """What carries blocks from one instance to another."""

    DEFAULT = 0
    MPI = 1
    UCX = 2
    NIXL = 3

    @staticmethod
    def from_string(name: str) -> CacheTransceiverBackendType:
        """By name, in upper or lower case. Raises `ValueError` for any other."""
        for member in CacheTransceiverBackendType:
            if name in (member.name, member.name.lower()):
                return member
        raise ValueError(f"{name!r} is no backend; known are {', '.join(CacheTransceiverBackendType.__members__)}")


@dataclass(slots=True)
class CacheTransceiverConfig:
    """How this instance exchanges contexts with others. Not given: it does not."""

    backend: CacheTransceiverBackendType | None = None
    """`None` and `DEFAULT` are NIXL."""
    max_tokens_in_buffer: int | None = accepted(None, "blocks go from pool to pool, without a buffer in between")
    _: KW_ONLY
    kv_transfer_timeout_ms: int = addition(30_000)
    """How long a context waits for whoever continues it, and a transfer may take. Then blocks are given back, and the
    context is computed where it was to come to."""
    listen: str = addition("127.0.0.1:0")
    """HOST:PORT where other instances ask for contexts; port 0 takes a free one. Whoever reaches it can read what is
    in the cache."""
    role: InstanceRole = addition(InstanceRole.BOTH)
    peers: list[str] = addition(default_factory=list)
    """HOST:PORT of instances that are asked for what they have cached of a prompt before it is computed; it is fetched
    where the measured link makes that cheaper."""
    tls_certificate: str | None = addition(None)
    """PEM file of the chain that this instance shows when it calls and when it is called. With it calls between
    instances are TLS, and only who shows what `tls_ca` has signed is answered. The blocks are not encrypted."""
    tls_private_key: str | None = addition(None)
    """PEM file."""
    tls_ca: str | None = addition(None)
    """PEM file of the roots that sign the instances' certificates."""
    network: TransferNetwork | None = addition(None)
    """How instances reach each other. `None`: NIXL and gRPC. A `LocalNetwork` joins executors of one process."""

    def validate(self) -> None:
        """Raise an `InvalidRequestError` naming the first field that is wrong."""
        if self.kv_transfer_timeout_ms < 1:
            raise InvalidRequestError(
                f"cache_transceiver_config.kv_transfer_timeout_ms is {self.kv_transfer_timeout_ms}; "
                "it must be at least 1",
                field="cache_transceiver_config.kv_transfer_timeout_ms",
            )
