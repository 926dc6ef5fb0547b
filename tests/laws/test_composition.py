"""Every program, made by jointcut, composes with JAX's own transforms as the plain function does."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jointcut import aot
from oracle import STRATEGIES, assert_same, called, is_inexact, loss, plain, value_and_grad, weigh
from programs import CORPUS, EVERY_PROGRAM, OF_EACH_KIND, named

LOSSES = tuple(program for program in CORPUS if "grad" not in program.lacks)
SCALARS = tuple(program for program in LOSSES if program.scalar)


def over(programs, lacking="", strategies=STRATEGIES):
    """Parameters: each program by the first strategy, and with JOINTCUT_EVERY_PROGRAM by the others too."""
    chosen = [
        program
        for program in programs
        if lacking not in program.lacks and (EVERY_PROGRAM or program.name in OF_EACH_KIND)
    ]
    first, *others = strategies
    cases = [(program, first) for program in chosen]
    cases += [(program, other) for program in chosen for other in others if EVERY_PROGRAM]
    return pytest.mark.parametrize(
        ("program", "strategy"), cases, ids=[f"{program.name}-{strategy}" for program, strategy in cases]
    )


def compiled(program, strategy):
    return aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux, strategy=strategy)


def check(program, strategy, transform, slack=1.0):
    """Apply a transform of `oracle`'s kind to the function made by jointcut, and compare under jax.jit."""
    with program.precision():
        got = jax.jit(transform(program, compiled(program, strategy)))(*program.args)
        assert_same(got, plain(program, transform), program, slack=slack)


def positions(program):
    return (program.argnums,) if isinstance(program.argnums, int) else program.argnums


def scaled(tree, factor):
    """The tree with its inexact leaves multiplied, in their own types."""
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype) if is_inexact(leaf) else leaf, tree)


def as_arrays(args):
    return jax.tree.map(jnp.asarray, args)


@over(SCALARS if EVERY_PROGRAM else SCALARS[::2])
def test_jax_value_and_grad_of_it_under_jit(program, strategy):
    """The law of vmap asks it of every program, with a batch around it."""
    check(program, strategy, value_and_grad)


@over(SCALARS if EVERY_PROGRAM else SCALARS[1::2])
def test_its_value_and_grad_under_jit(program, strategy):
    with program.precision():
        got = jax.jit(compiled(program, strategy).value_and_grad)(*program.args, **program.kwargs)
        assert_same(got, plain(program, value_and_grad), program)


@over(SCALARS if EVERY_PROGRAM else SCALARS[1::2], strategies=("min_cut",))
def test_jax_value_and_grad_of_it_without_jit(program, strategy):
    with program.precision():
        got = value_and_grad(program, compiled(program, strategy))(*program.args)
        assert_same(got, plain(program, value_and_grad), program)


@over([program for program in CORPUS if not program.scalar or program.has_aux])
def test_a_call_under_jit(program, strategy):
    check(program, strategy, called)


def gradient_of_weighed(program, function):
    """The gradient of a number made of every output."""
    return jax.grad(loss(program, function), argnums=positions(program))


@over([program for program in LOSSES if not program.scalar])
def test_gradient_through_every_output_under_jit(program, strategy):
    check(program, strategy, gradient_of_weighed)


def batched(program, function):
    """The function and its gradient over a batch of two, and the gradient of the sum over the batch.

    Inexact leaves differ, the others are shared.
    """
    scalar = loss(program, function)

    def both(*args):
        if "grad" in program.lacks:
            return function(*args, **program.kwargs)
        return function(*args, **program.kwargs), jax.grad(scalar, argnums=positions(program))(*args)

    def transformed(*args):
        leaves, tree = jax.tree.flatten(as_arrays(args))
        batch = jax.tree.unflatten(tree, [jnp.stack([x, x * 0.9]) if is_inexact(x) else x for x in leaves])
        axes = jax.tree.unflatten(tree, [0 if is_inexact(x) else None for x in leaves])
        each = jax.vmap(both, in_axes=axes)(*batch)
        if "grad" in program.lacks:
            return each

        def total(*batch):
            return jnp.sum(jax.vmap(scalar, in_axes=axes)(*batch))

        return each, jax.grad(total, argnums=positions(program))(*batch)

    return transformed


@over(CORPUS if EVERY_PROGRAM else CORPUS[1::2], lacking="vmap", strategies=("min_cut",))
def test_vmap_of_it_and_of_its_gradient_and_the_gradient_of_its_vmap(program, strategy):
    check(program, strategy, batched)


def differentiated_twice(program, function):
    """The gradient of a number made of the gradient."""
    gradient = jax.grad(loss(program, function), argnums=positions(program))

    def transformed(*args):
        return jax.grad(lambda *inner: weigh(gradient(*inner)), argnums=positions(program))(*args)

    return transformed


@over(LOSSES if EVERY_PROGRAM else LOSSES[::2], lacking="second grad")
def test_a_second_gradient(program, strategy):
    check(program, strategy, differentiated_twice, slack=10)


def pushed_forward(program, function):
    """jax.jvp along the differentiated arguments themselves."""

    def transformed(*args):
        args = as_arrays(args)
        places = [place % len(args) for place in positions(program)]

        def of_differentiated(*chosen):
            changed = dict(zip(places, chosen, strict=True))
            return loss(program, function)(*[changed.get(i, arg) for i, arg in enumerate(args)])

        chosen = tuple(args[place] for place in places)
        return jax.jvp(of_differentiated, chosen, scaled(chosen, jnp.float32(0.5)))

    return transformed


@over(LOSSES if EVERY_PROGRAM else LOSSES[::2], lacking="jvp", strategies=("min_cut",))
def test_jvp(program, strategy):
    check(program, strategy, pushed_forward)


def looped(program, function):
    """Both uses in a scan: a gradient taken in its body, and a gradient taken of the whole."""
    scalar = loss(program, function)
    factors = (1.0, 0.9, 0.8)

    def total(*args):
        def step(sofar, factor):
            value, gradients = jax.value_and_grad(scalar, positions(program))(*scaled(as_arrays(args), factor))
            return sofar + value.astype(sofar.dtype), gradients

        return lax.scan(step, jnp.float32(0), jnp.float32(factors))

    def values(*args):
        def step(sofar, factor):
            return sofar + scalar(*scaled(as_arrays(args), factor)).astype(sofar.dtype), None

        return lax.scan(step, jnp.float32(0), jnp.float32(factors))[0]

    def transformed(*args):
        return total(*args), jax.grad(values, positions(program))(*args)

    return transformed


@over(LOSSES if EVERY_PROGRAM else LOSSES[1::4], strategies=("min_cut",))
def test_use_inside_scan(program, strategy):
    check(program, strategy, looped, slack=3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_per_example_gradients_without_jit(strategy):
    program = named("two_layers")
    weights, rows, targets = program.args
    per_example = jax.vmap(jax.grad(compiled(program, strategy)), in_axes=(None, 0, 0))
    want = jax.vmap(jax.grad(program.function), in_axes=(None, 0, 0))
    assert_same(per_example(weights, rows, targets), want(weights, rows, targets), program)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("transform", [jax.hessian, jax.jacrev, jax.jacfwd], ids=lambda transform: transform.__name__)
def test_jacobians(transform, strategy):
    program = named("layer_norm")
    function = partial(compiled(program, strategy), program.args[0])
    want = jax.jit(transform(partial(program.function, program.args[0])))
    assert_same(jax.jit(transform(function))(*program.args[1:]), want(*program.args[1:]), program, slack=3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_inside_another(strategy):
    """A jointcut function that calls a jointcut function."""
    program = named("two_layers")
    inner = compiled(program, strategy)

    def outer(function, weights, x, y):
        return jnp.sin(function(weights, x, y)) + function(weights, y @ weights["out"].T @ weights["in"].T, y)

    got = aot.function(partial(outer, inner), strategy=strategy).value_and_grad(*program.args)
    assert_same(got, jax.jit(jax.value_and_grad(partial(outer, program.function)))(*program.args), program)


REFUSALS = [(program, transform) for program in CORPUS for transform in program.lacks]
TRANSFORMS = {
    "jvp": pushed_forward,
    "grad": gradient_of_weighed,
    "second grad": differentiated_twice,
    "vmap": batched,
}


@pytest.mark.parametrize(
    ("program", "transform"), REFUSALS, ids=[f"{program.name}-{transform}" for program, transform in REFUSALS]
)
def test_plain_jax_refuses_what_the_corpus_says_it_does(program, transform):
    """So that no law is skipped for a reason of yesterday."""
    with (
        program.precision(),
        pytest.raises((TypeError, ValueError, AttributeError, NotImplementedError), match=program.lacks[transform]),
    ):
        plain(program, TRANSFORMS[transform])
