import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.lanes.ring import ALIGN, Ring


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000), st.integers(0, 50)), max_size=200))
def test_blocks_in_use_never_overlap(actions):
    ring = Ring(8192)
    held: dict[int, int] = {}
    for take, length, which in actions:
        if take:
            start = ring.reserve(length)
            if start is not None:
                end = start + max(length, 1)
                assert start % ALIGN == 0 and end <= ring.size
                for other, size in held.items():
                    assert end <= other or start >= other + max(size, 1)
                held[start] = length
        elif held:
            start = sorted(held)[which % len(held)]
            ring.release(start)
            del held[start]
    for start in list(held):
        ring.release(start)
    assert ring.used == 0
    assert ring.reserve(ring.size) == 0


def test_a_full_ring_says_so_and_recovers():
    ring = Ring(256)
    first, second = ring.reserve(128), ring.reserve(128)
    assert ring.reserve(1) is None
    ring.release(second)
    assert ring.reserve(1) is None, "space returns in the order it was given out"
    ring.release(first)
    assert ring.reserve(256) == 0


def test_a_block_larger_than_the_ring_is_an_error_not_a_wait():
    with pytest.raises(ValueError, match="can't fit"):
        Ring(128).reserve(129)
