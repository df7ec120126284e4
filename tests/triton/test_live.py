"""Responses of live requests, without a server: what happens when one of them cannot be sent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from executor.api.errors import ErrorCode

TRITON_CODES = {"UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS"}
TRITON_CODES |= {"CANCELLED"}
MODULES = ("triton_python_backend_utils", "executor.triton.backend.responses", "executor.triton.backend.live")


class TritonError(SimpleNamespace):
    """As server 2.51 has it."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message=message, code=code)


for code in TRITON_CODES:
    setattr(TritonError, code, code)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules that run in Triton's interpreter, on a stand-in for what Triton gives them."""
    utils: Any = ModuleType("triton_python_backend_utils")
    utils.TritonError = TritonError
    utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    utils.Tensor = lambda name, values: (name, values.tolist())
    utils.InferenceResponse = lambda tensors=(), error=None: SimpleNamespace(tensors=dict(tensors), error=error)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    responses, live = (import_module(name) for name in MODULES[1:])
    yield SimpleNamespace(live=live, responses=responses)
    for name in MODULES:
        sys.modules.pop(name, None)


class Sender:
    """Takes responses; those without the final flag fail from the one numbered `fails_at` on."""

    def __init__(self, fails_at: int) -> None:
        self.sent: list[tuple[Any, int]] = []
        self._fails_at = fails_at

    def send(self, response: Any, flags: int = 0) -> None:
        if not flags and len(self.sent) >= self._fails_at:
            raise RuntimeError("no shared memory is left")
        self.sent.append((response, flags))


def add_batch(backend: Any, batches: Any, sender: Sender) -> Any:
    request = SimpleNamespace(
        get_response_sender=lambda: sender, request_id=lambda: "", requested_output_names=lambda: ["output_ids"]
    )
    batch = backend.live.Batch(request, batches.reserve(1), True)
    batches.add(batch, [True])
    return batch


def test_a_response_that_cannot_be_sent_ends_its_request_with_an_error_and_no_other(backend: Any) -> None:
    batches = backend.live.LiveBatches()
    broken, whole = Sender(fails_at=1), Sender(fails_at=9)
    [broken_key] = add_batch(backend, batches, broken).keys
    [whole_key] = add_batch(backend, batches, whole).keys
    to_cancel = []
    for token in (5, 6, 7):
        events = [[key, 0, [token], 0, token == 7, None] for key in (broken_key, whole_key)]
        to_cancel += batches.deliver(events, memoryview(b""))
    assert to_cancel == [broken_key]
    assert [flags for _, flags in broken.sent] == [0, 1]
    assert "no shared memory is left" in broken.sent[-1][0].error.message
    assert [response.tensors["output_ids"] for response, _ in whole.sent] == [[[[5]]], [[[6]]], [[[7]]]]
    assert [flags for _, flags in whole.sent] == [0, 0, 1]
    assert batches.snapshot() == []


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_of_the_executor_has_one_of_tritons(backend: Any, code: ErrorCode) -> None:
    assert backend.responses.error_response(code.value, "why").error.code in TRITON_CODES
