"""What single tokens are written with: their bytes, exactly, and as text."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Speller:
    """Bytes and texts of one tokenizer's tokens.

    Byte-level tokenizers write each byte as one character, byte-fallback ones write `<0xE2>`; both are exact. For
    all others a token's text is what it adds behind a letter, since many decoders drop a space at the start.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        kinds = _kinds(tokenizer)
        self._bytes_of = _byte_level() if "ByteLevel" in kinds else None
        self._fallback = "ByteFallback" in kinds
        self._letter = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._found: dict[int, bytes] = {}

    def spell(self, token_id: int) -> bytes:
        """The token's bytes; none for an id that the tokenizer doesn't know."""
        if token_id not in self._found:
            self._found[token_id] = self._find(token_id)
        return self._found[token_id]

    def text(self, token_id: int) -> str:
        """The token as text, with U+FFFD for parts of a character."""
        return self.spell(token_id).decode("utf-8", "replace")

    def key(self, token_id: int) -> str:
        """As `text`, but `bytes:\\xf0\\x9f` for parts of a character, so that different ones don't look alike."""
        spelled = self.spell(token_id)
        try:
            return spelled.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _find(self, token_id: int) -> bytes:
        if token_id in self._special:
            return self._special[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._bytes_of is not None and all(char in self._bytes_of for char in token):
            return bytes(self._bytes_of[char] for char in token)
        byte = _BYTE.fullmatch(token) if self._fallback else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        before = self._tokenizer.decode(self._letter)
        both = self._tokenizer.decode([*self._letter, token_id])
        return both.removeprefix(before).encode()


def _kinds(tokenizer: Tokenizer) -> set[str]:
    if tokenizer.decoder is None:
        return set()
    found, open_ = set(), [json.loads(tokenizer.decoder.__getstate__())]
    while open_:
        one = open_.pop()
        found.add(one["type"])
        open_ += one.get("decoders", [])
    return found


def _byte_level() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
