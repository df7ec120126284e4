"""Draws tokens from logits. See README.md."""

from executor.sampling.errors import InvalidLogitsError, LogitsProcessorError, NoTokenLeftError, SamplingError
from executor.sampling.interface import (
    BatchedLogitsProcessor,
    GrammarMatcher,
    LogitsProcessor,
    SampledRows,
    SampledSequence,
    SamplingSpec,
    TopLogProbs,
)
from executor.sampling.sampler import Sampler

__all__ = [
    "BatchedLogitsProcessor",
    "GrammarMatcher",
    "InvalidLogitsError",
    "LogitsProcessor",
    "LogitsProcessorError",
    "NoTokenLeftError",
    "SampledRows",
    "SampledSequence",
    "Sampler",
    "SamplingError",
    "SamplingSpec",
    "TopLogProbs",
]
