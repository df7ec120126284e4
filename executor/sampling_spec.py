"""From a request to what the sampler has to know of one of its sequences."""

from __future__ import annotations

import numpy as np

from executor.api.config import LogitsPostProcessorConfig
from executor.api.errors import InvalidRequestError
from executor.api.request import LogitsPostProcessor, Request
from executor.cuda_streams import without_streams
from executor.sampling import SamplingSpec


class PostProcessors:
    """The logits post-processors that an executor was given, by name."""

    def __init__(self, config: LogitsPostProcessorConfig | None) -> None:
        config = config or LogitsPostProcessorConfig()
        self._by_name = {name: without_streams(each) for name, each in (config.processor_map or {}).items()}
        self._batched = None if config.processor_batched is None else without_streams(config.processor_batched)

    def of(self, request: Request) -> list[LogitsPostProcessor]:
        """Those that a request's rows go through, one by one.

        Raises:
            InvalidRequestError: the executor was given none of the name.
        """
        processors = [] if request.logits_post_processor is None else [without_streams(request.logits_post_processor)]
        name = request.logits_post_processor_name
        if name is not None and name != Request.BATCHED_POST_PROCESSOR_NAME:
            if name not in self._by_name:
                raise InvalidRequestError(
                    f"logits_post_processor_name is {name!r}; the executor was given {sorted(self._by_name) or 'none'}",
                    field="logits_post_processor_name",
                )
            processors.append(self._by_name[name])
        return processors

    def batched_of(self, request: Request) -> LogitsPostProcessor | None:
        """The one that goes through the rows of all requests that ask for it.

        Raises:
            InvalidRequestError: the executor was given none.
        """
        if request.logits_post_processor_name != Request.BATCHED_POST_PROCESSOR_NAME:
            return None
        if self._batched is None:
            raise InvalidRequestError(
                "logits_post_processor_name asks for the batched processor; the executor was given none",
                field="logits_post_processor_name",
            )
        return self._batched


def sampling_spec(
    request: Request,
    prompt_token_ids: list[int],
    post_processors: PostProcessors,
    vocab_size: int,
    *,
    sequence_index: int,
) -> SamplingSpec:
    """How the tokens of sequence `sequence_index` are drawn, but for its grammar.

    Raises:
        RequestError: a field does not fit the vocabulary, or names a logits processor that the executor was not given.
    """
    output = request.output_config
    stop_words = request.stop_words or []
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
        logits_processors=post_processors.of(request),
        batched_logits_processor=post_processors.batched_of(request),
        sequence_index=sequence_index,
        client_id=request.client_id,
    )
    spec.validate(vocab_size)
    return spec
