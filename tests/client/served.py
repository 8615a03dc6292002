"""The HTTP application and the gRPC methods around one service, in a thread of their own with real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from raymoe.api.http import create_app
from raymoe.api.service import Service
from tests.api.grpc_server import serving

START_S = 30.0


@contextmanager
def served(service: Service) -> Iterator[dict[str, str]]:
    """Yields the URLs by protocol, `http` and `grpc`."""
    urls: dict[str, str] = {}
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        config = uvicorn.Config(create_app(service), port=0, log_level="error", lifespan="off")
        http = uvicorn.Server(config)
        async with serving(service) as address:
            task = asyncio.create_task(http.serve())
            while not http.started:
                await asyncio.sleep(0.01)
            port = http.servers[0].sockets[0].getsockname()[1]
            urls.update(http=f"http://127.0.0.1:{port}", grpc=f"grpc://{address}")
            ready.set()
            while not done.is_set():
                await asyncio.sleep(0.01)
            http.should_exit = True
            http.force_exit = True
            await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(START_S)
        yield urls
    finally:
        done.set()
        thread.join()
