"""What a client asks of a server, before tokenization: the same for gRPC, HTTP and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from executor.api.errors import InvalidRequestError
from executor.api.request import (
    ContextPhaseParams,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    LookaheadDecodingConfig,
    RequestType,
)
from executor.api.sampling_config import SamplingConfig

MAX_REQUEST_ID_BYTES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_TENANT_BYTES = 128
MAX_OUTPUTS = 128
MAX_TOP_LOG_PROBS = 20
MAX_RETENTION_RANGES = 1024


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text, tokenized with the special tokens that the tokenizer adds by default."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn: a role that the chat template knows, and what is said."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered with the model's chat template and opened for the assistant's answer."""

    messages: Sequence[ChatMessage]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: Sequence[int]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(slots=True)
class GenerationRequest:
    """A prompt and how to continue it. Field names are those of `inflight.v1.GenerateRequest`."""

    prompt: Prompt
    max_tokens: int | None = None
    """`None`: as many as the engine's sequence length leaves."""
    streaming: bool = True
    """Whether deltas come as tokens come; otherwise each output gives one delta, when it has ended."""
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    return_log_probs: bool = False
    num_top_log_probs: int = 0
    return_prompt_log_probs: bool = False
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    bad_words: Sequence[Sequence[int]] = ()
    num_return_sequences: int = 1
    """Output i uses seed + i when there is a seed."""
    priority: float = 0.5
    tenant: str = ""
    cache_salt_id: int | None = None
    allotted_time_ms: int | None = None
    guided_decoding_params: GuidedDecodingParams | None = None
    lookahead_config: LookaheadDecodingConfig | None = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    request_type: RequestType = RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION
    """Which part of the work the server's instance does."""
    context_phase_params: ContextPhaseParams | None = None
    """Of the context-only request, for a generation-only one."""
    request_id: str | None = None
    """`None`: the serving layer makes one up."""
    trace_parent: str | None = None
    """W3C trace context that the protocol carries beside the request."""

    def validate(self) -> None:
        """Check what the Executor does not see; the Executor checks the rest.

        Raises:
            InvalidRequestError: names the first field that is wrong and what would be right.
        """
        if self.request_id is not None:
            check_request_id(self.request_id)
        if self.max_tokens is not None and self.max_tokens < 1:
            _fail("max_tokens", f"is {self.max_tokens}; it must be at least 1")
        if not 1 <= self.num_return_sequences <= MAX_OUTPUTS:
            _fail("num_return_sequences", f"is {self.num_return_sequences}; it must be in [1, {MAX_OUTPUTS}]")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            _fail("stop_strings", f"has {len(self.stop_strings)} strings; at most {MAX_STOP_STRINGS} are taken")
        for index, stop in enumerate(self.stop_strings):
            check_text(f"stop_strings[{index}]", stop, MAX_STOP_STRING_BYTES)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            _fail("stop_token_ids", f"has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are taken")
        if len(self.bad_words) > MAX_BAD_WORDS:
            _fail("bad_words", f"has {len(self.bad_words)} sequences; at most {MAX_BAD_WORDS} are taken")
        for index, word in enumerate(self.bad_words):
            if len(word) > MAX_BAD_WORD_TOKENS:
                _fail(f"bad_words[{index}]", f"has {len(word)} tokens; at most {MAX_BAD_WORD_TOKENS} are taken")
        if self.tenant:
            check_text("tenant", self.tenant, MAX_TENANT_BYTES)
        if not 0 <= self.num_top_log_probs <= MAX_TOP_LOG_PROBS:
            _fail(
                "output_config.num_top_log_probs",
                f"is {self.num_top_log_probs}; it must be in [0, {MAX_TOP_LOG_PROBS}]",
            )
        if self.num_top_log_probs and not self.return_log_probs:
            _fail("output_config.num_top_log_probs", "needs output_config.return_log_probs")


def check_request_id(request_id: str) -> None:
    """Raise `InvalidRequestError` unless the id has 1 to 128 bytes."""
    check_text("request_id", request_id, MAX_REQUEST_ID_BYTES)


def check_text(name: str, text: str, max_bytes: int) -> None:
    """Raise `InvalidRequestError` unless the text is Unicode of 1 to `max_bytes` bytes in UTF-8."""
    num_bytes = check_unicode(name, text)
    if not 1 <= num_bytes <= max_bytes:
        _fail(name, f"has {num_bytes} bytes; it must have 1 to {max_bytes}")


def check_unicode(name: str, text: str) -> int:
    """Raise `InvalidRequestError` for lone surrogates (JSON can spell them); return the text's bytes in UTF-8."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} is not valid Unicode at character {error.start}: {error.reason}", field=name
        ) from None


def _fail(name: str, what: str) -> None:
    raise InvalidRequestError(f"{name} {what}", field=name)
