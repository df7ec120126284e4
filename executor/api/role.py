"""What an instance does in a deployment whose contexts and generations run on different instances."""

from __future__ import annotations

from enum import StrEnum


class InstanceRole(StrEnum):
    """Which requests an instance takes (not upstream's)."""

    CONTEXT = "context"
    """Context-only ones."""
    GENERATION = "generation"
    """Generation-only ones."""
    BOTH = "both"
    """All, those that do context and generation in one place included."""
