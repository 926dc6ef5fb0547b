"""Parameters that a scan takes slices of are updated slice by slice, in the steps of the scan in the backward."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jointcut import aot
from jointcut.aot.update.slices import Slice
from jointcut.partition.program.jax import jaxprs, runtime
from jointcut.partition.rewrite import simplify
from programs import named

LAYERS, WIDTH = 3, 4
X = jnp.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)


@pytest.fixture(autouse=True)
def promotion_as_optax_needs_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def fresh():
    keys = jax.random.split(jax.random.key(0), 3)
    stacked = {"w": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)), "b": jnp.zeros((LAYERS, WIDTH))}
    return {"layers": stacked | {"scale": jnp.ones(LAYERS)}, "out": jax.random.normal(keys[1], (WIDTH, 2))}


def layer(x, p):
    return x + jnp.tanh(x @ p["w"] + p["b"]) * p["scale"], None


def network(params, x, reverse=False):
    x, _ = lax.scan(layer, x, params["layers"], reverse=reverse)
    return jnp.mean((x @ params["out"]) ** 2)


def twice(params, x):
    x, _ = lax.scan(layer, x, params["layers"])
    return network(params, x, reverse=True)


def decayed(params, x):
    return 0.01 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params)) + network(params, x)


def in_halves(params, x):
    return network(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), x).astype(jnp.float32)


def read_whole(params, x):
    return network(params, x @ params["layers"]["w"][0])


def checkpointed(params, x):
    x, _ = lax.scan(jax.checkpoint(layer), x, params["layers"])
    return jnp.mean((x @ params["out"]) ** 2)


def two_deep(params, x):
    def outer(x, p):
        return lax.scan(layer, x, jax.tree.map(lambda leaf: leaf[None], p))[0], None

    return jnp.mean(lax.scan(outer, x, params["layers"])[0] ** 2)


ADAM = optax.adamw(optax.cosine_decay_schedule(1e-2, 30), weight_decay=0.1)
MOMENTUM = optax.sgd(0.05, momentum=0.9)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.05, momentum=0.9))


def written(closed):
    """How many stacks scans of a program write slice by slice."""
    bodies = (jaxprs.scan_layout(eqn).body for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan")
    return sum(eqn.primitive.name == "dynamic_update_slice" for body in bodies for eqn in body.eqns)


def stacks(loss, update, params=None, sweeps=1):
    """How many stacks a step of `loss` writes slice by slice."""
    params = fresh() if params is None else params
    state = update.init(params) if hasattr(update, "init") else params
    return written(aot.function(loss).trace_update(params, state, X, update=update, sweeps=sweeps).program.closed)


def stepped(loss, update, step, steps, params=None):
    """The parameters and state after some steps, of ours and of one `jax.jit` of plain JAX."""
    params = fresh() if params is None else params
    state = update.init(params) if hasattr(update, "init") else jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def plain(params, state, x):
        gradients = jax.grad(loss)(params, x)
        if not hasattr(update, "init"):
            return update(gradients, state, params)
        changes, state = update.update(gradients, state, params)
        return optax.apply_updates(params, changes), state

    got, want = jax.tree.map(jnp.copy, (params, state)), (params, state)
    for _ in range(steps):
        _, *got = step(*got, X)
        want = plain(*want, X)
    return tuple(got), want


def same(got, want, **near):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **(near or {"rtol": 1e-6, "atol": 1e-6})), got, want)


WAYS = {
    "cut": aot.function,
    "budget": functools.partial(aot.function, budget=0.0),
    "tape": aot.tape,
}


@pytest.mark.parametrize("way", WAYS)
def test_twenty_steps_end_in_equal_parameters(way):
    step = functools.partial(WAYS[way](network).value_and_update, update=ADAM)
    got, want = stepped(network, ADAM, step, 20)
    if way == "cut":
        jax.tree.map(np.testing.assert_array_equal, got, want)
    else:  # the forward of a tape runs op by op, and under a budget a part of it runs again
        same(got, want)
    assert stacks(network, ADAM) == 9


UPDATES = {
    "SGD": (optax.sgd(0.05), 1, 3),
    "momentum": (optax.sgd(0.05, momentum=0.9, nesterov=True), 1, 6),
    "Lion": (optax.lion(1e-3, weight_decay=0.1), 1, 6),
    "clipped": (CLIPPED, 2, 2),  # but for the weights, there are so few numbers that all wait for the norm together
    "norms of leaves": (optax.lamb(1e-3), 1, 0),
}


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_of_elements_runs_in_the_scan(name):
    update, sweeps, count = UPDATES[name]
    assert stacks(network, update, sweeps=sweeps) == count


def test_a_norm_of_all_gradients_is_made_of_those_of_slices():
    traced = aot.function(network).trace_update(fresh(), CLIPPED.init(fresh()), X, update=CLIPPED, sweeps=2)
    scans = [eqn for eqn in traced.program.closed.jaxpr.eqns if eqn.primitive.name == "scan"]
    made = [v.aval.shape for eqn in scans for v in eqn.outvars[jaxprs.scan_layout(eqn).num_carry :]]
    assert (LAYERS, WIDTH, WIDTH) not in made
    assert (LAYERS, WIDTH) in made and (LAYERS,) in made  # gradients of few numbers, and sums over slices
    step = jax.jit(functools.partial(aot.tape(network).value_and_update, update=CLIPPED, sweeps=2))
    same(*stepped(network, CLIPPED, step, 2))


LOSSES = {
    "of a reverse scan": (functools.partial(network, reverse=True), 6),
    "used in two scans": (twice, 6),
    "with a decay of its own": (decayed, 6),
    "in half precision": (in_halves, 6),
    "read elsewhere": (read_whole, 4),
    "under jax.checkpoint": (checkpointed, 6),
    "of a scan of scans": (two_deep, 6),
    "in a jitted function": (jax.jit(network), 6),
}


@pytest.mark.parametrize("name", LOSSES)
def test_parameters_are_updated_in_the_last_scan_that_reads_them(name):
    loss, count = LOSSES[name]
    assert stacks(loss, MOMENTUM) == count
    same(*stepped(loss, MOMENTUM, functools.partial(aot.function(loss).value_and_update, update=MOMENTUM), 2))


def test_a_state_whose_parts_change_places_is_written_at_once():
    def update(gradients, state, params):
        first, second = state
        return jax.tree.map(lambda p, a, g: p - 0.1 * a * g, params, first, gradients), (
            jax.tree.map(lambda b, g: b + g, second, gradients),
            jax.tree.map(lambda a, g: a - g, first, gradients),
        )

    params, x = jnp.ones((LAYERS, WIDTH, WIDTH)), X
    loss = aot.function(lambda w, x: jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2))
    state = 0.5 * params, 2 * params
    want = update(jax.grad(loss)(params, x), state, params)
    assert written(loss.trace_update(params, state, x, update=update).program.closed) == 3
    same(loss.value_and_update(params, state, x, update=update)[1:], want)


def test_a_hook_that_is_traced_runs_in_the_scan_and_another_sees_the_whole_gradient():
    seen = []

    def clipped(gradient):
        return jnp.clip(gradient, -0.01, 0.01)

    def called_back(gradient):
        seen.append(np.asarray(gradient).shape)

    def loss(hook):
        def hooked(w, x):
            w = aot.post_accumulate(w, hook, traced=hook is clipped)
            return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)

        return aot.tape(hooked)

    update, params = optax.sgd(1.0), jnp.full((LAYERS, WIDTH, WIDTH), 0.1)
    for hook, change in ((clipped, clipped), (called_back, lambda g: g)):
        want = params - change(jax.grad(loss(lambda g: g))(params, X))
        got = loss(hook).value_and_update(jnp.copy(params), update.init(params), X, update=update)[1]
        same(got, want)
    assert seen == [(LAYERS, WIDTH, WIDTH)]


PROGRAMS = ("reverse_scan", "scan_of_one_step", "nested_scans", "cond_in_scan", "float64_scan", "dropout_in_scan")


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_the_corpus_are_updated_as_by_plain_jax(name):
    program = named(name)
    nums = (program.argnums,) if isinstance(program.argnums, int) else tuple(program.argnums)
    params = tuple(program.args[i] for i in nums)

    def loss(params, x):
        del x
        args = list(program.args)
        for i, p in zip(nums, params, strict=True):
            args[i] = p
        outputs = jax.tree.leaves(program.function(*args, **program.kwargs))
        return sum(jnp.sum(jnp.sin(out)) for out in outputs if jnp.issubdtype(out.dtype, jnp.floating))

    def update(gradients, state, params):
        state = jax.tree.map(lambda m, g: (0.9 * m + g).astype(m.dtype), state, gradients)
        return jax.tree.map(lambda p, m: (p - 0.01 * m).astype(p.dtype), params, state), state

    with program.precision():
        assert stacks(loss, update, params) >= 2
        step = functools.partial(aot.function(loss).value_and_update, update=update)
        same(*stepped(loss, update, step, 2, params), rtol=1e-5, atol=1e-6)


def test_what_runs_again_reads_the_slices_that_the_scan_writes():
    """Else XLA would copy the stack, since the scan writes into it."""

    def step(x, w):
        return x + jnp.sin(jnp.cos(x @ w) * x), None

    made = aot.function(lambda w, x: jnp.mean(lax.scan(step, x, w)[0] ** 2), budget=0.0)
    traced = made.trace_update(jnp.ones((8, 64, 64)), (), jnp.ones((48, 64)), update=lambda g, s, p: (p - g, s))
    (scan,) = [eqn for eqn in traced.partition().backward.jaxpr.eqns if eqn.primitive.name == "scan"]
    layout = jaxprs.scan_layout(scan)
    assert sum(eqn.primitive.name == "dot_general" for eqn in layout.body.eqns) == 3
    assert (8, 64, 64) in [v.aval.shape for v in scan.invars[layout.num_consts :][: layout.num_carry]]
    sliced = scan.invars[layout.num_consts + layout.num_carry :]
    assert (8, 64, 64) not in [v.aval.shape for v in sliced]


def slice_of(function, *arrays):
    """The program for one slice of what a function makes of its first argument; None if it joins slices."""
    jaxpr, _ = jaxprs.opened(simplify.inlined(jax.make_jaxpr(function)(*arrays)))
    made = Slice.of(jaxpr.eqns, jaxpr.outvars, {jaxpr.invars[0]})
    if made is None:
        return None
    read = [*made.sliced, *made.whole]
    values = runtime.evaluate(jaxprs.build(jaxpr.invars, read, jaxpr.eqns), *arrays)
    cut, whole = values[: len(made.sliced)], values[len(made.sliced) :]
    return [runtime.evaluate(made.program, *(x[i] for x in cut), *whole)[0] for i in range(len(arrays[0]))]


G = jnp.arange(24.0).reshape(2, 3, 4)
ALONE = {
    "a number": (lambda g, c: g * c + 1, jnp.float32(2)),
    "another array": (lambda g, w: jnp.where(g > 3, g, w), -G),
    "a vector over all slices": (lambda g, v: g + v, jnp.arange(4.0)),
    "a number for each slice": (lambda g, v: g * v[:, None, None], jnp.arange(2.0)),
    "sums of its own": (lambda g, c: g / (c + jnp.sum(g**2, (1, 2), keepdims=True)), jnp.float32(1)),
    "another order": (lambda g, c: (g.transpose(0, 2, 1) * c).reshape(2, 12), jnp.float32(1)),
}
JOINED = {
    "a norm": lambda g: g / jnp.sqrt(jnp.sum(g**2)),
    "a sum over slices": lambda g: g - jnp.mean(g, 0),
    "the slice before": lambda g: g + jnp.roll(g, 1, 0),
    "an order that moves slices": lambda g: g.transpose(1, 0, 2),
    "slices in another shape": lambda g: g.reshape(6, 4),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_slice_is_computed_alone(name):
    function, more = ALONE[name]
    np.testing.assert_array_equal(jnp.stack(slice_of(function, G, more)), function(G, more))


@pytest.mark.parametrize("name", JOINED)
def test_slices_that_are_joined_are_not_computed_alone(name):
    assert slice_of(JOINED[name], G) is None
