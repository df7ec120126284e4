"""What the users of a cluster feel, and what it costs."""

from __future__ import annotations

from collections import Counter

from batch_manager.request import FinishReason, Request
from batch_manager.simulate.histogram import Histogram
from batch_manager.simulate.member import Flow
from batch_manager.simulate.metrics import ServiceLevel


class ClusterMetrics:
    """Counts of a cluster's run; the same quantities as `RunMetrics`, of requests wherever they are. Seconds."""

    def __init__(self, service_level: ServiceLevel | None = None) -> None:
        self.service_level = service_level or ServiceLevel()
        self.time_to_first_token = Histogram()
        self.inter_token = Histogram()
        """A first token leaves with the end of its context, so the way to another instance counts here."""
        self.time_per_output_token = Histogram()
        self.end_to_end = Histogram()
        self.transfer = Histogram()
        """From room at the receiver to arrival."""
        self.num_offered = 0
        self.num_refused: Counter[str] = Counter()
        self.num_ended: Counter[FinishReason] = Counter()
        self.num_served_well = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.num_reused_tokens = 0
        self.num_transferred_tokens = 0
        self.num_transferred_bytes = 0.0
        self.num_rerouted = 0
        """Requests sent on because their instance died, each time counted."""
        self.num_lost_tokens = 0
        """Of these requests, positions that were computed or received where they were."""
        self.num_lost_transfers = 0
        """Expected or under way when their sender died: computed by the receiver."""
        self.first_arrival: float | None = None
        self.last_event = 0.0

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last end of anything."""
        return 0.0 if self.first_arrival is None else self.last_event - self.first_arrival

    def on_arrival(self, flow: Flow) -> None:
        self.num_offered += 1
        self.num_prompt_tokens += len(flow.offered.prompt_token_ids)
        if self.first_arrival is None:
            self.first_arrival = flow.arrival_time

    def on_tokens(self, flow: Flow, count: int, now: float) -> None:
        self.num_output_tokens += count
        flow.num_delivered_tokens += count
        if flow.first_token_time is None:
            flow.first_token_time = now
        else:
            self.inter_token.add(now - flow.last_token_time)
        flow.last_token_time = now

    def on_refusal(self, flow: Flow, reason: str) -> None:
        self.num_refused[reason] += 1
        if not flow.num_delivered_tokens:
            self.num_prompt_tokens -= len(flow.offered.prompt_token_ids)

    def on_death(self, request: Request | None) -> None:
        """The instance of a live request died; None: it had not been looked at."""
        self.num_rerouted += 1
        if request is not None:
            self.num_lost_tokens += request.num_computed_tokens

    def on_end(self, flow: Flow, reason: FinishReason, now: float) -> None:
        self.num_ended[reason] += 1
        self.last_event = max(self.last_event, now)
        if reason not in (FinishReason.LENGTH, FinishReason.END_ID, FinishReason.STOP_WORDS):
            return
        assert flow.first_token_time is not None
        first = flow.first_token_time - flow.arrival_time
        end_to_end = now - flow.arrival_time
        later_tokens = flow.num_delivered_tokens - 1
        per_token = (now - flow.first_token_time) / later_tokens if later_tokens else 0.0
        self.time_to_first_token.add(first)
        self.end_to_end.add(end_to_end)
        if later_tokens:
            self.time_per_output_token.add(per_token)
        self.num_served_well += self.service_level.is_met(first, per_token, end_to_end)
