"""The replica's side of an engine process, for asyncio."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from raymoe.engine.messages import EngineConfig, GenerateChunk, GenerateRequest, joined
from raymoe.engine.pace import Pace
from raymoe.engine.wire import Unframer, error_from_wire, event_from_wire, frame, request_to_wire
from raymoe.errors import EngineError, RaymoeError, RouterLostError
from raymoe.policy.layout import Layout
from raymoe.policy.threads import thread_environment

STOP_TIMEOUT_S = 5.0
LOAD_TIMEOUT_S = 1800.0
"""The model may still be loading, or the step under way be long."""
ENDED = "the router's engine has ended; send the request again"

log = logging.getLogger(__name__)


class EngineClient:
    """Starts an engine process and speaks with it. Use from one event loop.

    If the process dies, requests raise RouterLostError, since another router can go on with them; all other calls
    raise `failure`, which says how it ended.
    """

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.process = process
        self._sock = sock
        self._requests: dict[str, asyncio.Queue[GenerateChunk | RaymoeError]] = {}
        self._stats: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._acked = -1
        self._changed = asyncio.Condition()
        self._out: asyncio.Queue[bytes] = asyncio.Queue()
        self.ready: dict[str, Any] | None = None
        """Facts from the engine once it can serve: kv_tokens, kv_bytes_per_token."""
        self.blocked: str | None = None
        """The expert that the engine waits for, None while it has all that it needs."""
        self.failure: RaymoeError | None = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    @classmethod
    async def spawn(cls, config: EngineConfig) -> EngineClient:
        """Start the process; it loads its model in the background."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "raymoe.engine.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Ray sets OMP_NUM_THREADS for its workers by their CPU share; ours comes from the settings.
                env={**os.environ, **thread_environment(config.threads)},
            )
        ours.setblocking(False)
        client = cls(process, ours)
        client._send(**config.to_wire())
        return client

    async def set_layout(self, layout: Layout, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Have the engine use `layout`; returns once it does, which is between two steps.

        Raises:
            TimeoutError: it does not by then.
            RaymoeError: the engine process has ended.
        """
        self._raise_failure()
        self._send(kind="layout", layout=layout.to_wire())
        await self._until(lambda: self._acked >= layout.epoch, timeout_s)

    async def wait_ready(self, timeout_s: float = LOAD_TIMEOUT_S) -> dict[str, Any]:
        """Wait until the engine serves; returns `ready`. Raises as `set_layout`."""
        await self._until(lambda: self.ready is not None, timeout_s)
        return self.ready or {}

    async def wait_ended(self) -> RaymoeError:
        """Wait until the process has ended; returns `failure`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.failure is not None)
        return self.failure or EngineError(ENDED)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Stream a request's chunks, several of the engine's as one if many requests run. Closing it cancels.

        Raises:
            RouterLostError: the process has ended, or ends meanwhile.
            RaymoeError: as the engine says.
        """
        if self.failure is not None:
            raise RouterLostError(ENDED)
        key = request.request_id
        if key in self._requests:
            raise EngineError(f"request id {key} is in use")
        queue = self._requests[key] = asyncio.Queue()
        self._send(kind="submit", request=request_to_wire(request))
        done, loop, pace = False, asyncio.get_running_loop(), Pace()
        try:
            while not done:
                arrived = [await queue.get()]
                await asyncio.sleep(pace.wait_s(loop.time(), len(self._requests)))
                while not queue.empty():
                    arrived.append(queue.get_nowait())
                pace.sent(loop.time())
                last = arrived[-1]
                done = isinstance(last, RaymoeError) or last.finish_reason is not None
                chunks = [what for what in arrived if isinstance(what, GenerateChunk)]
                if chunks:
                    yield joined(chunks)
                if isinstance(last, RaymoeError):
                    raise last
        finally:
            del self._requests[key]
            if not done and self.failure is None:
                self._send(kind="cancel", id=key)

    def abandon(self, request_id: str, why: RaymoeError) -> None:
        """End a request from outside its stream, which raises `why`. Its id may be unknown."""
        queue = self._requests.get(request_id)
        if queue is not None:
            queue.put_nowait(why)
            self._send(kind="cancel", id=request_id)

    async def stats(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """The engine's counters.

        Raises:
            TimeoutError: a step takes longer than that, or the engine waits for experts.
        """
        self._raise_failure()
        number = next(self._numbers)
        future = self._stats[number] = asyncio.get_running_loop().create_future()
        self._send(kind="stats", number=number)
        try:
            return await asyncio.wait_for(future, timeout_s)
        finally:
            del self._stats[number]

    async def close(self) -> None:
        """End the process: politely, then by signal. Idempotent."""
        self._send(kind="stop")
        waiting = asyncio.get_running_loop().run_in_executor(None, self.process.wait)
        try:
            await asyncio.wait_for(asyncio.shield(waiting), STOP_TIMEOUT_S)
        except TimeoutError:
            self.process.kill()
            await waiting
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sock.close()

    def _send(self, **message: Any) -> None:
        self._out.put_nowait(frame(message))

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: condition() or self.failure is not None)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # the reader sees the end, and says it
            while True:
                await loop.sock_sendall(self._sock, await self._out.get())

    async def _read(self) -> None:
        loop, unframer = asyncio.get_running_loop(), Unframer()
        reason: RaymoeError | None = None
        try:
            while data := await loop.sock_recv(self._sock, 1 << 20):
                for message in unframer.feed(data):
                    await self._on_message(message)
        except OSError as error:
            log.warning("engine process %d: %s", self.process.pid, error)
        except RaymoeError as error:
            reason = error
        if reason is None:
            # Its end of the socket closes just before it can be waited for.
            code = await asyncio.to_thread(self._exit_code)
            reason = EngineError(f"the engine process ended with exit code {code}")
        self.failure = reason
        for queue in self._requests.values():
            queue.put_nowait(RouterLostError(ENDED))
        for future in self._stats.values():
            if not future.done():
                future.set_exception(reason)
        async with self._changed:
            self._changed.notify_all()

    def _exit_code(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(STOP_TIMEOUT_S)
        return None

    async def _on_message(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "events":
            for event in message["events"]:
                key, what = event_from_wire(event)
                queue = self._requests.get(key)
                if queue is not None:  # a cancelled request's last chunks may still arrive
                    queue.put_nowait(what)
        elif kind == "stats":
            future = self._stats.get(message["number"])
            if future is not None and not future.done():
                future.set_result(message["stats"])
        elif kind == "blocked":
            self.blocked = message["reason"]
        elif kind == "failed":
            raise error_from_wire(message["error"])
        else:
            async with self._changed:
                if kind == "layout":
                    self._acked = max(self._acked, message["epoch"])
                elif kind == "ready":
                    self.ready = {k: v for k, v in message.items() if k != "kind"}
                self._changed.notify_all()
