"""The service `inflight.v1.Control`."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from importlib.metadata import version

import grpc

from batch_manager import UnknownRequestError
from executor.api.errors import ReceiptNotFoundError
from executor.serving.generation import GenerationService
from executor.serving.generation_request import check_request_id
from executor.serving.grpc_control_messages import (
    ROLES,
    iteration_message,
    kv_event_message,
    kv_ledger_message,
    kv_pin_message,
    limits_message,
    output_receipt_message,
    pin_duration,
    role_of,
    row_message,
    wait_reason_message,
)
from executor.serving.grpc_messages import SCHEMA_REVISION
from executor.serving.grpc_status import CallRefusedError
from executor.serving.kv_event_feed import KvEventFeed
from executor.serving.progress import ProgressMonitor
from executor.serving.stats_feed import StatsFeed
from protos.inflight.v1 import control_pb2 as pb


class ControlServicer:
    """Describes a server. Method names are the .proto file's."""

    def __init__(
        self,
        generation: GenerationService,
        progress: ProgressMonitor,
        stats: StatsFeed,
        kv_events: KvEventFeed | None,
        *,
        model_name: str,
    ) -> None:
        self._generation = generation
        self._executor = generation.executor
        self._progress = progress
        self._stats = stats
        self._kv_events = kv_events
        self._model_name = model_name
        self._started = time.monotonic()

    async def ServerInfo(  # noqa: N802 - the .proto file's name
        self, _request: pb.ServerInfoRequest, _context: grpc.aio.ServicerContext
    ) -> pb.ServerInfoResponse:
        spec = self._executor.spec
        return pb.ServerInfoResponse(
            schema_revision=SCHEMA_REVISION,
            version=version("inflight-executor"),
            engine_dir=str(self._executor.engine_dir),
            uptime_seconds=time.monotonic() - self._started,
            limits=limits_message(self._executor.limits),
            tokens_per_block=spec.tokens_per_block,
            kv_bytes_per_block=spec.kv_bytes_per_block,
            role=ROLES[self._executor.role],
            transfer_address=self._executor.transfer_address or "",
        )

    async def ModelInfo(  # noqa: N802 - the .proto file's name
        self, _request: pb.ModelInfoRequest, _context: grpc.aio.ServicerContext
    ) -> pb.ModelInfoResponse:
        spec = self._executor.spec
        tokenizer = self._generation.tokenizer
        return pb.ModelInfoResponse(
            name=self._model_name,
            vocab_size=spec.vocab_size,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            max_input_len=spec.max_input_len,
            max_seq_len=spec.max_seq_len,
            end_ids=self._generation.end_ids,
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
        )

    async def Load(  # noqa: N802 - the .proto file's name
        self, _request: pb.LoadRequest, _context: grpc.aio.ServicerContext
    ) -> pb.LoadResponse:
        self._stats.refresh()
        latest = self._stats.latest
        return pb.LoadResponse(
            num_unfinished_requests=self._executor.num_unfinished_requests,
            latest_iteration=None if latest is None else iteration_message(latest),
        )

    async def Health(  # noqa: N802 - the .proto file's name
        self, _request: pb.HealthRequest, _context: grpc.aio.ServicerContext
    ) -> pb.HealthResponse:
        if self._generation.is_draining:
            state = pb.HEALTH_STATE_DRAINING
        elif self._executor.is_paused:
            state = pb.HEALTH_STATE_PAUSED
        elif self._progress.is_stalled:
            state = pb.HEALTH_STATE_STALLED
        else:
            state = pb.HEALTH_STATE_SERVING
        return pb.HealthResponse(
            state=state,
            seconds_since_progress=self._progress.seconds_since_progress(),
            num_unfinished_requests=self._executor.num_unfinished_requests,
        )

    async def IterationStats(  # noqa: N802 - the .proto file's name
        self, _request: pb.IterationStatsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        with self._stats.subscribe() as subscription:
            async for stats in subscription:
                await context.write(iteration_message(stats))

    async def IterationTable(  # noqa: N802 - the .proto file's name
        self, request: pb.IterationTableRequest, _context: grpc.aio.ServicerContext
    ) -> pb.IterationTableResponse:
        return pb.IterationTableResponse(
            rows=[
                row_message(row) for row in self._executor.iteration_table() if row.iteration >= request.first_iteration
            ]
        )

    async def Pause(  # noqa: N802 - the .proto file's name
        self, _request: pb.PauseRequest, _context: grpc.aio.ServicerContext
    ) -> pb.PauseResponse:
        self._executor.pause()
        return pb.PauseResponse()

    async def Resume(  # noqa: N802 - the .proto file's name
        self, _request: pb.ResumeRequest, _context: grpc.aio.ServicerContext
    ) -> pb.ResumeResponse:
        self._executor.resume()
        return pb.ResumeResponse()

    async def UpdateLimits(  # noqa: N802 - the .proto file's name
        self, request: pb.UpdateLimitsRequest, _context: grpc.aio.ServicerContext
    ) -> pb.UpdateLimitsResponse:
        changes = {field.name: value for field, value in request.ListFields()}
        self._executor.change_limits(dataclasses.replace(self._executor.limits, **changes))
        return pb.UpdateLimitsResponse(limits=limits_message(self._executor.limits))

    async def ChangeRole(  # noqa: N802 - the .proto file's name
        self, request: pb.ChangeRoleRequest, _context: grpc.aio.ServicerContext
    ) -> pb.ChangeRoleResponse:
        self._executor.change_role(role_of(request))
        return pb.ChangeRoleResponse()

    async def Explain(  # noqa: N802 - the .proto file's name
        self, request: pb.ExplainRequest, _context: grpc.aio.ServicerContext
    ) -> pb.ExplainResponse:
        check_request_id(request.request_id)
        open_outputs = self._generation.open_outputs(request.request_id)
        if open_outputs is None:
            raise CallRefusedError(grpc.StatusCode.NOT_FOUND, f"no live request has the id {request.request_id!r}")
        response = pb.ExplainResponse()
        for output_index, executor_id in open_outputs:
            try:
                reason = self._executor.explain_request(executor_id)
            except UnknownRequestError:  # it has just ended
                continue
            response.outputs.add(
                output_index=output_index,
                executor_request_id=executor_id,
                wait_reason=None if reason is None else wait_reason_message(reason),
            )
        return response

    async def Receipt(  # noqa: N802 - the .proto file's name
        self, request: pb.ReceiptRequest, _context: grpc.aio.ServicerContext
    ) -> pb.ReceiptResponse:
        check_request_id(request.request_id)
        executor_ids = self._generation.executor_ids_of_ended(request.request_id)
        if executor_ids is None:
            raise CallRefusedError(
                grpc.StatusCode.NOT_FOUND, f"no request with the id {request.request_id!r} is among the last that ended"
            )
        try:
            receipts = [self._executor.get_receipt(executor_id) for executor_id in executor_ids]
        except ReceiptNotFoundError as error:
            raise CallRefusedError(grpc.StatusCode.NOT_FOUND, str(error)) from None
        return pb.ReceiptResponse(
            outputs=[output_receipt_message(index, receipt) for index, receipt in enumerate(receipts)]
        )

    async def KvLedger(  # noqa: N802 - the .proto file's name
        self, _request: pb.KvLedgerRequest, _context: grpc.aio.ServicerContext
    ) -> pb.KvLedgerResponse:
        return kv_ledger_message(await asyncio.to_thread(self._executor.kv_ledger))

    async def PinPrefix(  # noqa: N802 - the .proto file's name
        self, request: pb.PinPrefixRequest, _context: grpc.aio.ServicerContext
    ) -> pb.PinPrefixResponse:
        pin = self._executor.pin_prefix(
            request.token_ids,
            cache_salt_id=request.cache_salt_id if request.HasField("cache_salt_id") else None,
            duration=pin_duration(request),
        )
        return pb.PinPrefixResponse(pin=kv_pin_message(pin))

    async def UnpinPrefix(  # noqa: N802 - the .proto file's name
        self, request: pb.UnpinPrefixRequest, _context: grpc.aio.ServicerContext
    ) -> pb.UnpinPrefixResponse:
        self._executor.unpin_prefix(request.pin_id)
        return pb.UnpinPrefixResponse()

    async def KvEvents(  # noqa: N802 - the .proto file's name
        self, _request: pb.KvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        if self._kv_events is None:
            raise CallRefusedError(
                grpc.StatusCode.FAILED_PRECONDITION, "KV cache events need --event_buffer_max_size at the start"
            )
        with self._kv_events.subscribe() as subscription:
            async for event in subscription:
                await context.write(kv_event_message(event))
