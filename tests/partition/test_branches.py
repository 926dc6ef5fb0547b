"""Branches of conditionals are cut like programs of their own, and what they keep shares its space."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from jointcut import aot
from jointcut.partition import Plan, Problem, parse, show
from jointcut.partition.bodies.slots import Space
from jointcut.partition.lower.memory.replay import handed_bytes
from jointcut.partition.program.jax import jaxprs


def layers(count, width):
    """A branch of so many layers, each with hidden arrays of its own width."""

    def branch(x, w):
        for _ in range(count):
            hidden = jnp.sin(x @ w[:, :width]) * jnp.cos(x[:, :width])
            x = jnp.tanh(hidden @ w[:width])
        return x

    return branch


BRANCHES = [layers(1 + k // 4, 3 + k) for k in range(8)]
W = 0.3 * jnp.cos(jnp.arange(144.0)).reshape(12, 12)
X = jnp.sin(jnp.arange(48.0)).reshape(4, 12)
EACH = jnp.array([5, 0, 7, 2, 2], jnp.int32)


def of_eight(w, x, index):
    return jnp.sum(lax.switch(index, BRANCHES, x, w) ** 2)


def in_a_scan(w, x, indices, branches=tuple(BRANCHES)):
    def step(h, index):
        h = lax.switch(index, branches, h, w)
        return h, jnp.sum(h)

    last, sums = lax.scan(step, x, indices)
    return jnp.sum(last**2) + jnp.sum(sums)


def in_two_scans(w, x, indices):
    def outer(h, _):
        return lax.scan(lambda g, i: (lax.switch(i, BRANCHES[:3], g, w), None), h, indices)[0], None

    return jnp.sum(lax.scan(outer, x, None, 2)[0])


def nested(w, x, index):
    def inner(h, v):
        return lax.cond(h[0, 0] > 0, lambda a, b: jnp.sin(a @ b), lambda a, b: a * jnp.exp(a), h, v)

    return jnp.sum(lax.cond(index > 3, inner, lambda h, v: jnp.tanh(h) @ v, x, w))


def result_read_twice(w, x, index):
    first, second = lax.cond(index > 3, lambda a, b: (jnp.sin(a), a @ b), lambda a, b: (jnp.exp(a), a), x, w)
    return jnp.sum(first * jnp.sin(first)) + jnp.sum(jnp.tanh(second)), first


def with_dropout(w, x, index):
    def dropped(h, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), jnp.sin(h @ w), 0.0) * jnp.exp(h)

    return jnp.sum(lax.cond(index > 3, dropped, lambda h, key: jnp.cos(h), x, jax.random.key(0)))


PROGRAMS = {
    "dropout": (with_dropout, jnp.int32(5)),
    "scan": (in_a_scan, EACH),
    "two scans": (in_two_scans, jnp.array([1, 0, 2], jnp.int32)),
    "nested": (nested, jnp.int32(5)),
    "short scan": (partial(in_a_scan, branches=BRANCHES[:2]), jnp.array([1, 0], jnp.int32)),
    "idle": (lambda w, x, i: jnp.sum(lax.cond(i > 3, lambda h: jnp.sin(h) @ w, lambda h: h, x)), jnp.int32(1)),
    "one operand": (lambda w, x, i: jnp.sum(lax.cond(i > 3, jnp.sin, jnp.cos, x @ w) * x), jnp.int32(1)),
}


def conditionals(closed):
    """All `cond` equations of a jaxpr, those in loops included."""
    jaxpr, _ = jaxprs.opened(closed)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            yield eqn
        elif eqn.primitive.name == "scan":
            yield from conditionals(eqn.params["jaxpr"])


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_jax(name):
    program, last = PROGRAMS[name]
    assert_close(
        aot.function(program, argnums=(0, 1)).value_and_grad(W, X, last),
        jax.jit(jax.value_and_grad(program, argnums=(0, 1)))(W, X, last),
    )


def test_every_branch_gets_its_own_residuals_back():
    cut, plain = aot.function(of_eight, argnums=(0, 1)), jax.jit(jax.value_and_grad(of_eight, argnums=(0, 1)))
    for index in map(jnp.int32, range(8)):
        out, pullback = cut.vjp(W, X, index)
        assert_close((out, pullback(jnp.float32(1))[:2]), plain(W, X, index))


def test_results_that_others_read_stay_results():
    cut = aot.function(result_read_twice, argnums=(0, 1), has_aux=True)
    for index in (1, 5):
        want = jax.value_and_grad(result_read_twice, argnums=(0, 1), has_aux=True)(W, X, index)
        assert_close(cut.value_and_grad(W, X, jnp.int32(index)), want)


@pytest.mark.parametrize("name", ["nested", "short scan"])
def test_in_forward_mode_mapped_and_to_second_order(name):
    program, last = PROGRAMS[name]
    cut = aot.function(program)
    assert_close(
        jax.jvp(lambda w: cut(w, X, last), (W,), (jnp.ones_like(W),)),
        jax.jvp(lambda w: program(w, X, last), (W,), (jnp.ones_like(W),)),
    )
    many = jnp.stack([X, -X, 2 * X])
    assert_close(
        jax.vmap(jax.grad(cut), (None, 0, None))(W, many, last),
        jax.vmap(jax.grad(program), (None, 0, None))(W, many, last),
    )
    twice = [jax.grad(lambda w, f=f: jnp.sum(jax.grad(f)(w, X, last) ** 2)) for f in (cut, program)]
    assert_close(twice[0](W), twice[1](W))


def test_a_mapped_index_selects():
    def program(w, x, index):
        return jnp.sum(lax.switch(index, BRANCHES[:3], x, w) ** 2)

    each = jnp.array([1, 0, 2, 2], jnp.int32)
    mapped = (jax.jit(jax.vmap(jax.grad(f), (None, None, 0))) for f in (aot.function(program), program))
    assert_close(*(f(W, X, each) for f in mapped))


@pytest.mark.parametrize(("program", "last"), [(of_eight, jnp.int32(0)), (in_a_scan, EACH)])
def test_branches_keep_what_the_largest_keeps_alone(program, last):
    steps = 1 if program is of_eight else len(EACH)
    alone = [
        aot.function(lambda w, x, f=f: jnp.sum(f(x, w) ** 2)).trace(W, X).partition(strategy="min_cut")
        for f in BRANCHES
    ]
    largest = max(cut.plan.bytes_saved for cut in alone)
    plan = aot.function(program).trace(W, X, last).partition(strategy="min_cut").plan
    graph = plan.problem.graph
    of_branches = sum(saved.bytes for saved in plan.saved if graph.rivals[graph.values[saved.value].loop] > 1)
    assert steps * (largest - X.nbytes) <= of_branches <= steps * largest  # the result is counted elsewhere


def test_halves_hand_over_what_the_plan_says_but_for_a_little_padding():
    for program, last in ((of_eight, jnp.int32(0)), (in_a_scan, EACH), (nested, jnp.int32(5))):
        cut = aot.function(program).trace(W, X, last).partition(strategy="min_cut")
        assert cut.plan.bytes_saved <= cut.split.residual_bytes <= 1.05 * cut.plan.bytes_saved
        assert handed_bytes(cut.split.graph, cut.split.schedule) == cut.plan.bytes_saved


def layered_scan(w, x, flags):
    """Blocks of which each runs or not, in a scan: as in stochastic depth, or layers that a router skips."""

    def block(h, w):
        return h + jnp.tanh(jax.nn.gelu(h @ w) @ w.T)

    def step(h, each):
        w, flag = each
        return lax.cond(flag, block, lambda h, w: h * jnp.sin(h) + jnp.exp(-h * h), h, w), None

    return jnp.mean(lax.scan(step, x, (w, flags))[0] ** 2)


def test_budgets_reach_into_conditionals():
    w = 0.05 * jnp.cos(jnp.arange(8 * 64 * 256.0)).reshape(8, 64, 256)
    arguments = w, jnp.sin(jnp.arange(128 * 64.0)).reshape(128, 64), jnp.arange(8) % 3 == 0
    function = aot.function(layered_scan, budget=0.2)
    cut = function.trace(*arguments).partition()
    assert cut.compile().activation_bytes <= 0.2 * cut.traced.plain_memory.temp_bytes
    assert {cut.split.graph.ops[i].name for i in cut.plan.recomputed} & {"dot_general", "branches"}
    assert_close(function.value_and_grad(*arguments), jax.jit(jax.value_and_grad(layered_scan))(*arguments))


def test_a_conditional_runs_again_where_its_result_is_not_kept():
    def program(w, x, flag):
        h = lax.cond(flag, lambda a: jnp.sin(a @ w), lambda a: jnp.exp(a), x)
        return jnp.sum(jnp.tanh(h @ w) ** 2)

    def nothing(graph):
        return Plan.of(graph, [])

    function = aot.function(program, argnums=(0, 1), strategy=nothing)
    cut = function.trace(W, X, True).partition()
    assert cut.plan.bytes_saved == 0 and "again branches" in str(cut.split.schedule)
    for flag in (True, False):
        assert_close(
            function.value_and_grad(W, X, flag),
            jax.jit(jax.value_and_grad(program, argnums=(0, 1)))(W, X, flag),
        )


def test_a_schedule_shows_each_branch():
    cut = aot.function(result_read_twice, has_aux=True).trace(W, X, jnp.int32(1)).partition(strategy="min_cut")
    text = str(cut.split.schedule)
    assert "branches #" in text and "branch 0 keeps" in text and "branch 1 keeps" in text
    assert parse(show(cut.split.graph)) == cut.split.graph


def test_a_random_key_of_a_branch_reaches_its_backward():
    def program(x, key, flag):
        def noisy(h):
            inner = jax.random.split(key, 2)[1]
            return h * jax.random.normal(inner, h.shape) + jnp.sin(h)

        return jnp.sum(lax.cond(flag, noisy, jnp.cos, x) ** 2)

    def everything(graph):
        made = [v.id for v in graph.values if v.maker is not None and graph.rivals[v.loop] > 1]
        late = Problem.of(graph).sides.late
        steps = {v for op in graph.ops if op.name in ("step", "literal", "loop", "branches") for v in op.outputs}
        return Plan.of(graph, [v for v in made if v not in late and v not in steps])

    key = jax.random.key(3)
    for flag in (True, False):
        got = aot.function(program, strategy=everything).value_and_grad(X, key, flag)
        assert_close(got, jax.jit(jax.value_and_grad(program))(X, key, flag))


@pytest.mark.parametrize(("program", "last"), [(of_eight, jnp.int32(0)), (in_a_scan, EACH)])
def test_a_branch_computes_cheap_values_again(program, last):
    cut = aot.function(program).trace(W, X, last).partition()
    (backward,) = conditionals(cut.backward)
    inside = [{eqn.primitive.name for eqn in jaxprs.opened(branch)[0].eqns} for branch in backward.params["branches"]]
    assert all({"sin", "cos", "tanh"} & names for names in inside)


def test_a_branch_with_an_effect_stays_as_it_is(capsys):
    def loud(a):
        jax.debug.print("loud")
        return jnp.sin(a) * jnp.exp(a)

    def program(x, flag):
        return jnp.sum(lax.cond(flag, loud, jnp.cos, x))

    cut = aot.function(program)
    assert_close(cut.value_and_grad(X, True), (jnp.sum(jnp.sin(X) * jnp.exp(X)), jax.grad(program)(X, True)))
    jax.effects_barrier()
    assert capsys.readouterr().out.count("loud") == 2


def test_arrays_laid_over_a_mesh_keep_their_types():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
        got = jax.jit(aot.function(lambda x, i: of_eight(W, x, i)).value_and_grad)(x, jnp.int32(3))
        assert_close(got, jax.jit(jax.value_and_grad(lambda x: of_eight(W, x, 3)))(x))


def test_with_symbolic_sizes_conditionals_stay_as_jax_wrote_them(tmp_path):
    def program(x, w, index):
        return jnp.sum(lax.switch(index, BRANCHES[:3], x, w) ** 2)

    shapes = [aot.shapes("b, 12", "float32"), aot.shapes("12, 12", "float32"), aot.shapes("", "int32")]
    aot.function(program).export(tmp_path / "artefact", *shapes, platforms="cpu", sizes={"b": 4})
    loaded = aot.load(tmp_path / "artefact")
    assert_close(loaded.value_and_grad(X, W, jnp.int32(2)), jax.value_and_grad(program)(X, W, 2))


def test_a_branch_may_keep_empty_arrays():
    def program(w, x, flag):
        return jnp.sum(lax.cond(flag, jnp.sin, lambda x: x * x, x)) + jnp.sum(w)

    got = aot.function(program, argnums=(0, 1)).value_and_grad(W, X[:0], True)
    assert_close(got, jax.value_and_grad(program, argnums=(0, 1))(W, X[:0], True))


def test_references_that_branches_write():
    def program(w, x, index):
        ref = jax.new_ref(x)

        def through():
            ref[...] = jnp.sin(ref[...] @ w)

        def twice():
            ref[...] = ref[...] * 2

        lax.cond(index > 1, through, twice)
        lax.cond(index > 2, through, twice)
        return jnp.sum(ref[...] ** 2)

    cut, plain = aot.function(program, argnums=(0, 1)), jax.value_and_grad(program, argnums=(0, 1))
    for index in (1, 2, 3):
        assert_close(cut.value_and_grad(W, X, jnp.int32(index)), plain(W, X, jnp.int32(index)))


def typed(*shapes, dtype="float32"):
    return [jax.core.ShapedArray(shape, np.dtype(dtype)) for shape in shapes]


def test_equally_large_arrays_share_a_slot():
    space = Space.of([typed((2, 3), (6,), (4,)), typed((3, 2), (4,)), typed()])
    assert [aval.shape for aval in space.avals] == [(4,), (6,), (6,)]


def test_arrays_of_other_sizes_lie_one_after_another():
    space = Space.of([typed((2, 3), (5,)), typed((7,)), typed((3,), (3,), dtype="int32")])
    slots = [(aval.shape, aval.dtype.name) for aval in space.avals]
    assert slots == [((11,), "float32"), ((3,), "int32"), ((3,), "int32")]


@pytest.mark.parametrize("branch", range(3))
def test_what_is_packed_is_unpacked(branch):
    kept = [typed((2, 3), (5,)), typed((7,), ()), [*typed((4, 1)), *typed((2,), dtype="int32")]]
    space = Space.of(kept)
    arrays = [jnp.arange(aval.size, dtype=aval.dtype).reshape(aval.shape) for aval in kept[branch]]
    slots = space.pack(branch, arrays)
    assert [(x.shape, x.dtype) for x in slots] == [(aval.shape, aval.dtype) for aval in space.avals]
    for got, want in zip(space.unpack(branch, slots), arrays, strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.shape == want.shape
