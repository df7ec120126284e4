"""How many proposed tokens were accepted."""

from __future__ import annotations


class SpeculationStats:
    """Counts over all verifications since the last `take`."""

    def __init__(self) -> None:
        self.num_drafts = 0
        """Verifications of at least one proposed token."""
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_per_position: list[int] = []
        """How often the first, second, ... proposed token was accepted."""

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        positions = self.num_accepted_per_position
        positions.extend([0] * (num_draft_tokens - len(positions)))
        for position in range(num_accepted_tokens):
            positions[position] += 1
