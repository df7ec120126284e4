"""Draws tokens from logits. See README.md."""

from executor.sampling.interface import (
    BatchedLogitsProcessor,
    GrammarMatcher,
    LogitsProcessor,
    SampledRows,
    SampledSequence,
    SamplingError,
    SamplingSpec,
    TopLogProbs,
)
from executor.sampling.sampler import Sampler

__all__ = [
    "BatchedLogitsProcessor",
    "GrammarMatcher",
    "LogitsProcessor",
    "SampledRows",
    "SampledSequence",
    "Sampler",
    "SamplingError",
    "SamplingSpec",
    "TopLogProbs",
]
