"""`inflight.v1.Control`, health and reflection, over the wire."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from executor.api.request import Request
from executor.serving.grpc_messages import SCHEMA_REVISION
from executor.serving.progress import ProgressMonitor
from protos.inflight.v1 import control_pb2 as pb
from protos.inflight.v1 import inference_pb2
from tests.serving.byte_tokenizer import END_ID
from tests.serving.fake_executor import FakeExecutor
from tests.serving.harness import RunningServer, running_server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(server: RunningServer, service: str = "inflight.v1.Inference") -> int:
    stub = health_pb2_grpc.HealthStub(server.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def test_server_and_model_describe_themselves() -> None:
    async with running_server() as server:
        info = await server.control.ServerInfo(pb.ServerInfoRequest())
        model = await server.control.ModelInfo(pb.ModelInfoRequest())
    assert info.schema_revision == SCHEMA_REVISION
    assert (info.max_batch_size, info.max_num_tokens, info.tokens_per_block) == (64, 1024, 16)
    assert info.engine_dir == "/nowhere/fake-engine"
    assert (model.name, model.vocab_size, model.max_input_len) == ("fake", 258, 4096)
    assert list(model.end_ids) == [END_ID]
    assert model.has_tokenizer
    assert model.has_chat_template


async def test_the_iteration_table_has_a_row_for_each_request_of_each_iteration() -> None:
    async with running_server() as server:
        await server.generate(text="abcd", max_tokens=3)
        table = await server.control.IterationTable(pb.IterationTableRequest())
        later = await server.control.IterationTable(pb.IterationTableRequest(first_iteration=3))
    assert [(row.phase, row.num_scheduled_tokens) for row in table.rows] == [
        (pb.PHASE_CONTEXT, 4),
        (pb.PHASE_GENERATION, 1),
        (pb.PHASE_GENERATION, 1),
    ]
    assert [row.iteration for row in later.rows] == [3]


async def test_iteration_stats_stream_to_every_subscriber() -> None:
    """Statistics once were drained by whoever read first."""
    async with running_server(FakeExecutor(step_seconds=0.01)) as server:
        first, second = (server.control.IterationStats(pb.IterationStatsRequest()) for _ in range(2))
        readers = [asyncio.ensure_future(anext(aiter(call))) for call in (first, second)]
        await asyncio.sleep(0.1)
        await server.generate(text="x", max_tokens=20)
        one, other = await asyncio.wait_for(asyncio.gather(*readers), 5)
        assert one == other
        assert (one.iteration, one.num_context_requests) == (1, 1)
        first.cancel()
        second.cancel()
        load = await server.control.Load(pb.LoadRequest())
        assert load.num_unfinished_requests == 0
        assert load.latest_iteration.iteration == 20


async def test_a_stuck_engine_with_work_is_not_serving_until_it_moves_again() -> None:
    """Health once answered 200 while nothing was served."""
    executor = FakeExecutor()
    executor.hold()
    async with running_server(executor, progress_limit_seconds=0.2) as server:
        assert await health_of(server) == SERVING
        call = asyncio.ensure_future(server.generate(text="x", max_tokens=2))
        async with asyncio.timeout(5):
            while await health_of(server) != NOT_SERVING:
                await asyncio.sleep(0.05)
            status = await server.control.Health(pb.HealthRequest())
            assert status.state == pb.HEALTH_STATE_STALLED
            assert status.seconds_since_progress > 0.2
            executor.release()
            await call
            while await health_of(server, "") != SERVING:
                await asyncio.sleep(0.05)
        status = await server.control.Health(pb.HealthRequest())
        assert status.state == pb.HEALTH_STATE_SERVING


async def test_time_without_work_is_not_time_without_progress() -> None:
    executor = FakeExecutor()
    progress = ProgressMonitor(executor, limit_seconds=0.05)
    await asyncio.sleep(0.1)
    assert progress.seconds_since_progress() == 0
    executor.hold()
    executor.enqueue_request(Request([1], 5), listener=lambda _responses: None)
    assert not progress.is_stalled
    await asyncio.sleep(0.1)
    assert progress.is_stalled
    executor.shutdown()


async def test_draining_finishes_open_requests_and_refuses_new_ones() -> None:
    executor = FakeExecutor(step_seconds=0.01)
    async with running_server(executor) as server:
        call = asyncio.ensure_future(server.generate(text="x", max_tokens=30, streaming=True))
        while executor.num_unfinished_requests == 0:
            await asyncio.sleep(0.005)
        stopping = asyncio.ensure_future(server.server.stop())
        await asyncio.sleep(0.05)
        assert await health_of(server) == NOT_SERVING
        assert (await server.control.Health(pb.HealthRequest())).state == pb.HEALTH_STATE_DRAINING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.generate(text="y")
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        events = await call
        assert events[-1].finished.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        await stopping


async def test_reflection_tells_the_services_and_their_messages() -> None:
    async with running_server() as server:

        def ask() -> tuple[list[str], list[str]]:
            with grpc.insecure_channel(server.target) as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                file = database.FindFileContainingSymbol("inflight.v1.GenerateRequest")
                return sorted(database.get_services()), [message.name for message in file.message_type]

        services, messages = await asyncio.to_thread(ask)
    assert services == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "inflight.v1.Control",
        "inflight.v1.Inference",
    ]
    assert "GenerateRequest" in messages
