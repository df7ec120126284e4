"""A run in figures: as a table for people, as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from batch_manager.request import FinishReason
from batch_manager.simulate.histogram import Histogram
from batch_manager.simulate.metrics import RunMetrics

PERCENTS = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @staticmethod
    def of(histogram: Histogram) -> Latency:
        p50, p90, p95, p99 = map(histogram.percentile, PERCENTS)
        return Latency(histogram.mean, p50, p90, p95, p99, histogram.maximum)

    def to_json(self) -> dict[str, float]:
        """Seconds by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RunReport:
    """Figures of a run, simulated or recorded. Times are seconds, rates are per second of the run's duration."""

    duration: float
    num_requests: int
    num_refused: dict[str, int]
    num_ended: dict[str, int]
    """By finish reason."""
    time_to_first_token: Latency
    inter_token: Latency
    time_per_output_token: Latency
    end_to_end: Latency
    queue: Latency
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    """Prompt and output tokens, those found in the cache included."""
    goodput: float
    """Requests a second that were served within the service level."""
    served_well: float
    """Share of the requests taken in or refused."""
    num_pauses: int
    max_pauses_per_request: int
    recomputed_tokens: float
    """Share of the computed tokens."""
    cache_hits: float
    """Share of the prompt tokens that were found in the cache, those of resumed requests included."""
    num_iterations: int
    mean_batch: float
    """Sequences in an iteration."""
    mean_rows: float
    """Query rows in an iteration."""
    mixed_iterations: float
    """Share of the iterations that had both context and generation requests."""
    busy: float
    """Share of the duration in which a step ran."""
    max_waiting: int
    peak_used_blocks: int

    @staticmethod
    def of(metrics: RunMetrics) -> RunReport:
        duration = metrics.duration
        ended_by_itself = metrics.end_to_end.count
        offered = metrics.num_requests + metrics.num_refused.total()
        return RunReport(
            duration,
            metrics.num_requests,
            dict(metrics.num_refused),
            {reason.name: metrics.num_ended[reason] for reason in FinishReason if metrics.num_ended[reason]},
            Latency.of(metrics.time_to_first_token),
            Latency.of(metrics.inter_token),
            Latency.of(metrics.time_per_output_token),
            Latency.of(metrics.end_to_end),
            Latency.of(metrics.queue),
            ratio(ended_by_itself, duration),
            ratio(metrics.num_output_tokens, duration),
            ratio(metrics.num_output_tokens + metrics.num_prompt_tokens, duration),
            ratio(metrics.num_served_well, duration),
            ratio(metrics.num_served_well, offered),
            metrics.num_pauses,
            metrics.max_pauses_per_request,
            ratio(metrics.num_recomputed_tokens, metrics.num_computed_tokens),
            ratio(metrics.num_reused_tokens, metrics.num_prompt_tokens),
            metrics.num_iterations,
            ratio(metrics.num_scheduled_sequences, metrics.num_iterations),
            ratio(metrics.num_scheduled_rows, metrics.num_iterations),
            ratio(metrics.num_mixed_iterations, metrics.num_iterations),
            ratio(metrics.busy_seconds, duration),
            metrics.max_waiting,
            metrics.peak_used_blocks,
        )

    def to_json(self) -> dict[str, object]:
        """Fields by name, latencies as objects of their own."""
        return asdict(self)

    def table(self) -> str:
        """Lines of text: latencies in milliseconds, then everything else."""
        lines = [f"{'':24}" + "".join(f"{name:>12}" for name in ("mean", "p50", "p90", "p95", "p99", "max"))]
        for label, latency in (
            ("time to first token, ms", self.time_to_first_token),
            ("inter-token, ms", self.inter_token),
            ("per output token, ms", self.time_per_output_token),
            ("end to end, ms", self.end_to_end),
            ("in the queue, ms", self.queue),
        ):
            values = (latency.mean, latency.p50, latency.p90, latency.p95, latency.p99, latency.max)
            lines.append(f"{label:24}" + "".join(f"{value * 1e3:12.1f}" for value in values))
        lines.append("")
        lines += [f"{label:24}{value}" for label, value in self._facts()]
        return "\n".join(lines) + "\n"

    def _facts(self) -> list[tuple[str, str]]:
        ended = ", ".join(f"{count} {reason}" for reason, count in self.num_ended.items())
        refused = ", ".join(f"{count} {reason}" for reason, count in self.num_refused.items())
        return [
            ("duration", f"{self.duration:.1f} s, {self.busy:.0%} of it busy"),
            ("requests", f"{self.num_requests}: {ended or 'none ended'}; refused: {refused or 'none'}"),
            (
                "throughput",
                f"{self.requests_per_second:.2f} requests/s, {self.output_tokens_per_second:.0f} output tokens/s, "
                f"{self.total_tokens_per_second:.0f} tokens/s in all",
            ),
            ("goodput", f"{self.goodput:.2f} requests/s, {self.served_well:.1%} within the service level"),
            (
                "pauses",
                f"{self.num_pauses}, at most {self.max_pauses_per_request} a request; "
                f"{self.recomputed_tokens:.1%} of the computed tokens recomputed",
            ),
            ("cache hits", f"{self.cache_hits:.1%} of the prompt tokens"),
            (
                "iterations",
                f"{self.num_iterations}: {self.mean_batch:.1f} sequences and {self.mean_rows:.1f} rows on average, "
                f"{self.mixed_iterations:.1%} mixed",
            ),
            ("at most", f"{self.max_waiting} waiting, {self.peak_used_blocks} blocks in use"),
        ]


def ratio(part: float, whole: float) -> float:
    """0 of nothing."""
    return part / whole if whole else 0.0
