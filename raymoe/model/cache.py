"""Keys and values of running sequences, and the packed cache that a model's attention layers write to.

A sequence owns one buffer per layer and side, which grows in whole blocks. A step packs the rows of several
sequences into one row list without padding; the cache cuts it up again.

Shape letters: Q new rows of a sequence, L its length after the step, Hk key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from raymoe.errors import EngineError

BLOCK = 64
"""Tokens by which a sequence's buffers grow, at least; beyond 16 blocks they grow by a quarter."""


def capacity_for(tokens: int) -> int:
    """Tokens for which buffers are made when `tokens` must fit. Never shrinks with more tokens.

    >>> capacity_for(1), capacity_for(65), capacity_for(2000)
    (64, 128, 2048)
    """
    if tokens <= 0:
        return 0
    capacity = BLOCK
    while capacity < tokens:
        capacity += max(BLOCK, capacity // 4 // BLOCK * BLOCK)
    return capacity


class SequenceCache:
    """Keys and values of one sequence. `length` counts the tokens that count: a failed step leaves it alone."""

    def __init__(self) -> None:
        self.length = 0
        self.capacity = 0
        self._sides: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(key.nbytes + value.nbytes for key, value in self._sides.values())

    def reserve(self, tokens: int) -> None:
        """Say that up to `tokens` will be written; buffers follow at the next write."""
        self.capacity = max(self.capacity, capacity_for(tokens))

    def write(self, layer: int, key_HkQD: Tensor, value_HkQD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new rows behind `length`; returns views [Hk, L, D] of all keys and values."""
        start, end = self.length, self.length + key_HkQD.shape[1]
        sides = self._sides.get(layer)
        if sides is None or sides[0].shape[1] < end:
            self.reserve(end)
            sides = (self._grown(key_HkQD, sides and sides[0]), self._grown(value_HkQD, sides and sides[1]))
            self._sides[layer] = sides
        key, value = sides
        key[:, start:end] = key_HkQD
        value[:, start:end] = value_HkQD
        return key[:, :end], value[:, :end]

    def clear(self) -> None:
        """Give all memory back; the sequence must be computed again."""
        self._sides.clear()
        self.length = self.capacity = 0

    def _grown(self, like: Tensor, old: Tensor | None) -> Tensor:
        new = like.new_empty(like.shape[0], self.capacity, like.shape[2])
        if old is not None:
            new[:, : self.length] = old[:, : self.length]
        return new


class Part:
    """One sequence's share of a packed forward: `rows` new tokens behind its cached ones."""

    __slots__ = ("cache", "rows")

    def __init__(self, cache: SequenceCache, rows: int) -> None:
        self.cache, self.rows = cache, rows


class PackedCache:
    """Stands for transformers' cache in one forward; models only call `update` when they get position ids.

    `separate`: attention reads each sequence's views, nothing is copied. Models that compute on what `update`
    returns (MLA expands latents to keys) need all sequences in one tensor instead.
    """

    is_compileable = False

    def __init__(self, parts: Sequence[Part], separate: bool) -> None:
        self.parts = parts
        self.separate = separate
        self.views: list[tuple[Tensor, Tensor]] = []
        self.lengths = [part.cache.length + part.rows for part in parts]

    def get_seq_length(self, *_: Any) -> int:
        """Zero, as positions are given."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values [1, Hk, T, D] of the packed rows."""
        if key.shape[0] != 1:
            raise EngineError(f"a packed step has one row list, the model made {key.shape[0]}")
        self.views = []
        start = 0
        for part in self.parts:
            end = start + part.rows
            self.views.append(part.cache.write(layer_idx, key[0, :, start:end], value[0, :, start:end]))
            start = end
        if self.separate:
            return key, value
        keys, values = zip(*self.views, strict=True)
        return _joined(keys), _joined(values)

    def commit(self) -> None:
        """The step went well: what was written counts."""
        for part in self.parts:
            part.cache.length += part.rows


def _joined(views: Sequence[Tensor]) -> Tensor:
    first = views[0]
    if len(views) == 1:
        return first[None]
    total = sum(view.shape[1] for view in views)
    out = first.new_empty(1, first.shape[0], total, first.shape[2])
    start = 0
    for view in views:
        out[0, :, start : start + view.shape[1]] = view
        start += view.shape[1]
    return out
