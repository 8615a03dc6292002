"""Frames between a router replica and its engine process: a length, then msgpack. And errors as data."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgpack

from raymoe import errors
from raymoe.engine.messages import GenerateChunk, GenerateRequest, SamplingParams, TokenLogprob
from raymoe.errors import EngineError, RaymoeError

LENGTH = struct.Struct("<I")
MAX_FRAME = 256 << 20


def frame(message: dict[str, Any]) -> bytes:
    """One message as bytes."""
    body = msgpack.packb(message)
    return LENGTH.pack(len(body)) + body


class Unframer:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The messages that `data` completes.

        Raises:
            EngineError: the stream is broken.
        """
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise EngineError(f"a frame of {length} bytes between replica and engine")
            end = LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            yield msgpack.unpackb(body)


def error_to_wire(error: RaymoeError) -> list[Any]:
    """Class name, arguments and attributes."""
    reduced = error.__reduce__()
    state = reduced[2] if len(reduced) > 2 else None
    return [type(error).__name__, list(reduced[1]), state or {}]


def error_from_wire(wire: list[Any]) -> RaymoeError:
    """The inverse; a name outside raymoe's tree becomes an EngineError."""
    name, arguments, state = wire
    cls = getattr(errors, name, None)
    if not (isinstance(cls, type) and issubclass(cls, RaymoeError)):
        return EngineError(f"{name}{tuple(arguments)}")
    error = cls(*(tuple(a) if isinstance(a, list) else a for a in arguments))
    error.__dict__.update(state)
    return error


def request_to_wire(request: GenerateRequest) -> list[Any]:
    """A request as plain lists and dicts."""
    return [
        request.request_id,
        list(request.prompt_ids),
        request.max_tokens,
        vars(request.sampling),
        list(request.stop_token_ids),
        request.deadline_s,
        list(request.generated_ids),
        request.logprobs,
        request.prompt_logprobs,
        request.prompt_scored,
        request.client,
        request.grammar,
    ]


def request_from_wire(wire: list[Any]) -> GenerateRequest:
    """The inverse."""
    request_id, prompt, max_tokens, sampling, stops, deadline_s, generated, *others = wire
    return GenerateRequest(
        request_id,
        tuple(prompt),
        max_tokens,
        SamplingParams(**{name: _tuples(value) for name, value in sampling.items()}),
        tuple(stops),
        deadline_s,
        tuple(generated),
        *others,
    )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def event_to_wire(request_id: str, what: GenerateChunk | RaymoeError) -> list[Any]:
    """A chunk or an error of one request."""
    if isinstance(what, RaymoeError):
        return [request_id, None, None, error_to_wire(what)]
    wire: list[Any] = [request_id, list(what.token_ids), what.finish_reason, None]
    if what.logprobs or what.prompt_logprobs:
        wire += [what.logprobs, what.prompt_logprobs]
    return wire


def event_from_wire(wire: list[Any]) -> tuple[str, GenerateChunk | RaymoeError]:
    """The inverse."""
    request_id, tokens, reason, error, *logprobs = wire
    if error is not None:
        return request_id, error_from_wire(error)
    return request_id, GenerateChunk(tuple(tokens), reason, *map(_logprobs_from_wire, logprobs))


def _logprobs_from_wire(wire: list[Any]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(logprob, rank, _tuples(top)) for logprob, rank, top in wire)
