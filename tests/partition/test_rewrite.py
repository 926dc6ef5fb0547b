"""Calls are opened and equal equations merged; names, lines and effects stay as they were."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.partition.program.jax import jaxprs, runtime, user_source
from jointcut.partition.rewrite import simplify


def equations(closed):
    return jaxprs.opened(closed)[0].eqns


def names(closed):
    return [eqn.primitive.name for eqn in equations(closed)]


def same(closed, other, *args):
    results = zip(runtime.evaluate(closed, *args), runtime.evaluate(other, *args), strict=True)
    return all(np.array_equal(a, b) for a, b in results)


@jax.jit
def inner(x):
    return jnp.sin(x) * 2


def test_nested_calls_are_opened_and_their_names_join_the_stack():
    @jax.jit
    def outer(x):
        with jax.named_scope("deep"):
            return inner(x) + 1

    closed = jax.make_jaxpr(lambda x: outer(x))(1.0)
    opened = simplify.inlined(closed)
    assert names(opened) == ["sin", "mul", "add"]
    assert [user_source.scope_of(eqn) for eqn in equations(opened)] == [
        "outer/deep/inner",
        "outer/deep/inner",
        "outer/deep",
    ]
    assert all("test_rewrite.py" in user_source.source_of(eqn) for eqn in equations(opened))
    assert same(closed, opened, 0.3)


def test_one_call_made_twice_gives_two_sets_of_results():
    closed = jax.make_jaxpr(lambda x: inner(inner(x)))(1.0)
    assert names(simplify.inlined(closed)) == ["sin", "mul", "sin", "mul"]
    assert same(closed, simplify.inlined(closed), 0.3)


def test_calls_in_a_scan_body_are_opened():
    closed = jax.make_jaxpr(lambda x: lax.scan(lambda h, _: (inner(h), None), x, None, length=3)[0])(1.0)
    scan = next(eqn for eqn in equations(simplify.inlined(closed)) if eqn.primitive.name == "scan")
    assert [eqn.primitive.name for eqn in jaxprs.scan_layout(scan).body.eqns] == ["sin", "mul"]
    assert same(closed, simplify.inlined(closed), 0.3)


def test_a_call_with_shardings_of_its_own_stays_closed():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.jit(jnp.sin, in_shardings=device)
    assert len(names(simplify.inlined(jax.make_jaxpr(lambda x: placed(x))(1.0)))) == 1
    assert names(simplify.inlined(jax.make_jaxpr(lambda x: placed(x))(1.0))) != ["sin"]


def merged(function, *args, boundary=0):
    jaxpr, _ = jaxprs.opened(jax.make_jaxpr(function)(*args))
    eqns, outs, count = simplify.merged(jaxpr.eqns, jaxpr.outvars, boundary)
    return jaxprs.build(jaxpr.invars, outs, eqns), count


def test_what_is_computed_twice_is_computed_once():
    def twice(x):
        return jnp.exp(jnp.sin(x)) + jnp.exp(jnp.sin(x))

    closed, _ = merged(twice, 0.3)
    assert names(closed) == ["sin", "exp", "add"]
    assert same(closed, jax.make_jaxpr(twice)(0.3), 0.3)


def test_other_parameters_or_other_operands_are_not_the_same():
    closed, _ = merged(lambda x: (x**2, x**3, x + 1, x + 2, x.astype(jnp.int32), x.astype(jnp.int16)), np.float32(0.3))
    assert len(equations(closed)) == 6


def test_effects_are_never_merged():
    def printed(x):
        jax.debug.print("{}", x)
        jax.debug.print("{}", x)
        return jnp.sin(x)

    closed, _ = merged(printed, 0.3)
    assert len(equations(closed)) == 3


def test_the_boundary_counts_what_is_left_of_the_forward():
    closed, count = merged(lambda x: (jnp.sin(x), jnp.sin(x), jnp.cos(x), jnp.cos(x)), 0.3, boundary=3)
    assert (names(closed), count) == (["sin", "cos"], 2)
