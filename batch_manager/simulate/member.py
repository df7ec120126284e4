"""An instance as part of a cluster, and the requests that are there."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from batch_manager.config import BatchManagerConfig
from batch_manager.kv import KvCacheConfig, KvCacheManager
from batch_manager.request import Request
from batch_manager.simulate.cost import CostModel
from batch_manager.simulate.instance import SimulatedInstance
from batch_manager.simulate.metrics import RunMetrics
from batch_manager.simulate.network import Transfer
from batch_manager.simulate.receiving import ReceivingKvCacheManager
from batch_manager.simulate.workload import END_TOKEN, OfferedRequest


class Role(StrEnum):
    """What an instance computes."""

    CONTEXT = "context"
    """Prompts and first tokens; the rest is generated elsewhere."""
    GENERATION = "generation"
    """What comes after first tokens."""
    BOTH = "both"
    """Requests from their first to their last token; also what others have begun."""


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What an instance of a cluster is.

    `kv_config` is None only with `MAX_REQUESTS`, and with the role `BOTH`.
    """

    role: Role
    config: BatchManagerConfig
    kv_config: KvCacheConfig | None
    cost: CostModel


class Flow:
    """A request on its way through the cluster: at one instance at a time."""

    def __init__(self, request_id: int, offered: OfferedRequest) -> None:
        self.request_id = request_id
        self.offered = offered
        """What is left of it: of a request that has generated already, these tokens are part of the prompt."""
        self.arrival_time = offered.arrival_time
        self.first_token_time: float | None = None
        self.last_token_time = 0.0
        self.num_delivered_tokens = 0
        self.is_split = False
        """Whether only the first token is generated where it is now."""
        self.source: tuple[Member, int] | None = None
        """Who has its keys and values, and by which lease; it is expected or on its way from there."""
        self.transfer: Transfer | None = None
        self.charge = (0, 0)
        """Pending and active tokens it counts for at its member."""

    def part(self) -> OfferedRequest:
        """What the instance is asked for."""
        if not self.goes_on_elsewhere:
            return self.offered
        return self.offered._replace(num_output_tokens=1, max_new_tokens=1)

    @property
    def goes_on_elsewhere(self) -> bool:
        """Whether, once it has its next token, another instance takes over."""
        return self.is_split and self.offered.num_output_tokens > 1

    def go_on_from(self, request: Request | None) -> None:
        """What an instance generated becomes part of the prompt. None: it was not looked at there."""
        if request is None or not request.num_generated_tokens:
            return
        offered, count = self.offered, request.num_generated_tokens
        limit = offered.max_new_tokens
        self.offered = offered._replace(
            prompt_token_ids=list(request.token_ids),
            num_output_tokens=offered.num_output_tokens - count,
            max_new_tokens=None if limit is None else limit - count,
            output_token_ids=offered.output_token_ids[count:],
        )

    def probe(self) -> Request:
        """What a router is shown."""
        offered = self.offered
        return Request(
            self.request_id,
            offered.prompt_token_ids,
            1,
            end_id=END_TOKEN,
            cache_salt=offered.cache_salt,
            adapter_id=offered.adapter_id,
        )


class Member:
    """An instance of a cluster."""

    def __init__(
        self,
        number: int,
        role: Role,
        instance: SimulatedInstance,
        kv: KvCacheManager | None,
        metrics: RunMetrics,
    ) -> None:
        self.number = number
        self.role = role
        self.instance = instance
        self.kv = kv
        self.metrics = metrics
        self.is_alive = True
        self.is_touched = False
        """Whether something happened that planning has to look at."""
        self.inbox: deque[Flow] = deque()
        """Sent here, not looked at yet: an instance looks between steps."""
        self.flows: dict[int, Flow] = {}
        """Here, the inbox included."""
        self.requests: dict[int, Request] = {}
        """Of these, those that were taken in."""
        self.num_pending_tokens = 0
        self.num_active_tokens = 0

    @property
    def receiver(self) -> ReceivingKvCacheManager:
        assert isinstance(self.kv, ReceivingKvCacheManager)
        return self.kv

    @property
    def num_requests(self) -> int:
        return len(self.flows)

    @property
    def backlog(self) -> int:
        """Requests that wait."""
        return len(self.inbox) + self.instance.manager.num_waiting

    def num_cached_tokens(self, request: Request) -> int:
        return 0 if self.kv is None else self.kv.find_reuse(request).num_tokens

    def send(self, flow: Flow, num_pending_tokens: int) -> None:
        """Give it a request of which so many tokens are to be computed before the next one comes out."""
        flow.charge = num_pending_tokens, len(flow.offered.prompt_token_ids)
        self.num_pending_tokens += flow.charge[0]
        self.num_active_tokens += flow.charge[1]
        self.flows[flow.request_id] = flow
        self.inbox.append(flow)

    def leave(self, flow: Flow) -> Request | None:
        """It is not here any more; returns the request if it had been taken in."""
        del self.flows[flow.request_id]
        self.on_token(flow)
        self.num_active_tokens -= flow.charge[1]
        return self.requests.pop(flow.request_id, None)

    def on_token(self, flow: Flow) -> None:
        """It has a token: what was to be computed before it has been."""
        self.num_pending_tokens -= flow.charge[0]
        flow.charge = 0, flow.charge[1]
