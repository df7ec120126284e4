"""Every method of both services with requests that nobody would send, against a server process with a real engine.

Messages are drawn from their descriptors, so that a new field or method is fuzzed as soon as it is there.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.client import Delta, Finished, InferenceClient
from protos.inflight.v1 import control_pb2, inference_pb2
from tests.serving.server_process import serving
from tests.serving.tiny_engine_dir import build_tiny_engine

_SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"],
    control_pb2.DESCRIPTOR.services_by_name["Control"],
)
_METHODS = [method for service in _SERVICES for method in service.methods]
_ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # the test's own: some of these requests run for long, or for ever
}
_SECONDS = 0.4
_OPTIONS = ("--event_buffer_max_size", "100", "--iteration_table_max_rows", "1000", "--log_level", "error")

Process = tuple[subprocess.Popen[str], str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    engine_dir = build_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny")
    with serving(engine_dir, *_OPTIONS) as process:
        yield process


_INTEGERS = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}
_DOUBLES = [0.0, -0.0, 1.0, 0.5, -1.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324]
_STRINGS = ["", "job", "x", "\x00", "\ufffd\U0001f600", "</s>", '{"type": "object"}', "[a-z]+", "(((", "x" * 3000]


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """A value of a field that does not repeat: small, extreme, or anything."""
    if field.type in _INTEGERS:
        least, most = _INTEGERS[field.type]
        return st.integers(0, 9) | st.sampled_from([least, most, most // 2, 2**31 - 1]) | st.integers(least, most)
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return st.sampled_from(_DOUBLES) | st.floats()
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.sampled_from(_STRINGS) | st.text(max_size=8)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    assert field.type == FieldDescriptor.TYPE_MESSAGE, field.full_name
    return messages(field.message_type, 4)


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, most_fields: int) -> Message:
    """A message of which up to so many fields are set."""
    message: Message = message_factory.GetMessageClass(descriptor)()
    if not descriptor.fields:
        return message
    for field in draw(st.lists(st.sampled_from(list(descriptor.fields)), max_size=most_fields, unique=True)):
        if field.is_repeated:
            drawn = draw(st.lists(values(field), max_size=3)) * draw(st.sampled_from([1, 1, 1, 700]))
            getattr(message, field.name).extend(drawn)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(values(field)))
        else:
            setattr(message, field.name, draw(values(field)))
    return message


@st.composite
def calls(draw: st.DrawFn) -> tuple[MethodDescriptor, bytes]:
    """A method and what is sent to it: mostly a good request with some fields replaced, at times damaged bytes."""
    method = draw(st.sampled_from([_METHODS[0]] * len(_METHODS) + _METHODS))
    request = message_factory.GetMessageClass(method.input_type)()
    if method.name == "Generate" and draw(st.booleans()):
        request.MergeFrom(inference_pb2.GenerateRequest(text="ab", max_tokens=3, streaming=True))
    request.MergeFrom(draw(messages(method.input_type, 3)))
    data = request.SerializeToString()
    damage = draw(st.integers(0, 9))
    if damage == 0:
        data = draw(st.binary(max_size=60))
    elif damage == 1 and data:
        at = draw(st.integers(0, len(data) - 1))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + 1 :]
    return method, data


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(batch=st.lists(calls(), min_size=1, max_size=12))
def test_no_call_is_internal_and_the_server_still_serves(
    server: Process, batch: list[tuple[MethodDescriptor, bytes]]
) -> None:
    process, target = server
    with grpc.insecure_channel(target) as channel, InferenceClient(target) as client:
        limits = client.server_info().limits
        open_calls = [(method, data, _start(channel, method, data)) for method, data in batch]
        for method, data, call in open_calls:
            code = _end(call)
            assert code in _ALLOWED, f"{method.name} ended with {code}: {call.details()}; it was sent {data!r}"
        client.resume()
        client.update_limits(max_batch_size=limits.max_batch_size, max_num_tokens=limits.max_num_tokens)
        client.update_limits(max_queue_size=2**31, max_queued_tokens=2**62)
        events = list(client.generate("still here", max_tokens=2, ignore_eos=True, timeout=30))
        assert sum(len(event.token_ids) for event in events if isinstance(event, Delta)) == 2
        assert isinstance(events[-1], Finished)
    assert process.poll() is None


def _start(channel: grpc.Channel, method: MethodDescriptor, data: bytes) -> Any:
    """The call, begun: several of them run at once. All of them are read as streams, of one message or many."""
    return channel.unary_stream(f"/{method.containing_service.full_name}/{method.name}")(data, timeout=_SECONDS)


def _end(call: Any) -> grpc.StatusCode:
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass
    code: grpc.StatusCode = call.code()
    return code
