"""The two packages that a plan can be built with, and how one that is missing is said."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from engine_build.targets.interface import TargetError


@dataclass(frozen=True, slots=True)
class TensorRtPackage:
    """One of NVIDIA's two builders."""

    target: str
    module: str
    distribution: str
    """What pip installs."""
    extra: str
    """Ours that asks for it."""

    def load(self) -> Any:
        """The module.

        Raises:
            TargetError: it is not installed, or not whole.
        """
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            found = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be loaded ({error})"
            raise TargetError(
                f"target {self.target} needs the package {self.distribution}, which {found}: "
                f"pip install 'inflight-executor[{self.extra}]'"
            ) from error


TENSORRT = TensorRtPackage("tensorrt", "tensorrt", "tensorrt-cu13", "tensorrt")
TENSORRT_RTX = TensorRtPackage("tensorrt-rtx", "tensorrt_rtx", "tensorrt-rtx-cu13", "tensorrt-rtx")
