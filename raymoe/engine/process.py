"""`python -m raymoe.engine.process FD`: the engine process beside a router replica.

A process of its own, so that bursts of Python on the replica's event loop don't delay steps. It talks over one
socket and ends when the other side does, wherever it is just then.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.moe import describe
from raymoe.checkpoint.private import attention_kinds
from raymoe.checkpoint.router import load_router
from raymoe.dispatch.dispatcher import Dispatcher
from raymoe.engine.kv_size import kv_size
from raymoe.engine.loop import LOOK_S, Engine
from raymoe.engine.messages import EngineConfig
from raymoe.engine.scheduler import Limits
from raymoe.engine.wire import Unframer, error_to_wire, event_to_wire, frame, request_from_wire
from raymoe.errors import EngineError, ExpertUnavailableError, MemoryLimitError, RaymoeError
from raymoe.lanes.hello import Hello
from raymoe.lanes.kinds import connect
from raymoe.model.attention import NAME as ATTENTION
from raymoe.model.attention import can_pack
from raymoe.model.cache import FIRST_CAPACITY
from raymoe.model.context import run_experts
from raymoe.model.grammar import Grammars
from raymoe.model.invariant_check import check_can_be_invariant, make_invariant
from raymoe.policy.layout import GroupPlace, Layout

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
SCORE_BYTES = 128 << 20
"""Of the logits that are kept for prompts' log probabilities in a step, as fp32."""
IDLE_PROBE_S = 5.0
"""How often an idle engine tries its experts, so that readiness is known before a request finds out."""


class Channel:
    """The socket to the replica."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._unframer = sock, Unframer()
        self._kept: list[dict[str, Any]] = []

    def first(self) -> dict[str, Any]:
        """Wait for the first message, and keep for `receive` what came with it."""
        while not (messages := self.receive(None)):
            pass
        self._kept = messages[1:]
        return messages[0]

    def send(self, **message: Any) -> None:
        """Send one message; the replica reads all the time."""
        self._sock.sendall(frame(message))

    def receive(self, timeout_s: float | None) -> list[dict[str, Any]]:
        """What has arrived, after at most `timeout_s` (None = as long as it takes). Ends the process at EOF."""
        if self._kept:
            kept, self._kept = self._kept, []
            return kept
        ready, _, _ = select.select([self._sock], [], [], timeout_s)
        if not ready:
            return []
        data = self._sock.recv(1 << 20)
        if not data:
            _leave()
        return list(self._unframer.feed(data))


class Process:
    """The engine and its channel."""

    def __init__(self, channel: Channel, config: EngineConfig) -> None:
        self._channel = channel
        torch.set_num_threads(config.threads)
        checkpoint = Checkpoint.open(config.checkpoint)
        dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        moe = describe(checkpoint, dtype)
        hello = Hello(
            config.token,
            checkpoint.fingerprint,
            str(moe.dtype).removeprefix("torch."),
            moe.hidden_size,
            config.deterministic,
        )

        def open_lane(place: GroupPlace) -> Any:
            return connect(
                place.kind,
                place.name,
                place.address,
                hello,
                ring_bytes=config.lane_bytes,
                router=config.router,
                timeout_s=CONNECT_TIMEOUT_S,
            )

        self._config = config
        self._experts = Dispatcher(open_lane, config.silence_s)
        if config.deterministic:
            check_can_be_invariant(checkpoint.config)
        self._packs = can_pack(checkpoint.config)
        if not self._packs:
            log.warning(
                "the packed cache can't hold the states of a %s model (%s): sequences are computed one by one",
                checkpoint.config.model_type,
                ", ".join(sorted(attention_kinds(checkpoint.config))),
            )
        attention = ATTENTION if self._packs else None
        self._model = load_router(checkpoint, run_experts, dtype=moe.dtype, attention=attention)
        self._engine: Engine | None = None
        self._told: str | None = None
        self._tried = time.monotonic()
        self._channel.send(kind="loaded")

    def run(self) -> None:
        """Serve until the replica is gone or says stop."""
        while True:
            engine = self._engine
            for message in self._channel.receive(self._patience()):
                if message["kind"] == "stop":
                    self._experts.close()
                    return
                self._handle(message)
            if engine is None:
                self._try_to_start()
                continue
            now = time.monotonic()
            if engine.busy:
                events = engine.step()
                if events:
                    self._channel.send(kind="events", events=[event_to_wire(*event) for event in events])
                self._tried = now
            elif engine.blocked is not None or now - self._tried >= IDLE_PROBE_S:
                engine.probe()
                self._tried = now
            self._tell_blocked(engine)

    def _tell_blocked(self, engine: Engine) -> None:
        reason = None if engine.blocked is None else str(engine.blocked)
        if reason != self._told:
            self._told = reason
            self._channel.send(kind="blocked", reason=reason)

    def _patience(self) -> float:
        engine = self._engine
        if engine is None or (engine.waits and engine.blocked is not None):
            return LOOK_S
        return 0 if engine.busy else IDLE_PROBE_S

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "layout":
            layout = Layout.from_wire(message["layout"])
            self._experts.set_layout(layout)
            if self._engine is not None:
                self._engine.look()
            self._channel.send(kind="layout", epoch=layout.epoch)
        elif kind == "stats":
            stats = {} if self._engine is None else self._engine.stats()
            self._channel.send(kind="stats", number=message["number"], stats=stats)
        elif kind == "cancel":
            if self._engine is not None:
                self._engine.cancel(message["id"])
        elif kind == "submit":
            request = request_from_wire(message["request"])
            try:
                if self._engine is None:
                    raise EngineError("a request came before the engine was ready")
                self._engine.submit(request)
            except RaymoeError as error:
                self._channel.send(kind="events", events=[event_to_wire(request.request_id, error)])
        else:
            raise EngineError(f"unknown message {kind!r} to the engine")

    def _try_to_start(self) -> None:
        """Once a layout's experts all answer a probe, be ready."""
        if self._experts.epoch < 0:
            return
        try:
            size = kv_size(self._model, self._experts.run)
            if self._config.deterministic:
                make_invariant(self._model, self._experts.run)
        except ExpertUnavailableError as error:
            log.warning("not ready: %s", error)
            self._experts.reconnect()
            return
        config = self._config
        limits = Limits(
            step_tokens=config.step_tokens,
            max_sequences=config.max_sequences,
            max_waiting=config.max_waiting,
            kv_tokens=config.kv_bytes // size.per_token,
            fixed_tokens=-(-size.fixed // size.per_token),
            stepwise=not self._packs,
            score_rows=max(SCORE_BYTES // (4 * self._model.config.get_text_config().vocab_size), 1),
        )
        least = limits.fixed_tokens + FIRST_CAPACITY
        if limits.kv_tokens < least:
            raise MemoryLimitError(
                f"router.kv_bytes = {config.kv_bytes} holds {limits.kv_tokens} tokens of {size.per_token} bytes;"
                f" set it to at least {least * size.per_token}"
            )
        self._engine = Engine(
            self._model,
            self._experts,
            limits,
            replace_timeout_s=config.replace_timeout_s,
            grammars=Grammars(Path(config.checkpoint), self._model.config.get_text_config().vocab_size),
        )
        self._channel.send(
            kind="ready", kv_tokens=limits.kv_tokens - limits.fixed_tokens, kv_bytes_per_token=size.per_token
        )


def _leave() -> None:
    # Not sys.exit: a step may wait for a group in another thread's stack, and nothing here needs unwinding.
    os._exit(0)


def _watch(sock: socket.socket) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    _leave()


def main(fd: int) -> None:
    """Read the config from the socket, then serve."""
    logging.basicConfig(level=logging.INFO, format="engine %(levelname)s %(name)s: %(message)s")
    sock = socket.socket(fileno=fd)
    threading.Thread(target=_watch, args=(sock,), daemon=True).start()
    channel = Channel(sock)
    try:
        Process(channel, EngineConfig(**channel.first())).run()
    except RaymoeError as error:
        log.exception("the engine ends")
        channel.send(kind="failed", error=error_to_wire(error))
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
