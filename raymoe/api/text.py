"""From token ids to text, piece by piece: characters and stop strings that span tokens come out whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\ufffd"
"""What decoders print for a character that is cut in the middle."""


class Decoder(Protocol):
    """The one method of `tokenizers.Tokenizer` used here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids."""
        ...


class TextDecoder:
    """Incremental detokenization of one sequence.

    A token's text depends on its left neighbour (spaces, bytes), so each step decodes a short window and
    releases what it adds; text that ends inside a character waits. Same idea as `tokenizers`' DecodeStream,
    which is not used because it raises when a byte-fallback tokenizer meets bytes that are not UTF-8.
    """

    def __init__(self, tokenizer: Decoder, context_ids: Sequence[int] = ()) -> None:
        """`context_ids`: last tokens of the prompt that the text continues; empty for a text of its own."""
        self._tokenizer = tokenizer
        self._window = list(context_ids)
        self._released = tokenizer.decode(self._window)
        if self._released.endswith(_INCOMPLETE):
            self._window, self._released = [], ""
        self._settled = len(self._window)
        self.inside = False
        """The last token ends within a character."""

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps none."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        self.inside = text.endswith(_INCOMPLETE)
        return "" if self.inside else self._release(text)

    def finish(self) -> str:
        """What is still held back, with U+FFFD for bytes that never became a character."""
        return self._release(self._tokenizer.decode(self._window))

    def _release(self, text: str) -> str:
        fresh = self._window[self._settled :]
        if text.startswith(self._released):
            added = text[len(self._released) :]
        else:  # the decoder rewrote text that was sent: invalid bytes joined to valid ones
            added = self._tokenizer.decode(fresh)
        if added:
            self._window, self._settled = fresh, len(fresh)
            self._released = self._tokenizer.decode(fresh)
        return added


class StopMatcher:
    """Ends a text right before the earliest place where a stop string begins.

    "Earliest" is by where a match begins: while a match that began earlier may still complete, it is awaited.
    So the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings."""
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that can be sent now. Nothing comes any more once `stopped` is set."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        self._held += text
        match, partial = self._first_match(), self._first_partial()
        if match is not None and (partial is None or match <= partial):
            self.stopped = True
            return self._take(match)
        return self._take(len(self._held) if partial is None else partial)

    def finish(self) -> str:
        """The end of the text has come: no partial match can complete any more."""
        if self.stopped:
            return ""
        match = self._first_match()
        self.stopped = match is not None
        return self._take(len(self._held) if match is None else match)

    def _take(self, end: int) -> str:
        taken, self._held = self._held[:end], self._held[end:]
        return taken

    def _first_match(self) -> int | None:
        found = [index for stop in self._stops if (index := self._held.find(stop)) >= 0]
        return min(found, default=None)

    def _first_partial(self) -> int | None:
        """The first index from which the rest of the held text begins a stop string without completing it."""
        longest = max(map(len, self._stops))
        for index in range(max(0, len(self._held) - longest + 1), len(self._held)):
            rest = self._held[index:]
            if any(len(rest) < len(stop) and stop.startswith(rest) for stop in self._stops):
                return index
        return None
