"""The tiles of batch-invariant products, agreed on by routers and expert groups."""

from __future__ import annotations

ROWS = 4
"""The rows of each product are a multiple of this. With 1, 2 or 3 MKL computes a row in another way."""
KEYS = 64
"""Attention reads a multiple of so many keys; all sizes of buffers are multiples of it."""
BLOCK = 128
"""Values are summed over so many keys at once. Over 192 or more than 256, MKL sums in an order of its own."""


def tiled(count: int, tile: int = ROWS) -> int:
    """`count` rounded up.

    >>> [tiled(n) for n in (1, 4, 5)]
    [4, 4, 8]
    """
    return -(-count // tile) * tile
