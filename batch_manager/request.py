"""One request as the scheduler sees it: its tokens, its limits, its progress.

There is no context phase and no generation phase in the arithmetic. A request has a number of tokens whose keys and
values should exist (`num_tokens_with_spec`) and a number for which they do (`num_computed_tokens`); an iteration
closes part of the difference. The phase is only a name for where that difference comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


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
        "block_ids",
        "cache_salt",
        "deadline",
        "draft_token_ids",
        "end_id",
        "finish_reason",
        "max_new_tokens",
        "min_new_tokens",
        "num_computed_tokens",
        "num_pauses",
        "num_prompt_tokens",
        "num_reused_tokens",
        "priority",
        "receipt",
        "request_id",
        "retention",
        "state",
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
        retention: object | None = None,
    ) -> None:
        """Describe a request.

        Args:
            request_id: unique among live requests.
            prompt_token_ids: the prompt, at least one token.
            max_new_tokens: at most this many tokens are generated, at least 1.
            end_id: ends the request with `END_ID`; `None` ignores the model's end token.
            stop_token_ids: any of them ends the request with `STOP_WORDS`.
            stop_words: token sequences; the request ends with `STOP_WORDS` when its generated tokens end in one.
            min_new_tokens: stop conditions other than length are not looked at before so many tokens. The sampler
                masks the end id below this number; the BatchManager only trims.
            priority: 0 to 1, higher runs sooner.
            tenant: who is charged by the fair queue.
            arrival_time: seconds, on the BatchManager's clock.
            allotted_time: seconds from arrival after which the request ends with `TIMED_OUT`, queued or running.
            cache_salt: requests share cached blocks only with requests of an equal salt.
            adapter_id: LoRA task id; part of the cache key, and of the adapter-page budget.
            adapter_pages: pages of the adapter cache that `adapter_id` takes.
            retention: `batch_manager.kv.KvCacheRetentionConfig`, how long its blocks are worth keeping.
        """
        self.request_id = request_id
        self.token_ids: list[int] = list(prompt_token_ids)
        """Prompt, then generated tokens. Never drafts."""
        self.num_prompt_tokens = len(self.token_ids)
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
        self.retention = retention

        self.state = RequestState.WAITING
        self.finish_reason = FinishReason.NOT_FINISHED
        self.num_computed_tokens = 0
        """Tokens whose K and V are in the pool, or are being written by a step in flight."""
        self.num_reused_tokens = 0
        """Of these, how many were found in the cache at the last (re)start."""
        self.draft_token_ids: list[int] = []
        """Proposed continuation, verified in the next step."""
        self.block_ids: list[int] = []
        """Block table: position p lives in block `block_ids[p // tokens_per_block]`. Owned by the KV manager."""
        self.num_pauses = 0
        self.receipt: object | None = None

    @property
    def num_tokens_with_spec(self) -> int:
        """Tokens whose K and V should exist: prompt, generated, drafts."""
        return len(self.token_ids) + len(self.draft_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_num_tokens(self) -> int:
        """The length at which the request ends at the latest."""
        return self.num_prompt_tokens + self.max_new_tokens

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.state.name}, prompt={self.num_prompt_tokens}, "
            f"computed={self.num_computed_tokens}/{self.num_tokens_with_spec}, blocks={len(self.block_ids)})"
        )
