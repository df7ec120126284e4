"""From a request to what the sampler has to know of one of its sequences."""

from __future__ import annotations

import numpy as np

from executor.api.config import ExecutorConfig
from executor.api.errors import InvalidRequestError
from executor.api.request import LogitsPostProcessor, Request
from executor.sampling import SamplingSpec


def sampling_spec(
    request: Request, prompt_token_ids: list[int], config: ExecutorConfig, vocab_size: int, *, sequence_index: int
) -> SamplingSpec:
    """How the tokens of sequence `sequence_index` are drawn, but for its grammar.

    Raises:
        RequestError: a field does not fit the vocabulary, or names a logits processor that the executor was not given.
    """
    output = request.output_config
    stop_words = request.stop_words or []
    batched = request.logits_post_processor_name == Request.BATCHED_POST_PROCESSOR_NAME
    spec = SamplingSpec(
        config=request.sampling_config,
        prompt_token_ids=prompt_token_ids,
        end_id=request.effective_end_id,
        stop_token_ids=[word[0] for word in stop_words if len(word) == 1],
        stop_words=[word for word in stop_words if len(word) > 1],
        bad_words=request.bad_words or (),
        embedding_bias=None if request.embedding_bias is None else np.asarray(request.embedding_bias, np.float32),
        num_top_log_probs=output.num_top_log_probs,
        return_log_probs=output.return_log_probs,
        return_generation_logits=output.return_generation_logits,
        logits_processors=_logits_processors(request, config),
        batched_logits_processor=_batched_processor(config) if batched else None,
        sequence_index=sequence_index,
        client_id=request.client_id,
    )
    spec.validate(vocab_size)
    return spec


def _logits_processors(request: Request, config: ExecutorConfig) -> list[LogitsPostProcessor]:
    processors = [] if request.logits_post_processor is None else [request.logits_post_processor]
    name = request.logits_post_processor_name
    if name is not None and name != Request.BATCHED_POST_PROCESSOR_NAME:
        known = (config.logits_post_processor_config and config.logits_post_processor_config.processor_map) or {}
        if name not in known:
            raise InvalidRequestError(
                f"logits_post_processor_name is {name!r}; the executor was given {sorted(known) or 'none'}",
                field="logits_post_processor_name",
            )
        processors.append(known[name])
    return processors


def _batched_processor(config: ExecutorConfig) -> LogitsPostProcessor:
    given = config.logits_post_processor_config
    if given is None or given.processor_batched is None:
        raise InvalidRequestError(
            "logits_post_processor_name asks for the batched processor; the executor was given none",
            field="logits_post_processor_name",
        )
    return given.processor_batched
