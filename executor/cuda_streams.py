"""Lets logits post-processors that were written for GPUs run where there is none.

They wait for the stream that the logits are computed on: `with torch.cuda.stream(torch.cuda.ExternalStream(ptr))`.
Without a GPU the logits are there already, `ptr` is `None`, and torch's `stream(None)` does nothing; but its
`ExternalStream` cannot be made. While such a post-processor runs, making one gives `None`, no stream.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def without_streams(processor: Callable[..., None]) -> Callable[..., None]:
    """The post-processor, able to ask for a stream where there is none; itself where torch is missing, or has a GPU.

    Imports torch, where it is installed.
    """
    if importlib.util.find_spec("torch") is None:
        return processor
    import torch

    if torch.cuda.is_available():
        return processor

    @functools.wraps(processor)
    def call(*arguments: Any) -> None:
        with _no_streams.given():
            processor(*arguments)

    return call


class _NoStreams:
    """The replacement is there while anybody needs it: several executors may run post-processors at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._original: Any = None

    @contextmanager
    def given(self) -> Iterator[None]:
        import torch

        with self._lock:
            if self._num_users == 0:
                self._original = torch.cuda.ExternalStream
                torch.cuda.ExternalStream = _no_stream
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0:
                    torch.cuda.ExternalStream = self._original


def _no_stream(*_arguments: Any, **_options: Any) -> None:
    return None


_no_streams = _NoStreams()
