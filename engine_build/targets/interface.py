"""What a target adds to the network that all of them read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from engine_build.checkpoint.model_config import ModelConfig
from engine_build.manifest import BuildConfig, TensorRtConfig

ProgressCallback = Callable[[str, int, int], None]
"""Called with the stage, and how much of how much is done."""


class TargetError(Exception):
    """A target cannot build what was asked for: names the setting or library, and what would be right."""


class KvCacheType(NamedTuple):
    """One way a target can keep keys and values."""

    name: str
    bytes_per_element: int
    extra_bytes_per_row: int
    """Scales and the like, for the key or value of one head at one position."""


class BuildCost(NamedTuple):
    """What a build takes of the machine it runs on; estimates from measured builds."""

    memory: int
    """Bytes at the peak, for one rank."""
    seconds: float
    """For one rank, on two CPU cores."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How a network is compiled; nothing of it is recorded, since the plan does the same whatever they are."""

    input_timing_cache: Path | None = None
    """Kernel timings of earlier builds."""
    output_timing_cache: Path | None = None
    """Where to write this build's."""


DEFAULT_PROFILING_VERBOSITY = "layer_names_only"


@dataclass(frozen=True, slots=True)
class TensorRtOptions:
    """What was asked of a plan of TensorRT; see `TensorRtConfig` for what is made of it."""

    compute_capabilities: tuple[str, ...] = ()
    """Empty for the target's choice."""
    kv_cache_dtype: str | None = None
    """`None` for the plan's dtype."""
    strip_plan: bool = False
    weight_streaming: bool = False
    profiling_verbosity: str = DEFAULT_PROFILING_VERBOSITY


class Target(Protocol):
    """A kind of plan. Implementations import their library in the method that needs it."""

    @property
    def name(self) -> str: ...

    dtypes: tuple[str, ...]
    """What it computes in; the first is the default."""
    weight_dtypes: tuple[str, ...]
    """What matrices may be kept as."""
    quantized_as: str
    """How quantized matrices are written: see `NetworkOptions.quantized_as`."""
    default_tokens_per_block: int
    times_kernels: bool
    """Whether a build times kernels, so that a timing cache can be read and written."""

    def activation_dtype(self, dtype: str) -> str:
        """What values between the network's operators are declared as, in an engine that computes in `dtype`."""
        ...

    def tensorrt_config(self, options: TensorRtOptions | None, dtype: str) -> TensorRtConfig | None:
        """What a plan of TensorRT that computes in `dtype` is built with; `None` for other targets.

        Raises:
            TargetError: options for another target, or ones that cannot be met here.
        """
        ...

    def check(self, build_config: BuildConfig, model: ModelConfig) -> None:
        """Raises `TargetError` when the target cannot do what `build_config` asks for."""
        ...

    def kv_cache_types(self, build_config: BuildConfig) -> tuple[KvCacheType, ...]:
        """How keys and values can be kept by an engine of `build_config`; the first is the default."""
        ...

    def versions(self) -> dict[str, str]:
        """Package -> version of the libraries a plan depends on. Raises `TargetError` when one is not installed."""
        ...

    def plan_files(self, build_config: BuildConfig) -> tuple[str, ...]:
        """Names of the files that an engine of this target needs."""
        ...

    def build_cost(self, weight_bytes: int, build_config: BuildConfig, model: ModelConfig) -> BuildCost | None:
        """What compiling one rank will take; `None` where it is next to nothing."""
        ...

    def compile(
        self,
        directory: Path,
        rank: int,
        build_config: BuildConfig,
        model: ModelConfig,
        options: CompileOptions,
        report: ProgressCallback,
    ) -> None:
        """Turn the network in `directory` into the files that `plan_files` names, in the same place.

        Where the plan's inputs and outputs are not the network's, `model.onnx` is changed to have them.

        Args:
            directory: holds `model.onnx` and its data, the network of one rank.
            rank: which.
            build_config: what it is built for.
            model: the whole model.
            options: how.
            report: called with progress.

        Raises:
            TargetError: it does not compile.
        """
        ...
