"""What a target adds to the network that all of them read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from engine_build.manifest import BuildConfig


class TargetError(Exception):
    """A target cannot build what was asked for: names the setting or library, and what would be right."""


class KvCacheType(NamedTuple):
    """One way a target can keep keys and values."""

    name: str
    bytes_per_element: int
    extra_bytes_per_row: int
    """Scales and the like, for the key or value of one head at one position."""


class Target(Protocol):
    """A kind of plan. Implementations import their library in the method that needs it."""

    name: str
    dtypes: tuple[str, ...]
    """What it computes in; the first is the default."""
    activation_dtype: str
    """What values between the network's operators are declared as."""
    default_tokens_per_block: int
    arch: str
    """See `Manifest.arch`."""

    def check(self, build_config: BuildConfig) -> None:
        """Raises `TargetError` when the target cannot do what `build_config` asks for."""
        ...

    def kv_cache_types(self, dtype: str) -> tuple[KvCacheType, ...]:
        """How keys and values can be kept by an engine that computes in `dtype`; the first is the default."""
        ...

    def versions(self) -> dict[str, str]:
        """Package -> version of the libraries a plan depends on. Raises `TargetError` when one is not installed."""
        ...

    def prove(self, model_path: Path, build_config: BuildConfig) -> None:
        """Compile the network as an engine would.

        Raises:
            TargetError: it does not compile.
        """
        ...
