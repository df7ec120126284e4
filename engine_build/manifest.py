"""What an engine directory's `config.json` says."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from engine_build.checkpoint.model_config import ModelConfig

FORMAT_VERSION = 2
"""Raised whenever a reader of the previous version could not use what is written now."""


@dataclass(frozen=True, slots=True)
class TensorRtConfig:
    """What only plans of TensorRT have."""

    compute_capabilities: tuple[str, ...]
    """Device generations the plan runs on, `major.minor`."""
    kv_cache_dtype: str
    """What keys and values are kept in: the plan's dtype, `float8_e4m3fn` or `int8`."""
    strip_plan: bool
    """Whether weights are left out of the plan, to be put back by refitting."""
    weight_streaming: bool
    """Whether weights may stay in host memory and stream to the device."""
    profiling_verbosity: str
    """What the plan tells about its layers: `none`, `layer_names_only` or `detailed`."""


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """What an engine was built for. Names are those of TensorRT-LLM's builder where the meaning is the same."""

    max_batch_size: int
    """Sequences in one forward pass."""
    max_num_tokens: int
    """Rows in one forward pass."""
    max_input_len: int
    """Prompt tokens of one request."""
    max_seq_len: int
    """Prompt and generated tokens of one request."""
    tokens_per_block: int
    """Positions in one KV block."""
    dtype: str
    """What the engine computes in: `float32`, `float16` or `bfloat16`."""
    weight_dtype: str
    """What matrices are kept as: `as_stored`, `int8`, `int4` or `fp8`."""
    tp_size: int = 1
    """Devices that share every matrix (tensor parallelism)."""
    pp_size: int = 1
    """Groups of devices that share the layers (pipeline parallelism)."""
    tensorrt: TensorRtConfig | None = None
    """For the targets `tensorrt` and `tensorrt-rtx`."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of the network."""

    dtype: str
    """A numpy (or `ml_dtypes`) name."""
    shape: tuple[int | str, ...]
    """A string is the name of a dimension that varies."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it was written."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `config.json`."""

    format_version: int
    builder_versions: dict[str, str]
    """Package -> version, of everything that had a part in the plan."""
    target: str
    pretrained_config: ModelConfig
    build_config: BuildConfig
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    files: dict[str, FileRecord]
    """Path relative to the engine directory, `/` between parts -> record; everything but `config.json` itself."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"
