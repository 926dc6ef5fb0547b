"""What was found for one function is never used for another that differs inside a body alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas

from jointcut import aot
from jointcut.aot.options.limits import limit
from jointcut.aot.planning.budgets import searches
from jointcut.partition.prices.cost import Roofline

W = jnp.linspace(0.2, 0.9, 8)
COST = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)


def repeated(inner):
    return lambda w: jnp.sum(lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, inner(c[1]) * w), (0, w))[1])


def scanned(inner):
    return lambda w: jnp.sum(lax.scan(lambda h, _: (inner(h) * w, None), w, None, length=3)[0])


def branching(inner):
    return lambda w: jnp.sum(lax.cond(w[0] > 0, inner, jnp.cos, w))


def jitted(inner):
    return lambda w: jnp.sum(jax.jit(jax.jit(inner))(w))


def with_slope(inner):
    @jax.custom_vjp
    def ruled(w):
        return inner(w)

    ruled.defvjp(lambda w: (ruled(w), w), lambda w, ct: (inner(w) * ct,))
    return lambda w: jnp.sum(ruled(w))


def called_back(inner):
    struct = jax.ShapeDtypeStruct(W.shape, W.dtype)
    same = jax.custom_jvp(lambda w: jax.pure_callback(lambda w: w, struct, w))
    same.defjvp(lambda ws, ts: (same(*ws), *ts))
    return lambda w: jnp.sum(lax.scan(lambda h, _: (inner(same(h)), None), w, None, length=2)[0])


def in_a_kernel(inner):
    def kernel(x_ref, o_ref):
        o_ref[...] = inner(x_ref[...])

    struct = jax.ShapeDtypeStruct(W.shape, W.dtype)
    same = jax.custom_vjp(lambda w: pallas.pallas_call(kernel, out_shape=struct, interpret=True)(w))
    same.defvjp(lambda w: (same(w), w), lambda w, ct: (ct * inner(w),))
    return lambda w: jnp.sum(same(w))


TABLE = np.arange(8, dtype=np.float32)
AROUND = [repeated, scanned, branching, jitted, with_slope, called_back, in_a_kernel]
INNER = {
    "a literal": (lambda h: h * 2.0, lambda h: h * 3.0),
    "an op": (lambda h: jnp.sin(h), lambda h: jnp.cos(h)),
    "a constant": (lambda h: h * lax.rev(TABLE, (0,)), lambda h: h + lax.rev(2 * TABLE, (0,))),
    "a size": (lambda h: h * jnp.sum(jnp.resize(h, (4,))), lambda h: h * jnp.sum(jnp.resize(h, (40,)))),
}
EQUAL = {repeated: scanned}  # which JAX can differentiate
PAIRS = [
    pytest.param(around, *pair, id=f"{name} {around.__name__}")
    for around in AROUND
    for name, pair in INNER.items()
    if (around, name) != (in_a_kernel, "a constant")  # which a kernel may not close over
]


@pytest.mark.parametrize(("around", "one", "other"), PAIRS)
def test_a_plan_is_kept_under_the_whole_program(around, one, other):
    def places(inner):
        wanted = aot.function(around(inner), cost=COST).trace(W).request.wanted(limit(0.5))
        lookup = searches.Lookup.of(wanted)
        assert lookup.least is not None, "the search has a name"
        return lookup.place, lookup.key, id(lookup.least.place)

    first, second, again = places(one), places(other), places(one)
    assert first[0] is again[0] and first[1:] == again[1:]
    assert first[0] is not second[0] and first[1] != second[1] and first[2] != second[2]


@pytest.mark.parametrize(("around", "one", "other"), PAIRS[::5])
def test_programs_and_notes_on_disk_and_records_of_a_tape_are_of_one_function(around, one, other, tmp_path):
    for inner in (one, other):
        function, want = around(inner), jax.grad(EQUAL.get(around, around)(inner))(W)
        for budget in (None, 1.0):
            found = aot.function(function, cache=tmp_path, budget=budget, cost=COST).grad(W)
            np.testing.assert_allclose(found, want, rtol=1e-5)
        np.testing.assert_allclose(aot.tape(function).grad(W), want, rtol=1e-5)
