"""Target `reference`: the graph is interpreted operator by operator, so there is nothing to compile."""

from __future__ import annotations

from pathlib import Path

from engine_build.manifest import BuildConfig
from engine_build.targets.interface import KvCacheType, TargetError


class ReferenceTarget:
    """See `Target`."""

    name = "reference"
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    activation_dtype = "float32"
    default_tokens_per_block = 32
    arch = "any"

    def check(self, build_config: BuildConfig) -> None:
        if build_config.dtype not in self.dtypes:
            raise TargetError(
                f"dtype {build_config.dtype!r} is unknown; target reference computes in {', '.join(self.dtypes)}"
            )

    def kv_cache_types(self, dtype: str) -> tuple[KvCacheType, ...]:
        default = "float32" if dtype == "float32" else dtype
        sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
        names = (default, *(name for name in sizes if name != default))
        return tuple(KvCacheType(name, sizes[name], 0) for name in names)

    def versions(self) -> dict[str, str]:
        return {}

    def prove(self, model_path: Path, build_config: BuildConfig) -> None:
        """Nothing is left to prove: the network's writer has checked the graph."""
