"""What is checked when a request arrives: whatever can never run is refused now, with the numbers that say why."""

from __future__ import annotations

from dataclasses import fields

from batch_manager.config import BatchManagerConfig, CapacitySchedulerPolicy
from batch_manager.errors import InvalidConfigError, RefusalReason, RequestRefused
from batch_manager.kv import InvalidKvCacheConfigError
from batch_manager.kv.retention import checked_retention
from batch_manager.lifecycle import Lifecycle
from batch_manager.policies.capacity import tokens_to_completion
from batch_manager.request import Request, RequestState

LIVE_FIELDS = frozenset(
    {
        "max_batch_size",
        "max_num_tokens",
        "max_num_active",
        "capacity_scheduler_policy",
        "context_chunking_policy",
        "long_prompt_cap",
        "waiting_queue_policy",
        "priority_ageing",
        "tenant_weights",
        "max_queued_requests",
        "max_queued_tokens",
        "enable_prefix_deferral",
    }
)
"""Fields of `BatchManagerConfig` that may change while requests are live."""


def check_request(request: Request, config: BatchManagerConfig, lifecycle: Lifecycle) -> None:
    """Raises `RequestRefused` if `request` cannot be taken in."""
    _check_fields(request)
    if request.request_id in lifecycle.requests:
        raise RequestRefused(request.request_id, RefusalReason.DUPLICATE_ID, "a live request has the same id")
    _check_fits(request, config, lifecycle)
    waiting = lifecycle.waiting
    limit = config.max_queued_requests
    if limit is not None and waiting.num_requests >= limit:
        raise RequestRefused(
            request.request_id,
            RefusalReason.QUEUE_FULL_REQUESTS,
            f"{waiting.num_requests} requests are waiting, at most {limit} may (max_queued_requests)",
            needed=1,
            available=0,
        )
    limit = config.max_queued_tokens
    num_tokens = len(request.token_ids)
    if limit is not None and waiting.num_tokens + num_tokens > limit:
        raise RequestRefused(
            request.request_id,
            RefusalReason.QUEUE_FULL_TOKENS,
            f"its {num_tokens} tokens and the {waiting.num_tokens} waiting ones exceed {limit} (max_queued_tokens)",
            needed=num_tokens,
            available=max(0, limit - waiting.num_tokens),
        )


def _check_fields(request: Request) -> None:
    problem = None
    if request.state is not RequestState.WAITING or request.block_ids or request.num_computed_tokens:
        problem = f"it has been used before (state {request.state.name}); make a new Request"
    elif not request.token_ids:
        problem = "the prompt is empty; it needs at least one token"
    elif request.max_new_tokens < 1:
        problem = f"max_new_tokens is {request.max_new_tokens}; it must be at least 1"
    elif not 0 <= request.priority <= 1:
        problem = f"priority is {request.priority}; it must be in 0..1, higher runs sooner"
    elif request.min_new_tokens < 0:
        problem = f"min_new_tokens is {request.min_new_tokens}; it must be at least 0"
    elif request.allotted_time is not None and not request.allotted_time >= 0:
        problem = f"allotted_time is {request.allotted_time}; it must be at least 0 seconds"
    elif not all(request.stop_words):
        problem = "a stop word has no tokens; each needs at least one"
    elif request.beam_width < 1:
        problem = f"beam_width is {request.beam_width}; it must be at least 1"
    elif request.adapter_pages < 0:
        problem = f"adapter_pages is {request.adapter_pages}; it must be at least 0"
    else:
        try:
            checked_retention(request.request_id, request.retention)
        except InvalidKvCacheConfigError as error:
            problem = str(error)
    if problem is not None:
        raise RequestRefused(request.request_id, RefusalReason.INVALID_FIELD, problem)


def _check_fits(request: Request, config: BatchManagerConfig, lifecycle: Lifecycle) -> None:
    blocks = lifecycle.blocks
    num_tokens = tokens_to_completion(request)
    if config.capacity_scheduler_policy is not CapacitySchedulerPolicy.MAX_REQUESTS:
        needed = -(-num_tokens // blocks.tokens_per_block)
        if needed > blocks.num_blocks:
            raise RequestRefused(
                request.request_id,
                RefusalReason.EXCEEDS_KV_CACHE,
                f"prompt and max_new_tokens ({request.num_prompt_tokens} + {request.max_new_tokens}) need {needed} "
                f"blocks of {blocks.tokens_per_block} tokens, the whole pool has {blocks.num_blocks}",
                needed=needed,
                available=blocks.num_blocks,
            )
    if request.beam_width > config.max_num_tokens:
        raise RequestRefused(
            request.request_id,
            RefusalReason.EXCEEDS_TOKEN_BUDGET,
            f"a step of beam_width {request.beam_width} exceeds max_num_tokens ({config.max_num_tokens})",
            needed=request.beam_width,
            available=config.max_num_tokens,
        )
    longest = longest_context(request, config)
    if longest > config.max_num_tokens and not config.enable_chunked_context:
        raise RequestRefused(
            request.request_id,
            RefusalReason.EXCEEDS_TOKEN_BUDGET,
            f"its context of up to {longest} tokens must fit one iteration (max_num_tokens {config.max_num_tokens}), "
            "since chunked context is off",
            needed=longest,
            available=config.max_num_tokens,
        )
    pages = lifecycle.adapters.num_pages
    if request.adapter_id is not None and request.adapter_pages > pages:
        raise RequestRefused(
            request.request_id,
            RefusalReason.EXCEEDS_ADAPTER_PAGES,
            f"adapter {request.adapter_id} takes {request.adapter_pages} pages, the adapter cache has {pages}",
            needed=request.adapter_pages,
            available=pages,
        )


def longest_context(request: Request, config: BatchManagerConfig) -> int:
    """Rows of the longest context it may have to compute: the prompt, or, where requests are paused, everything."""
    if config.capacity_scheduler_policy is CapacitySchedulerPolicy.MAX_UTILIZATION:
        return max(tokens_to_completion(request), config.min_rows_per_sequence)
    return max(len(request.token_ids), config.min_rows_per_sequence)


def check_change(previous: BatchManagerConfig, config: BatchManagerConfig, lifecycle: Lifecycle) -> None:
    """Raises `InvalidConfigError` if `config` cannot follow `previous` while the live requests are there."""
    for field in fields(BatchManagerConfig):
        if field.name not in LIVE_FIELDS and getattr(previous, field.name) != getattr(config, field.name):
            raise InvalidConfigError(
                f"{field.name} cannot change while running (from {getattr(previous, field.name)} to "
                f"{getattr(config, field.name)}); these can: {', '.join(sorted(LIVE_FIELDS))}"
            )
    policies = (previous.capacity_scheduler_policy, config.capacity_scheduler_policy)
    if policies[0] is not policies[1] and CapacitySchedulerPolicy.MAX_REQUESTS in policies:
        raise InvalidConfigError(
            f"capacity_scheduler_policy cannot change from {policies[0].name} to {policies[1].name}: "
            "MAX_REQUESTS goes without a KV cache, the others with one"
        )
    for request in lifecycle.requests.values():
        needed = request.beam_width
        if not config.enable_chunked_context:
            needed = max(needed, longest_context(request, config))
        if needed > config.max_num_tokens:
            raise InvalidConfigError(
                f"live request {request.request_id} needs up to {needed} rows in one iteration, "
                f"more than max_num_tokens ({config.max_num_tokens})"
            )
