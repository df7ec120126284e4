"""docs/pain_points.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "pain_points.md"


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text())
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert len(named) == sum(1 for row in rows if not row.startswith(("| reported as", "|---")))
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not re.search(rf"^(async )?def {name}\(", (TESTS / path).read_text(), re.MULTILINE)
    ]
    assert missing == []
