"""The cut is the cheapest of all, exact in bytes, the same in every process, and refused where there is none."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections import deque
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import combinations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jointcut import aot
from jointcut.partition.errors import PlanError
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.rules import Verdict
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.text import parse
from jointcut.partition.search.mincut import min_cut, minimum_cut, save_all, with_ties
from jointcut.partition.search.network import INFINITE, SINK, SOURCE, Network, network
from programs import EVERY_PROGRAM, named
from refusals import cut_under

quick = settings(deadline=None, max_examples=150 if EVERY_PROGRAM else 60, derandomize=True, database=None)


# ------------------------------------------------------------------------------------ against all sets


@st.composite
def graphs(draw):
    """A joint program of at most 12 forward values, as text: ops of one result or two, some heavy, some reducing."""
    lines, values, op = ["primal %0:int8[4]", "cotangent %1:int8[]"], [0], 0
    while len(values) < 12 and op < draw(st.integers(1, 9)):
        made = [2 + len(values) - 1 + i for i in range(draw(st.integers(1, min(2, 12 - len(values)))))]
        types = " ".join(f"%{v}:int8[{draw(st.integers(0, 9))}]" for v in made)
        read = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2))
        name = draw(st.sampled_from(["sin", "split", "dot_general", "reduce_sum"]))
        lines.append(f"{types} = {name} {' '.join(f'%{v}' for v in read)}")
        values, op = values + made, op + 1
    last = len(values) + 1
    wanted = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))
    outputs = draw(st.lists(st.sampled_from(values), max_size=2, unique=True))
    lines += ["backward:", f"%{last}:int8[4] = mul %1 {' '.join(f'%{v}' for v in wanted)}"]
    lines += [*(f"output %{v}" for v in outputs), f"gradient %{last}"]
    return parse("\n".join(lines))


def cheapest(problem):
    """The least price of a set of saved values from which all that the backward reads can be had; None without one."""
    graph, sides, verdicts = problem.graph, problem.sides, problem.verdicts
    early = [v.id for v in graph.values if not sides.is_late(v.id) and not verdicts[v.id].not_saved]
    best = None
    for size in range(len(early) + 1):
        for saved in combinations(early, size):
            price = sum(problem.prices[v] for v in saved)
            if (best is None or price < best) and all(at_hand(graph, verdicts, saved, v) for v in sides.wanted):
                best = price
    return best


def at_hand(graph, verdicts, saved, v):
    if v in saved:
        return True
    maker = graph.values[v].maker
    if verdicts[v].not_recomputed or maker is None:
        return False
    return all(at_hand(graph, verdicts, saved, u) for u in graph.ops[maker].inputs)


@quick
@given(graphs())
def test_the_cut_is_the_cheapest_of_all_sets(graph):
    plan = min_cut(graph)
    assert plan.bytes_saved == plan.bound_bytes
    assert plan.bytes_saved == cheapest(Problem.of(graph))


@quick
@given(graphs(), st.data())
def test_the_cut_is_the_cheapest_of_all_sets_under_any_rules(graph, data):
    rule = st.builds(Verdict, st.sampled_from(["", "", "", "no"]), st.sampled_from(["", "", "no"]))
    verdicts = (
        Verdict("", "it is an input") if value.maker is None else data.draw(rule, label=value.name)
        for value in graph.values
    )
    problem = replace(Problem.of(graph), verdicts=tuple(verdicts))
    best = cheapest(problem)
    if best is None:
        with pytest.raises(PlanError):
            minimum_cut(network(problem))
    else:
        assert minimum_cut(network(problem)).weight == best


@quick
@given(graphs())
def test_no_cut_saves_more_than_save_all(graph):
    assert min_cut(graph).bytes_saved <= save_all(graph).bytes_saved


# ------------------------------------------------------------------------------------ exact in wide numbers


def flow_of(num_nodes, arcs):
    """Maximum flow by Edmonds and Karp (1972), in Python's own integers."""
    room = [[0] * num_nodes for _ in range(num_nodes)]
    for tail, head, capacity in arcs:
        room[tail][head] += capacity
    total = 0
    while True:
        before, queue = {SOURCE: SOURCE}, deque([SOURCE])
        while queue:
            u = queue.popleft()
            for v in range(num_nodes):
                if room[u][v] and v not in before:
                    before[v] = u
                    queue.append(v)
        if SINK not in before:
            return total
        path, v = [], SINK
        while v != SOURCE:
            path.append((before[v], v))
            v = before[v]
        pushed = min(room[u][v] for u, v in path)
        for u, v in path:
            room[u][v] -= pushed
            room[v][u] += pushed
        total += pushed


def net_of(num_nodes, arcs):
    tails, heads, capacities = np.array(arcs, np.int64).reshape(-1, 3).T
    return Network(num_nodes, tails, heads, capacities, np.full(0, -1), np.zeros(len(tails)), np.arange(num_nodes))


@st.composite
def networks(draw):
    num_nodes = draw(st.integers(2, 7))
    widest = draw(st.sampled_from([3, 2**31 - 1, 2**31, 2**33, 2**40, 2**40 + 1, 2**55]))
    node = st.integers(0, num_nodes - 1)
    size = st.integers(0, widest) | st.sampled_from([1, widest])
    arcs = draw(st.lists(st.tuples(node, node, size), min_size=1, max_size=16, unique_by=lambda arc: arc[:2]))
    kept = [arc for arc in arcs if arc[0] != arc[1] and (arc[1], arc[0], 0) not in {(t, h, 0) for t, h, _ in arcs}]
    return num_nodes, kept or [(SOURCE, SINK, widest)]


@quick
@given(networks())
def test_the_cut_is_exact_for_any_width_of_capacity(case):
    num_nodes, arcs = case
    cut = minimum_cut(net_of(num_nodes, arcs))
    assert cut.weight == cut.flow == flow_of(num_nodes, arcs)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32, 2**40, 2**40 + 1, 2**59 + 12345])
def test_a_single_wide_arc_is_cut_at_its_width(size):
    """The solver of scipy alone answers 0 for 2**40: it keeps the lower 32 bits."""
    assert minimum_cut(net_of(2, [(SOURCE, SINK, size)])).weight == size


def test_a_byte_counts_beside_a_terabyte():
    arcs = [(SOURCE, 2, 2**40), (2, 3, 2**40 - 1), (3, SINK, 2**40), (SOURCE, 3, 1), (2, SINK, INFINITE)]
    assert minimum_cut(net_of(4, arcs)).weight == flow_of(4, arcs) == 2**40 + 1


def test_among_equal_cuts_the_one_nearest_to_the_backward_is_taken():
    graph = parse(
        """
        primal %0:float32[64]
        cotangent %1:float32[]
        %2:float32[8] = dot_general %0
        %3:float32[8] = sin %2
        %4:float32[8] = exp %3
        %5:float32[] = reduce_sum %4
        backward:
        %6:float32[8] = mul %1 %4
        output %5
        gradient %6
        """
    )
    assert min_cut(graph).values == (4,)


# ------------------------------------------------------------------------------------ refusals


def test_rules_that_forbid_every_choice_along_a_path_are_refused():
    with pytest.raises(PlanError) as refusal:
        cut_under({2: Verdict("too big", "too slow"), 3: Verdict("too big", "")})
    assert str(refusal.value) == (
        "%2:float32[8] (dot_general) may not be recomputed, and nothing from it to %3:float32[8] (sin), which the "
        "backward reads, may be saved.\nLift one of the rules."
    )


def test_an_infinite_cut_of_a_network_without_values_is_refused_as_such():
    with pytest.raises(PlanError) as refusal:
        minimum_cut(net_of(3, [(SOURCE, 2, INFINITE), (2, SINK, INFINITE)]))
    assert str(refusal.value) == "The cut is infinite: rules forbid every choice.\nLift one of the rules."


def test_two_rules_that_contradict_each_other_are_named():
    with pytest.raises(PlanError) as refusal:
        cut_under({3: Verdict("too big", "too slow")})
    assert str(refusal.value) == (
        "%3:float32[8] (sin) may not be saved (too big) and may not be recomputed (too slow).\n"
        "Lift one of the two rules."
    )


# ------------------------------------------------------------------------------------ the same everywhere

IDS_OF_PLANS = """
from jointcut import aot
from programs import named
for name in ("transformer_block", "nested_scans", "two_layers"):
    program = named(name)
    traced = aot.function(program.function, argnums=program.argnums).trace(*program.args)
    print(name, *(traced.partition(strategy).plan.values for strategy in ("min_cut", "save_all")))
"""


def test_every_process_makes_the_same_plan():
    """Whatever the seed of Python's hashes, and wherever objects lie in memory."""
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = [sys.executable, "-c", IDS_OF_PLANS]
    there = subprocess.run(run, env=env, capture_output=True, text=True, timeout=120, check=True).stdout
    here = io.StringIO()
    with redirect_stdout(here):
        exec(IDS_OF_PLANS, {})
    assert here.getvalue() == there and there.count("\n") == 3


# ------------------------------------------------------------------------------------ save_all

AS_JAX = [
    "two_layers",
    "transformer_block",
    "layer_norm",
    "elman",
    "bfloat16_weights",
    "scan_with_constants",
    "scan_with_several_carries",
    "reverse_scan",
    "scan_of_no_steps",
    "nested_scans",
    "cond_on_data",
    "cond_in_scan",
    "batched_products",
    "complex_weights",
]


def kept_by_jax(traced, program):
    """Bytes of the residuals of `jax.vjp` that are neither inputs nor outputs of the function, each counted once."""
    leaves, tree = jax.tree.flatten((program.args, dict(program.kwargs)))

    def forward(*leaves):
        def chosen(*picked):
            full = list(leaves)
            for i, x in zip(traced.wanted, picked, strict=True):
                full[i] = x
            args, kwargs = jax.tree.unflatten(tree, full)
            return program.function(*args, **kwargs)

        out, pullback = jax.vjp(chosen, *(leaves[i] for i in traced.wanted))
        return jax.tree.leaves(out), jax.tree.leaves(pullback)

    closed, (outs, _) = jax.make_jaxpr(forward, return_shape=True)(*leaves)
    jaxpr, _ = jaxprs.opened(closed)
    ends = [v for v in jaxpr.outvars if not isinstance(v, jaxprs.Literal)]
    held = {*jaxpr.invars, *jaxpr.constvars, *(v for v in jaxpr.outvars[: len(outs)] if v in ends)}
    return sum(abstract.aval_bytes(v.aval) for v in dict.fromkeys(ends) if v not in held)


@pytest.mark.parametrize("name", AS_JAX)
def test_save_all_saves_the_bytes_that_jax_keeps(name, traced):
    assert traced(name).partition("save_all").plan.bytes_saved == kept_by_jax(traced(name), named(name))


@pytest.mark.parametrize("name", ["nested_jits", "gather_and_scatter", "module_as_argument"])
def test_save_all_saves_less_where_jax_keeps_one_value_twice(name, traced):
    """Equal equations are merged before the cut."""
    assert traced(name).partition("save_all").plan.bytes_saved < kept_by_jax(traced(name), named(name))


@pytest.mark.parametrize(("name", "more"), [("scan_feeding_scan", 12), ("internal_reference", 12)])
def test_save_all_saves_more_where_a_constant_of_the_backward_occurs_in_the_forward(name, more, traced):
    """Both halves broadcast a zero; merged, it is the forward's, and the backward reads it. Min-cut leaves it out."""
    plans = traced(name).partition("save_all").plan, traced(name).partition("min_cut").plan
    assert plans[0].bytes_saved == kept_by_jax(traced(name), named(name)) + more
    assert "broadcast_in_dim" in [s.op for s in plans[0].saved]
    assert "broadcast_in_dim" not in [s.op for s in plans[1].saved]


BIASED = """
    primal %0:float32[8,8]
    primal %1:float32[8]
    cotangent %2:float32[8,8]
    %3:float32[8,8] = dot_general %0 %0
    %4:float32[8,8] = add %3 %1
    %5:float32[8,8] = LAST %4
    %6:float32[] = reduce_sum %5
    backward:
    %7:float32[8,8] = mul %2 %5
    output %6
    gradient %7
"""


def test_of_two_cheapest_cuts_the_product_is_saved_and_not_what_fuses_with_its_readers():
    plan = min_cut(parse(BIASED.replace("LAST", "neg")))
    assert plan.values == (3,)
    assert min_cut(parse(BIASED.replace("LAST", "tanh"))).values == (5,)
    assert (plan.bound_bytes, plan.bytes_saved) == (256, 256)


def test_prices_too_large_for_a_second_rank_keep_the_first():
    graph = parse(BIASED.replace("LAST", "neg"))
    huge = (2**60,) * len(graph.values)
    assert with_ties(replace(Problem.of(graph), prices=huge)) == (1, huge)


def test_save_all_keeps_a_stack_that_a_second_loop_goes_through():
    def layer(w, xs):
        def step(h, x):
            h = jax.numpy.tanh(w * h + jax.numpy.sin(w) * x)
            return h, 3.0 * h  # nothing in this loop's own backward reads the product

        return jax.lax.scan(step, xs[0], xs)[1]

    def loss(w, xs):
        return jax.numpy.sum(layer(w, 2.0 * layer(w, xs)) ** 2)

    w, xs = np.float32(0.5), np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    for strategy in ("save_all", "min_cut"):
        gradient = aot.function(loss, strategy=strategy).grad(w, xs)
        np.testing.assert_allclose(gradient, jax.grad(loss)(w, xs), rtol=1e-5, atol=1e-6)
