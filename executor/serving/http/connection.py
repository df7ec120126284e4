"""A client that leaves cancels what is done for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.types import Receive


class ClientLeftError(Exception):
    """The connection was closed before the answer was complete."""


@asynccontextmanager
async def ending_with_the_connection(receive: Receive) -> AsyncIterator[None]:
    """Run the body; when the client disconnects meanwhile, end it with `ClientLeftError`.

    The request's own body must have been read before.
    """
    task = asyncio.current_task()
    assert task is not None, "runs in a task"
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not left:
            raise
        task.uncancel()
        raise ClientLeftError from None
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
