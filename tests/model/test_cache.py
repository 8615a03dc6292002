"""Sizes, contents and bytes of the caches."""

from __future__ import annotations

import torch

from raymoe.model.cache import FIRST_CAPACITY, PackedCache, SequenceCache, capacity_for


def rows(count: int, seed: int = 0, heads: int = 2, width: int = 4) -> torch.Tensor:
    return torch.randn(heads, count, width, generator=torch.Generator().manual_seed(seed))


def test_capacity_holds_the_tokens_never_shrinks_and_wastes_a_quarter_at_most() -> None:
    sizes = [capacity_for(n) for n in range(1, 5000)]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert all(size <= max(1.25 * n, n + FIRST_CAPACITY) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 30


def test_rows_stay_when_the_buffers_grow() -> None:
    cache, written = SequenceCache(), []
    for step, count in enumerate((1, 63, 1, 200, 70)):
        written.append(rows(count, step))
        keys, values = cache.write(0, written[-1], -written[-1])
        cache.advance(count)
        assert torch.equal(keys, torch.cat(written, 1))
        assert torch.equal(values, -torch.cat(written, 1))


def test_bytes_are_those_of_the_buffers_and_go_at_once() -> None:
    cache = SequenceCache()
    for layer in range(3):
        cache.write(layer, rows(70), rows(70, width=8))
    assert cache.nbytes == 3 * 2 * capacity_for(70) * (4 + 8) * 4
    cache.advance(70)
    cache.release()
    assert (cache.nbytes, cache.length, cache.capacity) == (0, 0, 0)


def test_a_reservation_is_made_at_the_first_write() -> None:
    cache = SequenceCache()
    cache.reserve(300)
    cache.write(0, rows(3), rows(3))
    assert cache.nbytes == 2 * 2 * 320 * 4 * 4
    cache.reserve(10)
    assert cache.capacity == 320


def test_rows_of_a_step_that_was_broken_off_are_written_over() -> None:
    cache = SequenceCache()
    cache.write(0, rows(5), rows(5))
    cache.advance(5)
    cache.write(0, rows(2, 1), rows(2, 1))
    keys, _ = cache.write(0, rows(2, 2), rows(2, 2))
    assert cache.length == 5
    assert torch.equal(keys, torch.cat([rows(5), rows(2, 2)], 1))


def test_a_packed_cache_cuts_the_rows_by_sequence() -> None:
    for joined in (False, True):
        one, two = SequenceCache(), SequenceCache()
        one.write(0, rows(3, 7), rows(3, 7))
        one.advance(3)
        packed = PackedCache([(one, 1), (two, 4)], joined)
        new = rows(5, 8)
        keys, _ = packed.update(new[None], new[None], 0, kwargs={})
        expected = [torch.cat([rows(3, 7), new[:, :1]], 1), new[:, 1:]]
        if joined:
            assert torch.equal(keys[0], torch.cat(expected, 1))
        else:
            assert torch.equal(keys[0], new)
            assert all(torch.equal(k, e) for (k, _), e in zip(packed.views[0], expected, strict=True))
        assert (one.length, two.length) == (3, 0)
        packed.advance()
        assert (one.length, two.length) == (4, 4)
