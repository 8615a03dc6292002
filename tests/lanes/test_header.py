import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.lanes.header import HEADER_BYTES, MAX_MESSAGE, Header, Kind

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


@given(st.tuples(st.integers(1, 6), U32, U64, U32, U32, U32, U32, U32, U64, U64, U64, U32, U64, U64))
def test_a_header_survives_the_wire(fields):
    header = Header(*fields)
    packed = header.pack()
    assert len(packed) == HEADER_BYTES < MAX_MESSAGE
    assert Header.unpack(packed + b"more") == header


def test_a_short_header_is_refused():
    with pytest.raises(ValueError, match="got 3"):
        Header.unpack(b"abc")


def test_the_key_names_the_piece_and_nothing_else():
    header = Header(Kind.ROWS, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert header._replace(kind=Kind.REPLY, busy_ns=5, rows=9).key == header.key == (1, 2, 3, 4)
