import doctest

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.errors import ConfigError
from raymoe.policy import layout
from raymoe.policy.layout import Copy, GroupPlace, Layout, even_layout, even_slices


def test_the_example_in_the_documentation_is_true():
    assert doctest.testmod(layout).failed == 0


@given(st.integers(1, 300), st.integers(1, 300))
def test_slices_cover_every_expert_once_and_differ_by_at_most_one(experts, groups):
    if groups > experts:
        with pytest.raises(ConfigError, match=f"{experts} experts .* {groups} expert groups"):
            even_slices(experts, groups)
        return
    slices = even_slices(experts, groups)
    assert [e for part in slices for e in part] == list(range(experts))
    sizes = {len(part) for part in slices}
    assert max(sizes) - min(sizes) <= 1


def test_no_groups_is_refused():
    with pytest.raises(ConfigError, match="0 expert groups"):
        even_slices(8, 0)


def test_a_layout_survives_the_wire():
    made = even_layout(4, [GroupPlace("a", "@x"), GroupPlace("b", "@y")], [5, 7])
    assert Layout.from_wire(msgpack.unpackb(msgpack.packb(made.to_wire()))) == made
    assert made.copies[1][6] == (Copy("b", 2, 0),)


@pytest.mark.parametrize(
    ("groups", "copies", "text"),
    [
        (("a", "a"), ((Copy("a", 0, 0),),), "share a name"),
        (("a",), ((),), "expert 0 of MoE layer 0 has no copy"),
        (("a",), ((Copy("b", 0, 0),),), "unknown expert group b"),
    ],
)
def test_a_layout_that_could_not_be_served_is_refused(groups, copies, text):
    with pytest.raises(ConfigError, match=text):
        Layout(0, tuple(GroupPlace(name, "") for name in groups), (copies,))
