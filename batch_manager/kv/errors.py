"""Typed errors of the KV block manager: each names what was wrong and what would be right."""

from __future__ import annotations


class KvCacheError(Exception):
    """Base of all errors raised by the KV block manager."""


class InvalidKvCacheConfigError(KvCacheError, ValueError):
    """A configuration field is out of its range: names the field, its value and the range."""


class BlockOwnershipError(KvCacheError):
    """A call on behalf of a request that does not fit what the manager knows of this request."""


class StaleReuseError(KvCacheError):
    """A `Reuse` names blocks that were evicted after `find_reuse`; look again and allocate at once."""


class StepOrderError(KvCacheError):
    """`begin_step` or `end_step` with an iteration that does not fit the steps in flight."""


class KvInvariantError(KvCacheError):
    """The bookkeeping contradicts itself: a defect of the manager, not of its caller."""
