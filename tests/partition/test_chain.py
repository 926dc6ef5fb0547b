"""Divisions of a chain are the cheapest there are for their peak, and make plans that close and mean the same."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jointcut import aot
from jointcut.partition import Plan, parse, split
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.prices.rules import CheckpointPolicy, Constraint
from jointcut.partition.search.alike import Alike
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.chain import Chain, Piece, Programme, divisions, peak_bytes
from jointcut.partition.search.recompute import figures
from jointcut.partition.search.stretches import Stretches, narrow_places, places
from programs import CORPUS, EVERY_PROGRAM

ROOFLINE = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
NAMES = [p.name for p in CORPUS if p.name != "integers_to_differentiate"]  # that one cannot be traced
SOME = [
    "checkpoints_in_a_row", "convolutions", "dropout_network", "mixture_of_experts", "nested_scans", "scan_over_layers",
    "transformer_block", "unrolled_layers",
]  # fmt: skip
LEAST = 10**12
quick = settings(deadline=None, max_examples=60 if EVERY_PROGRAM else 20, derandomize=True, database=None)
some_programs = pytest.mark.parametrize("name", SOME)
every_second = pytest.mark.parametrize("name", NAMES[::2])


@dataclass(frozen=True)
class PlainSeconds:
    """An op takes what its line says, else a second; bytes are written in almost no time."""

    byte_seconds: float = 1e-12

    def seconds(self, graph, op):
        return 1.0

    def saving_seconds(self, num_bytes):
        return num_bytes * self.byte_seconds


# ------------------------------------------------------------------------------------ the programme, on pieces alone


@st.composite
def endings(draw, most=7):
    """Pieces of a chain of a few stretches, with figures out of nowhere; each stretch can be a piece of its own."""
    count = draw(st.integers(1, most))
    found = [()]
    figures = st.tuples(st.integers(0, 9), st.integers(0, 9).map(float), st.integers(0, 12))
    for stop in range(1, count + 1):
        spans = [(start, draw(st.integers(start == stop - 1, 2))) for start in range(stop)]
        found.append(tuple(piece(start, stop, *draw(figures)) for start, many in spans for _ in range(many)))
    return tuple(found)


def piece(start, stop, saved, seconds, working):
    return Piece(start, stop, (), saved, seconds, working)


def all_divisions(ending, stop=None):
    """Every way to put pieces in a row."""
    stop = len(ending) - 1 if stop is None else stop
    if not stop:
        return [()]
    return [(*before, last) for last in ending[stop] for before in all_divisions(ending, last.start)]


@quick
@given(endings(), st.integers(0, 60), st.sampled_from([0.0, 0.25, 1.0]))
def test_the_fastest_division_is_as_cheap_as_any_within_the_peak(ending, peak, byte_seconds):
    programme = Programme(ending, byte_seconds)
    costs = [programme.costs(d) for d in all_divisions(ending) if peak_bytes(d) <= peak]
    found = programme.fastest(peak)
    if not costs:
        assert found is None
    else:
        assert peak_bytes(found) <= peak
        assert programme.costs(found) == min(costs)


@quick
@given(endings())
def test_the_smallest_division_has_the_least_peak_of_all(ending):
    assert peak_bytes(Programme(ending).smallest()) == min(map(peak_bytes, all_divisions(ending)))


@quick
@given(endings(), st.integers(1, 4))
def test_with_few_labels_a_peak_is_kept_and_met_wherever_it_can_be(ending, labels):
    least = min(map(peak_bytes, all_divisions(ending)))
    programme = Programme(ending, most_labels=labels)
    assert programme.fastest(least - 1) is None
    for peak in (least, least + 1, 2 * least + 3):
        assert peak_bytes(programme.fastest(peak)) <= peak


@quick
@given(endings())
def test_a_larger_peak_never_costs_more(ending):
    programme = Programme(ending)
    least = peak_bytes(programme.smallest())
    costs = [programme.costs(programme.fastest(peak)) for peak in range(least, least + 30)]
    assert all(a >= b for a, b in itertools.pairwise(costs))


# ------------------------------------------------------------------------------------ chains of layers, as text


@st.composite
def chains(draw, most=24):
    """Layers of a few ops each that read the layer before and at times one further back, as a joint program."""
    lines, h, op = ["primal %0:int8[8]", "cotangent %1:int8[]"], [0], 2
    names = ["dot_general", "sin", "mul", "reduce_sum", "split"]
    wanted = []
    for _ in range(draw(st.integers(2, most))):
        x = h[-1]
        for _ in range(draw(st.integers(1, 3))):
            far = f" %{draw(st.sampled_from(h))}" if not draw(st.integers(0, 5)) else ""
            size, name = draw(st.integers(1, 9)), draw(st.sampled_from(names))
            lines.append(f"%{op}:int8[{size}] = {name} %{x}{far} takes {0.25 * draw(st.integers(0, 8))}s")
            x, op = op, op + 1
            if draw(st.booleans()):
                wanted.append(x)
        h.append(x)
    lines.append("backward:")
    ct = 1
    for v in reversed(wanted or [x]):
        lines.append(f"%{op}:int8[8] = mul %{ct} %{v}")
        ct, op = op, op + 1
    return parse("\n".join([*lines, f"output %{x}", f"gradient %{ct}"]))


def chained(graph, constraints=(), most=8):
    """A planner of a graph, and the graph as a chain of a few stretches."""
    mine = Planner(Problem.of(graph, PlainSeconds(), constraints))
    row = Stretches(mine.problem, most, 1.0)
    return mine, Chain(row, mine.front)


def divided(mine):
    byte_seconds = mine.model.saving_seconds(1)
    return divisions(mine.problem, mine.front, byte_seconds)


@settings(quick, max_examples=30 if EVERY_PROGRAM else 15)
@given(chains(most=8))
def test_on_short_chains_the_programme_finds_what_trying_all_divisions_finds(graph):
    _, chain = chained(graph, most=5)
    programme = Programme(chain.ending)
    every = [(peak_bytes(d), programme.costs(d)) for d in all_divisions(chain.ending)]
    assert peak_bytes(programme.smallest()) == min(peak for peak, _ in every)
    for peak in sorted({peak for peak, _ in every})[::3]:
        least = min(cost for p, cost in every if p <= peak)
        assert programme.costs(programme.fastest(peak)) == pytest.approx(least)


@quick
@given(chains())
def test_equal_pieces_are_never_better(graph):
    _, chain = chained(graph, most=16)
    count = len(chain.row.stretches)
    programme = Programme(chain.ending)
    whole = {(p.start, p.stop): p for stop in range(1, count + 1) for p in chain.alike(-1, stop)}
    for length in range(1, count + 1):
        ends = [*range(0, count, length), count]
        equal = [whole[pair] for pair in itertools.pairwise(ends)]
        found = programme.fastest(peak_bytes(equal))
        assert programme.costs(found) <= programme.costs(equal) + 1e-9
        assert peak_bytes(programme.smallest()) <= peak_bytes(equal)


@quick
@given(chains())
def test_a_division_makes_a_plan_of_no_more_bytes_and_seconds_than_it_says(graph):
    mine, _ = chained(graph)
    for division in divided(mine):
        plan = mine.priced(Plan.of(graph, division.saved))
        assert plan.bytes_saved <= division.bytes_saved <= division.peak_bytes
        assert plan.seconds <= division.seconds + 1e-9


@quick
@given(chains(), st.data())
def test_divisions_keep_to_demands(graph, data):
    free = Planner(Problem.of(graph, PlainSeconds()))
    made = [v.id for v in graph.values if v.maker is not None and not free.problem.sides.is_late(v.id)]
    keep = data.draw(st.sets(st.sampled_from(made), max_size=3))
    drop = data.draw(st.sets(st.sampled_from(made), max_size=3)) - keep
    demands = [Constraint(v, CheckpointPolicy.MUST_SAVE, "told") for v in keep]
    demands += [Constraint(v, CheckpointPolicy.MUST_RECOMPUTE, "told not to") for v in drop]
    mine = Planner(Problem.of(graph, PlainSeconds(), demands))
    for division in divided(mine):
        plan = Plan.of(graph, division.saved)
        needed = mine.problem.sides.wanted | {
            v for i in (*plan.recomputed, *plan.deferred) for v in graph.ops[i].inputs
        }
        assert keep & needed <= set(division.saved)
        assert not drop & set(division.saved)
        assert {division.reasons[v] for v in keep & set(division.saved)} <= {"not recomputed: told"}


# ------------------------------------------------------------------------------------ what passes between stretches


def check_that_nothing_earlier_runs(mine, found, place):
    """With what passes a place, and what must be saved, nothing heavy before it runs for what lies behind it."""
    graph = mine.graph
    passing = {v for v, made in enumerate(found.made) if 0 <= made <= place < found.last[v] and v in found.roots[v]}
    stack = [v for v in mine.problem.sides.wanted if found.made[v] > place]
    seen = set()
    while stack:
        v = stack.pop()
        if v in seen or v in passing or v in found.must_save or graph.values[v].maker is None:
            continue
        seen.add(v)
        assert found.made[v] > place or v not in found.roots[v], graph.where(v)
        stack.extend(graph.ops[graph.values[v].maker].inputs)


@every_second
def test_what_passes_a_place_is_all_that_what_lies_behind_it_needs(name, traced):
    mine = Planner(Problem.of(traced(name).graph, ROOFLINE))
    found = places(mine.problem)
    for place in range(0, len(found.width), 1 + len(found.width) // 12):
        check_that_nothing_earlier_runs(mine, found, place)


@quick
@given(chains())
def test_what_passes_a_place_of_a_chain_is_all_that_what_lies_behind_it_needs(graph):
    mine = Planner(Problem.of(graph, PlainSeconds()))
    found = places(mine.problem)
    for place in range(len(found.width)):
        check_that_nothing_earlier_runs(mine, found, place)


@pytest.mark.parametrize("how", ["read in each step", "scanned over"])
def test_what_a_loop_reads_from_around_passes_up_to_the_loop(how):
    """It is made first, and read at the end in the body of a loop alone."""

    def loss(w, x):
        far = jnp.tanh(w @ w)
        for _ in range(12):
            x = jnp.tanh(x @ w)
        if how == "scanned over":
            return lax.scan(lambda h, row: (jnp.tanh(h + jnp.sum(row)), None), jnp.sum(x), far)[0]
        return jnp.sum(lax.scan(lambda h, _: (jnp.tanh(h @ far), None), x, None, length=2)[0])

    matrix = jax.ShapeDtypeStruct((16, 16), "float32")
    mine = Planner(Problem.of(aot.function(loss).trace(matrix, matrix).graph, ROOFLINE))
    found = places(mine.problem)
    (far,) = [v for op in mine.graph.ops if op.name == "tanh" and found.runs_at[op.id] == 1 for v in op.outputs]
    (scan,) = [op for op in mine.graph.ops if op.id in mine.problem.sides.forward and op.name == "loop"]
    assert found.last[far] >= found.runs_at[scan.id] > 20
    assert min(found.width[2 : found.runs_at[scan.id]]) >= 16 * 16 * 4


@quick
@given(chains(), st.integers(1, 20))
def test_stretches_are_at_most_as_many_as_asked_for_and_each_has_its_share(graph, most):
    mine = Planner(Problem.of(graph, PlainSeconds()))
    found = places(mine.problem)
    cuts = narrow_places(found, most, 0.5)
    load = np.cumsum(found.load)
    ends = [0, *load[list(cuts)], load[-1]]
    assert len(cuts) < max(most, 1) or not cuts
    assert not cuts or all(b - a >= load[-1] / most for a, b in itertools.pairwise(ends))


def layered(layers, width):
    lines = ["primal %0:float32[8]", "cotangent %1:float32[]"]
    h = 0
    for k in range(layers):
        v = 3 * k + 2
        lines.append(f"%{v}:float32[{width}] = dot_general %{h} takes 0.01s")
        lines.append(f"%{v + 1}:float32[{width}] = sin %{v} takes 0.01s")
        lines.append(f"%{v + 2}:float32[8] = dot_general %{v + 1} takes 0.01s")
        h = v + 2
    lines.append("backward:")
    ct = 1
    for v in range(3 * layers + 1, 1, -1):
        lines.append(f"%{6 * layers + 3 - v}:float32[8] = mul %{ct} %{v}")
        ct = 6 * layers + 3 - v
    return parse("\n".join([*lines, f"output %{h}", f"gradient %{ct}"]))


@pytest.mark.parametrize("layers", [4, 16, 40])
def test_a_chain_of_equal_layers_is_divided_between_layers(layers):
    mine = Planner(Problem.of(layered(layers, 64), PlainSeconds()))
    found = places(mine.problem)
    assert narrow_places(found, 72, 2.0) == tuple(range(2, 3 * layers - 1, 3))


def test_of_the_smallest_division_of_equal_layers_the_first_pieces_are_the_longest():
    """A later piece is undone while more beginnings of others are saved.

    The first piece has the layers that are left over. Of the last one some values are kept.
    """
    smallest = min(divided(Planner(Problem.of(layered(40, 24), PlainSeconds()))), key=lambda d: d.peak_bytes)
    lengths = [p.stop - p.start for p in smallest.pieces]
    assert len(lengths) > 4 and lengths[1] > lengths[-2]
    assert lengths[1:-1] == sorted(lengths[1:-1], reverse=True)
    assert smallest.peak_bytes < 0.3 * sum(v.bytes for v in layered(40, 24).values[2:122])


# ------------------------------------------------------------------------------------ real programs


@every_second
def test_every_division_of_a_program_closes_and_keeps_to_its_figures(name, traced):
    mine = Planner(Problem.of(traced(name).graph, ROOFLINE))
    found = divided(mine)
    assert len({(d.saved, d.dropped) for d in found}) == len(found)
    for division in found:
        parts = {"reasons": division.reasons, "dropped": division.dropped}
        plan = mine.priced(Plan.of(mine.graph, division.saved, **parts))
        share = max(mine.graph.rivals)  # a branch counts for its part of the space that all share
        assert plan.bytes_saved <= share * division.bytes_saved
        assert plan.seconds <= division.seconds + 1e-12 < math.inf
        assert all(record.reason for record in plan.saved)


@some_programs
def test_divisions_are_the_same_every_time(name, traced):
    graph = traced(name).graph
    assert divided(Planner(Problem.of(graph, ROOFLINE))) == divided(Planner(Problem.of(graph, ROOFLINE)))


def perceptron(layers):
    def loss(weights, x):
        for w in weights:
            x = x + jnp.tanh(jnp.sin(x @ w) @ w.T)
        return jnp.sum(x**2)

    key = jax.random.key(layers)
    return loss, (list(0.3 * jax.random.normal(key, (layers, 6, 24))), jax.random.normal(key, (4, 6)))


def looped(layers):
    """Layers before and behind a loop that reads what is made at the beginning."""

    def loss(weights, x):
        far = jnp.sin(x)
        for w in weights[:layers]:
            x = jnp.tanh(x @ w) @ w.T
        x, seen = lax.scan(
            lambda h, row: (jnp.tanh(h * far + row), jnp.cos(h) * row), x, jnp.exp(weights[0].T[:, None])
        )
        for w in weights[layers:]:
            x = jnp.tanh(x @ w) @ w.T
        return jnp.sum(x**2) + jnp.sum(seen)

    key = jax.random.key(layers)
    return loss, (list(0.3 * jax.random.normal(key, (2 * layers, 6, 24))), jax.random.normal(key, (4, 6)))


@pytest.mark.parametrize("program", [perceptron, looped])
def test_a_program_cut_by_a_division_computes_what_it_computed(program):
    loss, args = program(3)
    traced = aot.function(loss, argnums=(0, 1)).trace(*args)
    found = divided(Planner(Problem.of(traced.graph, ROOFLINE)))
    assert found and all(division.seconds for division in found)
    leaves = jax.tree.leaves(args)
    for division in (found[0], found[-1]):

        def strategy(graph, d=division):
            return Plan.of(graph, d.saved, strategy=str(d))

        cut = split(traced.program.closed, traced.program.roles, strategy, graph=traced.graph)
        with jax.disable_jit():
            outputs, gradients = cut(leaves, [jnp.float32(1.0)])
            value, pullback = jax.vjp(loss, *args)
            wanted = jax.tree.leaves(pullback(jnp.float32(1.0)))
        np.testing.assert_allclose(outputs[0], value, rtol=1e-6)
        for got, want in zip(gradients, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_the_peak_of_a_division_is_near_that_of_its_plan():
    """Of layers that XLA has little to fuse in; `memory` replays the plan equation by equation."""
    loss, _ = perceptron(1)
    shapes = [jax.ShapeDtypeStruct((64, 256), "float32")] * 24, jax.ShapeDtypeStruct((512, 64), "float32")
    mine = Planner(Problem.of(aot.function(loss, argnums=(0, 1)).trace(*shapes).graph, ROOFLINE))
    found = divided(mine)
    assert len(found) > 8
    for division in found:
        peak = mine.replay(Plan.of(mine.graph, division.saved, dropped=division.dropped)).peak_bytes
        assert 0.85 * peak <= division.peak_bytes <= 1.25 * peak


# ------------------------------------------------------------------------------------------------ equal stretches


def test_the_figures_of_alike_stretches_are_those_that_each_has_by_itself():
    def loss(layers, x):
        for w in layers:
            x = x + jnp.tanh(x @ w) @ w.T
        return jnp.sum(x**2)

    graph = aot.function(loss).trace(jnp.ones((6, 8, 8)), jnp.ones((16, 8))).graph
    row = Stretches(Problem.of(graph).timed(ROOFLINE), 20, 0.0)
    alike = Alike(row)
    assert len(set(alike.first)) < 0.6 * len(alike.first)
    for number, stretch in enumerate(row.stretches):
        exports = frozenset(stretch.exports)
        for inside in (frozenset(), frozenset(stretch.values[:1]), frozenset(stretch.values)):
            for outer, inner in ((exports, frozenset()), (frozenset(), exports)):
                for drops in (False, True):
                    mine = figures(row, stretch, inside, outer, inner, drops)
                    assert alike.figures(number, inside, outer, inner, drops) == mine
