import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.dispatch.table import LayerTable
from raymoe.policy.layout import Copy

GROUPS = 3
NAMES = {f"g{n}": n for n in range(GROUPS)}


@st.composite
def tables(draw):
    experts = draw(st.integers(1, 12))
    homes = [draw(st.sets(st.integers(0, GROUPS - 1), min_size=1)) for _ in range(experts)]
    slots = [0] * GROUPS
    copies = []
    for home in homes:
        copies.append([])
        for group in sorted(home):
            copies[-1].append(Copy(f"g{group}", slots[group], 0))
            slots[group] += 1
    return LayerTable(3, copies, NAMES), copies


@settings(max_examples=200)
@given(tables(), st.data())
def test_every_pair_goes_to_exactly_one_living_copy_of_its_expert(made, data):
    table, copies = made
    expert_P = np.array(data.draw(st.lists(st.integers(0, len(copies) - 1), max_size=60)), np.int64)
    lost = data.draw(st.frozensets(st.integers(0, GROUPS - 1), max_size=GROUPS - 1))
    gone = [all(NAMES[c.group] in lost for c in own) for own in copies]
    assert table.gone(lost).tolist() == gone
    expert_P = np.array([expert for expert in expert_P if not gone[expert]], np.int64)
    seen = []
    for plan in table.plan(expert_P, lost, [0] * GROUPS):
        assert plan.lane not in lost
        start = 0
        last = -1
        for slot, generation, count in plan.segments_S3.tolist():
            assert slot > last and count > 0
            last = slot
            for pair in plan.pair_P[start : start + count].tolist():
                assert Copy(f"g{plan.lane}", slot, generation) in copies[expert_P[pair]]
            start += count
        assert start == len(plan.pair_P)
        seen += plan.pair_P.tolist()
    assert sorted(seen) == list(range(len(expert_P)))


def test_the_copy_on_the_shortest_queue_is_taken():
    copies = [[Copy("g0", 0, 0), Copy("g1", 0, 0)], [Copy("g0", 1, 0), Copy("g1", 1, 0)]]
    table = LayerTable(0, copies, {"g0": 0, "g1": 1})
    both = np.array([0, 0, 0, 1, 1])
    assert [(p.lane, len(p.pair_P)) for p in table.plan(both, frozenset(), [0, 0])] == [(0, 3), (1, 2)]
    assert [(p.lane, len(p.pair_P)) for p in table.plan(both, frozenset(), [9, 0])] == [(1, 5)]


def test_the_groups_of_experts_are_named():
    table = LayerTable(5, [[Copy("g0", 0, 0), Copy("g1", 0, 0)], [Copy("g1", 1, 0)]], {"g0": 0, "g1": 1})
    assert table.groups_of([1]) == ("g1",)
    assert table.groups_of([1, 0]) == ("g0", "g1")
    assert table.groups_of([]) == ()
