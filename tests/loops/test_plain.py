"""A `lax.while_loop` or a dynamic `fori_loop` in the user's or a library's code runs backwards as it stands."""

from __future__ import annotations

import contextlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from jax.scipy.optimize import minimize
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jointcut import aot
from jointcut.partition.errors import BudgetError, DerivativeError
from programs import EVERY_PROGRAM

X = jnp.array([0.4, 1.1, 2.0])


def root(a):
    """The square root by Newton's method, until it stands still."""

    def closer(carry):
        x, _ = carry
        return 0.5 * (x + a / x), jnp.max(jnp.abs(x * x - a))

    return lax.while_loop(lambda carry: carry[1] > 1e-5, closer, (jnp.maximum(a, 1.0), jnp.array(jnp.inf, a.dtype)))[0]


@jax.custom_jvp
def by_rule(x):
    return jnp.exp(x)


@by_rule.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return by_rule(x), root(by_rule(x) ** 2) * dx  # a loop in the rule itself


def in_a_scan(x):
    return jnp.sum(lax.scan(lambda c, row: (c + root(row + c**2), c), jnp.float32(1), x)[1])


def in_a_branch(x):
    return jnp.sum(lax.cond(x[0] > 0, root, jnp.sin, x))


def in_a_loop(x):
    return jnp.sum(lax.fori_loop(0, jnp.int32(3), lambda i, y: root(y + i), x))


def in_jit(x):
    return jnp.sum(jnp.sin(jax.jit(root)(x)))


def under_checkpoint(x):
    return jnp.sum(jax.checkpoint(lambda v: jnp.sin(root(v)))(x))


def in_a_rule(x):
    return jnp.sum(by_rule(x))


def zero_trips(x):
    return jnp.sum(lax.while_loop(lambda v: jnp.sum(v) < 0, lambda v: v * 2, jnp.cos(x)))


EXACT = {
    in_a_scan: lambda x: jnp.sum(lax.scan(lambda c, r: (c + jnp.sqrt(r + c**2), c), jnp.float32(1), x)[1]),
    in_a_branch: lambda x: jnp.sum(jnp.sqrt(x)),
    in_a_loop: lambda x: jnp.sum(jnp.sqrt(jnp.sqrt(jnp.sqrt(x) + 1) + 2)),
    in_jit: lambda x: jnp.sum(jnp.sin(jnp.sqrt(x))),
    under_checkpoint: lambda x: jnp.sum(jnp.sin(jnp.sqrt(x))),
    in_a_rule: lambda x: jnp.sum(jnp.exp(x)),
    zero_trips: lambda x: jnp.sum(jnp.cos(x)),
}


def near(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("program", EXACT, ids=lambda f: f.__name__)
def test_the_gradient_is_that_of_what_the_loop_computes(program):
    """By one of two ways in turn, and by both with JOINTCUT_EVERY_PROGRAM."""
    cut = aot.function(program)
    ways = [cut.value_and_grad, jax.jit(jax.value_and_grad(cut))]
    for way in ways if EVERY_PROGRAM else [ways[list(EXACT).index(program) % 2]]:
        near(way(X), jax.jit(jax.value_and_grad(EXACT[program]))(X))


def test_all_ways_of_calling():
    cut, exact = aot.function(in_jit), EXACT[in_jit]
    out, pullback = cut.vjp(X)
    near((out, *pullback(jnp.float32(2))), (exact(X), 2 * jax.grad(exact)(X)))
    near(cut.trace(X).partition().compile().value_and_grad(X), jax.value_and_grad(exact)(X))
    near(jax.vmap(jax.grad(cut))(jnp.stack([X, 2 * X])), jax.vmap(jax.grad(exact))(jnp.stack([X, 2 * X])))
    near(jax.jvp(cut, (X,), (X,)), jax.jvp(exact, (X,), (X,)))


def polar(x):
    """An entry of the orthogonal factor of a matrix, by a loop of JAX's; it is x / sqrt(x^2 + 1)."""
    return jax.scipy.linalg.polar(jnp.array([[1, 0], [0, 1]]) * x + jnp.array([[0.0, -1], [1, 0]]))[0][0, 0]


def fitted(theta):
    """The least point by JAX's own BFGS, a loop in a loop; it is theta, theta * 0.7."""

    def distance(x):
        return (theta - x[0]) ** 2 + (x[1] - x[0] * 0.7) ** 2

    return jnp.sum(minimize(distance, jnp.zeros(2), method="BFGS").x)


@pytest.mark.parametrize(
    ("function", "gradient"),
    [(polar, (1.3**2 + 1) ** -1.5), *[(fitted, 1.7)] * EVERY_PROGRAM],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_loops_of_a_library(function, gradient):
    """JAX refuses their gradients."""
    x = jnp.float32(1.3)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(function)(x)
    near(aot.function(function).grad(x), gradient)


def test_exported(tmp_path):
    aot.function(in_a_loop).export(tmp_path / "artefact", X, platforms="cpu")
    near(aot.load(tmp_path / "artefact").value_and_grad(X), jax.value_and_grad(EXACT[in_a_loop])(X))


def test_bounds_that_are_arrays():
    def power(x, n):
        return jnp.sum(lax.fori_loop(0, n, lambda i, y: y * x, jnp.ones_like(x)))

    cut = aot.function(power)
    for n in (0, 1, 5):
        np.testing.assert_allclose(cut.grad(X, jnp.int32(n)), n * X ** max(n - 1, 0), rtol=1e-5)


def test_an_array_that_is_filled_is_in_no_checkpoint():
    def filled(w):
        def step(i, array):
            return array.at[i].set(jnp.tanh(array @ w).sum(0))

        rows = lax.while_loop(lambda c: c[0] < 500, lambda c: (c[0] + 1, step(*c)), (1, jnp.ones((500, 4))))[1]
        return jnp.sum(rows)

    memory = aot.function(filled).trace(jnp.eye(4)).partition().compile().memory
    assert memory.step.temp_bytes < 40 * 500 * 4 * 4


def below(bound, start=0, change=1):
    return lambda x: lax.while_loop(lambda c: c[0] < bound, lambda c: (c[0] + change, jnp.sin(c[1])), (start, x))[1]


TRIPS = {
    "a number": (below(8), 8),
    "by threes": (below(8, -1, 3), 3),
    "a small type": (below(np.int8(127), np.int8(119)), 8),
    "downwards": (
        lambda x: lax.while_loop(lambda c: c[0] >= 7, lambda c: (c[0] - 2, jnp.sin(c[1])), (np.uint8(12), x))[1], 3
    ),
    "a bound in the carry": (lambda x: lax.fori_loop(0, jnp.int32(8), lambda i, y: jnp.sin(y), x), 8),
    "or less": (
        lambda x: lax.while_loop(
            lambda c: (c[0] < 8) & (c[1][0] < 9), lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x)
        )[1], 8
    ),
    "ours": (lambda x: aot.while_loop(lambda c: c[0] < 8, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1], 8),
    "a type that would wrap around": (below(np.int8(127), np.int8(120), np.int8(4)), 10),
    "an end that nobody knows": (
        lambda x: lax.while_loop(lambda c: c[1][0] > 0.5, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1], 10
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TRIPS)
def test_a_loop_keeps_no_more_carries_than_the_program_shows_it_to_make_trips(case):
    loop, want = TRIPS[case]
    plan = aot.function(lambda x: jnp.sum(loop(x))).trace(jnp.ones(2**18)).partition().plan
    assert plan.nested[0].checkpoints == want


@pytest.mark.parametrize(
    ("trips", "floats", "want"),
    [
        (None, 2**18, 10), (None, 2**12, 10), (None, 2**9, 16), (None, 4, 1024),  # few bytes, at least 10
        (8, 2**18, 8), (1000, 2**18, 44), (1000, 2**12, 128), (100, 2**12, 100),  # 2 MiB, or each step again once
        (10**6, 2**20, 16),  # but never more than 64 MiB
    ],
)  # fmt: skip
def test_the_default_stops_at_what_pays(trips, floats, want):
    with contextlib.nullcontext() if trips is None else aot.trips(trips):
        traced = aot.function(lambda x, n: jnp.sum(rooted(x, n))).trace(jnp.ones(floats), jnp.int32(3))
    assert traced.partition().plan.nested[0].checkpoints == want


def test_the_most_trips_are_no_expected_ones():
    def loss(most, x):
        return aot.while_loop(lambda c: c[0] > 0.1, jnp.sin, x, max_trips=most)[0]

    traced = [aot.function(partial(loss, most)).trace(jnp.ones(2**16)) for most in (3, 2000)]
    kept = [t.partition().plan.nested[0] for t in traced]
    assert [(loop.checkpoints, loop.most) for loop in kept] == [(3, 3), (10, 64)]


def test_loops_are_counted_by_name_wherever_they_run():
    def doubled(x):
        return lax.while_loop(lambda y: y < 100.0, lambda y: 2 * y, x)

    def program(x, xs):
        total = aot.while_loop(lambda y: y < 1000.0, lambda y: doubled(y) + y, x)
        total, _ = lax.scan(lambda c, x: (doubled(x) + c, None), total, xs)
        count = jnp.int32(total // 200)
        return lax.cond(total > 0, lambda: aot.fori_loop(0, count, lambda _, y: y + 1, total), lambda: 0.0)

    for form in (program, aot.function(program), jax.jit(program), jax.jit(aot.function(program))):
        counts = aot.count_trips(form, 1.0, xs=jnp.array([0.5, 10.0, 200.0]))
        assert {4, 8} <= {*counts.values()} <= {4, 7, 8}, counts
        assert next(n for name, n in counts.items() if "the lax.while_loop at" in name) == 8
    assert aot.count_trips(lambda x: x + 1, 1.0) == {}
    assert [*aot.count_trips(jax.vmap(doubled), jnp.array([1.0, 10.0])).values()] == [7]
    with aot.trips(max(aot.count_trips(doubled, 1.0).values())):
        assert aot.function(doubled).trace(1.0).partition().plan.nested[0].trips == 7


def test_a_loop_that_runs_more_often_than_expected_keeps_no_more_carries():
    def loss(x, n):
        with aot.trips(4):
            return jnp.sum(rooted(x, n))

    cut = aot.function(loss).trace(X, jnp.int32(40)).partition()
    assert cut.plan.nested[0].checkpoints == 4
    want = jax.jit(jax.grad(lambda x: jnp.sum(by_python(x, 40))))(X)
    np.testing.assert_allclose(cut.compile().value_and_grad(X, jnp.int32(40))[1], want, rtol=2e-5)


def test_a_function_without_such_loops_is_traced_once():
    calls = []

    def loss(x):
        calls.append(1)
        return jnp.sum(lax.fori_loop(0, 3, lambda i, y: jnp.sin(y), x))

    aot.function(loss).trace(X)
    assert len(calls) == 1


def test_a_loop_with_an_effect_is_refused():
    def loud(x):
        def body(v):
            io_callback(lambda: None, None, ordered=True)
            return v * 2

        return jnp.sum(lax.while_loop(lambda v: jnp.sum(v) < 100, body, x))

    with pytest.raises(DerivativeError) as caught:
        aot.function(loud).grad(X)
    place = r"\S*test_plain\.py:\d+"
    assert re.fullmatch(
        rf"the lax\.while_loop at {place} \(\S*loud\) has the effect OrderedIO, in {place} \(\S*body\); "
        r"so the loop has no derivative\.\n"
        r"Steps would be run again\. Return the value in the carry, and have the effect after the loop\.",
        str(caught.value),
    )


def test_other_errors_of_jax_come_through():
    def mixed(x):
        y = lax.while_loop(lambda v: jnp.sum(v) < 9, lambda v: v * 2, x)
        return jnp.sum(jax.pure_callback(np.sin, y, y))

    with pytest.raises(ValueError, match="Pure callbacks do not support JVP"):
        aot.function(mixed).grad(X)


def rooted(x, n):
    return lax.fori_loop(0, n, lambda i, y: jnp.sin(y) * x, x)


def by_python(x, n):
    y = x
    for _ in range(n):
        y = jnp.sin(y) * x
    return y


def test_mapped_inside_each_lane_makes_its_own_trips():
    xs, trips = jnp.stack([X, 2 * X, 3 * X]), np.array([0, 2, 5])
    got = aot.function(lambda xs, n: jnp.sum(jax.vmap(rooted)(xs, n))).grad(xs, jnp.asarray(trips))
    want = [jax.grad(lambda x, n=n: jnp.sum(by_python(x, n)))(x) for x, n in zip(xs, trips, strict=True)]
    near(got, jnp.stack(want))


def test_without_trips_the_pullback_is_the_identity():
    _, pullback = aot.function(rooted).vjp(X, jnp.int32(0))
    np.testing.assert_array_equal(pullback(3 * X)[0], 3 * X)


@pytest.mark.parametrize("checks", [True, False])
def test_inside_shard_map(checks):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def loss(loop):
        def program(x, w):
            def local(x, w):
                return loop(lambda i, y: jnp.sin(y * w) + 0.1 * lax.psum(y, "d"), x)

            specs = {"in_specs": (P("d"), P()), "out_specs": P("d"), "check_vma": checks}
            return jnp.sum(jax.shard_map(local, mesh=mesh, **specs)(x, w) ** 2)

        return program

    def unrolled(body, y):
        for i in range(4):
            y = body(i, y)
        return y

    want = jax.jit(jax.value_and_grad(loss(unrolled), (0, 1)))(X, 0.5 * X)
    plain = aot.function(loss(lambda body, y: lax.fori_loop(0, jnp.int32(4), body, y)), argnums=(0, 1))
    near(plain.value_and_grad(X, 0.5 * X), want)
    kept = loss(partial(aot.fori_loop, 0, jnp.int32(4)))
    near(jax.jit(jax.value_and_grad(kept, (0, 1)))(X, 0.5 * X), want)


def test_trips_may_differ_by_device():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def loss(x):
        def local(x):
            return lax.fori_loop(0, 2 + lax.axis_index("d"), lambda i, y: jnp.sin(y), x)

        return jnp.sum(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x))

    near(aot.function(loss).grad(X), jnp.cos(jnp.sin(X)) * jnp.cos(X))


def test_a_step_may_make_references():
    def loss(loop):
        def step(i, y):
            ref = jax.new_ref(y)
            ref[...] = jnp.sin(ref[...])
            return ref[...] * y

        return lambda x: jnp.sum(loop(step, x))

    want = jax.grad(loss(lambda step, x: step(1, step(0, x))))(X)
    near(aot.function(loss(lambda step, x: lax.fori_loop(0, jnp.int32(2), step, x))).grad(X), want)
    near(aot.function(loss(lambda step, x: aot.fori_loop(0, jnp.int32(2), step, x))).grad(X), want)


def test_a_body_checks_as_often_as_the_forward_runs():
    def doubled(x):
        def body(i, y):
            checkify.check(y[0] < 100, "too large: {}", y[0])
            return y * 2

        return jnp.sum(lax.fori_loop(0, jnp.int32(9), body, x))

    cut = aot.function(doubled)
    error, grads = checkify.checkify(lambda x: cut.grad(x))(X)
    assert "too large: 102.4" in error.get()
    error, grads = checkify.checkify(lambda x: cut.grad(x))(X / 8)
    assert error.get() is None
    near(grads, np.full(3, 2.0**9))


def test_exported_for_any_size(tmp_path):
    program = aot.function(lambda x, n: jnp.sum(rooted(x, n)))
    shapes = aot.shapes("b", "float32"), aot.shapes("", "int32")
    program.export(tmp_path / "artefact", *shapes, platforms="cpu", sizes={"b": 8})
    near(aot.load(tmp_path / "artefact").grad(X, jnp.int32(3)), jax.grad(lambda x: jnp.sum(by_python(x, 3)))(X))


def test_reports_and_budgets_name_no_figure_of_plain_jax_where_it_has_no_gradient():
    def halved(x):
        return jnp.sum(lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: jnp.sin(c) / 2, x))

    report = aot.function(halved).trace(jnp.ones(8)).partition("min_cut").explain(measure=False)
    remark, *_ = report.bounds
    assert remark.startswith("plain JAX has no gradient through the lax.while_loop at ")
    assert remark.endswith(": all saved is this step with nothing cut")
    assert str(report).count("lain JAX") == 1
    assert ", all saved " in report.verdict
    assert not any("plain JAX" in total["detail"] for total in report.data["totals"])
    assert "÷ all saved" in str(report.front)
    with pytest.raises(BudgetError) as refusal:
        aot.function(halved, budget="0.001%").grad(jnp.ones(8))
    assert str(refusal.value).startswith("budget of 0.001% of the activations with all saved cannot be met.")
    assert "plain JAX" not in str(refusal.value)
