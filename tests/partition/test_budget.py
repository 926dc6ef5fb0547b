"""A planner's plans close, keep to demands and to their own figures, and those of its front are the best there are."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from benchmarks.polish import polished
from jointcut import aot
from jointcut.partition import Plan, parse, show, split
from jointcut.partition.errors import PlanError
from jointcut.partition.lower.emit import emit
from jointcut.partition.lower.memory.replay import Replayer
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.lower.verify import verify_structure
from jointcut.partition.plans.backend import CPU
from jointcut.partition.plans.plan import validated
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.prices.rules import CheckpointPolicy, Constraint
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.candidates import Candidate, first_within, ranked
from jointcut.partition.search.front import Choice, sampled, spread
from programs import CORPUS, EVERY_PROGRAM

ROOFLINE = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
NAMES = [p.name for p in CORPUS if p.name != "integers_to_differentiate"]  # that one cannot be traced
SOME = [
    "convolutions", "cumulative_and_sorted", "dropout_in_scan", "elman", "gated_recurrent_unit", "mixture_of_experts",
    "nested_scans", "reparametrised_sample", "scan_over_layers", "unrolled_layers",
]  # fmt: skip
LOOPED = ["dropout_in_scan", "gated_recurrent_unit", "nested_scans", "scan_over_layers"]
AMPLE = 60.0  # seconds for an integer program that takes milliseconds
quick = settings(deadline=None, max_examples=40 if EVERY_PROGRAM else 20, derandomize=True, database=None)
every_program = pytest.mark.parametrize("name", NAMES)
some_programs = pytest.mark.parametrize("name", SOME)
some_loops = pytest.mark.parametrize("name", LOOPED)


@dataclass(frozen=True)
class PlainSeconds:
    """An op takes what its line says, else a second; bytes are written in almost no time."""

    byte_seconds: float = 1e-12

    def seconds(self, graph, op):
        return 1.0

    def saving_seconds(self, num_bytes):
        return num_bytes * self.byte_seconds


@pytest.fixture(scope="module")
def planner(traced):
    """From the name of a program to its planner, its menu worked out once."""
    known = {}

    def planned(name):
        if name not in known:
            known[name] = Planner(Problem.of(traced(name).graph, ROOFLINE, backend=CPU))
        return known[name]

    return planned


# ------------------------------------------------------------------------------------ what ranking leaves

PEAKS, TIMES = st.integers(0, 6), st.integers(0, 6).map(float)
candidates = st.lists(st.tuples(PEAKS, TIMES), max_size=12).map(
    lambda pairs: [Candidate(Plan(str(n), (), (), ()), *pair) for n, pair in enumerate(pairs)]
)


@quick
@given(candidates, st.randoms())
def test_ranking_leaves_what_no_other_betters(menu, order):
    found = ranked(menu)
    assert all(a.peak_bytes > b.peak_bytes and a.step_seconds < b.step_seconds for a, b in itertools.pairwise(found))
    assert all(c in menu for c in found)
    for c in menu:
        assert any(f.peak_bytes <= c.peak_bytes and f.step_seconds <= c.step_seconds for f in found)
    order.shuffle(menu)
    assert [(c.peak_bytes, c.step_seconds) for c in ranked(menu)] == [(c.peak_bytes, c.step_seconds) for c in found]


@quick
@given(st.sets(st.integers(1, 1000), max_size=12), st.floats(0.3, 3), st.floats(0, 3000))
def test_the_first_that_fits_is_found_in_three_looks_where_peaks_tell_what_is_expected(peaks, share, most):
    row = [Candidate(Plan("", (), (), ()), peak, 0.0) for peak in sorted(peaks, reverse=True)]
    looks: list[int] = []

    def expected(candidate):
        looks.append(candidate.peak_bytes)
        return share * candidate.peak_bytes

    at = first_within(row, most, expected)
    assert at == next((i for i, c in enumerate(row) if share * c.peak_bytes <= most), len(row))
    assert len(looks) == len(set(looks)) <= 3


@some_programs
def test_the_ranked_menu_falls_in_peak_rises_in_time_and_betters_all_else(name, planner):
    menu = planner(name).menu
    found = ranked(menu)
    assert all(a.peak_bytes > b.peak_bytes and a.step_seconds <= b.step_seconds for a, b in itertools.pairwise(found))
    for c in menu:
        assert any(f.peak_bytes <= c.peak_bytes and f.step_seconds <= c.step_seconds for f in found)
    assert list(menu) == sorted(menu, key=lambda c: (c.step_seconds, c.peak_bytes))


@quick
@given(st.sets(st.integers(0, 10**9), min_size=1), st.integers(2, 30))
def test_a_spread_holds_both_ends_in_order_and_no_more_than_asked_for(sizes, count):
    choices = [Choice(size, 0.0, np.zeros(0)) for size in sorted(sizes)]
    found = spread(choices, count)
    assert found[0] is choices[0] and found[-1] is choices[-1]
    assert len(found) <= max(count, 2) and [c.bytes for c in found] == sorted({c.bytes for c in found})
    assert len(choices) > count or found == choices


# ------------------------------------------------------------------------------------ every plan of a menu


@every_program
def test_every_plan_of_a_menu_closes_and_its_halves_fit_together(name, planner):
    mine = planner(name)
    plans = list(mine.plans())
    assert plans[0].strategy == "min_cut"
    assert max(Counter(p.key for p in plans).values()) == 1
    for plan in plans:
        assert validated(mine.problem, plan) == plan
        verify_structure(mine.graph, emit(mine.graph, schedule(mine.problem, plan)))
        assert 0 <= plan.bound_seconds <= plan.seconds < math.inf


@some_programs
def test_the_menu_holds_each_plan_with_its_own_figures(name, planner, traced):
    mine = planner(name)
    byte = mine.model.saving_seconds(1)
    assert mine.model == replace(ROOFLINE, fresh_bytes_per_s=None)  # so little is kept that no memory is new
    for c in mine.menu:
        assert c.peak_bytes == Replayer(mine.graph).rows(schedule(mine.problem, c.plan)).peak_bytes
        assert c.plan.peak_bytes is None  # a peak of the whole step is promised once its arguments are known
        assert c.step_seconds == pytest.approx(c.plan.seconds + byte * handed_bytes(traced(name), c.plan), abs=2 * byte)
        assert c == mine.candidate(mine.priced(c.plan))
    listed = {p.key for p in mine.plans()}
    assert listed == {c.plan.key for c in mine.menu if not c.plan.kept_steps}


@some_programs
def test_the_menu_keeps_shares_of_the_steps_of_the_fastest_plan_in_segments(name, planner):
    mine = planner(name)
    fastest = next((c.plan for c in ranked(c for c in mine.menu if not c.plan.kept_steps) if c.plan.segments), None)
    expected = {mine.partly(fastest, share).key for share in (0.75, 0.5, 0.25)} if fastest else set()
    assert {c.plan.key for c in mine.menu if c.plan.kept_steps} == expected - {fastest and fastest.key}


def handed_bytes(traced, plan):
    program = traced.program
    return split(program.closed, program.roles, lambda graph: plan, graph=traced.graph).residual_bytes


@some_programs
def test_a_plan_hands_over_as_many_bytes_as_it_says(name, planner, traced):
    for c in planner(name).menu:
        if not c.plan.segments:
            assert handed_bytes(traced(name), c.plan) == c.plan.bytes_saved, c.plan.strategy


@some_loops
def test_a_plan_in_segments_hands_over_as_many_bytes_as_it_says(name, planner, traced):
    plans = [c.plan for c in planner(name).menu if c.plan.segments]
    assert [p.bytes_saved for p in plans] == [handed_bytes(traced(name), p) for p in plans]


@some_programs
def test_more_room_never_gives_a_slower_plan_and_what_is_given_fits(name, planner):
    mine = planner(name)
    least, most = mine.ranked[-1].peak_bytes, mine.ranked[0].peak_bytes
    assert mine.fastest(least - 1) is None
    assert mine.fastest(most) is mine.ranked[0]
    found = [(room, mine.fastest(room)) for room in np.linspace(least, most, 25)]
    assert all(c.peak_bytes <= room for room, c in found)
    assert all(a.step_seconds >= b.step_seconds for (_, a), (_, b) in itertools.pairwise(found))
    for _, c in found:
        assert c.peak_bytes == Replayer(mine.graph).rows(schedule(mine.problem, c.plan)).peak_bytes
        assert validated(mine.problem, c.plan) == c.plan


@some_programs
def test_a_budget_finds_what_it_would_find_if_all_plans_were_replayed_and_replays_fewer(name, planner):
    """Its plan, and the next larger one that no other betters."""
    mine = planner(name)
    row, counts = mine.ranked, []
    for room in np.linspace(row[-1].peak_bytes, row[0].peak_bytes, 7):
        new = Planner(mine.problem)
        found = new._menu.row(room, lambda c: c.peak_bytes)
        counts.append(new.num_replayed)
        at, expected = (first_within(r, room, lambda c: c.peak_bytes) for r in (found, row))
        assert (found[at].step_seconds, at > 0) == (row[expected].step_seconds, expected > 0)
        assert not at or found[at - 1].peak_bytes == row[expected - 1].peak_bytes
        assert new.small(room, 1.0)[0].peak_bytes == row[-1].peak_bytes
    most = 0.5 if name in ("unrolled_layers", "scan_over_layers", "mixture_of_experts") else 1.0
    assert np.mean(counts) <= most * len(mine.menu)


@some_programs
def test_the_smallest_plan_within_a_time_is_that_of_all_plans_and_fewer_are_replayed(name, planner):
    mine = planner(name)
    for row in mine.ranked:
        new = Planner(mine.problem)
        found = new.smallest(row.step_seconds)
        assert found is not None and (found.peak_bytes, found.step_seconds) == (row.peak_bytes, row.step_seconds)
        has_segments = any(plan.segments for plan in new._menu.plans)
        assert has_segments or new.num_replayed <= len(mine.menu)
    assert mine.smallest(mine.ranked[0].step_seconds * 0.999 - 1e-9) is None


@settings(deadline=None, max_examples=10 if EVERY_PROGRAM else 4, derandomize=True, database=None)
@given(st.lists(st.sampled_from([8, 16, 24, 32]), min_size=24, max_size=30), st.randoms())
def test_whatever_is_given_is_used(widths, order):
    """On chains of many layers: for nine of ten budgets between the least and the fastest plan, to 85 % at least."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    weights = [jax.ShapeDtypeStruct(pair, "float32") for pair in itertools.pairwise([16, *widths])]
    traced = aot.function(loss).trace(weights, jax.ShapeDtypeStruct((512, 16), "float32"))
    mine = Planner(Problem.of(traced.graph, ROOFLINE, backend=CPU))
    least, most = mine.ranked[-1].peak_bytes, mine.ranked[0].peak_bytes
    rooms = np.linspace(least, most, 20).tolist()
    order.shuffle(rooms)
    found = sorted((room, mine.fastest(room)) for room in rooms)
    assert np.mean([c.peak_bytes >= 0.85 * room for room, c in found]) >= 0.9
    assert all(a.step_seconds >= b.step_seconds for (_, a), (_, b) in itertools.pairwise(found))


@some_programs
def test_samples_of_a_front_are_its_best_cuts_from_end_to_end(name, planner):
    whole = planner(name).front
    found = sampled(whole, 9)
    assert (found[0].bytes, found[-1].bytes) == (whole.choices[0].bytes, whole.choices[-1].bytes)
    assert len(found) <= 18
    assert all(a.bytes < b.bytes and a.seconds > b.seconds for a, b in itertools.pairwise(found))


@some_programs
def test_a_planner_made_anew_has_the_same_menu(name, planner, traced):
    assert Planner(Problem.of(traced(name).graph, ROOFLINE, backend=CPU)).menu == planner(name).menu


# ------------------------------------------------------------------------------------ the front


@some_programs
def test_more_bytes_never_take_more_seconds(name, planner):
    front = planner(name).front
    first, last = front.choices[0].bytes, front.choices[-1].bytes
    budgets = sorted({*np.linspace(first, last + 1, 40).astype(int).tolist(), *(c.bytes for c in front.choices)})
    found = [front.best(budget) for budget in budgets]
    assert all(c.bytes <= budget for c, budget in zip(found, budgets, strict=True))
    assert all(a.seconds >= b.seconds for a, b in itertools.pairwise(found))
    assert front.best(first - 1) is None


@some_programs
def test_the_plan_of_a_choice_costs_what_the_choice_says(name, planner):
    mine = planner(name)
    for choice in mine.front.choices:
        plan = mine.plan(choice, "front")
        assert plan.bytes_saved <= choice.bytes
        assert plan.seconds == pytest.approx(choice.seconds, rel=1e-6, abs=1e-15)
        assert all(record.reason for record in plan.saved)


@st.composite
def graphs(draw, names=("sin", "exp", "split", "dot_general", "reduce_sum"), most=12):
    """A joint program of at most `most` forward values, as text; every op says what it takes."""
    lines, values, op = ["primal %0:int8[4]", "cotangent %1:int8[]"], [0], 0
    count = draw(st.integers(1, 9))
    while len(values) < most and op < count:
        made = [2 + len(values) - 1 + i for i in range(draw(st.integers(1, min(2, most - len(values)))))]
        types = " ".join(f"%{v}:int8[{draw(st.integers(0, 9))}]" for v in made)
        read = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2))
        name = draw(st.sampled_from(names))
        seconds = 0.25 * draw(st.integers(0, 8))
        lines.append(f"{types} = {name} {' '.join(f'%{v}' for v in read)} takes {seconds}s")
        values, op = values + made, op + 1
    last = len(values) + 1
    wanted = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2, unique=True))
    lines += ["backward:", f"%{last}:int8[4] = mul %1 {' '.join(f'%{v}' for v in wanted)}"]
    lines += [*(f"output %{v}" for v in outputs), f"gradient %{last}"]
    return parse("\n".join(lines))


def closing_plans(mine):
    """(bytes, seconds) of every set of saved values that closes under the rules which are not of cost."""
    early = [v.id for v in mine.graph.values if v.maker is not None and not mine.problem.sides.is_late(v.id)]
    savable = [v for v in early if not mine.problem.verdicts[v].not_saved]
    for size in range(len(savable) + 1):
        for saved in itertools.combinations(savable, size):
            try:
                plan = Plan.of(mine.graph, saved)
            except PlanError:
                continue
            again = {v for i in plan.recomputed for v in mine.graph.ops[i].outputs} - set(saved)
            if not any(
                mine.problem.verdicts[v].not_recomputed and not mine.problem.verdicts[v].is_costly for v in again
            ):
                yield sum(mine.problem.prices[v] for v in saved), sum(mine.problem.seconds[i] for i in plan.recomputed)


@settings(quick, max_examples=30)
@given(graphs(most=9))
def test_the_front_is_as_fast_as_the_fastest_of_all_plans_at_every_number_of_bytes(graph):
    mine = Planner(Problem.of(graph, PlainSeconds()))
    plans = set(closing_plans(mine))
    for budget in sorted({b for b, _ in plans})[:12]:
        fastest = min(s for b, s in plans if b <= budget)
        choice = polished(mine.front, budget, AMPLE)
        plan = mine.plan(choice, "front")
        assert plan.bytes_saved <= budget
        assert plan.seconds == choice.seconds == fastest
        assert plan.bound_seconds <= fastest
    assert mine.front.best(min(b for b, _ in plans) - 1) is None


@quick
@given(graphs(), st.sampled_from([0.01, 0.1, 0.5]))
def test_a_byte_is_not_saved_for_less_than_it_takes_to_write(graph, byte_seconds):
    """The last choice is the best there is at that price; what lies beyond would pay more for its bytes."""
    mine = Planner(Problem.of(graph, PlainSeconds(byte_seconds)))
    chosen = mine.front.choices[-1]
    whole = Planner(Problem.of(graph, PlainSeconds())).front
    least = min(c.seconds + byte_seconds * c.bytes for c in whole.choices)
    assert chosen.seconds + byte_seconds * chosen.bytes == pytest.approx(least)


# ------------------------------------------------------------------------------------ demands


def demanded(graph, constraints):
    """The menu under demands; none where they contradict each other."""
    try:
        return list(Planner(Problem.of(graph, PlainSeconds(), constraints)).plans())
    except PlanError:
        return []


def needed_in(graph, sides, plan):
    """What the backward reads, itself or to run ops of the forward."""
    return sides.wanted | {v for i in (*plan.recomputed, *plan.deferred) for v in graph.ops[i].inputs}


@quick
@given(graphs(), st.data())
def test_what_must_be_saved_is_saved_where_it_is_needed(graph, data):
    sides = Planner(Problem.of(graph, PlainSeconds())).problem.sides
    made = [v.id for v in graph.values if v.maker is not None and not sides.is_late(v.id)]
    chosen = data.draw(st.sets(st.sampled_from(made), min_size=1))
    for plan in demanded(graph, [Constraint(v, CheckpointPolicy.MUST_SAVE, "told") for v in chosen]):
        assert all(v in plan.values or v not in needed_in(graph, sides, plan) for v in chosen)
        assert {s.reason for s in plan.saved if s.value in chosen} <= {"not recomputed: told"}


@quick
@given(graphs(), st.data())
def test_what_must_be_recomputed_is_never_saved(graph, data):
    sides = Planner(Problem.of(graph, PlainSeconds())).problem.sides
    made = [v.id for v in graph.values if v.maker is not None and not sides.is_late(v.id)]
    chosen = data.draw(st.sets(st.sampled_from(made), min_size=1))
    plans = demanded(graph, [Constraint(v, CheckpointPolicy.MUST_RECOMPUTE, "told") for v in chosen])
    assume(plans)
    for plan in plans:
        assert not chosen & set(plan.values), plan.strategy


def free_to_choose(mine):
    """Values that may be saved and may run again, at whatever cost."""
    early = [v.id for v in mine.graph.values if v.maker is not None and not mine.problem.sides.is_late(v.id)]
    rules = [(v, mine.problem.verdicts[v]) for v in early]
    return [v for v, rule in rules if not rule.not_saved and (rule.is_costly or not rule.not_recomputed)]


@some_programs
def test_what_must_be_saved_is_handed_over_by_the_halves_of_every_plan(name, traced):
    mine, keep = with_saves(traced(name).graph)
    for plan in mine.plans():
        assert all(v in plan.values or v not in needed_in(mine.graph, mine.problem.sides, plan) for v in keep)
        assert plan.segments or keep & set(plan.values) <= handed_values(mine, plan), plan.strategy


@some_loops
def test_what_must_be_saved_is_handed_over_though_its_loop_runs_in_segments(name, traced):
    mine, keep = with_saves(traced(name).graph)
    for plan in mine.plans():
        assert keep & set(plan.values) <= handed_values(mine, plan), plan.strategy


def with_saves(graph):
    """A planner that must save some values, and these."""
    keep = set(free_to_choose(Planner(Problem.of(graph, ROOFLINE)))[::9])
    return Planner(Problem.of(graph, ROOFLINE, [Constraint(v, CheckpointPolicy.MUST_SAVE, "told") for v in keep])), keep


def handed_values(mine, plan):
    return set(schedule(mine.problem, plan).handed)


@some_programs
def test_what_must_be_recomputed_is_saved_by_no_plan(name, traced):
    """Of values that are not heavy: the next test is of the rest."""
    graph = traced(name).graph
    free = Planner(Problem.of(graph, ROOFLINE))
    drop = {v for v in free_to_choose(free)[4::9] if not free.problem.verdicts[v].is_costly}
    mine = Planner(Problem.of(graph, ROOFLINE, [Constraint(v, CheckpointPolicy.MUST_RECOMPUTE, "told") for v in drop]))
    for plan in mine.plans():
        assert not drop & set(plan.values), plan.strategy


def test_a_demand_to_recompute_goes_before_a_rule_of_cost():
    graph = parse(
        """
        primal %0:float32[8]
        cotangent %1:float32[]
        %2:float32[8] = dot_general %0 takes 0.5s
        %3:float32[] = reduce_sum %2
        backward:
        %4:float32[8] = mul %1 %2
        output %3
        gradient %4
        """
    )
    (plan,) = {
        p.values
        for p in Planner(
            Problem.of(graph, PlainSeconds(), [Constraint(2, CheckpointPolicy.MUST_RECOMPUTE, "told")])
        ).plans()
    }
    assert plan == ()


# ------------------------------------------------------------------------------------ what happens once


@quick
@given(graphs(names=("sin", "dot_general", "psum", "all_gather", "io_callback")), st.data())
def test_effects_never_run_again(graph, data):
    marked = data.draw(st.sets(st.integers(0, len(graph.ops) - 2)))
    text = []
    for n, line in enumerate(show(graph).splitlines()):
        is_marked = " takes " in line and n - 2 in marked
        text.append(line.replace(" takes ", " effects takes ") if is_marked else line)
    graph = parse("\n".join(text))
    for plan in demanded(graph, ()):
        for i in plan.recomputed:
            assert not graph.ops[i].effects, plan


def test_collectives_within_an_op_never_run_again():
    """A shard_map is one op, which every device must enter."""
    graph = parse(
        """
        primal %0:float32[64]
        cotangent %1:float32[]
        %2:float32[64] = shard_map %0 takes 1e-9s holds psum sin
        %3:float32[64] = sin %2 takes 1e-9s
        backward:
        %4:float32[64] = mul %1 %2
        output %3
        gradient %4
        """
    )
    assert all(0 not in plan.recomputed for plan in demanded(graph, ()))


def test_notes_and_writes_of_a_program_never_run_again():
    def loss(x, ref):
        for _ in range(6):
            x = jnp.exp(jnp.sin(x))
            jax.debug.callback(lambda: None)
            ref[...] += lax.stop_gradient(jnp.sum(x))
            x = jnp.tanh(x) * x
        return jnp.sum(x)

    graph = aot.function(loss).trace(jnp.ones((32, 32)), jax.new_ref(jnp.float32(0))).graph
    mine = Planner(Problem.of(graph, ROOFLINE, backend=CPU))
    assert sum(op.effects for op in graph.ops) >= 12
    for plan in mine.plans():
        assert not any(graph.ops[i].effects for i in plan.recomputed)
    assert any(plan.recomputed for plan in mine.plans())


# ------------------------------------------------------------------------------------ segments


@pytest.mark.parametrize("length", [1, 2, 10, 100])
def test_a_loop_runs_in_segments_where_that_keeps_fewer_bytes(length):
    def loss(w, x):
        return jnp.sum(lax.scan(lambda h, _: (jnp.sin(jnp.tanh(h @ w) @ w), None), x, None, length=length)[0])

    matrix = jax.ShapeDtypeStruct((16, 16), "float32")
    traced = aot.function(loss).trace(matrix, matrix)
    mine = Planner(Problem.of(traced.graph, ROOFLINE))
    (plain,) = [p for p in mine.plans() if p.strategy == "min_cut"]
    segmented = list(mine.in_segments(plain))
    assert bool(segmented) == (length > 1)
    for plan in segmented:
        assert plan.strategy == "min_cut, segments"
        assert plan.seconds > plain.seconds
        assert mine.replay(plan).peak_bytes < mine.replay(plain).peak_bytes
