"""Batch-invariant attention: right, and with the bits that each row gets alone."""

from __future__ import annotations

import pytest
import torch

from raymoe.model.context import StepContext
from raymoe.model.invariant import attend
from raymoe.model.rows import LiveRows
from raymoe.policy.tiles import BLOCK, KEYS, tiled
from tests.model.test_attention import naive

LENGTH = 2 * BLOCK + KEYS + 9


def attention(
    count: int,
    length: int,
    *,
    groups: int = 2,
    repeats: int = 3,
    window: int | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
    rest: float = 0.0,
    padding: int = 0,
) -> torch.Tensor:
    """[count + padding, A, W]: the last rows of `length`; what lies behind the keys' end is `rest`."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(LENGTH, heads, width, generator=generator).to(dtype)
        for heads, width in ((groups * repeats, 8), (groups, 8), (groups, 16))
    )
    sinks_A = torch.randn(groups * repeats, generator=generator) if sinks else None
    room = tiled(length, KEYS)
    views = []
    for rows in (keys, values):
        buffer = torch.full((groups, room, rows.shape[2]), rest, dtype=dtype)
        buffer[:, :length] = rows[:length].transpose(0, 1)
        views.append(buffer)
    step = StepContext(LiveRows([count], strict=True))
    query_TAD = torch.nn.functional.pad(query[length - count : length], (0, 0, 0, 0, 0, padding))
    return attend(step, query_TAD, [(views[0], views[1])], [count], [length], 0.3, window, sinks_A)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 16, 200])
def test_each_row_attends_to_what_is_before_it(window, sinks):
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(LENGTH, heads, width, generator=generator) for heads, width in ((6, 8), (2, 8), (2, 16))
    )
    sinks_A = torch.randn(6, generator=generator) if sinks else None
    out = attention(LENGTH, LENGTH, window=window, sinks=sinks)
    for row in (0, 1, 15, 16, 63, 64, 200, 255, 256, LENGTH - 1):
        k, v = keys[: row + 1].transpose(0, 1), values[: row + 1].transpose(0, 1)
        expected = naive(query[row], k, v, 0.3, window, sinks_A)
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("repeats", [1, 3, 8])
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (None, True), (16, True), (200, False)])
def test_a_row_has_the_same_bits_alone_and_in_any_chunk(window, sinks, repeats, dtype):
    options = {"repeats": repeats, "window": window, "sinks": sinks, "dtype": dtype}
    whole = attention(LENGTH, LENGTH, **options)
    for count, length in [(1, n) for n in range(1, LENGTH + 1, 3)] + [
        (5, 7),
        (40, 200),
        (64, 250),
        (130, 290),
    ]:
        part = attention(count, length, **options)
        assert torch.equal(part, whole[length - count : length]), (count, length)


def test_what_lies_behind_the_end_and_padding_change_nothing():
    for count in (1, 30):
        plain = attention(count, 70)
        assert torch.equal(attention(count, 70, rest=1e20), plain)
        padded = attention(count, 70, padding=3)
        assert torch.equal(padded[:count], plain)
        assert not padded[count:].any()
