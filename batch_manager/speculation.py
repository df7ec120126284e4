"""How many proposed tokens were accepted."""

from __future__ import annotations


class SpeculationStats:
    """Counts over all verifications of at least one proposed token.

    `observe` runs once for each sequence and step, so it only counts how often each outcome came.
    """

    def __init__(self) -> None:
        self._outcomes: dict[tuple[int, int], int] = {}
        """Verifications by (proposed, accepted) tokens."""

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        outcome = (num_draft_tokens, num_accepted_tokens)
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1

    @property
    def num_drafts(self) -> int:
        """Verifications."""
        return sum(self._outcomes.values())

    @property
    def num_draft_tokens(self) -> int:
        return sum(proposed * count for (proposed, _), count in self._outcomes.items())

    @property
    def num_accepted_tokens(self) -> int:
        return sum(accepted * count for (_, accepted), count in self._outcomes.items())

    @property
    def num_accepted_per_position(self) -> list[int]:
        """How often the first, second, ... proposed token was accepted."""
        positions = [0] * max((proposed for proposed, _ in self._outcomes), default=0)
        for (_, accepted), count in self._outcomes.items():
            for position in range(accepted):
                positions[position] += count
        return positions
