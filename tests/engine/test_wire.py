"""What crosses between replica and engine comes back as it was."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe import errors
from raymoe.engine.messages import GenerateChunk, GenerateRequest, SamplingParams, TokenLogprob
from raymoe.engine.wire import (
    MAX_FRAME,
    Unframer,
    error_from_wire,
    error_to_wire,
    event_from_wire,
    event_to_wire,
    frame,
    request_from_wire,
    request_to_wire,
)
from raymoe.errors import EngineError, ExpertUnavailableError, LaneError, RaymoeError

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, RaymoeError)]


def through(value: object) -> object:
    (message,) = Unframer().feed(frame({"value": value}))
    return message["value"]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_comes_back_as_the_same_class(cls: type[RaymoeError]) -> None:
    if issubclass(cls, ExpertUnavailableError):
        error: RaymoeError = cls(3, ("g0", "g1"), "killed")
    elif issubclass(cls, LaneError):
        error = cls("g0", "silent")
    else:
        error = cls("text")
    back = error_from_wire(through(error_to_wire(error)))
    assert type(back) is cls
    assert (str(back), back.__dict__) == (str(error), error.__dict__)


def test_attributes_of_errors_come_along() -> None:
    back = error_from_wire(through(error_to_wire(errors.RequestError("wrong", "messages.0.content"))))
    assert back.param == "messages.0.content"
    assert error_from_wire(through(error_to_wire(errors.OverloadedError("full", 7)))).retry_after_s == 7


def test_a_foreign_error_class_is_an_engine_error() -> None:
    for name in ("SystemExit", "RaymoeErrors", "STATUS"):
        assert type(error_from_wire([name, ["x"], {}])) is EngineError


def test_requests_and_events_come_back_equal() -> None:
    request = GenerateRequest(
        "r", (1, 2), 5, SamplingParams(0.5, 0.9, 3, 2**63), (258,), 3.5, (9, 8), client="a"
    )
    assert request_from_wire(through(request_to_wire(request))) == request
    request = GenerateRequest("r", (1, 2), 0, logprobs=0, prompt_logprobs=3, prompt_scored=1, grammar="g")
    assert request_from_wire(through(request_to_wire(request))) == request
    scored = (TokenLogprob(-0.5, 1, ((7, -0.5), (8, float("-inf")))), TokenLogprob(-1.5, 2))
    for chunk in (
        GenerateChunk((1, 2)),
        GenerateChunk((), "stop"),
        GenerateChunk((7,), "length"),
        GenerateChunk((7, 8), None, scored),
        GenerateChunk((), None, (), scored),
    ):
        assert event_from_wire(through(event_to_wire("r", chunk))) == ("r", chunk)


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5), st.data())
def test_frames_survive_any_cut_of_the_stream(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frame({"body": body}) for body in bodies)
    unframer, seen = Unframer(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        seen += [message["body"] for message in unframer.feed(stream[:size])]
        stream = stream[size:]
    assert seen == bodies


def test_a_length_that_no_frame_has_is_refused() -> None:
    with pytest.raises(EngineError, match="frame"):
        list(Unframer().feed((MAX_FRAME + 1).to_bytes(4, "little")))
