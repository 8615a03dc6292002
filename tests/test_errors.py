import pickle

import grpc
import pytest

from raymoe import errors
from raymoe.errors import STATUS, ExpertUnavailableError, LaneClosedError, RaymoeError, status_of


def tree(cls=RaymoeError):
    yield cls
    for sub in cls.__subclasses__():
        yield from tree(sub)


def test_every_error_is_drawn_in_the_tree_and_has_a_status():
    for cls in tree():
        assert cls.__name__ in errors.__doc__, f"{cls.__name__} is missing in the drawing"
        assert status_of(cls.__new__(cls)) is not None
    assert set(STATUS) <= set(tree())


@pytest.mark.parametrize("status", STATUS.values(), ids=[cls.__name__ for cls in STATUS])
def test_the_table_uses_real_codes(status):
    assert 400 <= status.http <= 599
    assert hasattr(grpc.StatusCode, status.grpc)


def test_the_nearest_class_decides_and_a_foreign_error_is_internal():
    assert status_of(LaneClosedError("g", "gone")).code == "expert_unavailable"
    assert status_of(errors.ContextLengthError("x")).code == "context_length_exceeded"
    foreign = status_of(KeyError("secret"))
    assert foreign.http == 500 and not foreign.public


@pytest.mark.parametrize(
    "error",
    [
        ExpertUnavailableError(3, ("g0", "g1"), "end of file"),
        LaneClosedError("g0", "gone"),
        errors.RequestError("bad", "prompt"),
        errors.OverloadedError("full", 5),
    ],
)
def test_errors_survive_a_process_border(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
