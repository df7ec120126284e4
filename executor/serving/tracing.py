"""An OpenTelemetry span for each request. Needs the extra `tracing`."""

from __future__ import annotations

import time

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from executor.api.errors import RequestError
from executor.serving.request_record import RequestRecord

_NANOSECONDS = 1_000_000_000


def otlp_provider(endpoint: str, service_name: str) -> TracerProvider:
    """Where spans go: an OTLP collector over gRPC, `http://HOST:PORT` in plaintext or `https://HOST:PORT`."""
    provider = TracerProvider(resource=Resource({"service.name": service_name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class RequestTracer:
    """Writes a request's span when it has ended, as a child of the client's span where the client sent one.

    Attribute names are OpenTelemetry's for generative AI, and `inflight.*`. No prompt and no answer is in them.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("executor.serving")
        self._propagator = TraceContextTextMapPropagator()

    def on_refused(self, request_id: str | None, error: RequestError) -> None:
        """Nothing: a refused request did no work that a span would show."""

    def on_ended(self, record: RequestRecord) -> None:
        end = time.time_ns()
        start = end - int((record.ended_at - record.accepted_at) * _NANOSECONDS)
        carrier = {} if record.trace_parent is None else {"traceparent": record.trace_parent}
        span = self._tracer.start_span(
            "generate",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=start,
            attributes={
                "gen_ai.operation.name": "text_completion",
                "gen_ai.response.id": record.request_id,
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.completion_tokens,
                "gen_ai.response.finish_reasons": [reason.name for reason in record.finish_reasons],
                "inflight.outcome": record.outcome,
                "inflight.reused_tokens": record.reused_tokens,
                "inflight.tenant": record.tenant,
            },
        )
        if record.seconds_to_first_token is not None:
            span.add_event("first token", timestamp=start + int(record.seconds_to_first_token * _NANOSECONDS))
        if record.error is not None:
            span.set_status(Status(StatusCode.ERROR, record.error.message))
        span.end(end)

    def close(self) -> None:
        """Send what is not sent yet."""
        self._provider.shutdown()
