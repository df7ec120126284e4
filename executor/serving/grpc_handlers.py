"""Binds a servicer to a service of a .proto file; one rule for requests that do not parse and for typed errors.

The generated `add_..._to_server` functions let a request that does not parse (a string that is not UTF-8) end as
INTERNAL; here it is the client's error, and says so.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from executor.api.errors import InvalidRequestError, RequestError
from executor.serving.grpc_status import CallRefusedError, abort

_logger = logging.getLogger(__name__)

Handler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


def service_handler(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """Bind the servicer's methods, named as in the .proto file, to the service.

    A method is a coroutine of (request, context): a unary one returns the response, a streaming one writes to the
    context. Either may raise a `RequestError` or a `CallRefusedError`, which becomes the call's status.

    Raises:
        AttributeError: the servicer lacks one of the service's methods.
    """
    handlers = {method.name: _method_handler(method, getattr(servicer, method.name)) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _method_handler(method: MethodDescriptor, handler: Handler) -> grpc.RpcMethodHandler:
    request_type = message_factory.GetMessageClass(method.input_type)
    response_type = message_factory.GetMessageClass(method.output_type)

    def parse(data: bytes) -> Message | DecodeError:
        try:
            return request_type.FromString(data)
        except DecodeError as error:
            return error

    async def guarded(request: Message | DecodeError, context: grpc.aio.ServicerContext) -> Any:
        try:
            if isinstance(request, DecodeError):
                raise InvalidRequestError(
                    f"the request is not a valid {method.input_type.full_name}: damaged, or a string is not UTF-8"
                )
            return await handler(request, context)
        except RequestError as error:
            _logger.info("%s ended with %s: %s", method.full_name, error.code, error.message)
            return await abort(context, error)
        except CallRefusedError as refusal:
            return await context.abort(refusal.status, refusal.message)

    bind = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    return bind(guarded, request_deserializer=parse, response_serializer=response_type.SerializeToString)
