"""Prompt lookup: drafts are what followed the last tokens when they occurred before.

Whether drafts pay is arithmetic. A step of B sequences with k drafts for one of them gives B + p + p^2 + ... + p^k
tokens, where p is the probability that a draft which follows accepted ones is accepted, and costs what `StepCost` says
a step of B + k rows does after the last one. The k with the most tokens for the cost is proposed. The drafter measures
p as it goes, for each match length, and so proposes long drafts where text is copied, short ones where it is not, and
none, but for a rare probe, where they are never accepted or where the batch is large; and it fills the rows that the
engine would pad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batch_manager import IterationPlan, Phase
from executor.api.errors import InvalidRequestError
from executor.api.request import LookaheadDecodingConfig
from executor.speculation.ngram_index import NgramIndex
from executor.speculation.step_cost import StepCost

_SAMPLING_COST = 0.1
"""Rows that drawing and comparing a draft's token costs, on rows that are padding otherwise."""

_LONGEST_PADDING = 8
"""Drafts without any gain after which more drafts are not looked at: they may still fit rows that are padded anyway."""

_MEMORY = 0.9
"""Weight of the past in the running acceptance, for each measured draft."""

_MATCH_SIZES = 8
"""Matches of this length and longer are measured together."""

_LONGEST_PAUSE = 64
"""Tokens between probes where drafts are never accepted: at most 1/64 of a row's cost each."""

_SIZE_RANGES = {"max_window_size": (1, 64), "max_ngram_size": (1, 16), "max_verification_set_size": (0, 64)}
"""Least and most. The index keeps `max_ngram_size` n-grams for each token, so without a bound one request could take
all memory; a match is followed past any n-gram, so larger ones would find nothing more."""


@dataclass(slots=True)
class DraftStatistics:
    """Counts since the drafter, or the request, began."""

    num_proposals: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted of all drafts, 0 where there were none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


class _Sequence:
    """One sequence's n-grams, acceptance by match length, and the proposal that waits for its verdict."""

    __slots__ = ("acceptance", "drafts", "index", "match_size", "max_drafts", "pause", "statistics", "wait_until")

    def __init__(self, config: LookaheadDecodingConfig) -> None:
        self.index = NgramIndex(config.max_ngram_size)
        self.max_drafts = max_draft_tokens(config)
        # A first guess: the longer text has been copied, the likelier it goes on. That of text which copies nothing
        # is wrong a few times for each size before it is known; a higher guess would cost such text more than 2 %.
        self.acceptance = [size / (size + 2) for size in range(1, _MATCH_SIZES + 1)]
        self.drafts: list[int] = []
        self.match_size = 0
        self.pause = 1
        self.wait_until = 0
        self.statistics = DraftStatistics()


class Drafter:
    """Proposes drafts for many sequences. Not thread-safe: one caller at a time."""

    def __init__(self, default: LookaheadDecodingConfig | None = None, step_cost: StepCost | None = None) -> None:
        """Begin.

        Args:
            default: for sequences that were not opened with a configuration of their own; `None` drafts for opened
                sequences only.
            step_cost: what steps cost on this engine; `None`: the first guess.
        """
        if default is not None:
            check_lookahead_config(default)
        self._default = default
        self.step_cost = step_cost or StepCost()
        self._sequences: dict[int, _Sequence] = {}
        self.statistics = DraftStatistics()
        """Of all sequences, closed ones too."""

    def open(self, request_id: int, config: LookaheadDecodingConfig) -> None:
        """Draft for a sequence with a configuration of its own.

        Raises:
            InvalidRequestError: the configuration is out of range.
            ValueError: `request_id` is open already.
        """
        if request_id in self._sequences:
            raise ValueError(f"request {request_id} is open already")
        check_lookahead_config(config)
        self._sequences[request_id] = _Sequence(config)

    def close(self, request_id: int) -> None:
        """Forget a sequence; one that is not open is left alone."""
        self._sequences.pop(request_id, None)

    def statistics_of(self, request_id: int) -> DraftStatistics:
        """Of one open sequence, zeros where nothing was ever proposed for it."""
        sequence = self._sequences.get(request_id)
        return DraftStatistics() if sequence is None else sequence.statistics

    def learn_step(self, plan: IterationPlan, seconds: float) -> None:
        """A step took so long; those that compute context, whose rows are not all sampled, say nothing of drafts."""
        if self._sequences and all(item.phase is Phase.GENERATION for item in plan.scheduled):
            self.step_cost.learn(plan.num_tokens, seconds)

    def propose(self, request_id: int, token_ids: Sequence[int], *, num_sequences: int = 1) -> list[int]:
        """Draft tokens that may follow.

        Also learns from `token_ids` how many tokens of the last proposal came true.

        Args:
            request_id: whose tokens.
            token_ids: prompt and generated tokens; between calls they only grow.
            num_sequences: how many sequences share the next step.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            if self._default is None:
                return []
            sequence = self._sequences[request_id] = _Sequence(self._default)
        index = sequence.index
        new = token_ids[len(index.token_ids) :]
        if sequence.drafts:
            self._learn(sequence, new)
        index.extend(new)
        sequence.drafts = self._drafts(sequence, num_sequences)
        if sequence.drafts:
            for statistics in (self.statistics, sequence.statistics):
                statistics.num_proposals += 1
                statistics.num_draft_tokens += len(sequence.drafts)
        return list(sequence.drafts)

    def _drafts(self, sequence: _Sequence, num_sequences: int) -> list[int]:
        match = sequence.index.match()
        if match is None or sequence.max_drafts == 0:
            return []
        length, continuation = match
        size = min(length, _MATCH_SIZES)
        count = self._best_count(sequence.acceptance[size - 1], sequence.max_drafts, num_sequences)
        if count == 0:
            if len(sequence.index.token_ids) < sequence.wait_until:
                return []
            count = 1
        sequence.match_size = size
        return sequence.index.continuation(continuation, count)

    def _best_count(self, acceptance: float, max_drafts: int, num_sequences: int) -> int:
        """How many drafts give the most tokens for what the step costs."""
        best_count = 0
        best_rate = num_sequences / self.step_cost(num_sequences)
        tokens = float(num_sequences)
        all_accepted = 1.0
        for count in range(1, max_drafts + 1):
            all_accepted *= acceptance
            tokens += all_accepted
            rate = tokens / (self.step_cost(num_sequences + count) + _SAMPLING_COST * count)
            if rate > best_rate:
                best_count, best_rate = count, rate
            elif count - best_count > _LONGEST_PADDING:
                break
        return best_count

    def _learn(self, sequence: _Sequence, new: Sequence[int]) -> None:
        """Compare the last proposal with what came: matches up to the first difference, which is one miss."""
        drafts = sequence.drafts
        compared = min(len(drafts), len(new))
        hits = 0
        while hits < compared and drafts[hits] == new[hits]:
            hits += 1
        verdicts = [1.0] * hits + [0.0] * (hits < compared)
        size = sequence.match_size - 1
        for verdict in verdicts:
            sequence.acceptance[size] = _MEMORY * sequence.acceptance[size] + (1 - _MEMORY) * verdict
        if hits:
            sequence.pause = 1
        else:
            sequence.pause = min(2 * sequence.pause, _LONGEST_PAUSE)
        sequence.wait_until = len(sequence.index.token_ids) + sequence.pause
        accepted = min(hits, max(0, len(new) - 1))
        self.statistics.num_accepted_tokens += accepted
        sequence.statistics.num_accepted_tokens += accepted


def max_draft_tokens(config: LookaheadDecodingConfig) -> int:
    """Drafts a step may verify: as many as lookahead decoding with this window, n-gram and verification set would."""
    window, ngram, verification = config.max_window_size, config.max_ngram_size, config.max_verification_set_size
    if ngram == 1:
        return window - 1 + verification
    return ngram - 2 + (window - 1 + verification) * (ngram - 1)


def check_lookahead_config(config: LookaheadDecodingConfig) -> None:
    """Raise `InvalidRequestError` for a configuration that is out of range."""
    for name, (least, most) in _SIZE_RANGES.items():
        value = getattr(config, name)
        if not least <= value <= most:
            raise InvalidRequestError(
                f"lookahead_config.{name} is {value}; it must be in [{least}, {most}]",
                field=f"lookahead_config.{name}",
            )
