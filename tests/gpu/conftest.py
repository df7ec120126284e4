"""Tests that need an NVIDIA GPU, and a torch that was compiled for one. `scripts/verify_gpu` runs them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU that torch can use")
