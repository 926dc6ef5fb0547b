"""The replay counts what a reader of the two jaxprs would count by hand, and comes near to XLA's own account."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jointcut import aot
from jointcut.partition import Plan, Roles, split
from jointcut.partition.lower.memory.levels import Names
from jointcut.partition.lower.memory.replay import Replayer, Rows
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.plans.backend import PORTABLE
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import LITERAL, STEP
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.primitives import CALLS, ELEMENTWISE
from jointcut.partition.program.roles import Side
from jointcut.partition.search.mincut import STRATEGIES
from larger import LARGER
from programs import CORPUS, EVERY_PROGRAM

SIDE = 16
N = 4 * SIDE * SIDE  # bytes of one matrix
X = jax.ShapeDtypeStruct((SIDE, SIDE), "float32")
FULL = np.ones((SIDE, SIDE), np.float32)
WRITES_OVER = ELEMENTWISE | CALLS | {"dynamic_update_slice", "scatter", "scatter-add", "while", "scan", "loop"}
NAMES = [p.name for p in CORPUS if p.name != "integers_to_differentiate"]  # that one cannot be traced
quick = settings(deadline=None, max_examples=60 if EVERY_PROGRAM else 25, derandomize=True, database=None)


def replayed(forward, backward=lambda ct: ct, saved=()):
    """Replay two functions of matrices: `x -> (loss, *results)`, `(results at `saved`, ct) -> gradient`."""
    made = jax.make_jaxpr(forward)(X)
    kept = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in made.out_avals[1:]]
    back = jax.make_jaxpr(backward)(*(kept[i] for i in saved), jnp.float32(1))
    first, last = jaxprs.opened(made)[0], jaxprs.opened(back)[0]
    names = Names()
    names.give([*first.constvars, *first.invars, *last.constvars, *last.invars[len(saved) :]])
    names.run(first.eqns)
    count = len(names.level.rows)
    names.env.update((v, names.read(first.outvars[1 + i])) for i, v in zip(saved, last.invars, strict=False))
    names.run(last.eqns)
    ends = map(names.read, [first.outvars[0], *last.outvars])
    names.level.ends.update(b for b in ends if b is not None)
    return Rows(names.level, count).replay()


def in_matrices(found):
    """The peak in matrices; beside them stand a few numbers."""
    return round(found.peak_bytes / N, 1)


# ------------------------------------------------------------------------------------ by hand


def test_a_chain_of_products_counted_by_hand():
    """Forward: y, then y and z. Backward: y, b; y, b, g; y, b, g, h, the most; the sum lies over g or h."""

    def forward(x):
        y = x @ x
        return jnp.sum(y @ y), y

    def backward(y, ct):
        b = lax.broadcast(ct, (SIDE, SIDE))
        g = b @ y
        h = y @ b
        return (g + h) @ FULL

    found = replayed(forward, backward, [0])
    assert (found.peak_bytes, found.side, found.op) == (4 * N, Side.BACKWARD, "dot_general")
    assert [(b.bytes, b.type) for b in found.alive] == [(N, f"float32[{SIDE},{SIDE}]")] * 4
    assert sorted(b.op for b in found.alive) == ["broadcast_in_dim", "dot_general", "dot_general", "dot_general"]
    assert all(str(b).startswith("1.02 kB float32[16,16] ") and "test_memory.py" in b.source for b in found.alive)


@pytest.mark.parametrize(
    ("function", "matrices"),
    [
        (lambda x: jnp.sum(x), 0),
        (lambda x: jnp.sum(x @ x), 1),
        (lambda x: jnp.sum((x @ x) @ x), 2),
        (lambda x: jnp.sum(jnp.sin(x @ x) * 2), 1),  # fused into the sum
        (lambda x: jnp.sum(jnp.sin(x) @ x), 2),  # a product reads it from memory
        (lambda x: jnp.sum((lambda s: (s @ s) + s)(x * 2)), 2),
        (lambda x: jnp.sum((x @ x).reshape(-1)), 1),
        (lambda x: jnp.sum(((x @ x).reshape(-1).reshape(SIDE, SIDE)) @ x), 2),
        (lambda x: jnp.sum((x @ x).T @ x), 2),  # a product transposes by itself
        (lambda x: jnp.sum((lambda a, b: a @ b)(x @ x, x @ x + 1)), 3),
        (lambda x: jnp.sum((x @ x).astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)), 1.5),
    ],
)
def test_forwards_counted_by_hand(function, matrices):
    found = replayed(lambda x: (function(x),))
    assert in_matrices(found) == matrices
    assert matrices == 0 or found.side is Side.FORWARD


def test_a_transcendental_with_two_readers_is_written_and_an_addition_is_computed_twice():
    def twice(f, with_y):
        def forward(x):
            y = x @ x
            z = f(y)
            return (jnp.sum(z * 2) + jnp.sum(lax.rev(z, (0,))) + (jnp.sum(y) if with_y else 0.0),)

        return in_matrices(replayed(forward))

    assert [twice(lambda y: y + 1, with_y) for with_y in (False, True)] == [1, 1]
    assert [twice(jnp.sin, with_y) for with_y in (False, True)] == [1, 2]  # over y, where nothing reads it later


# ------------------------------------------------------------------------------------ in place


def test_an_elementwise_result_takes_the_place_of_an_operand_that_ends_there():
    def ends(x):
        z = jnp.tanh(x @ x)
        return (jnp.sum(z @ z),)

    def goes_on(x):
        y = x @ x
        z = jnp.tanh(y)
        return (jnp.sum((z @ z) * y),)

    assert [in_matrices(replayed(f)) for f in (ends, goes_on)] == [2, 3]


def test_zeros_that_a_gradient_is_scattered_into_lie_in_its_own_buffer():
    """As XLA has it: the gradient of a table that is read by rows takes no temporary of the table's size."""

    def backward(rows, ct):
        return jnp.zeros((100 * SIDE, SIDE)).at[np.arange(SIDE)].add(rows * ct)

    assert in_matrices(replayed(lambda x: (jnp.sum(x), x @ x), backward, [0])) <= 3


def test_an_argument_is_neither_counted_nor_written_over():
    assert in_matrices(replayed(lambda x: (jnp.sum(lax.optimization_barrier(jnp.tanh(x))),))) == 1


def test_a_result_of_another_size_takes_no_place():
    def forward(x):
        y = lax.optimization_barrier(x @ x)
        return (jnp.sum(lax.optimization_barrier(y.astype(jnp.bfloat16))).astype(jnp.float32),)

    assert in_matrices(replayed(forward)) == 1.5


def test_where_a_result_is_written_over_an_operand_the_list_shows_both():
    def forward(x):
        y, z = lax.optimization_barrier((x @ x, x @ x))
        return (jnp.sum(lax.optimization_barrier(y + z)),)

    found = replayed(forward)
    assert in_matrices(found) == 2
    assert found.op in ("add", "dot_general")
    assert sum(b.bytes for b in found.alive) == (3 if found.op == "add" else 2) * N


# ------------------------------------------------------------------------------------ what is not read


def test_an_array_that_nothing_reads_has_no_effect():
    def plain(x):
        y = jnp.tanh(x @ x)
        return jnp.sum(y @ y), y

    def with_spare(x):
        _ = jnp.exp((x @ x) @ x)
        return plain(x)

    def backward(y, ct):
        return (y * ct) @ y

    assert len(jax.make_jaxpr(with_spare)(X).eqns) > len(jax.make_jaxpr(plain)(X).eqns)
    assert replayed(with_spare, backward, [0]).peak_bytes == replayed(plain, backward, [0]).peak_bytes


@quick
@given(st.integers(0, 3), st.integers(0, 3))
def test_a_residual_more_never_lowers_the_peak(used, unused):
    """Read in the backward it lives until then; unread it is not kept."""

    def forward(x):
        made = [x @ x for _ in range(used + unused)]
        return jnp.sum(sum(made, x)), *made

    def backward(*residuals_and_ct):
        *residuals, ct = residuals_and_ct
        out = lax.broadcast(ct, (SIDE, SIDE)) @ FULL
        for r in residuals:
            out = out @ r
        return out

    peak = replayed(forward, backward, list(range(used))).peak_bytes
    for more in range(used, used + unused):
        assert replayed(forward, backward, list(range(more + 1))).peak_bytes >= peak


@pytest.mark.parametrize("name", NAMES[::9])
def test_a_saved_value_that_the_backward_does_not_read_never_lowers_the_peak(name, traced):
    made = traced(name)
    graph, planner = made.graph, made.planner
    sides = planner.problem.sides
    plan = STRATEGIES["min_cut"](graph)
    read = {v for i in (*plan.recomputed, *plan.deferred) for v in graph.ops[i].inputs} | sides.wanted
    before = planner.replay(plan).peak_bytes
    for v in graph.values:
        if v.maker is None or sides.is_late(v.id) or v.id in read or graph.ops[v.maker].name in (STEP, LITERAL):
            continue
        more = Plan.of(graph, {*plan.values, v.id})
        assert planner.replay(more).peak_bytes >= before, graph.where(v.id)


# ------------------------------------------------------------------------------------ saving all and nothing


def cut(layers, strategy):
    def joint(x, ct):
        def loss(x):
            for _ in range(layers):
                x = jnp.tanh(x @ x)
            return jnp.sum(x)

        y, pullback = jax.vjp(loss, x)
        return y, *pullback(ct)

    made = split(jax.make_jaxpr(joint)(X, jnp.float32(1)), Roles.simple(1, 1, 1, 1), strategy)
    return Replayer(made.graph).rows(made.schedule).replay()


def test_each_layer_costs_a_residual_and_a_chain_that_runs_again_as_a_whole_spares_nothing():
    """The first step of the backward needs the last layer, hence all before it."""
    all_saved, none_saved = (
        [cut(layers, strategy).peak_bytes for layers in range(3, 9)]
        for strategy in ("save_all", lambda graph: Plan.of(graph, []))
    )
    assert {b - a for a, b in pairwise(all_saved)} == {b - a for a, b in pairwise(none_saved)} == {N}
    assert all(0 <= b - a <= N for a, b in zip(all_saved, none_saved, strict=True))


def test_two_residuals_of_a_layer_take_a_matrix_more_than_one():
    """All: sin and cos of the product. The cheapest cut: the product."""

    def joint(x, ct):
        def loss(x):
            for _ in range(6):
                x = jnp.sin(x @ x)
            return jnp.sum(x)

        y, pullback = jax.vjp(loss, x)
        return y, *pullback(ct)

    closed, roles = jax.make_jaxpr(joint)(X, jnp.float32(1)), Roles.simple(1, 1, 1, 1)
    peaks = {}
    for name in STRATEGIES:
        made = split(closed, roles, name)
        peaks[name] = Replayer(made.graph).rows(made.schedule).peak_bytes
    assert peaks["save_all"] - peaks["min_cut"] >= 4 * N


# ------------------------------------------------------------------------------------ loops


def looped(length, stacked):
    def forward(x):
        def step(h, _):
            h = ((h @ h) @ h) @ h
            return h, h if stacked else None

        last, seen = lax.scan(step, x, None, length=length)
        return (jnp.sum(last @ last) + (jnp.sum(seen[0]) if stacked else 0.0),)

    return replayed(forward)


def test_the_peak_of_a_body_is_counted_once_whatever_the_trips():
    """In the body: a product and the next one; around it: the last carry."""
    assert {looped(length, False).peak_bytes for length in (2, 3, 50)} == {3 * N}
    assert looped(2, False).op == "scan"


def test_a_stack_takes_a_copy_for_each_trip():
    assert looped(50, True).peak_bytes - looped(2, True).peak_bytes == 48 * N


def test_what_is_alive_in_the_body_stands_in_the_list():
    found = looped(5, False)
    assert sum(b.bytes for b in found.alive) == found.peak_bytes
    assert [b.op for b in found.alive].count("dot_general") == 2


def test_branches_count_as_much_as_the_largest():
    def forward(x):
        return (jnp.sum(lax.cond(x[0, 0] > 0, lambda h: (h @ h) @ (h @ h), lambda h: h, x)),)

    assert in_matrices(replayed(forward)) == 3  # the result, and two products in the branch


def test_a_mask_that_is_read_later_keeps_no_random_bits():
    def forward(x):
        keep = jax.random.bits(jax.random.key(0), x.shape) < 2**30
        h = jnp.where(keep, x @ x, 0.0)
        return (jnp.sum(jnp.where(keep, (h @ h) @ (h @ h), 0.0)),)

    assert in_matrices(replayed(forward)) == 3  # three products; the bits would be a fourth


# ------------------------------------------------------------------------------------ on the corpus


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES[::4])
def test_what_is_alive_adds_up_to_the_peak_but_for_what_is_written_over(name, strategy, traced):
    graph = traced(name).graph
    plan = STRATEGIES[strategy](graph)
    steps = schedule(Problem.of(graph, backend=PORTABLE), plan)
    found = Replayer(graph).rows(steps).replay()
    listed = [b.bytes for b in found.alive]
    assert listed == sorted(listed, reverse=True)
    over = sum(listed) - found.peak_bytes
    assert over >= 0
    assert over == 0 or found.op in WRITES_OVER or "custom" in found.op
    assert over <= found.peak_bytes


@pytest.mark.parametrize("name", NAMES[1::7])
def test_a_replay_is_the_same_each_time(name, traced):
    planner = traced(name).planner
    plan = STRATEGIES["min_cut"](traced(name).graph)
    assert planner.replay(plan) == planner.replay(plan)


TEN = [p for p in LARGER if p.name not in ("transformer_block", "scan_over_layers")]


@pytest.mark.parametrize("program", TEN, ids=lambda program: program.name)
def test_the_model_lies_within_a_factor_of_three_of_xla(program):
    function = aot.function(program.function, argnums=program.argnums)
    made = function.trace(*program.args, **program.kwargs).partition().compile()
    temporaries = made.activation_bytes
    predicted = made.cut.request.planner.replay(made.cut.plan).peak_bytes
    assert temporaries > 100_000
    assert temporaries / 3 <= predicted <= 3 * temporaries


def test_a_barrier_is_another_name_for_each_operand_by_its_place_and_a_number_in_it_has_a_buffer():
    def forward(x):
        _, products, also = lax.optimization_barrier((1.0, x @ x, 2.0))
        return (jnp.sum(products @ products) + also,)

    assert in_matrices(replayed(forward)) == 2  # the products, once, and their product
