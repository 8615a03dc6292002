from raymoe.model.cache import FIRST_CAPACITY, capacity_for
from raymoe.policy.tiles import BLOCK, KEYS, ROWS, tiled


def test_counts_are_rounded_up_to_whole_tiles():
    assert [tiled(n, 4) for n in (0, 1, 3, 4, 5, 8)] == [0, 4, 4, 4, 8, 8]
    assert tiled(7) == tiled(7, ROWS)


def test_buffers_hold_whole_tiles_of_keys_and_blocks_are_made_of_them():
    assert FIRST_CAPACITY % KEYS == 0 and BLOCK % KEYS == 0
    assert all(capacity_for(n) % KEYS == 0 for n in range(1, 5000, 7))
