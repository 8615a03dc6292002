"""How often a stream of tokens sends: at once while few do, in larger chunks while many do.

Each message from a router to a client costs about as much whether it holds one token or twenty, most of it in the
two streaming calls on its way. So with many streams a token waits until its stream may send again, and shares a
message with what comes meanwhile. A token that comes after that, as all do of a slower model, never waits.
"""

from __future__ import annotations

import math

FEW = 2
"""So many streams send whenever they have something."""
MESSAGE_S = 0.003
"""What one message takes on its way from the engine to the client, on two cores that also compute; measured."""
MOST_S = 0.05
"""No token waits longer than that."""


class Pace:
    """When one stream may send; `now_s` are times of one clock."""

    def __init__(self) -> None:
        self._sent_s = -math.inf

    def wait_s(self, now_s: float, streams: int) -> float:
        """How long the next message is to wait while so many streams are open; 0: not at all."""
        apart_s = min(MESSAGE_S * streams, MOST_S) if streams > FEW else 0.0
        # The sum may round up.
        return min(max(self._sent_s + apart_s - now_s, 0.0), MOST_S)

    def sent(self, now_s: float) -> None:
        """It sends now."""
        self._sent_s = now_s
