"""One request as the scheduler sees it: its tokens, its limits, its progress.

There is no context phase and no generation phase in the arithmetic. A request has a number of tokens whose keys and
values should exist (`num_tokens_with_spec`) and a number for which they do (`num_computed_tokens`); an iteration
closes part of the difference. The phase is only a name for where that difference comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from batch_manager.reasons import WaitReason
from batch_manager.receipt import Receipt


class FinishReason(IntEnum):
    """Why a request ended. Names and numbers are those of TensorRT-LLM's executor."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class RequestState(IntEnum):
    """Where a request is. The order is meaningful: everything from `FINISHED` on holds no KV blocks."""

    WAITING = 0
    RUNNING = 1
    PAUSED = 2
    """Lost its KV blocks to others; it resumes by computing prompt and generated tokens again."""
    FINISHED = 3


class MultimodalSpan(NamedTuple):
    """Placeholder tokens of the prompt that stand for an image, sound or video."""

    start: int
    """Position of its first token."""
    length: int
    content_hash: bytes
    """Cryptographic digest of the item: part of the cache key, since its token ids do not tell items apart."""


class Request:
    """A request and its progress.

    The caller fills the first group of fields and never changes them; the BatchManager owns the rest.

    Token ids are Python ints in `[0, vocab_size)`; the edge (Executor) has checked them. Times are seconds on the
    clock the BatchManager was given.
    """

    __slots__ = (
        "adapter_id",
        "adapter_pages",
        "allotted_time",
        "arrival_time",
        "beam_width",
        "block_ids",
        "cache_salt",
        "context_end",
        "deadline",
        "draft_token_ids",
        "end_id",
        "finish_reason",
        "max_new_tokens",
        "max_num_tokens",
        "min_new_tokens",
        "multimodal_spans",
        "next_store",
        "num_allocated_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_drafts_in_flight",
        "num_pauses",
        "num_prompt_tokens",
        "num_remote_tokens",
        "num_reserved_blocks",
        "num_reused_tokens",
        "num_tokens",
        "num_tokens_unchecked",
        "order_key",
        "parked",
        "priority",
        "receipt",
        "request_id",
        "retention",
        "state",
        "stop_ids",
        "stop_token_ids",
        "stop_words",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        max_new_tokens: int,
        *,
        end_id: int | None = None,
        stop_token_ids: Sequence[int] = (),
        stop_words: Sequence[Sequence[int]] = (),
        min_new_tokens: int = 0,
        priority: float = 0.5,
        tenant: str = "",
        arrival_time: float = 0.0,
        allotted_time: float | None = None,
        cache_salt: int | None = None,
        adapter_id: int | None = None,
        adapter_pages: int = 0,
        beam_width: int = 1,
        retention: object | None = None,
        multimodal_spans: Sequence[MultimodalSpan] = (),
        generated_token_ids: Sequence[int] = (),
        num_remote_tokens: int = 0,
    ) -> None:
        """Describe a request.

        Args:
            request_id: unique among live requests.
            prompt_token_ids: the prompt, at least one token.
            max_new_tokens: at most this many tokens are generated, at least 1.
            end_id: ends the request with `END_ID`; `None` ignores the model's end token.
            stop_token_ids: any of them ends the request with `STOP_WORDS`.
            stop_words: token sequences; the request ends with `STOP_WORDS` when its generated tokens end in one.
            min_new_tokens: stop words are not looked at before so many tokens. The sampler masks the end id and
                the stop token ids below this number; one that is sampled nevertheless ends the request.
            priority: 0 to 1, higher runs sooner.
            tenant: who is charged by the fair queue.
            arrival_time: seconds, on the BatchManager's clock.
            allotted_time: seconds from arrival after which the request ends with `TIMED_OUT`, queued or running.
            cache_salt: requests share cached blocks only with requests of an equal salt.
            adapter_id: LoRA task id; part of the cache key, and of the adapter-page budget.
            adapter_pages: pages of the adapter cache that `adapter_id` takes.
            beam_width: query rows of one generation step; different widths never share an iteration.
            retention: `batch_manager.kv.KvCacheRetentionConfig`, how long its blocks are worth keeping.
            multimodal_spans: what the prompt's placeholder tokens stand for.
            generated_token_ids: what another instance has generated of it already, fewer than `max_new_tokens`.
            num_remote_tokens: of its first so many tokens another instance sends the blocks once it is admitted.
        """
        self.request_id = request_id
        self.token_ids: list[int] = list(prompt_token_ids)
        """Prompt, then generated tokens. Never drafts."""
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids += generated_token_ids
        self.max_new_tokens = max_new_tokens
        self.min_new_tokens = min_new_tokens
        self.end_id = end_id
        self.stop_token_ids = frozenset(stop_token_ids)
        self.stop_words = tuple(tuple(word) for word in stop_words)
        self.priority = priority
        self.tenant = tenant
        self.arrival_time = arrival_time
        self.allotted_time = allotted_time
        self.deadline = None if allotted_time is None else arrival_time + allotted_time
        self.cache_salt = cache_salt
        self.adapter_id = adapter_id
        self.adapter_pages = adapter_pages
        self.beam_width = beam_width
        self.retention = retention
        self.multimodal_spans = tuple(multimodal_spans)
        self.max_num_tokens = self.num_prompt_tokens + max_new_tokens
        """The length at which the request ends at the latest."""
        self.stop_ids = self.stop_token_ids if end_id is None else self.stop_token_ids | {end_id}
        """Every single token that ends the request."""

        self.state = RequestState.WAITING
        self.finish_reason = FinishReason.NOT_FINISHED
        self.num_computed_tokens = 0
        """Tokens whose K and V are in the pool, or are being written by a step in flight."""
        self.num_reused_tokens = 0
        """Of these, how many were found in the cache at the last (re)start, or received from another instance."""
        self.num_remote_tokens = num_remote_tokens
        """Tokens whose K and V another instance has; 0 once they are here, or given up."""
        self.draft_token_ids: list[int] = []
        """Proposed continuation, verified in the next step."""
        self.block_ids: list[int] = []
        """Block table: position p lives in block `block_ids[p // tokens_per_block]`. Owned by the KV manager."""
        self.num_pauses = 0
        self.receipt = Receipt()

        # The scheduler's own bookkeeping.
        self.order_key: tuple[float, int] = (0.0, 0)
        """Place in the order of all live requests, set by the waiting queue: the smallest comes first."""
        self.context_end = 0
        """Tokens known when it was last admitted: below is context phase, from there on generation phase."""
        self.num_tokens = len(self.token_ids)
        """`token_ids`, and those that steps in flight are sampling and whose ids are not known yet."""
        self.num_tokens_unchecked = self.max_num_tokens
        """A token that makes `token_ids` as long needs more than a look at `stop_ids` to see whether it is the last."""
        if self.stop_words:
            self.num_tokens_unchecked = min(self.max_num_tokens, self.num_prompt_tokens + min_new_tokens)
        self.num_drafts_in_flight = 0
        """Draft tokens being verified by a step in flight; the next position is not known until it ends."""
        self.num_allocated_tokens = 0
        """Positions that `block_ids` covers."""
        self.num_reserved_blocks = 0
        """Blocks it may still take until it ends."""
        self.next_store = 0
        """Computed tokens from which on another full block can be made findable."""
        self.parked: WaitReason | None = None
        """Why it waits outside the queue, if it does."""
        self.num_charged_tokens = 0
        """Tokens its tenant has been charged for."""

    @property
    def num_tokens_with_spec(self) -> int:
        """Tokens whose K and V should exist: prompt, generated, drafts."""
        return len(self.token_ids) + len(self.draft_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_placeholder_tokens(self) -> int:
        """Tokens being sampled by steps in flight: they follow `token_ids`."""
        return self.num_tokens - len(self.token_ids)

    def needs_block(self) -> bool:
        """Whether, running in its generation phase, it cannot take its next step without one more block."""
        return (
            self.num_allocated_tokens <= self.num_computed_tokens >= self.context_end
            and self.num_tokens < self.max_num_tokens
            and not self.num_drafts_in_flight
        )

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.state.name}, prompt={self.num_prompt_tokens}, "
            f"computed={self.num_computed_tokens}/{self.num_tokens_with_spec}, blocks={len(self.block_ids)})"
        )
