"""Notice when an actor is lost: its death at once, its silence after a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorUnavailableError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

PING_S = 1.0
BIRTH_S = 120.0
"""Until a new actor's process must have answered its first ping."""


async def until_lost(
    group: ActorHandle, silence_s: float, on_stats: Callable[[dict[str, Any]], object]
) -> str:
    """Wait until an expert group is lost; returns why.

    It is lost when its process ends, when its `ping` isn't answered for `silence_s`, or when the answer names
    a failure. `on_stats` gets each answer.
    """
    ended = ping = asyncio.ensure_future(answer(group.wait.remote()))
    deadline = time.monotonic() + max(BIRTH_S, silence_s)
    try:
        while True:
            ping = asyncio.ensure_future(answer(group.ping.remote()))
            await asyncio.wait(
                {ended, ping}, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
            if ended.done():
                return sentence(ended.exception())
            if not ping.done():
                return f"no answer for {silence_s:g} s"
            error = ping.exception()
            if error is None:
                stats = ping.result()
                on_stats(stats)
                deadline = time.monotonic() + silence_s
                if stats["failed"]:
                    return str(stats["failed"])
            elif not isinstance(error, ActorUnavailableError):
                return sentence(error)
            await asyncio.wait({ended}, timeout=PING_S)
    finally:
        for task in (ended, ping):
            task.cancel()
            task.add_done_callback(seen)


async def answer(ref: Any) -> Any:
    """The value of a Ray reference, as a coroutine that asyncio can make a task of."""
    return await ref


def sentence(error: BaseException | None) -> str:
    """The first line of one of Ray's long texts."""
    if error is None:
        return "it ended"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def seen(task: asyncio.Task[Any]) -> None:
    """Look at a task's exception, which asyncio would report as never retrieved."""
    if not task.cancelled():
        task.exception()
