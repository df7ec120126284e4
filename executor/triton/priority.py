"""From Triton's priority levels to the Executor's priorities.

Triton counts levels from 1, the soonest, up to `priority_levels`; 0 stands for the default level. The Executor's go
from 0.0 to 1.0, the soonest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from executor.api.errors import InvalidRequestError

_DEFAULT_PRIORITY = 0.5


class PriorityLevels(NamedTuple):
    """What the `dynamic_batching` section of a model says; zeros where it says nothing."""

    num_levels: int = 0
    default_level: int = 0

    def priority(self, name: str, level: Any) -> float:
        """The Executor's priority for a level, which a request gave as `name`.

        Raises:
            InvalidRequestError: there is no such level.
        """
        if not isinstance(level, int) or not 0 <= level <= self.num_levels:
            levels = f"0 to {self.num_levels}" if self.num_levels else "0, as the model has no priority_levels"
            raise InvalidRequestError(f"{name} is {level!r}; it must be {levels}", field=name)
        level = level or self.default_level
        if not level:
            return _DEFAULT_PRIORITY
        return 1.0 if self.num_levels == 1 else (self.num_levels - level) / (self.num_levels - 1)
