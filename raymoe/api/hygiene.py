"""Prompts without what nobody sees: such characters are tokens like others, and derail a model's routing.

Unpaired surrogates and invalid UTF-8 are refused before (`body.py`); this is what an operator can turn on besides.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_KEPT = frozenset("\t\n\r\u200c\u200d")
_VISIBLE = frozenset("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd")
"""Format characters that are printed: signs around numbers in Arabic, Syriac and Kaithi."""
_JOINER = r"[\u200c\u200d]"
_BESIDE = r"[^\x00-\x7f\u200c\u200d]"
_STRAY_JOINER = re.compile(f"(?<!{_BESIDE}){_JOINER}|{_JOINER}(?!{_BESIDE})")
"""A joiner has a meaning between two letters of Persian or of Indian scripts, and two emojis. Nowhere else."""


class _Table(dict[int, str | None]):
    """For `str.translate`: None for control (Cc) and format (Cf) characters."""

    def __missing__(self, code: int) -> str | None:
        char = chr(code)
        gone = unicodedata.category(char) in ("Cc", "Cf") and char not in _KEPT and char not in _VISIBLE
        self[code] = None if gone else char
        return self[code]


_TABLE = _Table()


def normalise(text: str) -> str:
    """`text` in NFKC, without control characters, and without format characters that show nothing.

    Tab, carriage return and line feed stay. Idempotent.

    >>> normalise("ﬁne\u200b\ufeff x\u0000")
    'fine x'
    """
    text = unicodedata.normalize("NFKC", text).translate(_TABLE)
    # What stood on both sides of a character that is gone may now be one.
    return unicodedata.normalize("NFKC", _STRAY_JOINER.sub("", text))


class Hygiene:
    """Normalises what clients send, and calls `on_change` for each text that it changed."""

    def __init__(self, on_change: Callable[[], object]) -> None:
        self._on_change = on_change

    def clean(self, value: T) -> T:
        """The same text, list or dict with normalised texts in it; names of dicts stay as they are."""
        cleaned: Any = self._clean(value)
        result: T = cleaned
        return result

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            cleaned = normalise(value)
            if cleaned != value:
                self._on_change()
            return cleaned
        if isinstance(value, list):
            return [self._clean(item) for item in value]
        if isinstance(value, dict):
            return {key: self._clean(item) for key, item in value.items()}
        return value
