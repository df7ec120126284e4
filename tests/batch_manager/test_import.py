"""The package is light: it can be imported wherever there is Python."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_loads_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import batch_manager; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["batch_manager"]
