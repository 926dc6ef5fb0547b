"""References mean the same inside JAX's transformations as plain JAX gives them, and are written once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.errors import CallError, TraceError
from jointcut.partition.search import mincut
from jointcut.wrappers.metadata.schemas import MutationType
from oracle import STRATEGIES

X = jnp.linspace(0.2, 0.8, 4)

pytestmark = pytest.mark.parametrize("strategy", STRATEGIES)


def normalised(x, statistics):
    """A normalisation that keeps running statistics, as BatchNorm does."""
    h = jnp.exp(jnp.sin(x))
    mean = jnp.mean(h)
    statistics["mean"][...] = 0.9 * statistics["mean"][...] + 0.1 * lax.stop_gradient(mean)
    statistics["count"][...] += 1
    return jnp.sum(jnp.tanh(h - mean) * h)


def fresh():
    return {"mean": jax.new_ref(jnp.float32(0)), "count": jax.new_ref(jnp.int32(0))}


def held(statistics):
    return {name: np.asarray(ref[...]) for name, ref in statistics.items()}


OUTER = {
    "grad": lambda f: jax.grad(f),
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "value_and_grad": lambda f: lambda x, s: jax.value_and_grad(f)(x, s)[1],
    "jit of the function": lambda f: jax.grad(jax.jit(f)),
    "jvp": lambda f: lambda x, s: jax.jvp(lambda x: f(x, s), (x,), (jnp.ones_like(x),))[1],
    "checkpoint": lambda f: jax.jit(lambda x, s: jax.vjp(lambda x: f(x, s), x)[1](jnp.float32(1))[0]),
    "in a scan": lambda f: lambda x, s: lax.scan(lambda c, _: (c + jax.grad(f)(x, s), None), 0 * x, None, length=2)[0],
}


@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
def test_statistics_are_those_of_jax_under(outer, strategy):
    mine, theirs = fresh(), fresh()
    function = aot.function(normalised, strategy=strategy)
    for _ in range(2):
        got, want = outer(function)(X, mine), outer(normalised)(X, theirs)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert held(mine)["count"] == held(theirs)["count"]
        np.testing.assert_allclose(held(mine)["mean"], held(theirs)["mean"], rtol=1e-5, atol=1e-6)


WAYS = {
    "call": lambda f, x, s: f(x, s),
    "value_and_grad": lambda f, x, s: f.value_and_grad(x, s)[1],
    "grad": lambda f, x, s: f.grad(x, s),
    "vjp": lambda f, x, s: f.vjp(x, s)[1](jnp.float32(1))[0],
    "jit of value_and_grad": lambda f, x, s: jax.jit(f.value_and_grad)(x, s)[1],
    "compiled": lambda f, x, s: f.trace(x, s).partition().compile().value_and_grad(x, s)[1],
    "compiled in two": lambda f, x, s: f.trace(x, s).partition().compile(executables=2).value_and_grad(x, s)[1],
    "compiled vjp": lambda f, x, s: f.trace(x, s).partition().compile().vjp(x, s)[1](jnp.float32(1)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_statistics_are_those_of_jax_by(way, strategy):
    mine, theirs = fresh(), fresh()
    function = aot.function(normalised, strategy=strategy)
    for _ in range(2):
        got = way(function, X, mine)
        value, gradient = jax.value_and_grad(normalised)(X, theirs)
        np.testing.assert_allclose(got, value if way is WAYS["call"] else gradient, rtol=1e-5, atol=1e-6)
        assert held(mine)["count"] == held(theirs)["count"]
        np.testing.assert_allclose(held(mine)["mean"], held(theirs)["mean"], rtol=1e-5, atol=1e-6)


def test_inside_a_transformation_the_function_is_cut_all_the_same(strategy):
    """The halves run there, not JAX's own derivative of the whole: a custom strategy is asked."""
    del strategy
    asked = []

    def watching(graph):
        asked.append(graph)
        return mincut.STRATEGIES["min_cut"](graph)

    jax.grad(aot.function(normalised, strategy=watching))(X, fresh())
    assert len(asked) == 1


def test_a_reference_that_is_differentiated_outside_stays_differentiable(strategy):
    """State made of what is differentiated flows through the reference, as in plain JAX."""

    def inner(x, ref):
        ref[...] = ref[...] * jnp.sin(x)
        return jnp.sum(ref[...] ** 2)

    def outer(f):
        def whole(x):
            ref = jax.new_ref(jnp.exp(x))
            first = f(x, ref)
            return first + jnp.sum(ref[...] * x)

        return jax.grad(whole)

    got = outer(aot.function(inner, strategy=strategy))(X)
    np.testing.assert_allclose(got, outer(inner)(X), rtol=1e-5, atol=1e-6)


def test_a_batch_of_references(strategy):
    def inner(x, ref):
        ref[...] = ref[...] + lax.stop_gradient(jnp.sum(x))
        return jnp.sum(jnp.sin(x) * ref[...])

    xs = jnp.stack([X, 2 * X])
    mine, theirs = jax.new_ref(jnp.ones(2)), jax.new_ref(jnp.ones(2))
    got = jax.vmap(jax.grad(aot.function(inner, strategy=strategy)))(xs, mine)
    want = jax.vmap(jax.grad(inner))(xs, theirs)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mine[...], theirs[...], rtol=1e-5, atol=1e-6)


def test_metadata_says_what_is_written(strategy):
    infos = aot.function(normalised, strategy=strategy).trace(X, fresh()).metadata.input_info
    assert [(i.path, i.mutation_type) for i in infos] == [
        ("args[0]", MutationType.NOT_MUTATED),
        ("args[1]['count']", MutationType.MUTATED_IN_GRAPH),
        ("args[1]['mean']", MutationType.MUTATED_IN_GRAPH),
    ]


# ----------------------------------------------------------------------------------------------------- errors


def leaking(x, ref):
    ref[...] = jnp.sum(x)
    return jnp.sum(x**2)


LEAKS = {
    "value_and_grad": lambda f, r: f.value_and_grad(X, r),
    "vjp": lambda f, r: f.vjp(X, r),
    "trace": lambda f, r: f.trace(X, r),
    "grad outside": lambda f, r: jax.grad(f)(X, r),
}


@pytest.mark.parametrize("way", LEAKS.values(), ids=LEAKS)
def test_a_differentiated_value_in_a_reference_that_is_not(way, strategy):
    with pytest.raises(TraceError) as caught:
        way(aot.function(leaking, strategy=strategy), jax.new_ref(jnp.float32(0)))
    assert str(caught.value) == (
        "leaking writes a value that is differentiated into a jax.Ref that is not.\n"
        "Write jax.lax.stop_gradient(value): statistics and counters need no derivative."
    )


REFUSED = {
    "value_and_grad": lambda f, *args: f.value_and_grad(*args),
    "vjp": lambda f, *args: f.vjp(*args),
    "trace": lambda f, *args: f.trace(*args),
    "call": lambda f, *args: f(*args),
}


@pytest.mark.parametrize("way", REFUSED.values(), ids=REFUSED)
def test_a_reference_passed_twice(way, strategy):
    ref = jax.new_ref(jnp.float32(0))
    with pytest.raises(CallError) as caught:
        way(aot.function(lambda x, a, b: jnp.sum(x) * a[...] * b["r"][...], strategy=strategy), X, ref, {"r": ref})
    assert str(caught.value) == (
        "args[2]['r'] is the same jax.Ref as args[1].\n"
        "Pass it once: a function that writes through two names could not tell which write comes last."
    )


@pytest.mark.parametrize("way", REFUSED.values(), ids=REFUSED)
def test_a_reference_returned(way, strategy):
    with pytest.raises(TraceError) as caught:
        way(aot.function(lambda x, a: (jnp.sum(x), {"a": a}), has_aux=True, strategy=strategy), X, jax.new_ref(X))
    assert str(caught.value) == (
        "result[1]['a'] is a jax.Ref, which a compiled function cannot return.\n"
        "Return what it holds, ref[...]; the caller has the reference itself."
    )


def test_a_reference_to_be_differentiated(strategy):
    function = aot.function(lambda a, x: jnp.sum(a["r"][...] * x), strategy=strategy)
    with pytest.raises(TraceError) as caught:
        function.value_and_grad({"r": jax.new_ref(X)}, X)
    assert str(caught.value) == (
        "args[0]['r'] is a jax.Ref: value_and_grad differentiates arrays.\n"
        "Leave it out of argnums=0, or pass what it holds, ref[...], and differentiate that."
    )


def test_vjp_gives_a_reference_no_cotangent(strategy):
    ref = jax.new_ref(X)
    _, pullback = aot.function(lambda x, a: jnp.sum(a[...] * x), strategy=strategy).vjp(X, ref)
    gradient, nothing = pullback(jnp.float32(1))
    np.testing.assert_allclose(gradient, X)
    assert (nothing.dtype, nothing.shape) == (jax.dtypes.float0, X.shape)
