"""Draws tokens from logits. See README.md."""

from executor.sampling.interface import (
    BatchedLogitsProcessor,
    GrammarMatcher,
    InvalidLogitsError,
    LogitsProcessor,
    NoTokenLeftError,
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
    "InvalidLogitsError",
    "LogitsProcessor",
    "NoTokenLeftError",
    "SampledRows",
    "SampledSequence",
    "Sampler",
    "SamplingError",
    "SamplingSpec",
    "TopLogProbs",
]
