"""The hull is that of all cuts, the bound holds, the best choice is exact where it is polished, and all is nested."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks import polish
from benchmarks.polish import polished
from jointcut.partition.errors import PlanError
from jointcut.partition.search import peel
from jointcut.partition.search.front import front
from jointcut.partition.search.mincut import minimum_cut
from jointcut.partition.search.network import INFINITE, SINK, SOURCE, Network

EXAMPLES = 60 if "JOINTCUT_EVERY_PROGRAM" in os.environ else 25
quick = settings(deadline=None, max_examples=EXAMPLES, derandomize=True, database=None)

AMPLE = 60.0  # seconds for the integer program: it ends by itself long before


@dataclass(frozen=True)
class Op:
    """Reads values and makes some; each made value has a price in bytes (None: not saved), and may be wanted."""

    reads: tuple[int, ...]
    prices: tuple[int | None, ...]
    wanted: tuple[bool, ...]
    seconds: float | None = 0.0  # None: not run again
    kept: tuple[bool, ...] = ()  # which results may not be recomputed, if the op itself may


def net_of(ops):
    """Two nodes per value, and one for each op of several results, as `network` does."""
    arcs, places, out_of = [], [-1, 2 * len(ops)], []
    for number, op in enumerate(ops):
        ins = []
        for price, wanted in zip(op.prices, op.wanted, strict=True):
            ins.append(len(places))
            places += 2 * [2 * number + 1 if number else -1]
            arcs.append((ins[-1], ins[-1] + 1, INFINITE if price is None else price, 0.0))
            arcs += [(ins[-1] + 1, SINK, INFINITE, 0.0)] * wanted
        arcs += [(SOURCE, v, INFINITE, 0.0) for v, kept in zip(ins, op.kept, strict=False) if kept]
        node = ins[0]
        if len(ins) > 1:
            node = len(places)
            places.append(2 * number)
            arcs += [(node, v, INFINITE, 0.0) for v in ins]
        arcs += [(out_of[v], node, INFINITE, 0.0) for v in op.reads]
        if op.seconds is None:
            arcs.append((SOURCE, node, INFINITE, 0.0))
        elif op.seconds > 0:
            arcs.append((SOURCE, node, 0, op.seconds))
        out_of += [v + 1 for v in ins]
    columns = list(zip(*arcs, strict=True))
    tails, heads, capacities = (np.array(column, np.int64) for column in columns[:3])
    value_in = np.array(out_of) - 1
    return Network(len(places), tails, heads, capacities, value_in, np.array(columns[3]), np.array(places))


def some_ops(rng, most_values, widest, unit=1 / 64, plain=False):
    """A random program: first an input, then ops of one to three results, some of them banned or not to be saved."""
    ops, values = [Op((), (0,), (False,), None)], 1
    while values < most_values:
        made = min(int(rng.choice([1, 1, 1, 2, 3])), most_values - values)
        reads = tuple(
            sorted({int(v) for v in rng.integers(max(0, values - 6), values, rng.choice([0, 1, 1, 2, 2, 3]))})
        )
        prices = tuple(None if rng.random() < 0.1 and not plain else int(rng.integers(1, widest)) for _ in range(made))
        wanted = tuple(bool(rng.random() < 0.35) for _ in range(made))
        kept = tuple(bool(rng.random() < 0.1) and price is not None for price in prices) if made > 1 else ()
        banned = None not in prices and rng.random() < 0.05
        seconds = None if banned else float(rng.integers(0, 50)) * unit
        ops.append(Op(reads, prices, wanted, seconds, kept))
        values += made
    return ops


programs = st.builds(
    lambda seed, most, widest: some_ops(np.random.default_rng(seed), most, widest),
    st.integers(0, 2**32 - 1),
    st.integers(2, 11),
    st.sampled_from([4, 40, 2**40]),
)


def all_cuts(ops):
    """(bytes, seconds) of every set of ops that run again, with what must then be saved: an independent reading."""
    makers = [number for number, op in enumerate(ops) for _ in op.prices]
    prices = [price for op in ops for price in op.prices]
    kept = [k for op in ops for k in (op.kept or (False,) * len(op.prices))]
    wanted = {v for v, w in enumerate(w for op in ops for w in op.wanted) if w}
    free = [number for number, op in enumerate(ops) if op.seconds is not None]
    cuts = set()
    for chosen in product((False, True), repeat=len(free)):
        again = {number for number, is_chosen in zip(free, chosen, strict=True) if is_chosen}
        needed = wanted | {v for number in again for v in ops[number].reads}
        saved = [prices[v] for v in needed if makers[v] not in again or kept[v]]
        if None not in saved:
            cuts.add((sum(saved), math.fsum(ops[number].seconds or 0.0 for number in again)))
    return cuts


def lower_hull(cuts):
    """Corners from fewest bytes, and then fewest seconds, to fewest seconds, and then fewest bytes."""
    corners = []
    for b, s in sorted(cuts):
        if corners and s >= corners[-1][1]:
            continue
        while len(corners) > 1:
            (b0, s0), (b1, s1) = corners[-2:]
            if (s1 - s0) * (b - b0) < (s - s0) * (b1 - b0):
                break
            corners.pop()
        corners.append((b, s))
    return corners


def solved(ops):
    """The front of a program, or None where it has no finite cut."""
    try:
        return front(net_of(ops))
    except PlanError:
        return None


def weighed(net, side):
    """(bytes, seconds) of a sink side, arc by arc; infinitely many bytes where it is no cut."""
    severed = ~side[net.tails] & side[net.heads]
    assert side[SINK] and not side[SOURCE]
    capacities = net.capacities[severed]
    return (math.inf if (capacities >= INFINITE).any() else sum(capacities.tolist())), math.fsum(net.seconds[severed])


# ------------------------------------------------------------------------------------ the hull


@quick
@given(programs)
def test_the_hull_is_that_of_all_cuts(ops):
    cuts, found = all_cuts(ops), solved(ops)
    if found is None:
        assert not cuts
        return
    points = [(choice.bytes, choice.seconds) for choice in found.choices]
    corners = lower_hull(cuts)
    assert set(corners) <= set(points)
    assert points == sorted(set(points)) and (points[0], points[-1]) == (corners[0], corners[-1])
    for b, s in points:
        below = [c for c in corners if c[0] <= b][-1]
        above = next(c for c in corners if c[0] >= b)
        assert (s - below[1]) * (above[0] - below[0]) == (above[1] - below[1]) * (b - below[0])


@quick
@given(programs)
def test_the_sides_of_the_hull_are_nested_and_weigh_what_they_say(ops):
    found = solved(ops)
    if found is None:
        return
    sides = [choice.sink_side for choice in found.choices]
    assert all((wide >= narrow).all() for wide, narrow in pairwise(sides))
    assert [weighed(found.net, side) for side in sides] == [(c.bytes, c.seconds) for c in found.choices]


@pytest.mark.parametrize("seed", range(8))
def test_the_first_choice_has_as_few_bytes_as_the_minimum_cut(seed):
    net = net_of(some_ops(np.random.default_rng(seed), 120, 2**35))
    assert front(net).choices[0].bytes == minimum_cut(net).weight


@quick
@given(programs, st.integers(0, 10), st.sampled_from([0.75, 1.25]))
def test_the_last_choice_under_a_price_is_the_cheapest_at_that_price(ops, turn, factor):
    whole = solved(ops)
    if whole is None or len(whole.choices) < 2:
        return
    one, other = list(pairwise(whole.choices))[turn % (len(whole.choices) - 1)]
    bytes_per_second = factor * (other.bytes - one.bytes) / (one.seconds - other.seconds)
    found = front(whole.net, bytes_per_second)
    assert found.choices == whole.choices[: len(found.choices)]
    last = found.choices[-1]
    least = min(b + bytes_per_second * s for b, s in all_cuts(ops))
    assert last.bytes + bytes_per_second * last.seconds == pytest.approx(least, rel=1e-12)
    assert found.best(INFINITE) == polished(found, INFINITE, AMPLE) == last
    assert found.bound_seconds(INFINITE) == whole.choices[-1].seconds


@pytest.mark.parametrize("seed", range(6))
def test_cuts_are_the_same_however_flow_finds_its_way(seed, monkeypatch):
    net = net_of(some_ops(np.random.default_rng(seed), 300, 2 ** (8 * seed + 2)))
    ranks = []
    for waves in (0, 2, 10**6):
        monkeypatch.setattr(peel, "_WAVES", waves)
        ranks.append(front(net).ranks.tolist())
    assert ranks[0] == ranks[1] == ranks[2]


def test_a_byte_counts_beside_many_terabytes():
    rng = np.random.default_rng(0)
    small = some_ops(rng, 10, 3, plain=True)
    ops = [
        Op(op.reads, tuple(2**40 * p + int(rng.integers(2)) for p in op.prices if p is not None), op.wanted, op.seconds)
        for op in small
    ]
    found = front(net_of(ops))
    assert set(lower_hull(all_cuts(ops))) <= {(choice.bytes, choice.seconds) for choice in found.choices}
    assert any(choice.bytes % 2**40 for choice in found.choices) and found.choices[-1].bytes > 2**40


def test_the_least_second_is_spared_at_the_price_of_a_terabyte():
    second = [Op((0,), (None,), (True,), 1.0), Op((0,), (2**40,), (True,), 2.0**-58)]
    found = front(net_of([Op((), (0,), (False,), None), *second]))
    assert [(c.bytes, c.seconds) for c in found.choices] == [(0, 1.0 + 2.0**-58), (2**40, 1.0)]


def test_equal_layers_leave_the_hull_one_by_one_from_the_last():
    """They are all worth the same price: without cuts on its edges, the hull would have two corners."""
    ops = [Op((), (0,), (False,), None)]
    for k in range(9):
        ops += [Op((2 * k,), (8,), (False,), None), Op((0, 2 * k + 1), (32,), (True,), 0.5)]
    net = net_of(ops)
    choices = front(net).choices
    assert [(c.bytes, c.seconds) for c in choices] == [(8 * 9 + 24 * k, 4.5 - 0.5 * k) for k in range(10)]
    for k, choice in enumerate(choices):
        assert choice.sink_side[net.value_in[2::2]].tolist() == [True] * (9 - k) + [False] * k


def test_rules_that_forbid_every_cut_are_refused():
    with pytest.raises(PlanError) as refusal:
        front(net_of([Op((), (None,), (True,), None)]))
    assert str(refusal.value) == (
        "value 0 may be neither saved nor recomputed, and the backward reads it.\nLift one of the rules."
    )


# ------------------------------------------------------------------------------------ within a budget


@settings(quick, max_examples=40)
@given(programs)
def test_the_bound_holds_and_the_polished_choice_is_the_optimum_at_every_budget(ops):
    found, cuts = solved(ops), all_cuts(ops)
    if found is None:
        return
    least = min(b for b, _ in cuts)
    assert found.best(least - 1) is None and found.bound_seconds(least - 1) == math.inf
    budgets = sorted({b for b, _ in cuts} | {b + 1 for b, _ in cuts})
    for budget in budgets[:: 1 + len(budgets) // 10]:
        optimum = min(s for b, s in cuts if b <= budget)
        quickly, slowly = found.best(budget), polished(found, budget, AMPLE)
        assert quickly is not None and slowly is not None and slowly.bytes <= budget
        assert found.bound_seconds(budget) <= optimum == slowly.seconds <= quickly.seconds
        assert weighed(found.net, slowly.sink_side) == (slowly.bytes, slowly.seconds)


@settings(quick, max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_the_bound_holds_for_seconds_that_no_tick_divides(seed):
    rng = np.random.default_rng(seed)
    ops = [
        Op(op.reads, op.prices, op.wanted, op.seconds and float(10 ** rng.uniform(-30, 2)), op.kept)
        for op in some_ops(rng, 10, 100)
    ]
    found, cuts = solved(ops), all_cuts(ops)
    for budget in sorted({b for b, _ in cuts}):
        choice = found.best(budget)
        optimum = min(s for b, s in cuts if b <= budget)
        assert found.bound_seconds(budget) <= min(optimum, choice.seconds)
        seconds = weighed(found.net, choice.sink_side)[1]
        assert seconds - len(ops) * found.tick_seconds <= choice.seconds <= seconds


def optimum_of(ops, budget):
    """Fewest seconds within a budget: which values are at hand, which ops run again, what is saved."""
    makers = [number for number, op in enumerate(ops) for _ in op.prices]
    prices = [price for op in ops for price in op.prices]
    kept = [k for op in ops for k in (op.kept or (False,) * len(op.prices))]
    wanted = [w for op in ops for w in op.wanted]
    n, m = len(makers), len(ops)
    rows, limits = [], []

    def at_most(limit, **terms):
        row = np.zeros(2 * n + m)
        for name, column in terms.items():
            row[column] += -1.0 if name.startswith("less") else 1.0
        rows.append(row)
        limits.append(limit)

    for v in range(n):  # columns: v is at hand, n + v is saved, 2 n + op runs again
        at_most(0, hand=v, less_saved=n + v, **({} if kept[v] else {"less_again": 2 * n + makers[v]}))
    for number, op in enumerate(ops):
        for v in op.reads:
            at_most(0, again=2 * n + number, less_hand=v)
    rows.append(np.array([0.0] * n + [float(p or 0) for p in prices] + [0.0] * m))
    limits.append(budget)
    low, high = np.zeros(2 * n + m), np.ones(2 * n + m)
    low[:n] = wanted
    high[n : 2 * n] = [price is not None for price in prices]
    high[2 * n :] = [op.seconds is not None for op in ops]
    costs = np.array([0.0] * (2 * n) + [op.seconds or 0.0 for op in ops])
    rules = LinearConstraint(np.array(rows), ub=np.array(limits, float))
    result = milp(costs, integrality=np.ones_like(costs), bounds=Bounds(low, high), constraints=rules)
    return None if result.x is None else float(costs @ result.x.round())


@pytest.mark.parametrize("seed", range(32))
def test_the_polished_choice_is_that_of_another_integer_program(seed):
    rng = np.random.default_rng(seed)
    ops = some_ops(rng, int(rng.integers(60, 151)), 1000, unit=0.25)
    found = front(net_of(ops))
    first, last = found.choices[0], found.choices[-1]
    budget = int(first.bytes + rng.uniform(0.05, 0.95) * (last.bytes - first.bytes))
    choice, quickly = polished(found, budget, AMPLE), found.best(budget)
    assert choice is not None and quickly is not None and choice.seconds <= quickly.seconds
    assert optimum_of(ops, first.bytes - 1) is None
    assert choice.seconds == optimum_of(ops, budget)
    assert weighed(found.net, choice.sink_side) == (choice.bytes, choice.seconds)
    assert choice.bytes <= budget


@pytest.mark.parametrize("seed", range(6))
def test_more_budget_never_takes_more_seconds(seed):
    rng = np.random.default_rng(seed)
    found = front(net_of(some_ops(rng, 400, 2 ** int(rng.integers(4, 40)))))
    first, last = found.choices[0].bytes, found.choices[-1].bytes
    budgets = sorted({*rng.integers(first, last + 1, 300).tolist(), *(c.bytes for c in found.choices)})
    choices = [found.best(budget) for budget in budgets]
    seconds = [choice.seconds for choice in choices]
    assert seconds == sorted(seconds, reverse=True)
    for budget, choice in zip(budgets, choices, strict=True):
        assert choice.bytes <= budget and found.bound_seconds(budget) <= choice.seconds
        assert weighed(found.net, choice.sink_side) == (choice.bytes, choice.seconds)
    assert any(choice.ahead for choice in choices)  # beyond the hull's own cuts
    assert all(c == found.best(c.bytes) for c in found.choices)


def mixes(net, wide, narrow):
    """Sides between two: what is left of the wide one before a place, or from a place on with all that this needs."""
    tied = net.capacities >= INFINITE
    for place in range(net.places.max() + 1):
        yield wide & (narrow | (net.places < place))
        side = narrow | (wide & (net.places >= place))
        while (missing := side[net.heads] & ~side[net.tails] & tied).any():
            side[net.tails[missing]] = True
        yield side


@pytest.mark.parametrize("seed", range(6))
def test_no_change_over_between_neighbours_is_better_than_the_choice(seed):
    found = front(net_of(some_ops(np.random.default_rng(seed), 60, 1000)))
    for one, other in pairwise(found.choices):
        for side in mixes(found.net, one.sink_side, other.sink_side):
            bytes_cut, seconds = weighed(found.net, side)
            assert bytes_cut < math.inf and found.best(bytes_cut).seconds <= seconds


def chain(length):
    """Values that follow from one another, 10 bytes each; what is wanted of each has 11 bytes."""
    ops = [Op((), (0,), (False,), None)]
    for k in range(length):
        ops += [Op((max(2 * k - 1, 0),), (10,), (False,), 1.0), Op((2 * k + 1,), (11,), (True,), 1.0)]
    return ops


def test_a_step_of_many_ops_is_taken_in_part():
    """To save the last k of what is wanted spares the end of the chain too."""
    found = front(net_of(chain(20)))
    assert [(choice.bytes, choice.seconds) for choice in found.choices] == [(0, 40.0), (220, 0.0)]
    assert [found.best(11 * k).seconds for k in range(21)] == [40.0 - 2 * k for k in range(21)]


@pytest.mark.parametrize("small", [1.5, 1.75])
def test_a_small_step_is_left_out_for_one_more_part_of_a_large_one(small):
    """In 69 bytes, three values of 7 leave room for four parts of the large step, and two for five."""
    ops = chain(20) + 3 * [Op((0,), (7,), (True,), small)]
    found = front(net_of(ops))
    everything = 40 + 3 * small
    assert [c.bytes for c in found.choices] == [0, 7, 14, 21, 241]
    assert [found.best(21 + 11 * k).seconds for k in range(21)] == [40.0 - 2 * k for k in range(21)]
    assert found.best(69).seconds == everything - (2 * small + 5 * 2) < everything - (3 * small + 4 * 2)


@pytest.mark.parametrize("seed", range(4))
def test_places_out_of_order_spoil_no_choice(seed):
    rng = np.random.default_rng(seed)
    net = net_of(some_ops(rng, 60, 1000))
    found = front(replace(net, places=rng.permutation(net.places)))
    for budget in range(found.choices[0].bytes, found.choices[-1].bytes, 100):
        choice = found.best(budget)
        assert weighed(net, choice.sink_side) == (choice.bytes, choice.seconds)


# ------------------------------------------------------------------------------------ in another process


def fingerprint():
    """Everything that a front answers about one program, as text."""
    found = front(net_of(some_ops(np.random.default_rng(5), 200, 2**30)))
    budgets = np.linspace(found.choices[0].bytes, found.choices[-1].bytes, 9).astype(int).tolist()
    chosen = [found.best(budget) for budget in budgets] + [polished(found, budgets[4], AMPLE)]
    sides = [np.flatnonzero(choice.sink_side).tolist() for choice in chosen]
    return repr((found.ranks.tolist(), found.choices, chosen, sides, [found.bound_seconds(b) for b in budgets]))


def test_another_process_answers_the_same():
    code = f"import runpy, sys; sys.stderr.write(runpy.run_path({__file__!r})['fingerprint']())"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.stderr == fingerprint()


# ------------------------------------------------------------------------------------ at size


def transformer(layers, *, is_jittered):
    """About 46 ops per layer: bytes of real tensors, seconds of a roofline, a skip connection every eight layers."""
    rng = np.random.default_rng(0)
    ops, sizes = [Op((), (0,), (False,), None)], [2**24]

    def add(reads, size, flops=0, wanted=True):
        moved = (size + sum(sizes[v] for v in reads)) / 1e12
        noise = rng.uniform(0.8, 1.2) if is_jittered else 1.0
        ops.append(Op(tuple(sorted(set(reads))), (size,), (wanted,), max(moved, flops / 2e14) * noise))
        sizes.append(size)
        return len(sizes) - 1

    def light(size, *reads, wanted=False):
        return add(reads, size, wanted=wanted)

    def normed(x, size):
        centred = light(size, x, light(size // 1024, x))
        square = light(size, centred)
        rate = light(size // 1024, light(size // 1024, square), wanted=True)
        return light(size, light(size, light(size, centred, rate, wanted=True)), wanted=True)

    h, mask, skips = light(2**24, 0), light(2**18, 0), []
    for layer in range(layers):
        size = int(2**24 * (rng.uniform(0.8, 1.25) if is_jittered else 1.0))
        wide, square, product_flops = 4 * size, 2**26, 512 * size
        x = normed(h, size)
        q, k, v = (light(size, light(size, add((x,), size, product_flops, False)), wanted=True) for _ in range(3))
        scores = light(square, light(square, add((q, k), square, product_flops // 2, False)), mask)
        power = light(square, light(square, scores, light(square // 512, scores)), wanted=True)
        chances = light(square, power, light(square // 512, power, wanted=True), wanted=True)
        dropped = light(square, chances, light(square // 4, 0, wanted=True), wanted=True)
        mixed = light(size, add((dropped, v), size, product_flops // 2, False), wanted=True)
        h = light(size, h, light(size, add((mixed,), size, product_flops, False)))
        u = light(wide, add((normed(h, size),), wide, 4 * product_flops, False), wanted=True)
        bent = light(wide, light(wide, u, light(wide, light(wide, u), u)), wanted=True)
        gate = light(wide, u, light(wide, bent), wanted=True)
        h = light(size, h, light(size, add((gate,), size, 4 * product_flops, False)))
        skips += [h] * (layer % 8 == 3)
        h = light(size, h, skips[-1]) if layer % 8 == 7 else h
    light(4, h, wanted=True)
    return ops


@pytest.mark.parametrize("is_jittered", [True, False])
def test_choices_for_a_transformer_are_within_a_percent_of_the_bound(is_jittered):
    ops = transformer(110, is_jittered=is_jittered)
    found = front(net_of(ops))
    first, last = found.choices[0].bytes, found.choices[-1].bytes
    gaps = []
    for share in (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95):
        budget = int(first + share * (last - first))
        choice, bound = found.best(budget), found.bound_seconds(budget)
        assert choice.bytes <= budget
        gaps.append(choice.seconds / bound - 1)
    assert len(ops) > 4500 and min(gaps) >= 0
    assert sum(gaps) / len(gaps) < 0.01, gaps


def test_polish_never_harms_where_it_sees_a_part_of_the_network_or_has_no_time():
    found = front(net_of(transformer(40, is_jittered=True)))
    budget = (found.choices[0].bytes + found.choices[-1].bytes) // 3
    for seconds in (1e-9, 0.3):
        choice = polished(found, budget, seconds)
        assert weighed(found.net, choice.sink_side)[0] == choice.bytes <= budget
        assert found.bound_seconds(budget) <= choice.seconds <= found.best(budget).seconds


def test_polish_between_two_neighbours_alone_never_harms(monkeypatch):
    monkeypatch.setattr(polish, "MOST_OPEN", 0)
    found = front(net_of(some_ops(np.random.default_rng(1), 80, 1000)))
    for budget in range(found.choices[0].bytes, found.choices[-1].bytes, 500):
        assert polished(found, budget, AMPLE).seconds <= found.best(budget).seconds


def test_polish_keeps_to_the_byte_where_floating_point_does_not():
    """One byte in a terabyte is less than the tolerance of the integer program."""
    inputs = 2 * [Op((), (0,), (False,), None)]
    ops = [Op((0,), (2**40 + 1,), (True,), 2.0), Op((1,), (2**40,), (True,), 1.0)]
    choice = polished(front(net_of(inputs + ops)), 2**40, AMPLE)
    assert (choice.bytes, choice.seconds) == (2**40, 2.0)
