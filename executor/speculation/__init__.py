"""Speculation without a draft model. See README.md."""

from executor.speculation.drafter import Drafter, DraftStatistics, check_lookahead_config, max_draft_tokens
from executor.speculation.ngram_index import NgramIndex
from executor.speculation.step_cost import StepCost

__all__ = ["DraftStatistics", "Drafter", "NgramIndex", "StepCost", "check_lookahead_config", "max_draft_tokens"]
