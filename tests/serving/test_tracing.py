"""A span for each request. Run where the extra `tracing` is installed."""

from __future__ import annotations

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

from collections.abc import Iterator
from concurrent import futures

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from executor.api.errors import EngineStepError, InvalidRequestError
from executor.serving.generation_request import GenerationRequest, TextPrompt
from executor.serving.tracing import RequestTracer
from protos.inflight.v1 import inference_pb2 as pb
from tests.serving.fake_executor import FakeExecutor
from tests.serving.harness import running_server, running_service
from tests.serving.test_generation import collect

TRACE_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def span_of(request: GenerationRequest, executor: FakeExecutor | None = None) -> ReadableSpan:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with running_service(executor, observers=[RequestTracer(provider)]) as service:
        try:
            await collect(service, request)
        except EngineStepError:
            assert executor is not None
        with pytest.raises(InvalidRequestError):
            await service.start(GenerationRequest(TextPrompt("")))
    (span,) = exporter.get_finished_spans()
    return span


async def test_a_request_is_a_span_with_its_numbers_and_without_its_text() -> None:
    span = await span_of(GenerationRequest(TextPrompt("secret"), max_tokens=4, tenant="blue", request_id="r"))
    assert span.attributes is not None
    assert span.attributes["gen_ai.response.id"] == "r"
    assert span.attributes["gen_ai.usage.input_tokens"] == 6
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    assert span.attributes["gen_ai.response.finish_reasons"] == ("LENGTH",)
    assert span.attributes["inflight.tenant"] == "blue"
    assert [event.name for event in span.events] == ["first token"]
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= span.events[0].timestamp <= span.end_time
    assert "secret" not in span.to_json()


async def test_a_failed_request_is_a_span_with_an_error() -> None:
    span = await span_of(GenerationRequest(TextPrompt("x"), max_tokens=4), FakeExecutor(fail_at=2))
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes["inflight.outcome"] == "INTERNAL"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what is sent to it."""

    def __init__(self) -> None:
        self.spans: list[object] = []

    def Export(  # noqa: N802 - the .proto file's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, _context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    kept = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield kept, f"http://127.0.0.1:{port}"
    server.stop(None)


async def test_spans_reach_a_collector_under_the_clients_span(collector: tuple[Collector, str]) -> None:
    kept, endpoint = collector
    async with running_server(otlp_endpoint=endpoint) as server:
        call = server.inference.Generate(
            pb.GenerateRequest(text="x", max_tokens=2), metadata=(("traceparent", TRACE_PARENT),)
        )
        assert [event async for event in call]
    (span,) = kept.spans
    assert span.trace_id.hex() == TRACE_PARENT.split("-")[1]  # type: ignore[attr-defined]
    assert span.parent_span_id.hex() == TRACE_PARENT.split("-")[2]  # type: ignore[attr-defined]
