"""`inflight.v1.Control`, health and reflection, over the wire."""

from __future__ import annotations

import asyncio
import json
import math
import re

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from typer.testing import CliRunner

from batch_manager import WaitCode, WaitReason
from executor.api.kv_cache import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventDiffInt,
    KVCacheOverflowData,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    UniqueToken,
)
from executor.api.request import Request
from executor.api.role import InstanceRole
from executor.cli import app
from executor.serving.grpc_control_messages import wait_reason_message
from executor.serving.grpc_messages import SCHEMA_REVISION
from executor.serving.progress import ProgressMonitor
from protos.inflight.v1 import control_pb2 as pb
from protos.inflight.v1 import inference_pb2
from tests.serving.byte_tokenizer import END_ID
from tests.serving.fake_executor import FakeExecutor
from tests.serving.harness import RunningServer, running_server, violated_field

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
    assert (info.limits.max_batch_size, info.limits.max_num_tokens, info.tokens_per_block) == (64, 1024, 16)
    assert not info.limits.HasField("max_queue_size")
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


async def test_the_account_of_kv_blocks_names_their_owners() -> None:
    async with running_server() as server:
        ledger = await server.control.KvLedger(pb.KvLedgerRequest())
    assert (ledger.counts.free, ledger.counts.used, ledger.counts.cached) == (7, 2, 1)
    request, _, tree = ledger.entries
    assert (request.owner_kind, request.owner_id, request.iteration) == (pb.KV_OWNER_KIND_REQUEST, 7, 5)
    assert (tree.owner_kind, tree.HasField("owner_id")) == (pb.KV_OWNER_KIND_TREE, False)
    failures = [(each.kind, each.count) for each in ledger.transfers.failed_by_kind]
    assert (ledger.host.used_num_blocks, failures) == (4, [("damaged", 1)])


async def test_a_prefix_is_pinned_and_unpinned_within_its_quota() -> None:
    async with running_server() as server:
        asked = pb.PinPrefixRequest(token_ids=[1] * 20, seconds=2.5)
        pin = (await server.control.PinPrefix(asked)).pin
        assert (pin.num_tokens, pin.seconds_left) == (16, 2.5)
        assert [each.pin_id for each in (await server.control.KvLedger(pb.KvLedgerRequest())).pins] == [pin.pin_id]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.control.PinPrefix(asked)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await server.control.UnpinPrefix(pb.UnpinPrefixRequest(pin_id=pin.pin_id))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.control.UnpinPrefix(pb.UnpinPrefixRequest(pin_id=pin.pin_id))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_executor_kv_shows_owners_tiers_and_pins() -> None:
    async with running_server() as server:
        await server.control.PinPrefix(pb.PinPrefixRequest(token_ids=[1] * 16))
        shown = await asyncio.to_thread(CliRunner().invoke, app, ["kv", server.target])
        as_json = await asyncio.to_thread(CliRunner().invoke, app, ["kv", server.target, "--json"])
    assert shown.exit_code == 0
    assert re.search(r"0 to 1 +request 7 +request +5 +allocate +2", shown.output)
    for line in (
        "pool: 7 free, 2 used, 1 cached, 0 leased",
        "host: 4 of 20 blocks used",
        "copies: 5 offloaded, 2 onboarded, 1 failed (damaged 1)",
        "pin 1: 16 tokens, blocks 3, until unpinned",
    ):
        assert line in shown.output
    ledger = json.loads(as_json.output)
    assert ledger["counts"] == {"free": 7, "used": 2, "cached": 1, "leased": 0}
    assert ledger["entries"][0]["owner"] == "request 7"


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e308])
async def test_a_pin_lasts_for_a_positive_time_that_can_be_told(seconds: float) -> None:
    async with running_server() as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.control.PinPrefix(pb.PinPrefixRequest(token_ids=[1] * 16, seconds=seconds))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(caught.value) == "seconds"


async def test_a_paused_server_takes_requests_and_runs_them_when_resumed() -> None:
    async with running_server(progress_limit_seconds=0.1) as server:
        await server.control.Pause(pb.PauseRequest())
        call = asyncio.ensure_future(server.generate(text="x", max_tokens=2))
        async with asyncio.timeout(5):
            while await health_of(server) != NOT_SERVING:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        assert (await server.control.Health(pb.HealthRequest())).state == pb.HEALTH_STATE_PAUSED
        assert not call.done()
        await server.control.Resume(pb.ResumeRequest())
        assert (await call)[-1].HasField("finished")
        assert (await server.control.Health(pb.HealthRequest())).state == pb.HEALTH_STATE_SERVING


async def test_limits_that_are_not_named_stay_as_they_are() -> None:
    async with running_server() as server:
        answer = await server.control.UpdateLimits(pb.UpdateLimitsRequest(max_batch_size=4, max_queue_size=0))
        assert (answer.limits.max_batch_size, answer.limits.max_num_tokens) == (4, 1024)
        assert answer.limits.HasField("max_queue_size")
        assert not answer.limits.HasField("max_queued_tokens")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.control.UpdateLimits(pb.UpdateLimitsRequest(max_batch_size=65))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (await server.control.ServerInfo(pb.ServerInfoRequest())).limits == answer.limits


async def test_explain_tells_what_each_open_output_waits_for() -> None:
    executor = FakeExecutor()
    executor.hold()
    async with running_server(executor) as server:
        call = asyncio.ensure_future(server.generate(text="x", max_tokens=2, request_id="mine", num_return_sequences=2))
        while executor.num_unfinished_requests < 2:
            await asyncio.sleep(0.005)
        answer = await server.control.Explain(pb.ExplainRequest(request_id="mine"))
        assert [(output.output_index, output.executor_request_id) for output in answer.outputs] == [(0, 1), (1, 2)]
        reason = answer.outputs[0].wait_reason
        assert (reason.code, reason.needed, reason.available) == (pb.WAIT_CODE_BATCH_SIZE, 1, 0)
        assert (list(reason.holders), reason.behind) == ([7, 8], 9)
        executor.release()
        await call
        for request_id, status in (("mine", grpc.StatusCode.NOT_FOUND), ("", grpc.StatusCode.INVALID_ARGUMENT)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await server.control.Explain(pb.ExplainRequest(request_id=request_id))
            assert caught.value.code() == status


async def test_a_receipt_tells_what_each_output_of_an_ended_request_cost() -> None:
    async with running_server() as server:
        await server.generate(text="abc", max_tokens=4, num_return_sequences=2, request_id="job")
        response = await server.control.Receipt(pb.ReceiptRequest(request_id="job"))
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await server.control.Receipt(pb.ReceiptRequest(request_id="jo"))
        with pytest.raises(grpc.aio.AioRpcError) as empty:
            await server.control.Receipt(pb.ReceiptRequest())
    assert [(output.output_index, output.executor_request_id) for output in response.outputs] == [(0, 1), (1, 2)]
    receipt = response.outputs[0]
    assert (receipt.num_prompt_tokens, receipt.num_generated_tokens, receipt.num_computed_tokens) == (3, 4, 7)
    assert (receipt.num_reused_tokens, receipt.num_recomputed_tokens, receipt.num_transferred_tokens) == (1, 2, 3)
    assert (receipt.num_draft_tokens, receipt.num_accepted_draft_tokens) == (5, 4)
    assert (receipt.block_seconds, receipt.queue_seconds) == (0.5, 0.25)
    assert (receipt.paused_seconds, receipt.total_seconds) == (0.125, 1.5)
    (pause,) = receipt.pauses
    assert (pause.iteration, pause.reason) == (4, pb.WAIT_CODE_KV_CAPACITY)
    assert (pause.beneficiary, pause.num_lost_tokens) == (9, 3)
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    assert empty.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_ids_of_ended_requests_are_bounded_and_the_latest_of_an_id_counts() -> None:
    async with running_server() as server:
        for _ in range(2):
            await server.generate(text="x", max_tokens=1, request_id="again")
        response = await server.control.Receipt(pb.ReceiptRequest(request_id="again"))
        assert [output.executor_request_id for output in response.outputs] == [2]
        for number in range(1000):
            await server.generate(text="x", max_tokens=1, request_id=f"{number}")
        with pytest.raises(grpc.aio.AioRpcError, match="among the last"):
            await server.control.Receipt(pb.ReceiptRequest(request_id="again"))


def test_every_wait_code_has_its_number() -> None:
    for code in WaitCode:
        message = wait_reason_message(WaitReason(code, 3, 2))
        assert pb.WaitCode.Name(message.code) == f"WAIT_CODE_{code.name}"
        assert not message.HasField("behind")


KV_EVENTS = [
    KVCacheEvent(0, KVCacheCreatedData([64, 8]), 256),
    KVCacheEvent(
        1, KVCacheStoredData(None, [KVCacheStoredBlockData(2**63, [UniqueToken(5), UniqueToken(6)], 3, 0, 35, [])]), 256
    ),
    KVCacheEvent(2, KVCacheStoredData(2**63, []), 256),
    KVCacheEvent(3, KVCacheUpdatedData(2**63, KVCacheEventDiffInt(0, 1)), 256),
    KVCacheEvent(4, KVCacheRemovedData([2**63]), 256),
    KVCacheEvent(9, KVCacheOverflowData(5), 256),
]


async def test_the_first_listener_of_kv_events_gets_those_from_the_start() -> None:
    executor = FakeExecutor()
    executor.kv_events = list(KV_EVENTS)
    async with running_server(executor) as server:
        call = server.control.KvEvents(pb.KvEventsRequest())
        events = [await asyncio.wait_for(call.read(), 5) for _ in KV_EVENTS]
        call.cancel()
    kinds = ["created", "stored", "stored", "updated", "removed", "overflow"]
    assert [event.WhichOneof("event") for event in events] == kinds
    assert [event.event_id for event in events] == [0, 1, 2, 3, 4, 9]
    assert list(events[0].created.num_blocks_per_cache_level) == [64, 8]
    assert not events[1].stored.HasField("parent_hash")
    assert events[1].stored.blocks[0].block_hash == 2**63
    assert list(events[1].stored.blocks[0].token_ids) == [5, 6]
    assert events[2].stored.parent_hash == 2**63
    assert events[3].updated.cache_level.new_value == 1
    assert not events[3].updated.HasField("priority")
    assert events[5].overflow.num_lost_events == 5


async def test_without_an_event_buffer_kv_events_are_a_failed_precondition() -> None:
    async with running_server() as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.control.KvEvents(pb.KvEventsRequest()).read()
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "--event_buffer_max_size" in caught.value.details()


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


async def test_a_server_changes_its_role_and_says_which_it_is() -> None:
    async with running_server() as server:
        server.executor.transfer_address = "127.0.0.1:7001"
        info = await server.control.ServerInfo(pb.ServerInfoRequest())
        assert (info.role, info.transfer_address) == (pb.INSTANCE_ROLE_BOTH, "127.0.0.1:7001")
        await server.control.ChangeRole(pb.ChangeRoleRequest(role=pb.INSTANCE_ROLE_CONTEXT))
        assert (await server.control.ServerInfo(pb.ServerInfoRequest())).role == pb.INSTANCE_ROLE_CONTEXT


@pytest.mark.parametrize(
    ("role", "transfers", "reason"),
    [(0, True, "role is 0; it must be one of INSTANCE_ROLE_CONTEXT"), (2, False, "needs a cache_transceiver_config")],
)
async def test_a_role_that_cannot_be_taken_is_refused(role: int, transfers: bool, reason: str) -> None:
    async with running_server() as server:
        server.executor.transfer_address = "127.0.0.1:7001" if transfers else None
        with pytest.raises(grpc.aio.AioRpcError, match=reason) as caught:
            await server.control.ChangeRole(pb.ChangeRoleRequest(role=role))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert violated_field(caught.value) == "role"
        assert server.executor.role is InstanceRole.BOTH
