"""The calls that have one answer: what is sent, and how the answer is read. Both clients make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from batch_manager.iteration_table import IterationRow
from executor.api.errors import InvalidRequestError
from executor.api.role import InstanceRole
from executor.client.messages import iteration_rows
from protos.inflight.v1 import control_pb2, inference_pb2

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Call(Generic[_T]):
    """A method of a service, its request, and what its response means."""

    method: str
    """As in the .proto file."""
    request: Message
    read: Callable[[Any], _T]


def abort(request_id: str) -> Call[bool]:
    return Call(
        "Abort",
        inference_pb2.AbortRequest(request_id=request_id),
        lambda response: bool(response.outcome == inference_pb2.ABORT_OUTCOME_ABORTED),
    )


def iteration_table(first_iteration: int) -> Call[list[IterationRow]]:
    request = control_pb2.IterationTableRequest(first_iteration=first_iteration)
    return Call("IterationTable", request, iteration_rows)


def server_info() -> Call[control_pb2.ServerInfoResponse]:
    return Call("ServerInfo", control_pb2.ServerInfoRequest(), _whole)


def model_info() -> Call[control_pb2.ModelInfoResponse]:
    return Call("ModelInfo", control_pb2.ModelInfoRequest(), _whole)


def load() -> Call[control_pb2.LoadResponse]:
    return Call("Load", control_pb2.LoadRequest(), _whole)


def health() -> Call[control_pb2.HealthResponse]:
    return Call("Health", control_pb2.HealthRequest(), _whole)


def explain(request_id: str) -> Call[list[control_pb2.OutputExplanation]]:
    request = control_pb2.ExplainRequest(request_id=request_id)
    return Call("Explain", request, lambda response: list(response.outputs))


def receipt(request_id: str) -> Call[list[control_pb2.OutputReceipt]]:
    request = control_pb2.ReceiptRequest(request_id=request_id)
    return Call("Receipt", request, lambda response: list(response.outputs))


def kv_ledger() -> Call[control_pb2.KvLedgerResponse]:
    return Call("KvLedger", control_pb2.KvLedgerRequest(), _whole)


def pin_prefix(token_ids: Sequence[int], cache_salt_id: int | None, seconds: float | None) -> Call[control_pb2.KvPin]:
    try:
        request = control_pb2.PinPrefixRequest(token_ids=token_ids, cache_salt_id=cache_salt_id, seconds=seconds)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"the prefix cannot be sent: {error}") from error
    return Call("PinPrefix", request, lambda response: response.pin)


def unpin_prefix(pin_id: int) -> Call[None]:
    return Call("UnpinPrefix", control_pb2.UnpinPrefixRequest(pin_id=pin_id), _nothing)


def change_role(role: InstanceRole) -> Call[None]:
    value = control_pb2.InstanceRole.Value(f"INSTANCE_ROLE_{role.name}")
    return Call("ChangeRole", control_pb2.ChangeRoleRequest(role=value), _nothing)


def pause() -> Call[None]:
    return Call("Pause", control_pb2.PauseRequest(), _nothing)


def resume() -> Call[None]:
    return Call("Resume", control_pb2.ResumeRequest(), _nothing)


def update_limits(
    max_batch_size: int | None, max_num_tokens: int | None, max_queue_size: int | None, max_queued_tokens: int | None
) -> Call[control_pb2.Limits]:
    try:
        request = control_pb2.UpdateLimitsRequest(
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_queue_size=max_queue_size,
            max_queued_tokens=max_queued_tokens,
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"the limits cannot be sent: {error}") from error
    return Call("UpdateLimits", request, lambda response: response.limits)


def _whole(response: Any) -> Any:
    return response


def _nothing(_response: Any) -> None:
    return None
