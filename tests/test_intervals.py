"""The schedules of the interval model are valid, and as short as trying all of them finds."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise, product
from random import Random

import pytest

from benchmarks.evict import evict
from benchmarks.intervals import Instance, Schedule, solve
from jointcut.partition.errors import GraphError, PlanError
from jointcut.partition.program.text import parse

with_solver = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-Tools is not installed")

# Two values of a chain are read again behind it, in the order in which a backward does.
CHAIN = """
    primal %0:float32[4] "x"
    %1:?[]/40B = first %0 takes 2.0s
    %2:?[]/40B = second %1 takes 1.0s
    %3:?[]/40B = third %2 takes 4.0s
    %4:?[]/8B = back %3 %2 takes 1.0s
    %5:?[]/8B = again %4 %1 takes 1.0s
    output %5
"""


def drawn(seed: int, most: int = 6) -> Instance:
    """A random instance of up to so many ops; some make two values or none, or may not run again."""
    random = Random(seed)
    count = random.randint(2, most)
    made: list[int] = []
    reads, makes = [], []
    for _ in range(count):
        reads.append(tuple(random.sample(made, min(len(made), random.choice((1, 1, 2, 3))))))
        makes.append(tuple(range(len(made), len(made) + random.choice((0, 1, 1, 1, 1, 2)))))
        made += makes[-1]
    return Instance(
        names=tuple(f"op{i}" for i in range(count)),
        seconds=tuple(random.choice((0.0, 0.125, 1.0, 2.5, 3.0)) for _ in range(count)),
        reads=tuple(reads),
        makes=tuple(makes),
        value_bytes=tuple(random.choice((0, 2, 4, 6, 10, 30)) for _ in made),
        kept=frozenset(random.sample(made, min(len(made), random.choice((0, 1, 2))))),
        once=frozenset(random.sample(range(count), random.choice((0, 0, 1)))),
    )


def chained(seed: int, count: int = 6) -> Instance:
    """A random instance whose second half reads the first in reverse, as a backward does; here greed may fail.

    Each op makes one value that is read, and some a second that is not; any of them may be kept.
    """
    random, half = Random(seed), count // 2
    reads: list[tuple[int, ...]] = []
    for i in range(count):
        values = {i - 1} if i else set()
        if i >= half:
            values |= {count - 1 - i, *random.sample(range(i), random.randint(0, 1))}
        elif i > 1:
            values |= set(random.sample(range(i), random.randint(0, 1)))
        reads.append(tuple(sorted(v for v in values if v < i)))
    beside = {i: count + k for k, i in enumerate(i for i in range(count) if random.random() < 0.4)}
    total = count + len(beside)
    return Instance(
        names=tuple(f"op{i}" for i in range(count)),
        seconds=tuple(float(random.choice((1, 2, 3, 5, 8, 13))) for _ in range(count)),
        reads=tuple(reads),
        makes=tuple((i, beside[i]) if i in beside else (i,) for i in range(count)),
        value_bytes=tuple(random.choice((1, 2, 3, 5, 8, 13)) for _ in range(total)),
        kept=frozenset(random.sample(range(total), random.randint(0, 2))),
    )


def peak_of(instance: Instance, runs: tuple[int, ...]) -> int:
    """The peak, by marking for each reader the places from its input's maker to itself."""
    held: list[set[int]] = [set(instance.makes[i]) for i in runs]
    latest: dict[int, int] = {}
    for place, i in enumerate(runs):
        for v in instance.reads[i]:
            for between in held[latest[v] : place + 1]:
                between.add(v)
        latest |= dict.fromkeys(instance.makes[i], place)
    for v in instance.kept:
        for after in held[latest[v] :]:
            after.add(v)
    return max(sum(instance.value_bytes[v] for v in values) for values in held)


def all_runs(instance: Instance, copies: int) -> Iterator[tuple[int, ...]]:
    """Every sequence of the model: in front of an op's first run, any ops before it, in order, each once."""
    count = len(instance.names)
    choices = [
        [stages for stages in product(range(i + 1, count + 2), repeat=copies - 1) if rising(stages, count + 1)]
        if i not in instance.once
        else [(count + 1,) * (copies - 1)]
        for i in range(count)
    ]
    for again in product(*choices):
        runs: list[int] = []
        for stage in range(count + 1):
            runs += [i for i in range(min(stage, count)) if stage in again[i]]
            runs += [stage] if stage < count else []
        yield tuple(runs)


def rising(stages: tuple[int, ...], never: int) -> bool:
    return all(a < b or a == b == never for a, b in pairwise(stages))


def front(instance: Instance, copies: int) -> list[tuple[int, float]]:
    """Peak and seconds of every sequence."""
    everything = all_runs(instance, copies)
    return [(peak_of(instance, runs), math.fsum(instance.seconds[i] for i in runs)) for runs in everything]


def carried_out(instance: Instance, schedule: Schedule) -> int:
    """The peak of a schedule with its frees, by doing what it says."""
    alive: set[int] = set()
    peak = 0
    for i, frees in zip(schedule.runs, schedule.frees, strict=True):
        assert set(instance.reads[i]) <= alive
        assert not set(instance.makes[i]) & alive, "a value is made while a copy of it is alive"
        alive |= set(instance.makes[i])
        peak = max(peak, sum(instance.value_bytes[v] for v in alive))
        assert set(frees) <= alive
        alive -= set(frees)
    assert alive == instance.kept
    return peak


@pytest.mark.parametrize("seed", range(40))
def test_a_replay_counts_what_is_alive_at_each_run(seed):
    random, instance = Random(seed), drawn(seed)
    everything = list(all_runs(instance, copies=2))
    for runs in random.sample(everything, min(5, len(everything))):
        schedule = Schedule.of(instance, runs)
        assert schedule.peak_bytes == instance.peak_bytes(runs) == peak_of(instance, runs)
        assert schedule.seconds == math.fsum(instance.seconds[i] for i in runs)
        assert schedule.peak_bytes >= instance.floor_bytes


@pytest.mark.parametrize("seed", range(20))
def test_what_the_caller_holds_counts_nothing(seed):
    plain = drawn(seed)
    caller = len(plain.value_bytes)
    reads = tuple((*values, caller) for values in plain.reads)
    held = replace(plain, reads=reads, value_bytes=(*plain.value_bytes, 70), kept=plain.kept | {caller})
    assert (held.floor_bytes, held.nominal_bytes) == (plain.floor_bytes, plain.nominal_bytes)
    for budget in range(plain.floor_bytes, plain.nominal_bytes + 1, 7):
        assert evict(held, budget) == evict(plain, budget)


@pytest.mark.parametrize("seed", range(60))
def test_the_frees_of_a_replay_leave_every_input_alive_until_it_is_read(seed):
    instance = drawn(seed)
    for runs in Random(seed).choices(list(all_runs(instance, copies=2)), k=5):
        schedule = Schedule.of(instance, runs)
        assert carried_out(instance, schedule) == schedule.peak_bytes


QUESTIONS = {
    **{
        f"drawn{seed}x{copies}": (drawn(seed, 6 if copies < 3 else 4), copies)
        for copies in (1, 2, 3)
        for seed in range(8)
    },
    **{f"chained{seed}": (chained(seed), 2) for seed in (*range(24), 56, 182)},
}


@with_solver
@pytest.mark.parametrize("question", QUESTIONS)
def test_no_sequence_of_runs_beats_the_solver(question):
    instance, copies = QUESTIONS[question]
    tried = front(instance, copies)
    for budget in sorted({peak for peak, _ in tried} | {instance.floor_bytes})[:4]:
        within = [seconds for peak, seconds in tried if peak <= budget]
        outcome = solve(instance, budget, copies=copies)
        if not within:
            assert (outcome.status, outcome.schedule, outcome.bound_seconds) == ("infeasible", None, math.inf)
            continue
        assert outcome.status == "optimal" and outcome.schedule is not None
        assert outcome.schedule.seconds == pytest.approx(min(within), rel=1e-8)
        assert outcome.bound_seconds == pytest.approx(min(within), rel=1e-7)
        assert outcome.bound_seconds <= min(within) * (1 + 1e-14)
        assert carried_out(instance, outcome.schedule) == outcome.schedule.peak_bytes <= budget
        assert not {i for i in instance.once if outcome.schedule.runs.count(i) > 1}
        assert max(outcome.schedule.runs.count(i) for i in range(len(instance.names))) <= copies


def any_order(instance: Instance, runs: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every sequence with first runs in order and each op at most twice, reruns wherever they may be."""
    first = len(set(runs))
    if first == len(instance.names):
        yield runs
    else:
        yield from any_order(instance, (*runs, first))
    for i in range(first):
        if runs.count(i) < 2 and i not in instance.once:
            yield from any_order(instance, (*runs, i))


@pytest.mark.parametrize("seed", range(40))
def test_on_small_graphs_no_other_order_of_the_reruns_is_better(seed):
    instance = drawn(seed + 2000, most=5)
    tried = front(instance, copies=2)
    for runs in any_order(instance):
        seconds = math.fsum(instance.seconds[i] for i in runs)
        peak = instance.peak_bytes(runs)
        assert any(p <= peak and s <= seconds for p, s in tried)


@with_solver
@pytest.mark.parametrize("seed", range(6))
def test_more_budget_is_never_slower_and_below_the_floor_nothing_runs(seed):
    instance = drawn(seed + 1000, most=12)
    low, high = instance.floor_bytes, instance.nominal_bytes
    assert solve(instance, low - 1).status == "infeasible"
    seconds = math.inf
    for budget in [low + (high - low) * k // 5 for k in range(6)]:
        outcome = solve(instance, budget)
        found = outcome.schedule.seconds if outcome.schedule else math.inf
        assert outcome.status in ("optimal", "infeasible")
        assert found <= seconds * (1 + 1e-8)
        seconds = found
    assert seconds == instance.nominal_seconds


@with_solver
def test_the_same_question_has_the_same_answer():
    instance = drawn(7, most=6)
    budget = (instance.floor_bytes + instance.nominal_bytes) // 2
    assert solve(instance, budget) == solve(instance, budget)


@with_solver
@pytest.mark.parametrize("seed", range(12))
def test_within_no_time_an_outcome_claims_no_more_than_it_has(seed):
    instance = drawn(seed + 3000, most=5)
    tried = front(instance, copies=2)
    for budget in sorted({peak for peak, _ in tried})[:3]:
        outcome = solve(instance, budget, seconds_limit=0.0)
        best = min(seconds for peak, seconds in tried if peak <= budget)
        assert outcome.bound_seconds <= best * (1 + 1e-14)
        assert (outcome.status == "unknown") == (outcome.schedule is None)
        if outcome.schedule:
            assert carried_out(instance, outcome.schedule) <= budget
            assert outcome.schedule.seconds >= best
            assert outcome.status != "optimal" or outcome.schedule.seconds == pytest.approx(best, rel=1e-8)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_evicted_leaves_a_valid_schedule_within_the_budget(seed):
    instance = drawn(seed + 4000, most=14)
    low, high = instance.floor_bytes, instance.nominal_bytes
    for budget in [low + (high - low) * k // 4 for k in range(5)]:
        schedule = evict(instance, budget)
        if schedule:
            assert carried_out(instance, schedule) == schedule.peak_bytes <= budget
            assert max(map(schedule.runs.count, schedule.runs)) <= 2
            assert not {i for i in instance.once if schedule.runs.count(i) > 1}
    nominal = Schedule.of(instance, range(len(instance.names)))
    assert evict(instance, high) == evict(instance, high, copies=1) == nominal
    assert evict(instance, high - 1, copies=1) is None


def test_ops_that_take_nothing_are_evicted_all_the_same():
    free = replace(Instance.of(parse(CHAIN)), seconds=(0.0,) * 5)
    schedule = evict(free, 100)
    assert schedule is not None and (schedule.seconds, schedule.peak_bytes) == (0.0, 88)


@with_solver
def test_a_graph_without_a_backward_is_scheduled_within_its_budget():
    instance = Instance.of(parse(CHAIN))
    assert (instance.nominal_bytes, instance.nominal_seconds, instance.floor_bytes) == (128, 9.0, 88)
    assert solve(instance, 128).bound_seconds == 9.0
    outcome = solve(instance, 100)
    assert outcome.schedule == Schedule((0, 1, 2, 3, 0, 4), ((), (1,), (), (2, 3), (), (1, 4)), 11.0, 88)


def test_a_graph_gives_what_its_ops_take_read_and_make():
    graph = parse(CHAIN)
    instance = Instance.of(graph)
    assert instance.names == ("first", "second", "third", "back", "again")
    assert instance.reads == ((), (1,), (2,), (3, 2), (4, 1))
    assert instance.value_bytes == (0, 40, 40, 40, 8, 8)
    assert instance.kept == {5}
    bare = replace(graph, ops=tuple(replace(op, seconds=None) for op in graph.ops))
    assert Instance.of(bare, lambda _, op: 1.0 + op.id).seconds == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert Instance.of(graph, lambda _, op: 1.0 + op.id).seconds == instance.seconds


def test_an_op_with_effects_runs_once():
    instance = Instance.of(parse(CHAIN.replace("%0 takes", "%0 effects takes")))
    assert instance.once == {0}


@with_solver
def test_only_what_the_caller_gets_is_held_of_what_one_op_makes():
    aside = "%6:?[]/8B %7:?[]/60B = aside %0 takes 1.0s\n    %1:"
    instance = Instance.of(parse(CHAIN.replace("%1:", aside, 1) + "    output %6"))
    outcome = solve(instance, 108)
    assert outcome.schedule is not None
    assert (outcome.schedule.seconds, outcome.schedule.peak_bytes) == (12.0, 96)


@with_solver
def test_what_runs_once_is_kept_instead_or_the_budget_is_refused():
    again = Instance.of(parse(CHAIN))
    once = replace(again, once=frozenset({0}))
    outcome = solve(again, 100)
    assert outcome.schedule is not None and outcome.schedule.runs.count(0) == 2
    assert solve(once, 100).status == "infeasible"
    assert solve(once, 128).status == "optimal"


def refusal(error: type[Exception], act) -> str:
    with pytest.raises(error) as caught:
        act()
    return str(caught.value)


def test_a_graph_that_is_no_instance_is_refused_with_a_cure():
    unpriced = "primal %0:float32[]\n%1:float32[] = sin %0"
    assert refusal(GraphError, lambda: Instance.of(parse(unpriced))) == (
        "op 0 (sin) has no seconds.\nWrite `takes 0.0125s` behind it, or pass a model that prices ops."
    )
    loop = "loop 1 x2\nprimal %0:float32[]\nspare %1:float32[]@1\noutput %0"
    assert refusal(GraphError, lambda: Instance.of(parse(loop))) == (
        "the graph has a loop.\nPass a graph of ops in one list."
    )
    late = "%0:float32[] = sin %1 takes 1s\n%1:float32[] = iota takes 1s"
    assert refusal(GraphError, lambda: Instance.of(parse(late))) == (
        "op 0 (sin) reads %1 before it is made.\nPut ops behind their inputs."
    )
    assert refusal(GraphError, lambda: Instance(("a", "b"), (1.0, 1.0), ((), ()), ((0,), (0,)), (4,))) == (
        "op 1 (b) makes %0, which an op before makes.\nGive each value a number of its own."
    )
    assert refusal(GraphError, lambda: Instance(("a",), (math.inf,), ((),), ((0,),), (4,))) == (
        "op 0 (a) takes inf seconds.\nGive seconds that are finite and not negative."
    )
    assert refusal(GraphError, lambda: Instance(("a",), (1.0,), ((), ()), ((0,),), (4,))) == (
        "the instance has 1 names, 1 seconds, 2 reads and 1 makes.\nGive one of each for an op."
    )
    assert refusal(GraphError, lambda: Instance(("a",), (1.0,), ((),), ((0,),), (-4,))) == (
        "%0 has -4 bytes.\nGive bytes that are not negative."
    )
    assert refusal(GraphError, lambda: Instance(("a",), (1.0,), ((7,),), ((0,),), (4,))) == (
        "op 0 (a) names %7, of 1 values in all.\nGive bytes for each value."
    )


def test_a_sequence_that_reads_what_is_not_made_is_refused():
    instance = Instance.of(parse(CHAIN))
    assert refusal(PlanError, lambda: Schedule.of(instance, [1])) == (
        "runs[0] runs second, which reads %1, before %1 is made.\nRun op 0 further up."
    )
    assert refusal(PlanError, lambda: Schedule.of(instance, [0, 1])) == "runs never make %5.\nRun op 4."
    for strange in (5, -1):
        assert refusal(PlanError, lambda i=strange: Schedule.of(instance, [0, i])) == (
            f"runs[1] names op {strange}, of 5 in all.\nName the ops of the instance by their places in it."
        )


def test_an_op_runs_at_least_once():
    assert refusal(PlanError, lambda: solve(Instance.of(parse(CHAIN)), 100, copies=0)) == (
        "copies is 0.\nSay how often an op may run: once, twice or more."
    )


def test_without_the_solver_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    monkeypatch.setitem(sys.modules, "ortools", None)
    assert refusal(ModuleNotFoundError, lambda: solve(Instance.of(parse(CHAIN)), 100)) == (
        "solve needs OR-Tools, which is not installed.\nRun `pip install 'jointcut[cpsat]'`."
    )
