"""Why no token can be drawn for a request."""

from __future__ import annotations

from executor.api.errors import ErrorCode, RequestError


class SamplingError(RequestError):
    """No token can be drawn for this request; other requests are not affected."""


class InvalidLogitsError(SamplingError):
    """The engine, or a post-processor, gave NaN or +inf for this request."""

    code = ErrorCode.INTERNAL


class NoTokenLeftError(SamplingError):
    """The request's own options (grammar, bad words, minimum length, ...) exclude every token together."""


class LogitsProcessorError(SamplingError):
    """A logits post-processor raised; its words are in the message."""
