"""Fixtures for every test: the demo model, where a test needs a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")
"""The same examples in every run, so that a run says the same on every machine; look for new ones with
`pytest --hypothesis-profile explore`."""

REPOSITORY = Path(__file__).parent.parent
DEMO_MODEL = REPOSITORY / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct. Tests that use it carry the mark `model`."""
    if not DEMO_MODEL.is_file():
        pytest.fail(f"{DEMO_MODEL} is missing: run scripts/fetch_model, or leave these tests out with -m 'not model'")
    return DEMO_MODEL
