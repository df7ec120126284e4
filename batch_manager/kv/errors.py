"""Typed errors of the KV block manager: each names what was wrong and what would be right."""

from __future__ import annotations


class KvCacheError(Exception):
    """Base of all errors raised by the KV block manager."""


class InvalidKvCacheConfigError(KvCacheError, ValueError):
    """A configuration field is out of its range: names the field, its value and the range."""


class BlockOwnershipError(KvCacheError):
    """A call that does not fit what the manager knows of the request, lease, pin or transfer it is about."""


class StaleReuseError(KvCacheError):
    """Blocks that `find_reuse` named are not there any more; look again and allocate at once."""


class StepOrderError(KvCacheError):
    """`begin_step` or `end_step` with an iteration that does not fit the steps in flight."""


class PinError(KvCacheError):
    """A prefix cannot be pinned: it is not in the device pool."""


class PinQuotaError(PinError):
    """A prefix cannot be pinned: too much is. Says so with the numbers."""


class KvInvariantError(KvCacheError):
    """The bookkeeping contradicts itself: a defect of the manager, not of its caller."""
