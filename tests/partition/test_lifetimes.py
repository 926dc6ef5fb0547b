"""When each buffer lives: the replay of a plan written out, so that its highest step is the replay's peak."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from drawn import rows
from jointcut import aot
from jointcut.partition.lower.memory.lifetimes import Lifetimes, lifetimes
from jointcut.partition.lower.memory.replay import Replayer
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.program.roles import Side
from larger import LARGER
from programs import CORPUS, named

RATES = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
NAMES = [p.name for p in CORPUS if p.name != "integers_to_differentiate"][::3]  # that one cannot be traced
quick = settings(deadline=None, max_examples=60, derandomize=True, database=None)


def cut_of(traced, name: str, strategy: str):
    with named(name).precision():
        return traced(name).partition(strategy).split


def row_of(split) -> Lifetimes:
    return lifetimes(Replayer(split.graph).rows(split.schedule), split.graph)


def check(graph, rows) -> None:
    """The laws of a row that a replay was written out to."""
    life, found = lifetimes(rows, graph), rows.replay()
    assert max(life.totals, default=0) == found.peak_bytes
    assert all(0 <= b.first <= b.last < len(life.moments) and b.bytes >= 0 for b in life.buffers)
    assert list(life.buffers) == sorted(life.buffers, key=lambda b: (b.first, b.last))
    assert [m.side for m in life.moments] == sorted((m.side for m in life.moments), key=[*Side].index)
    if found.peak_bytes:
        assert life.moments[life.peak].side is found.side


@pytest.mark.parametrize("strategy", ["min_cut", "save_all"])
@pytest.mark.parametrize("name", NAMES)
def test_the_highest_step_of_a_program_is_the_peak_of_its_replay(name, strategy, traced):
    made = cut_of(traced, name, strategy)
    check(made.graph, Replayer(made.graph).rows(made.schedule))


@pytest.mark.parametrize("program", [p for p in LARGER if p.name in ("elman", "nested_scans")], ids=lambda p: p.name)
def test_it_is_so_for_every_plan_that_a_budget_might_choose_segments_among_them(program):
    planner = aot.function(program.function, argnums=program.argnums, cost=RATES).trace(*program.args).planner
    plans = list(planner.plans())
    assert any(plan.segments for plan in plans)
    for plan in plans:
        check(planner.graph, planner.rows(plan))


def test_a_body_stands_in_the_row_once_and_says_how_often_it_runs():
    def loss(w, x):
        def inner(c, _):
            return jnp.tanh(c @ w), None

        def body(c, _):
            c, _ = lax.scan(inner, c, length=7)
            return jnp.sin(c) @ w, None

        c, _ = lax.scan(body, x, length=5)
        return jnp.sum(c)

    struct = jax.ShapeDtypeStruct((16, 16), "float32")
    made = aot.function(loss).trace(struct, struct).partition("save_all").split
    life = row_of(made)
    assert {m.trips for m in life.moments} == {1, 5, 35}
    products = [m.trips for m in life.moments if m.op == "dot_general" and m.side is Side.FORWARD]
    assert sorted(products) == [5, 35]
    assert all(__file__ in m.place.line for m in life.moments if m.op in ("dot_general", "tanh"))


@quick
@given(rows())
def test_a_total_counts_what_is_alive(row):
    by_hand = [sum(b.bytes for b in row.buffers if b.first <= i <= b.last) for i in range(len(row.moments))]
    assert list(row.totals) == by_hand
    assert [sum(b.bytes for b in row.alive(i)) for i in range(len(row.moments))] == by_hand
    assert row.totals[row.peak] == max(by_hand) and row.peak == by_hand.index(max(by_hand))
    assert all([b.bytes for b in alive] == sorted((b.bytes for b in alive), reverse=True) for alive in [row.alive(0)])


@quick
@given(rows(), st.integers(1, 4))
def test_the_parts_of_the_buffers_add_up_to_the_totals(row, count):
    parts = [row.bytes_of(row.buffers[i::count]) for i in range(count)]
    assert tuple(map(sum, zip(*parts, strict=True))) == row.totals


@quick
@given(rows())
def test_the_boundary_divides_the_sides_and_the_higher_half_has_the_peak(row):
    assert all(m.side is Side.FORWARD for m in row.moments[: row.boundary])
    assert all(m.side is Side.BACKWARD for m in row.moments[row.boundary :])
    halves = row.totals[: row.boundary], row.totals[row.boundary :]
    assert (row.peak_bytes(Side.FORWARD), row.peak_bytes(Side.BACKWARD)) == tuple(max(h, default=0) for h in halves)


def test_an_empty_row_has_no_peak_and_no_bytes():
    empty = Lifetimes((), ())
    assert (empty.totals, empty.peak, empty.boundary, empty.peak_bytes(Side.FORWARD)) == ((), 0, 0, 0)


def test_what_a_scan_stacks_is_named_by_the_line_of_its_body_that_makes_it():
    def loss(w, x):
        def cell(h, x):
            h = jnp.tanh(w @ h + x)
            return h, jnp.sin(h)

        _, ys = lax.scan(cell, x[0], x)
        return ys.sum()

    made = aot.function(loss).trace(jnp.ones((64, 64)), jnp.ones((5, 64))).partition("save_all").split
    row = row_of(made)
    first = loss.__code__.co_firstlineno
    lines = {b.place.line.partition(" ")[0] for b in row.buffers if b.type == "float32[5,64]"}
    found = {int(line.rpartition(":")[2]) - first for line in lines}
    assert {2, 3} <= found, found
