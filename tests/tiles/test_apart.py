"""Values that are said to keep rows apart do, and ops that are said to mix rows run in no block."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from benchmarks import mixing
from jointcut.partition.program.axes import MET, TOTAL, Joined, Rows
from jointcut.partition.program.graph import TOP
from jointcut.partition.program.jax import jaxprs, runtime
from jointcut.partition.program.roles import Side
from jointcut.partition.program.ties import ADD
from jointcut.partition.tiles.apart import apart, in_graph, labelled, told
from jointcut.partition.tiles.grow import grown
from programs import EVERY_PROGRAM

SEEDS, TOGETHER = (200 if EVERY_PROGRAM else 24), 6
OTHERS, SAME = np.array([1, 3, 4]), np.array([0, 2, 5])


@pytest.fixture(scope="module", autouse=True)
def wide():
    """Errors of rounding would hide errors of ours."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


class Followed:
    """The rows of the batch in a random program."""

    def __init__(self, seed):
        self.rows = mixing.program(seed)
        self.program, self.given = mixing.joint_of(self.rows)
        self.batch = self.program.roles.input_paths.index("args[2]")
        self.jaxpr, _ = jaxprs.opened(self.program.closed)
        self.early = self.jaxpr.eqns[: self.program.roles.forward_ops]
        graph, given = self.program.graph, {self.batch: 0}
        rows, found = apart(self.program.closed, self.program.roles, given, self.program.carries)
        self.places = in_graph(rows, graph)
        outside = {v: n for v, n in graph.regions[TOP].names.items() if graph.values[n].loop == TOP}
        self.axes = {v: self.places[n] for v, n in outside.items() if n in self.places}
        self.names = [op.op for op in found if op.side is Side.FORWARD]

    def forward(self, batch):
        """All values of the forward for a batch."""
        values = [v for eqn in self.early for v in eqn.outvars]
        given = [batch if n == self.batch else x for n, x in enumerate(self.given)]
        closed = jaxprs.build(self.jaxpr.invars, values, self.early)
        return dict(zip(values, runtime.evaluate(closed, *given), strict=True))

    def loops(self):
        """The equations of each loop of the forward, where all that can runs in blocks of the batch."""
        boundary = len(self.early)
        levels = grown(self.program.closed, boundary, self.jaxpr.invars[self.batch], 0, 0).levels
        return [level for level in levels if min(level) < boundary]


@pytest.mark.parametrize("first", range(0, SEEDS, TOGETHER), ids="from {}".format)
def test_a_row_of_a_value_does_not_change_with_other_rows(first):
    count = 0
    for seed in range(first, first + TOGETHER):
        case = Followed(seed)
        batch = case.given[case.batch]
        whole, other = case.forward(batch), case.forward(batch.at[OTHERS].multiply(-1.5))
        for v, x in whole.items():
            if isinstance(axis := case.axes.get(v), int):
                count += 1
                np.testing.assert_array_equal(*(np.take(np.asarray(each), SAME, axis) for each in (x, other[v])))
    assert count > TOGETHER


@pytest.mark.parametrize("first", range(0, SEEDS, TOGETHER), ids="from {}".format)
def test_an_op_that_mixes_rows_by_itself_runs_in_no_block(first):
    count = 0
    for seed in range(first, first + TOGETHER):
        case = Followed(seed)
        tiled = frozenset().union(*case.loops())
        rows = Rows({case.jaxpr.invars[case.batch]: 0})
        rows.follow(case.early)
        known = {id(eqn): n for n, eqn in enumerate(case.early)}
        ends = [(known[id(eqn)], places) for eqn, places in rows.ends if id(eqn) in known]
        alone = [n for n, places in ends if not any(isinstance(p, Joined) for p in places)]
        count += len(alone)
        assert tiled.isdisjoint(alone), case.rows.text
    assert count


def test_where_no_op_of_the_forward_mixes_rows_one_loop_takes_all_that_have_some():
    count = 0
    for seed in range(SEEDS):
        case = Followed(seed)
        if not case.names:
            loops, count = case.loops(), count + 1
            having = {n for n, eqn in enumerate(case.early) for v in eqn.outvars if isinstance(case.axes.get(v), int)}
            assert len(loops) <= 1, case.rows.text
            assert having <= frozenset().union(*loops), case.rows.text
    assert count > SEEDS / 8


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (0, "rows along axis 0"),
        (Joined(ADD), "sum over rows"),
        (Joined(ADD, starts=True), "sum over rows"),
        (Joined("max"), "rows meet"),
        (TOTAL, "computed from sums over rows"),
        (MET, "rows meet"),
        (None, "no rows"),
    ],
)
def test_a_place_is_told_in_words(place, text):
    assert told(place) == text


def test_a_label_stands_behind_the_name_of_an_input():
    case = Followed(0)
    values = labelled(case.program.graph, case.places).values
    assert values[case.batch].label == "args[2], rows along axis 0"
    assert values[0].label == "args[0]"
    assert {told(place) for v, place in case.places.items() if v != case.batch} == {
        v.label for v in values if v.maker is not None and v.label
    }
