"""What the Executor tells of a row, as Triton's output tensors.

Shapes are those of TensorRT-LLM's backend, with one row and one beam:

| output | dtype, shape |
|---|---|
| `output_ids` | i32 `[1, 1, n]`: new tokens when streaming, else prompt (unless excluded) and output |
| `sequence_length` | i32 `[1, 1]`: n |
| `batch_index`, `sequence_index` | i32 `[1, 1]` |
| `finish_reason` | i32 `[1, 1]`: `FinishReason`, 0 while it goes on (not upstream's) |
| `prefix_ids` | i32 `[1, 1, m]`: tokens streamed just before, for detokenizing (not upstream's) |
| what a request asks for | with a leading 1 |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from executor.triton.backend.wire import array

PREFIX_TOKENS = 8
"""As many as can be needed to know where in a character the text so far ended: a character has at most 4 bytes."""

_EXTRA_TYPES: Mapping[str, Any] = {
    "cum_log_probs": np.float32,
    "output_log_probs": np.float32,
    "context_logits": np.float32,
    "generation_logits": np.float32,
    "context_phase_params": np.uint8,
    "arrival_time_ns": np.int64,
    "first_scheduled_time_ns": np.int64,
    "first_token_time_ns": np.int64,
    "last_token_time_ns": np.int64,
    "acceptance_rate": np.float32,
}
"""Of outputs that only come when asked for; int32 where nothing is said."""

_ERROR_CODES: Mapping[str, str] = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "UNIMPLEMENTED": "UNSUPPORTED",
    "FAILED_PRECONDITION": "INVALID_ARG",
    "RESOURCE_EXHAUSTED": "UNAVAILABLE",
}
"""From the Executor's codes, which are gRPC's, to Triton's where they differ; it has none for a queue that is full, nor
for a request that another instance would have taken."""


def error_response(code: str, message: str) -> Any:
    """A response with an error; `code` is one of the Executor's."""
    triton_code = getattr(pb_utils.TritonError, _ERROR_CODES.get(code, code))
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, triton_code))


def send_final(sender: Any, last: Any) -> None:
    """Send the last response to a request."""
    sender.send(last, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def output_arrays(
    wanted: Sequence[str] | frozenset[str],
    token_ids: Sequence[int],
    prefix_ids: Sequence[int],
    row: int,
    sequence: int,
    finish_reason: int,
    extras: Mapping[str, Any],
    body: memoryview,
) -> dict[str, Any]:
    """The outputs of one row that are wanted, by name."""
    arrays: dict[str, Any] = {}
    if "output_ids" in wanted:
        arrays["output_ids"] = np.array([[token_ids]], np.int32)
    if "sequence_length" in wanted:
        arrays["sequence_length"] = np.array([[len(token_ids)]], np.int32)
    if "batch_index" in wanted:
        arrays["batch_index"] = np.array([[row]], np.int32)
    if "sequence_index" in wanted:
        arrays["sequence_index"] = np.array([[sequence]], np.int32)
    if "finish_reason" in wanted:
        arrays["finish_reason"] = np.array([[finish_reason]], np.int32)
    if "prefix_ids" in wanted:
        arrays["prefix_ids"] = np.array([[prefix_ids]], np.int32)
    for name, value in extras.items():
        if name in wanted:
            values = array(value["array"], body) if isinstance(value, dict) else value
            arrays[name] = np.array([values], _EXTRA_TYPES.get(name, np.int32))
    return arrays


def response(arrays: Mapping[str, Any]) -> Any:
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, values) for name, values in arrays.items()])


def joined(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The outputs of several rows as those of one response: shorter ones are padded, tokens with -1."""
    return {name: _stacked([row[name] for row in rows], -1 if name == "output_ids" else 0) for name in rows[0]}


def _stacked(arrays: Sequence[Any], padding: int) -> Any:
    shape = np.max([values.shape[1:] for values in arrays], axis=0)
    whole: Any = np.full((len(arrays), *shape), padding, arrays[0].dtype)
    for index, values in enumerate(arrays):
        whole[index][tuple(map(slice, values.shape[1:]))] = values[0]
    return whole
