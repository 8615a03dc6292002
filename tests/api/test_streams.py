import asyncio

import pytest

from raymoe.api.streams import while_connected


def test_a_second_cancellation_waits_for_the_clean_up_too():
    """A generator that a cancelled task still runs can't be closed by the handler: it must be done by then."""

    async def work() -> None:
        closed = []

        async def tokens():
            try:
                while True:
                    yield 1
                    await asyncio.sleep(10)
            finally:
                await asyncio.sleep(0.1)
                closed.append(True)

        async def consume(source):
            async for _ in source:
                pass

        async def receive():
            await asyncio.Event().wait()

        async def handler(source):
            try:
                await while_connected(receive, consume(source))
            finally:
                await source.aclose()

        task = asyncio.create_task(handler(tokens()))
        await asyncio.sleep(0.02)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == [True]

    asyncio.run(work())
