"""The documentation's compatibility page is what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import executor
from executor.api.support import Support, support_rows

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "compatibility_table.py"


def test_the_committed_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("compatibility_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run scripts/compatibility_table"


def test_the_page_names_each_refused_field_and_why() -> None:
    page = (SCRIPT.parent.parent / "docs" / "compatibility.md").read_text(encoding="utf-8")
    for cls in (executor.Request, executor.ExecutorConfig, executor.SamplingConfig, executor.KvCacheConfig):
        for row in support_rows(cls):
            if row.support is Support.REFUSED:
                assert f"| `{row.name}` | refused | {row.reason} |" in page
