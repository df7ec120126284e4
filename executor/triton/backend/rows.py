"""A Triton request of B rows as B rows: the tensors of each, by name, as plain values where they hold one."""

from __future__ import annotations

import json
from typing import Any

from executor.triton.backend.wire import FrameWriter


class RowError(ValueError):
    """The tensors of a request do not fit together: names the one at fault."""


def tensors_by_name(request: Any, batched: bool) -> tuple[dict[str, Any], int]:
    """The request's input tensors, with their batch dimension, and how many rows they have.

    Raises:
        RowError: tensors differ in the number of rows.
    """
    tensors: dict[str, Any] = {}
    num_rows = None
    first = ""
    for tensor in request.inputs():
        values = tensor.as_numpy() if batched else tensor.as_numpy()[None]
        name = tensor.name()
        if num_rows is None:
            num_rows, first = len(values), name
        elif len(values) != num_rows:
            raise RowError(f"{name} has {len(values)} rows, {first} has {num_rows}; each row is a request of its own")
        tensors[name] = values
    return tensors, num_rows or 0


def row_values(tensors: dict[str, Any], row: int, writer: FrameWriter) -> dict[str, Any]:
    """One row: numbers and texts as they are, arrays put into the writer.

    Raises:
        RowError: a text is not UTF-8.
    """
    values: dict[str, Any] = {}
    for name, tensor in tensors.items():
        value = tensor[row]
        if value.dtype.kind in "OS":
            values[name] = [decoded(name, item) for item in value.ravel()]
        elif value.size == 1 and value.ndim <= 1:
            values[name] = value.item()
        else:
            values[name] = {"array": writer.put(value)}
    return values


def decoded(name: str, data: Any) -> str:
    """A text element; Triton hands out bytes."""
    try:
        return data.decode() if isinstance(data, bytes) else str(data)
    except UnicodeDecodeError as error:
        raise RowError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from None


def request_parameters(request: Any) -> dict[str, Any]:
    """What the client sent beside tensors. Triton's own fields (sequence, priority, ...) are not among it."""
    parameters: dict[str, Any] = json.loads(request.parameters() or "{}")
    return parameters
