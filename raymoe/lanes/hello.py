"""The first message on a lane: who is calling, and for which model."""

from __future__ import annotations

import hmac
from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from raymoe.errors import HelloRefusedError
from raymoe.lanes.header import MAX_MESSAGE, PROTOCOL_VERSION, Kind


@dataclass(frozen=True)
class Hello:
    """What both sides of a lane must agree on.

    `token` is the secret shared by one server's parts; `deterministic` is whether both are batch-invariant.
    """

    token: str
    fingerprint: str
    dtype: str
    hidden_size: int
    deterministic: bool = False
    protocol: int = PROTOCOL_VERSION

    def pack(self, **extra: Any) -> bytes:
        """The hello message; `extra` holds what only the lane's own kind needs (ring sizes, names)."""
        return bytes([Kind.HELLO]) + msgpack.packb({**asdict(self), **extra})

    def judge(self, message: bytes) -> tuple[dict[str, Any], str | None]:
        """The caller's fields, and why it is refused (None = welcome). The token is never repeated."""
        theirs = _fields(message, Kind.HELLO)
        if theirs is None:
            return {}, "the first message is not a hello"
        if theirs.get("protocol") != self.protocol:
            return theirs, f"protocol version {theirs.get('protocol')} called, {self.protocol} answered"
        if not hmac.compare_digest(str(theirs.get("token")).encode(), self.token.encode()):
            return theirs, "the token differs"
        for name in ("fingerprint", "dtype", "hidden_size", "deterministic"):
            if theirs.get(name) != getattr(self, name):
                return theirs, f"{name} {theirs.get(name)!r} called, {getattr(self, name)!r} answered"
        return theirs, None


def welcome(group: str) -> bytes:
    """The answer that opens the lane."""
    return bytes([Kind.WELCOME]) + msgpack.packb({"group": group})


def refuse(reason: str) -> bytes:
    """The answer that closes it."""
    return bytes([Kind.REFUSED]) + msgpack.packb({"reason": reason[:1024]})


def check_answer(group: str, message: bytes) -> None:
    """Check the group's answer to a hello.

    Raises:
        HelloRefusedError: with the group's reason, or because another group answered at this address.
    """
    refused = _fields(message, Kind.REFUSED)
    if refused is not None:
        raise HelloRefusedError(group, str(refused.get("reason")))
    fields = _fields(message, Kind.WELCOME)
    if fields is None:
        raise HelloRefusedError(group, "the answer to the hello is not understood")
    if fields.get("group") != group:
        raise HelloRefusedError(group, f"expert group {fields.get('group')} answered at its address")


def _fields(message: bytes, kind: Kind) -> dict[str, Any] | None:
    if not message or message[0] != kind or len(message) > MAX_MESSAGE:
        return None
    try:
        fields = msgpack.unpackb(message[1:])
    except (ValueError, msgpack.UnpackException):
        return None
    return fields if isinstance(fields, dict) else None
