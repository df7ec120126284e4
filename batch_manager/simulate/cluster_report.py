"""A cluster's run in figures: as a table for people, as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from batch_manager.request import FinishReason
from batch_manager.simulate.cluster import Cluster
from batch_manager.simulate.member import Member
from batch_manager.simulate.report import Latency, ratio


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """What one instance did."""

    instance: int
    role: str
    is_alive: bool
    """At the end."""
    num_requests: int
    """Taken in, the parts of those that were elsewhere before or after included."""
    num_output_tokens: int
    cache_hits: float
    """Share of the prompt tokens that were found in the cache or came from elsewhere."""
    busy: float
    """Share of the run's duration in which a step ran."""
    mean_batch: float
    peak_used_blocks: int

    @staticmethod
    def of(member: Member, duration: float) -> InstanceReport:
        metrics = member.metrics
        return InstanceReport(
            member.number,
            member.role,
            member.is_alive,
            metrics.num_requests,
            metrics.num_output_tokens,
            ratio(metrics.num_reused_tokens, metrics.num_prompt_tokens),
            ratio(metrics.busy_seconds, duration),
            ratio(metrics.num_scheduled_sequences, metrics.num_iterations),
            metrics.peak_used_blocks,
        )


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """Figures of a run of several instances. Times are seconds, rates are per second of the run's duration."""

    duration: float
    num_requests: int
    """Offered."""
    num_refused: dict[str, int]
    num_ended: dict[str, int]
    """By finish reason."""
    time_to_first_token: Latency
    inter_token: Latency
    time_per_output_token: Latency
    end_to_end: Latency
    transfer: Latency
    requests_per_second: float
    output_tokens_per_second: float
    goodput: float
    """Requests a second that were served within the service level."""
    served_well: float
    """Share of the requests offered."""
    num_output_tokens: int
    cache_hits: float
    """Share of the prompt tokens that were found in a cache, where they were computed or where they were sent."""
    num_transferred_tokens: int
    num_transferred_bytes: float
    num_rerouted: int
    num_lost_tokens: int
    num_lost_transfers: int
    instances: tuple[InstanceReport, ...]

    @staticmethod
    def of(cluster: Cluster) -> ClusterReport:
        metrics = cluster.metrics
        duration = metrics.duration
        return ClusterReport(
            duration,
            metrics.num_offered,
            dict(metrics.num_refused),
            {reason.name: metrics.num_ended[reason] for reason in FinishReason if metrics.num_ended[reason]},
            Latency.of(metrics.time_to_first_token),
            Latency.of(metrics.inter_token),
            Latency.of(metrics.time_per_output_token),
            Latency.of(metrics.end_to_end),
            Latency.of(metrics.transfer),
            ratio(metrics.end_to_end.count, duration),
            ratio(metrics.num_output_tokens, duration),
            ratio(metrics.num_served_well, duration),
            ratio(metrics.num_served_well, metrics.num_offered),
            metrics.num_output_tokens,
            ratio(metrics.num_reused_tokens - metrics.num_transferred_tokens, metrics.num_prompt_tokens),
            metrics.num_transferred_tokens,
            metrics.num_transferred_bytes,
            metrics.num_rerouted,
            metrics.num_lost_tokens,
            metrics.num_lost_transfers,
            tuple(InstanceReport.of(member, duration) for member in cluster.members),
        )

    def to_json(self) -> dict[str, object]:
        """Fields by name, latencies and instances as objects of their own."""
        return asdict(self)

    def table(self) -> str:
        """Lines of text: latencies in milliseconds, then the whole, then each instance."""
        lines = [f"{'':24}" + "".join(f"{name:>12}" for name in ("mean", "p50", "p90", "p95", "p99", "max"))]
        for label, latency in (
            ("time to first token, ms", self.time_to_first_token),
            ("inter-token, ms", self.inter_token),
            ("per output token, ms", self.time_per_output_token),
            ("end to end, ms", self.end_to_end),
            ("transfer, ms", self.transfer),
        ):
            lines.append(f"{label:24}" + "".join(f"{value * 1e3:12.1f}" for value in latency.to_json().values()))
        ended = ", ".join(f"{count} {reason}" for reason, count in self.num_ended.items())
        refused = ", ".join(f"{count} {reason}" for reason, count in self.num_refused.items())
        lines += [
            "",
            f"{'duration':24}{self.duration:.1f} s",
            f"{'requests':24}{self.num_requests}: {ended or 'none ended'}; refused: {refused or 'none'}",
            f"{'throughput':24}{self.requests_per_second:.2f} requests/s, "
            f"{self.output_tokens_per_second:.0f} output tokens/s",
            f"{'goodput':24}{self.goodput:.2f} requests/s, {self.served_well:.1%} within the service level",
            f"{'cache hits':24}{self.cache_hits:.1%} of the prompt tokens",
            f"{'transferred':24}{self.num_transferred_tokens} tokens, {self.num_transferred_bytes / 1e9:.2f} GB",
            f"{'deaths':24}{self.num_rerouted} requests routed again, {self.num_lost_tokens} tokens lost with them, "
            f"{self.num_lost_transfers} transfers lost",
            "",
            f"{'instance':>8}  {'role':<18}{'requests':>10}{'tokens':>10}"
            f"{'cached':>8}{'busy':>8}{'batch':>8}{'blocks':>8}",
        ]
        lines += [
            f"{part.instance:>8}  {part.role + ('' if part.is_alive else ' (dead)'):<18}{part.num_requests:>10}"
            f"{part.num_output_tokens:>10}{part.cache_hits:>8.1%}{part.busy:>8.1%}{part.mean_batch:>8.1f}"
            f"{part.peak_used_blocks:>8}"
            for part in self.instances
        ]
        return "\n".join(lines) + "\n"
