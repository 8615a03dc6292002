from dataclasses import replace

import msgpack
import pytest

from raymoe.errors import HelloRefusedError
from raymoe.lanes.hello import Hello, check_answer, refuse, welcome

HELLO = Hello("secret-token", "abc", "float32", 64)


def test_equal_sides_welcome_each_other():
    fields, reason = HELLO.judge(HELLO.pack(router="r0"))
    assert reason is None and fields["router"] == "r0"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"fingerprint": "xyz"}, "fingerprint 'xyz' called, 'abc' answered"),
        ({"dtype": "bfloat16"}, "dtype 'bfloat16' called"),
        ({"hidden_size": 32}, "hidden_size 32 called, 64 answered"),
        ({"deterministic": True}, "deterministic True called, False answered"),
        ({"protocol": 99}, "protocol version 99 called"),
        ({"token": "wrong"}, "the token differs"),
    ],
)
def test_a_difference_is_named_with_both_values_but_no_token(change, text):
    _, reason = HELLO.judge(replace(HELLO, **change).pack())
    assert text in reason
    assert "secret" not in reason and "wrong" not in reason


@pytest.mark.parametrize(
    "message", [b"", b"x", b"\x01", b"\x01\xc1", b"\x01" + msgpack.packb([1]), b"\x04" * 96]
)
def test_garbage_is_not_a_hello(message):
    assert HELLO.judge(message)[1] is not None


def test_the_answer_is_checked():
    check_answer("g1", welcome("g1"))
    with pytest.raises(HelloRefusedError, match="because"):
        check_answer("g1", refuse("because"))
    with pytest.raises(HelloRefusedError, match="g2 answered"):
        check_answer("g1", welcome("g2"))
    with pytest.raises(HelloRefusedError, match="not understood"):
        check_answer("g1", b"\x07junk")
