"""Keys and values of each sequence, and the batch of them that one forward reads and extends.

Shape letters: G heads of keys and values, T rows of the step, Q of them of one sequence, L keys it has then,
D and W widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from raymoe.policy.tiles import tiled

FIRST_CAPACITY = 64
"""Tokens of the smallest buffer."""


def capacity_for(tokens: int) -> int:
    """Size of the buffers that hold `tokens`: multiples of 64 up to 256, then 4 sizes per doubling.

    >>> [capacity_for(n) for n in (1, 65, 256, 257, 1000, 1025)]
    [64, 128, 256, 320, 1024, 1280]
    """
    step = max(FIRST_CAPACITY, (1 << max(tokens - 1, 1).bit_length()) // 8)
    return -(-tokens // step) * step


class SequenceCache:
    """Buffers [G, capacity, D] of one sequence, two per layer, of which `length` tokens are valid.

    `reserve` sets the size; the buffers follow at the next write. Rows past `length` are leftovers of steps
    that were broken off.
    """

    def __init__(self) -> None:
        self.length = 0
        self.capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the buffers hold now."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers.values())

    def reserve(self, tokens: int) -> None:
        """Have room for `tokens` in all; never shrinks."""
        if tokens > self.capacity:
            self.capacity = capacity_for(tokens)

    def write(self, layer: int, keys_GQD: Tensor, values_GQW: Tensor, tile: int = 1) -> tuple[Tensor, Tensor]:
        """Put new rows behind the valid ones; gives views [G, L, D] and [G, L, W] of all rows up to them.

        L is rounded up to a multiple of `tile`, a divisor of `FIRST_CAPACITY`.
        """
        end = self.length + keys_GQD.shape[1]
        self.reserve(end)
        buffers = self._layers.get(layer)
        if buffers is None or buffers[0].shape[1] < end:
            buffers = self._layers[layer] = self._enlarged(buffers, keys_GQD, values_GQW)
        keys, values = buffers
        keys[:, self.length : end] = keys_GQD
        values[:, self.length : end] = values_GQW
        seen = tiled(end, tile)
        return keys[:, :seen], values[:, :seen]

    def advance(self, tokens: int) -> None:
        """Make the rows that were written last valid."""
        self.length += tokens

    def release(self) -> None:
        """Forget everything and give the memory back."""
        self.length = self.capacity = 0
        self._layers.clear()

    def _enlarged(
        self, old: tuple[Tensor, Tensor] | None, keys_GQD: Tensor, values_GQW: Tensor
    ) -> tuple[Tensor, Tensor]:
        grown = []
        for number, new in enumerate((keys_GQD, values_GQW)):
            # Zeros: batch-invariant attention reads past the end, and weights what it finds there with zero.
            buffer = new.new_zeros(new.shape[0], self.capacity, new.shape[2])
            if old is not None:
                buffer[:, : self.length] = old[number][:, : self.length]
            grown.append(buffer)
        return grown[0], grown[1]


class PackedCache:
    """What models get as `cache`: the step's rows are all sequences' rows one behind the other.

    transformers 5.24 calls `update` alone when it is given position ids. If `joined`, `update` gives all
    keys and values in one tensor, since the model computes with them (MLA expands latents); else the
    attention function reads the views of each sequence, and nothing is copied.

    `tile`: attention sees each sequence's rows up to a multiple of this (`spans`), and the step may have padding
    behind its last row.
    """

    is_compileable = False

    def __init__(
        self, parts: Sequence[tuple[SequenceCache, int]], joined: bool = False, tile: int = 1
    ) -> None:
        self.caches = tuple(cache for cache, _ in parts)
        self.counts = [count for _, count in parts]
        self.lengths = [cache.length + count for cache, count in parts]
        self.spans = [tiled(length, tile) for length in self.lengths]
        self.joined, self.tile = joined, tile
        self.views: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def update(
        self, keys_1GTD: Tensor, values_1GTW: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the step's rows of one layer."""
        rows = sum(self.counts)
        keys, values = (new[0, :, :rows].split(self.counts, 1) for new in (keys_1GTD, values_1GTW))
        views = [
            cache.write(layer_idx, k, v, self.tile)
            for cache, k, v in zip(self.caches, keys, values, strict=True)
        ]
        if not self.joined:
            self.views[layer_idx] = views
            return keys_1GTD, values_1GTW
        return torch.cat([k for k, _ in views], 1)[None], torch.cat([v for _, v in views], 1)[None]

    def advance(self, without: Collection[int] = ()) -> None:
        """The step is complete: its rows become valid, but those of the parts in `without`."""
        for number, (cache, count) in enumerate(zip(self.caches, self.counts, strict=True)):
            if number not in without:
                cache.advance(count)

    def get_seq_length(self, *_: Any) -> int:
        """Not a single number here: positions are always given."""
        return 0
