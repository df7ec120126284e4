"""The limits that an operator may change while requests run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from batch_manager import BatchManager, InvalidConfigError
from executor.api.errors import InvalidRequestError
from executor.engines.interface import EngineSpec


@dataclass(frozen=True, slots=True)
class LiveLimits:
    """Limits of iterations and of the queue; `None` bounds nothing."""

    max_batch_size: int
    """Requests in one iteration."""
    max_num_tokens: int
    """Tokens in one iteration."""
    max_queue_size: int | None
    """Requests that may wait."""
    max_queued_tokens: int | None
    """Prompt tokens that may wait."""


def current_limits(batch_manager: BatchManager) -> LiveLimits:
    """The limits in force. The caller holds the BatchManager's lock."""
    config = batch_manager.config
    return LiveLimits(
        config.max_batch_size, config.max_num_tokens, config.max_queued_requests, config.max_queued_tokens
    )


def change_limits(batch_manager: BatchManager, limits: LiveLimits, spec: EngineSpec) -> None:
    """Go on with other limits; what runs or waits is not lost. The caller holds the BatchManager's lock.

    Raises:
        InvalidRequestError: a limit is beyond what the engine was built for, cannot work, or is too small for a live
            request; nothing has changed.
    """
    for name, limit, built_for in (
        ("max_batch_size", limits.max_batch_size, spec.max_batch_size),
        ("max_num_tokens", limits.max_num_tokens, spec.max_num_tokens),
    ):
        if not 1 <= limit <= built_for:
            raise InvalidRequestError(
                f"{name} is {limit}; the engine was built for {built_for}, so it must be in [1, {built_for}]",
                field=name,
            )
    try:
        batch_manager.change_config(
            dataclasses.replace(
                batch_manager.config,
                max_batch_size=limits.max_batch_size,
                max_num_tokens=limits.max_num_tokens,
                max_queued_requests=limits.max_queue_size,
                max_queued_tokens=limits.max_queued_tokens,
            )
        )
    except InvalidConfigError as error:
        raise InvalidRequestError(str(error)) from None
