"""Calls logits post-processors the way `tensorrt_llm.bindings.executor` calls them."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor.api.errors import InvalidRequestError
from executor.sampling.errors import LogitsProcessorError

_STREAM = None
"""Upstream passes the device stream; on a CPU there is none."""


def check_processor(call: Callable[..., None], field: str) -> None:
    """Raise `InvalidRequestError`, naming `field`, for a callable that takes neither four nor five arguments.

    Loads torch as well, where it is installed: importing it takes a second, which no step should wait for.
    """
    _num_arguments(call, field)
    _tensor_maker()


class Processor:
    """A callable for one request's rows."""

    __slots__ = ("_call", "_num_arguments")

    def __init__(self, call: Callable[..., None]) -> None:
        """Raises `InvalidRequestError` for a callable that takes neither four nor five arguments."""
        self._call = call
        self._num_arguments = _num_arguments(call, "logits_post_processor")

    def __call__(
        self, request_id: int, logits: NDArray[np.float32], token_ids: list[int], client_id: int | None
    ) -> None:
        """Change one row, float32 `[vocab]`, in place. Raises `LogitsProcessorError`."""
        arguments = (request_id, _as_tensor(logits), [token_ids], _STREAM, client_id)
        try:
            self._call(*arguments[: self._num_arguments])
        except Exception as error:  # foreign code
            raise LogitsProcessorError(f"the logits post-processor raised {type(error).__name__}: {error}") from error


class BatchedProcessor:
    """A callable for the rows of all requests that name it."""

    __slots__ = ("_num_arguments", "call")

    def __init__(self, call: Callable[..., None]) -> None:
        """Raises `InvalidRequestError` for a callable that takes neither four nor five arguments."""
        self.call = call
        self._num_arguments = _num_arguments(call, "logits_post_processor_name")

    def __call__(
        self,
        request_ids: list[int],
        rows: list[NDArray[np.float32]],
        token_ids: list[list[int]],
        client_ids: list[int | None],
    ) -> None:
        """Change rows in place. Raises `LogitsProcessorError`, which ends all of the requests."""
        arguments = (request_ids, [_as_tensor(row) for row in rows], [[ids] for ids in token_ids], _STREAM, client_ids)
        try:
            self.call(*arguments[: self._num_arguments])
        except Exception as error:  # foreign code
            raise LogitsProcessorError(
                f"the batched logits post-processor raised {type(error).__name__}: {error}"
            ) from error


def _as_tensor(row: NDArray[np.float32]) -> Any:
    """`[1, 1, vocab]` on the row's memory: a torch tensor where torch is installed, else a numpy array."""
    return _tensor_maker()(row.reshape(1, 1, -1))


@cache
def _tensor_maker() -> Callable[[NDArray[np.float32]], Any]:
    """Makes what processors are given: a torch tensor on the same memory, or the array itself without torch."""
    if importlib.util.find_spec("torch") is None:
        return lambda array: array
    import torch

    maker: Callable[[NDArray[np.float32]], Any] = torch.from_numpy
    return maker


def _num_arguments(processor: Callable[..., None], field: str) -> int:
    """How many arguments a processor takes: five, or four where it does not want the client id.

    Raises:
        InvalidRequestError: neither; names `field`.
    """
    try:
        signature = inspect.signature(processor)
    except (TypeError, ValueError):  # a builtin without a signature: upstream's full call
        return 5
    for count in (5, 4):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    raise InvalidRequestError(
        f"{field} takes {signature}; it must take (request_id, logits, token_ids, stream, client_id) or the first four",
        field=field,
    )
