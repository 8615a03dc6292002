"""Tools for asynchronous streams: run several at once, close them, give up when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from raymoe.errors import DeadlineError

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
"""How long a cancelled stream may take to clean up before it is left to itself."""


class ClientGoneError(Exception):
    """The client closed its connection: nobody is left to answer. Not an error of anybody's."""


@contextlib.asynccontextmanager
async def closing(iterator: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close the iterator at the end, if it is one that can be closed."""
    try:
        yield iterator
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()


async def merge(sources: Sequence[AsyncIterator[T]], deadline_s: float) -> AsyncGenerator[T, None]:
    """Items of all sources as they come. The first failure, and closing, ends every source.

    Raises:
        DeadlineError: some source has not ended after `deadline_s` seconds.
    """
    queue: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue(maxsize=2 * len(sources))

    async def pump(source: AsyncIterator[T]) -> None:
        try:
            async with asyncio.timeout(deadline_s), closing(source):
                async for item in source:
                    await queue.put((item,))
        except TimeoutError:
            await queue.put(DeadlineError(f"the request was not answered within {deadline_s:g} s"))
        except Exception as error:  # noqa: BLE001 - handed over to the consumer, which raises it
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item[0]
    finally:
        await cancel(tasks)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, but cancel it at once when the client disconnects.

    `receive` is the ASGI receive of a request whose body has been read, so it waits for the disconnect.

    Raises:
        ClientGoneError: the client left first.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await cancel((task, gone))


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait, within a limit, until they have cleaned up.

    Being cancelled meanwhile (a server may cancel a handler whose client has left, and again) doesn't cut the
    wait short: whoever comes next would close generators that a task still runs.
    """
    cleaning = asyncio.ensure_future(_cancel(list(tasks)))
    interrupted: asyncio.CancelledError | None = None
    while not cleaning.done():
        try:
            await asyncio.shield(cleaning)
        except asyncio.CancelledError as error:
            interrupted = error
    cleaning.result()
    if interrupted is not None:
        raise interrupted


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        _, stuck = await asyncio.wait(pending, timeout=CLOSE_TIMEOUT_S)
        if stuck:
            logger.error("%d cancelled streams did not end within %g s", len(stuck), CLOSE_TIMEOUT_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # seen: else asyncio reports it as never retrieved


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
