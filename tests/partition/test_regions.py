"""Regions under `jax.checkpoint`: which are opened, how their equations are marked, and what a step then takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jointcut import aot
from jointcut.partition.program.graph import TOP
from jointcut.partition.program.jax import jaxprs, runtime, user_source
from jointcut.partition.program.places import RESULT, SAVED, modules_of, regions_of
from jointcut.partition.program.primitives import REGION
from jointcut.partition.rewrite.regions import inlined

POLICIES = jax.checkpoint_policies
X = np.linspace(0.5, 1.5, 16, dtype=np.float32).reshape(4, 4)


def equations(closed):
    """All equations that hold no others, however deep, outside of regions that stay closed."""
    found, work = [], [jaxprs.opened(closed)[0]]
    while work:
        for eqn in work.pop().eqns:
            inner = [] if eqn.primitive.name == REGION else list(jaxprs.inner_jaxprs(eqn))
            work += inner
            found += [] if inner else [eqn]
    return found


def marks(function):
    """Of each primitive of a function how deep in regions it is: those that let it be saved, and whose result it is."""
    closed = inlined(jax.make_jaxpr(function)(X))
    stacks = {e.primitive.name: user_source.scope_of(e) for e in equations(closed)}
    kinds = ("", SAVED, RESULT)
    return {name: tuple("".join(sorted(regions_of(stack, what))) for what in kinds) for name, stack in stacks.items()}


def test_all_equations_of_an_opened_region_are_marked_and_copies_are_its_results():
    region = jax.checkpoint(lambda x: jax.jit(jnp.sin)(x) * 2)
    found = marks(lambda x: jnp.cos(region(jnp.tanh(x))))
    assert found == {
        "tanh": ("", "", ""),
        "sin": ("0", "", ""),
        "mul": ("0", "", ""),
        "copy": ("0", "", "0"),
        "cos": ("", "", ""),
    }


def test_a_region_in_another_one_has_the_marks_of_both():
    inner = jax.checkpoint(lambda x: jnp.exp(jnp.sin(x)))
    outer = jax.checkpoint(lambda x: jnp.tanh(inner(jnp.cos(x))))
    stacks = [user_source.scope_of(e) for e in equations(inlined(jax.make_jaxpr(outer)(X)))]
    found = [tuple("".join(sorted(regions_of(stack, what))) for what in ("", RESULT)) for stack in stacks]
    assert found == [("0", ""), ("01", ""), ("01", ""), ("01", "1"), ("0", ""), ("0", "0")]


def test_what_a_policy_lets_be_saved_is_marked():
    def layer(x):
        return jnp.sin(checkpoint_name(x @ x, "kept"))

    dots = marks(jax.checkpoint(layer, policy=POLICIES.dots_saveable))
    assert dots["dot_general"] == ("0", "0", "")
    assert dots["name"] == dots["sin"] == ("0", "", "")
    named = marks(jax.checkpoint(layer, policy=POLICIES.save_only_these_names("kept")))
    assert named["name"] == ("0", "0", "")
    assert named["dot_general"] == named["sin"] == ("0", "", "")


def test_inputs_and_numbers_that_a_region_returns_are_no_copies():
    region = jax.checkpoint(lambda x: (x, 2.0, jnp.sin(x)))
    closed = inlined(jax.make_jaxpr(region)(X))
    assert [e.primitive.name for e in equations(closed)] == ["sin", "copy"]
    assert runtime.evaluate(closed, X)[0] is X


def test_marking_twice_marks_once():
    """A function that calls another one of ours is traced with what is marked there."""
    for region in (jax.checkpoint(lambda x: jnp.sin(x) * 2), jax.checkpoint(CLOSED["a loop"])):
        once = inlined(jax.make_jaxpr(region)(X))
        again = inlined(jax.make_jaxpr(lambda x, once=once: runtime.evaluate(once, x))(X))
        assert [user_source.scope_of(e) for e in equations(again)] == [user_source.scope_of(e) for e in equations(once)]


def test_the_marks_are_no_names_of_modules():
    closed = inlined(jax.make_jaxpr(jax.checkpoint(jax.named_scope("block")(lambda x: jnp.sin(x))))(X))
    assert modules_of(user_source.scope_of(equations(closed)[0])) == ("jax.checkpoint", "block")


CLOSED = {
    "a loop": lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0],
    "a loop in a region of its own": lambda x: jnp.cos(
        jax.checkpoint(lambda y: lax.fori_loop(0, 2, lambda _, c: jnp.sin(c), y))(x)
    ),
    "an effect": lambda x: (jax.debug.callback(lambda _: None, x), jnp.sin(x))[1],
}


@pytest.mark.parametrize("what", CLOSED)
def test_a_region_stays_closed_if_it_holds(what):
    assert any(e.primitive.name == REGION for e in equations(inlined(jax.make_jaxpr(jax.checkpoint(CLOSED[what]))(X))))


def test_a_conditional_under_a_checkpoint_is_opened_and_keeps_nothing():
    @jax.checkpoint
    def block(w, x):
        return x + lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(jnp.sin(x @ w) @ w), lambda x: jnp.sin(x) * jnp.exp(x), x)

    def loss(w, x):
        return jnp.sum(block(w, block(w, x)) ** 2)

    cut = aot.function(loss, argnums=(0, 1)).trace(X, 2 * X).partition("min_cut")
    graph = cut.split.graph
    assert [op.name for op in graph.ops].count("branches") == 4
    assert not [s for s in cut.plan.saved if graph.values[s.value].loop != TOP]
    for sign in (1, -1):
        got, want = (f(X, sign * X) for f in (cut.compile().value_and_grad, jax.value_and_grad(loss, (0, 1))))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_what_stays_in_a_closed_region_is_under_a_scope_and_the_region_is_not():
    (region,) = equations(inlined(jax.make_jaxpr(jax.checkpoint(CLOSED["a loop"]))(X)))
    (inner,) = [eqn for body in jaxprs.inner_jaxprs(region) for eqn in body.eqns]
    assert "jax.checkpoint" in user_source.scope_of(inner)
    assert "jax.checkpoint" not in user_source.scope_of(region)


def test_a_region_stays_closed_if_its_policy_offloads():
    policy = POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")
    region = jax.checkpoint(lambda x: jnp.sin(x @ x), policy=policy)
    assert [e.primitive.name for e in equations(inlined(jax.make_jaxpr(region)(X)))] == [REGION]


def test_no_region_in_one_that_stays_closed_is_opened():
    """JAX would lose it: of the outer region it derives the whole at once."""
    body = jax.checkpoint(lambda c: jnp.sin(c))
    outer = jax.checkpoint(lambda x: lax.scan(lambda c, _: (body(c), None), x, None, length=2)[0])
    closed = inlined(jax.make_jaxpr(outer)(X))
    assert str(closed).count(f"{REGION}[") == str(jax.make_jaxpr(outer)(X)).count(f"{REGION}[") == 2


WIDTH, ROWS, LAYERS = 64, 512, 6


def layers(wrap, x, weights):
    """The mean square of what some layers make, each in `wrap`."""
    layer = wrap(lambda h, w: h + jnp.sin(jnp.tanh(h @ w[0]) * 2) @ w[1])
    for w in weights:
        x = layer(x, w)
    return jnp.mean(x**2)


def scanned(wrap, x, weights):
    """The same in a scan."""
    layer = wrap(lambda h, w: h + jnp.sin(jnp.tanh(h @ w[0]) * 2) @ w[1])
    return jnp.mean(lax.scan(lambda h, w: (layer(h, w), None), x, weights)[0] ** 2)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the pass that removes barriers is XLA:CPU's")
@pytest.mark.parametrize("model", [layers, scanned])
def test_a_step_takes_no_more_than_what_jax_checkpoint_promises(model):
    """Its promise is kept by plain JAX where XLA:CPU is told to leave the barriers alone."""
    draws = np.random.default_rng(0)
    x = draws.standard_normal((ROWS, WIDTH), np.float32)
    weights = draws.standard_normal((LAYERS, 2, WIDTH, WIDTH), np.float32) / 8
    loss = jax.value_and_grad(lambda x, weights: model(jax.checkpoint, x, weights), 1)
    kept = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    promised = jax.jit(loss).lower(x, weights).compile(compiler_options=kept)
    step = aot.function(lambda weights, x: model(jax.checkpoint, x, weights)).trace(weights, x).partition().compile()
    assert step.activation_bytes <= 1.02 * promised.memory_analysis().temp_size_in_bytes
    value, gradient = step.value_and_grad(weights, x)
    want, want_gradient = promised(x, weights)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-4, atol=1e-6)


def test_a_fraction_is_of_the_step_that_plain_jax_takes_with_the_checkpoints():
    weights, x = np.ones((LAYERS, 2, WIDTH, WIDTH), np.float32), np.ones((ROWS, WIDTH), np.float32)

    def loss(weights, x):
        return scanned(jax.checkpoint, x, weights)

    plain = jax.jit(jax.value_and_grad(loss)).lower(weights, x).compile().memory_analysis()
    traced = aot.function(loss).trace(weights, x)
    assert abs(traced.plain_memory.temp_bytes - plain.temp_size_in_bytes) <= 128
    for step in (lambda f: f.trace(weights, x).partition(), lambda f: jax.eval_shape(jax.grad(f), weights, x)):
        with pytest.raises(aot.BudgetError):
            step(aot.function(loss, budget=0.2))
