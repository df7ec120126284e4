"""Hands what one reader takes out of the executor to everybody who subscribes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, TypeVar

_T = TypeVar("_T")

_SUBSCRIPTION_LENGTH = 10_000
"""Items kept for a slow subscriber; older ones are dropped."""


class Feed(Generic[_T]):
    """Items that come in batches, for listeners and subscribers. Lives on one asyncio loop."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Sequence[_T]], None]] = []

    @property
    def has_listeners(self) -> bool:
        return bool(self._listeners)

    def add_listener(self, listener: Callable[[Sequence[_T]], None]) -> None:
        """Call `listener` with each batch, oldest item first."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[Sequence[_T]], None]) -> None:
        self._listeners.remove(listener)

    def publish(self, items: Sequence[_T]) -> None:
        """Give a batch to all listeners."""
        for listener in list(self._listeners):
            listener(items)

    def subscribe(self) -> Subscription[_T]:
        """Items from now on, one by one."""
        return Subscription(self)


class Subscription(Generic[_T]):
    """Items from the subscription on. Iterate with `async for`, inside `with`."""

    def __init__(self, feed: Feed[_T]) -> None:
        self._feed = feed
        self._waiting: deque[_T] = deque(maxlen=_SUBSCRIPTION_LENGTH)
        self._changed = asyncio.Event()

    def _put(self, items: Sequence[_T]) -> None:
        self._waiting.extend(items)
        self._changed.set()

    def __aiter__(self) -> Subscription[_T]:
        return self

    async def __anext__(self) -> _T:
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()

    def __enter__(self) -> Subscription[_T]:
        self._feed.add_listener(self._put)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._feed.remove_listener(self._put)
