"""The service `inflight.v1.Inference`."""

from __future__ import annotations

import grpc

from executor.serving.generation import GenerationService
from executor.serving.generation_request import check_request_id
from executor.serving.grpc_messages import generation_request, response_message
from protos.inflight.v1 import inference_pb2 as pb


class InferenceServicer:
    """Generates on a `GenerationService`. Method names are the .proto file's."""

    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation

    async def Generate(  # noqa: N802 - the .proto file's name
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Write the request's events. A client that leaves or passes its deadline cancels this coroutine, and with
        it the request."""
        asked = generation_request(request)
        for key, value in context.invocation_metadata():
            if key == "traceparent":
                asked.trace_parent = value
        with await self._generation.start(asked) as stream:
            async for event in stream:
                await context.write(response_message(event))

    async def Abort(  # noqa: N802 - the .proto file's name
        self, request: pb.AbortRequest, _context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        check_request_id(request.request_id)
        found = self._generation.abort(request.request_id)
        return pb.AbortResponse(outcome=pb.ABORT_OUTCOME_ABORTED if found else pb.ABORT_OUTCOME_NOT_LIVE)
