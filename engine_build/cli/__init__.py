"""The `engine-build` command line."""

from __future__ import annotations

from engine_build.cli.main import main

__all__ = ["main"]
