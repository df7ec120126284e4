"""What the BatchManager raises: every error names what was wrong, with the numbers that say so."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batch_manager.request import Request


class RefusalReason(StrEnum):
    """Why a request was not taken in."""

    DUPLICATE_ID = "duplicate_id"
    INVALID_FIELD = "invalid_field"
    EXCEEDS_KV_CACHE = "exceeds_kv_cache"
    """It needs more blocks than the whole pool has: it could never finish."""
    EXCEEDS_TOKEN_BUDGET = "exceeds_token_budget"
    """Without chunked context its longest possible context does not fit one iteration."""
    EXCEEDS_ADAPTER_PAGES = "exceeds_adapter_pages"
    QUEUE_FULL_REQUESTS = "queue_full_requests"
    QUEUE_FULL_TOKENS = "queue_full_tokens"

    @property
    def is_temporary(self) -> bool:
        """Whether the same request may be taken in later."""
        return self in (self.DUPLICATE_ID, self.QUEUE_FULL_REQUESTS, self.QUEUE_FULL_TOKENS)


class RequestRefused(ValueError):
    """A request was not taken in; nothing has changed.

    Attributes:
        request_id: the request.
        reason: why.
        needed, available: the numbers behind it, in the unit the message names.
    """

    def __init__(
        self, request_id: int, reason: RefusalReason, message: str, *, needed: int = 0, available: int = 0
    ) -> None:
        super().__init__(f"request {request_id} refused ({reason}): {message}")
        self.request_id = request_id
        self.reason = reason
        self.needed = needed
        self.available = available


class InvalidConfigError(ValueError):
    """A configuration, or a change of it, that cannot work: names the field, its value and what would be right."""


class StepOrderError(RuntimeError):
    """`schedule`, `update` and `abandon` were called out of order; nothing has changed."""


class InvalidSampledTokensError(ValueError):
    """`update` was given tokens that do not fit the plan; nothing has changed."""


class PlanningFailedError(RuntimeError):
    """An iteration could not be planned, for a reason nobody foresaw (the cause). What was to be in it has ended.

    Attributes:
        ended: the requests that ended, without a finish reason; all others live on.
    """

    def __init__(self, ended: list[Request]) -> None:
        ids = ", ".join(str(request.request_id) for request in ended) or "none"
        super().__init__(f"an iteration could not be planned; requests that have ended: {ids}")
        self.ended = ended


class UnknownRequestError(LookupError):
    """There is no live request of this id."""

    def __init__(self, request_id: int) -> None:
        super().__init__(f"there is no live request {request_id}: it never arrived, or it has ended")
        self.request_id = request_id
