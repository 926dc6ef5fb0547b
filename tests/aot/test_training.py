"""Training with state: running statistics, counters, caches and keys, in the form that each library gives them, go
through a function of ours step by step as through plain JAX, and so do the losses and the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax

from jointcut import aot
from programs import EVERY_PROGRAM

STEPS = 4
WIDTH = 8
DRAWS = np.random.default_rng(1)
ROWS = jnp.asarray(DRAWS.normal(size=(STEPS, 6, 5)), jnp.float32)  # another batch for each step
LABELS = jnp.asarray(DRAWS.integers(0, 3, (STEPS, 6)))
SERIES = jnp.asarray(DRAWS.normal(size=(STEPS, 4, 6, 5)), jnp.float32)  # time in front of the batch
KEYS = jax.random.split(jax.random.key(7), STEPS)
RTOL, ATOL = 1e-3, 2e-5  # rounding, after steps each of which amplifies it


@dataclass(frozen=True)
class Training:
    """A loss `(params, state, key, *batch) -> (loss, state)`, where it starts, and the batches of its steps.

    Where `state` holds references, the loss writes to them and returns None in its place. `beside` are references
    that the loss closes over.
    """

    loss: Callable[..., Any]
    params: Any
    state: Any
    batches: tuple[Any, ...] = (ROWS, LABELS)
    beside: Any = ()


def cross_entropy(logits, labels):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


# ---------------------------------------------------------------- flax.linen


class LinenBoxes(linen.Module):
    """Weights in boxes that name the axes of a mesh, between them batch normalisation and dropout."""

    @linen.compact
    def __call__(self, x):
        kernel = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
        x = linen.Dense(WIDTH, kernel_init=kernel)(x)
        x = linen.BatchNorm(use_running_average=False, momentum=0.8)(x)
        return linen.Dense(3, kernel_init=kernel)(linen.Dropout(0.2, deterministic=False)(linen.relu(x)))


def linen_boxes_and_batch_statistics():
    model = LinenBoxes()
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, ROWS[0])
    assert isinstance(variables["params"]["Dense_0"]["kernel"], linen.Partitioned)

    def loss(params, state, key, x, labels):
        every = {"params": params, **state}
        logits, state = model.apply(every, x, rngs={"dropout": key}, mutable=["batch_stats"])
        return cross_entropy(logits, labels), state

    return Training(loss, variables["params"], {"batch_stats": variables["batch_stats"]})


# ---------------------------------------------------------------- flax.nnx


class NnxNetwork(nnx.Module):
    """Batch normalisation, dropout that draws from a counting stream, and a counter of its own."""

    def __init__(self, rngs):
        self.first = nnx.Linear(5, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 3, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def nnx_state_as_auxiliary_output():
    graph, params, state = nnx.split(NnxNetwork(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, state, key, x, labels):
        model = nnx.merge(graph, params, state, copy=True)
        value = cross_entropy(model(x), labels)
        return value, nnx.split(model, nnx.Param, ...)[2]

    return Training(loss, params, state)


def nnx_state_in_references():
    """The same network as `nnx_state_as_auxiliary_output`, its variables held in references by NNX itself."""
    graph, params, state = nnx.split(NnxNetwork(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, state, key, x, labels):
        return cross_entropy(nnx.merge(graph, params, state)(x), labels), None

    return Training(loss, params, nnx.with_vars(state, ref=True))


# ---------------------------------------------------------------- equinox


class Tally(eqx.Module):
    """Counts its calls in a state index."""

    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.int32(0))

    def __call__(self, x, state):
        calls = state.get(self.index)
        return x / (1 + calls), state.set(self.index, calls + 1)


class EquinoxNetwork(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    tally: Tally
    last: eqx.nn.Linear

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.first = eqx.nn.Linear(5, WIDTH, key=first)
        self.norm = eqx.nn.BatchNorm(WIDTH, axis_name="batch", momentum=0.8, mode="batch")
        self.drop = eqx.nn.Dropout(0.2)
        self.tally = Tally()
        self.last = eqx.nn.Linear(WIDTH, 3, key=last)

    def __call__(self, x, state, key):
        x, state = self.norm(self.first(x), state)
        x, state = self.tally(self.drop(jax.nn.relu(x), key=key), state)
        return self.last(x), state


def equinox_stateful_layers():
    model, state = eqx.nn.make_with_state(EquinoxNetwork)(jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, state, key, x, labels):
        batched = jax.vmap(eqx.combine(params, rest), axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        logits, state = batched(x, state, jax.random.split(key, len(x)))
        return cross_entropy(logits, labels), state

    return Training(loss, params, state)


# ---------------------------------------------------------------- haiku


def haiku_recurrent_with_state():
    """An LSTM unrolled over time, a moving average of what it says, and a counter that fades a term of the loss."""

    def network(series):
        core = hk.LSTM(WIDTH)
        said, _ = hk.dynamic_unroll(core, series, core.initial_state(series.shape[1]))
        mean = hk.ExponentialMovingAverage(0.8)(jnp.mean(said, (0, 1)))
        calls = hk.get_state("calls", (), jnp.int32, init=jnp.zeros)
        hk.set_state("calls", calls + 1)
        away = jnp.mean((said[-1] - lax.stop_gradient(mean)) ** 2) / (1 + calls)
        return hk.Linear(3)(hk.dropout(hk.next_rng_key(), 0.2, said[-1])), away

    model = hk.transform_with_state(network)
    params, state = model.init(jax.random.key(0), SERIES[0])

    def loss(params, state, key, series, labels):
        (logits, away), state = model.apply(params, state, key, series)
        return cross_entropy(logits, labels) + 0.1 * away, state

    return Training(loss, params, state, (SERIES, LABELS))


# ---------------------------------------------------------------- references


def weights():
    first, last = (jnp.asarray(DRAWS_OF_WEIGHTS[i] / 2, jnp.float32) for i in range(2))
    return {"first": first, "last": last, "scale": jnp.ones(WIDTH)}


DRAWS_OF_WEIGHTS = DRAWS.normal(size=(5, WIDTH)), DRAWS.normal(size=(WIDTH, 3))


def statistics():
    """Fresh references for a running mean and variance and a counter."""
    held = {"mean": jnp.zeros(WIDTH), "variance": jnp.ones(WIDTH)}
    return {"norm": jax.tree.map(jax.new_ref, held), "calls": jax.new_ref(jnp.int32(0))}


def normalised_loss(params, state, x, labels):
    """Normalises by running statistics, which it reads, updates and reads again; the counter warms them up."""
    h = x @ params["first"]
    share = 1 / (1 + state["calls"][...].astype(jnp.float32))
    for name, now in (("mean", jnp.mean(h, 0)), ("variance", jnp.var(h, 0))):
        state["norm"][name][...] = (1 - share) * state["norm"][name][...] + share * lax.stop_gradient(now)
    state["calls"][...] += 1
    h = (h - state["norm"]["mean"][...]) * lax.rsqrt(state["norm"]["variance"][...] + 1e-3) * params["scale"]
    return cross_entropy(jax.nn.relu(h) @ params["last"], labels)


def references_in_a_tree():
    def loss(params, state, key, x, labels):
        return normalised_loss(params, state, x, labels), None

    return Training(loss, weights(), statistics())


def references_closed_over():
    state = statistics()

    def loss(params, _, key, x, labels):
        return normalised_loss(params, state, x, labels), None

    return Training(loss, weights(), None, beside=state)


def cache_in_a_scan():
    """Attention over what was seen before, kept in a dict of references that each step of a scan writes and reads."""
    length = SERIES.shape[1]
    cache = {name: jax.new_ref(jnp.zeros((length, 6, WIDTH))) for name in ("keys", "values")}
    cache["used"] = jax.new_ref(jnp.int32(0))

    def loss(params, cache, key, series, labels):
        cache["used"][...] = jnp.int32(0)

        def step(h, x):
            h = jnp.tanh(h * params["scale"] + x @ params["first"])
            here = cache["used"][...]
            cache["keys"][here] = lax.stop_gradient(h)
            cache["values"][here] = lax.stop_gradient(jnp.sin(3 * h))
            cache["used"][...] = here + 1
            scores = jnp.einsum("bw,tbw->tb", h, cache["keys"][...])
            seen = jnp.arange(length)[:, None] <= here
            mixed = jax.nn.softmax(jnp.where(seen, scores, -1e9), 0)
            return h + 0.3 * jnp.einsum("tb,tbw->bw", mixed, cache["values"][...]), None

        h, _ = lax.scan(step, jnp.zeros((6, WIDTH)), series)
        return cross_entropy(h @ params["last"], labels), None

    return Training(loss, weights(), cache, (SERIES, LABELS))


TRAININGS = (
    linen_boxes_and_batch_statistics,
    nnx_state_as_auxiliary_output,
    nnx_state_in_references,
    equinox_stateful_layers,
    haiku_recurrent_with_state,
    references_in_a_tree,
    references_closed_over,
    cache_in_a_scan,
)

# JAX 0.10.2 refuses NNX's own writes to references under jax.grad, so what it must come to is asked of the same network
# with its state handed on.
PLAIN = {nnx_state_in_references: nnx_state_as_auxiliary_output}


# ---------------------------------------------------------------- ways to a gradient


def plain(loss):
    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def its_value_and_grad(loss):
    return aot.function(loss, has_aux=True).value_and_grad


def jax_value_and_grad_of_it_in_jit(loss):
    return jax.jit(jax.value_and_grad(aot.function(loss, has_aux=True), has_aux=True))


def its_vjp(loss):
    made = aot.function(loss, has_aux=True)

    def run(*args):
        value, pullback, aux = made.vjp(*args)
        return (value, aux), pullback(jnp.ones_like(value))[0]

    return run


# As one program, as two, and inside somebody's own: one of them for each training in turn, and all three with
# JOINTCUT_EVERY_PROGRAM. That compiled stages, and calls of its own gradient inside jit, carry state as well is asked
# of one network in `laws/test_objects.py`.
WAYS = (its_value_and_grad, its_vjp, jax_value_and_grad_of_it_in_jit)

# Not Adam, which blows the rounding of a gradient that is zero up to a full step.
OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9, nesterov=True))


def update(params, moments, gradients):
    updates, moments = OPTIMISER.update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments


def trained(training, way):
    """Losses of all steps, and the parameters and the state that they end at."""
    value_and_grad, updated = way(training.loss), jax.jit(update)
    params, state = training.params, training.state
    moments, losses = OPTIMISER.init(params), []
    for key, *batch in zip(KEYS, *training.batches, strict=True):
        (loss, new), gradients = value_and_grad(params, state, key, *batch)
        params, moments = updated(params, moments, gradients)
        state = state if new is None else new
        losses.append(loss)
    return {"losses": losses, "params": params, "state": held(state), "beside": held(training.beside)}


def held(tree):
    """What the references of a tree hold, random keys as numbers; without the library's own containers."""
    leaves = [leaf[...] if isinstance(leaf, jax.Ref) else leaf for leaf in jax.tree.leaves(tree)]
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [jax.random.key_data(leaf) if on else leaf for leaf, on in zip(leaves, is_key, strict=True)]


def assert_near(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=ATOL, err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module", autouse=True)
def settings():
    """Libraries mix int and float."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(params=TRAININGS, ids=lambda make: make.__name__, scope="module")
def known(request):
    """How to begin a training anew, and what plain JAX makes of it."""
    start = PLAIN.get(request.param, request.param)()
    want = trained(start, plain)
    assert not np.allclose(want["losses"], want["losses"][0])
    for before, after in zip(jax.tree.leaves(start.params), jax.tree.leaves(want["params"]), strict=True):
        assert not np.array_equal(before, after)
    begun = request.param()
    before, after = (held(begun.state), held(begun.beside)), (want["state"], want["beside"])
    assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))
    return request.param, want


def test_losses_parameters_and_state_are_those_of_plain_jax(known):
    make, want = known
    for way in WAYS if EVERY_PROGRAM else [WAYS[TRAININGS.index(make) % 3]]:
        assert_near(trained(make(), way), want)


# ---------------------------------------------------------------- whole steps


def plainly(loss):
    return loss


def ours(loss):
    return aot.function(loss, has_aux=True)


def gradient_of(made):
    """`value_and_grad` of a function of ours, or of a plain one."""
    return made.value_and_grad if isinstance(made, aot.Function) else jax.value_and_grad(made, has_aux=True)


def jaxs_gradient_of(made):
    return jax.value_and_grad(made, has_aux=True)


def assert_the_same_training(train, *gradients):
    """`train` is given what wraps a loss and what differentiates it, and returns arrays."""
    want = train(plainly, gradient_of)
    assert not np.allclose(want["losses"], want["losses"][0])
    for differentiate in gradients:
        assert_near(train(ours, differentiate), want)


SCHEDULED = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.05, STEPS), weight_decay=0.01)
)
OPTIMISERS = {
    "adamw on a schedule": SCHEDULED,
    "two gradients to a step": optax.MultiSteps(optax.sgd(0.3), 2),
    "rmsprop with its rate in the state": optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.03),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_step_with_its_optimiser_inside_one_jit_that_gives_up_its_arguments(name):
    optimiser = OPTIMISERS[name]

    def train(wrap, differentiate):
        training = references_in_a_tree()
        value_and_grad = differentiate(wrap(training.loss))

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(params, moments, state, key, *batch):
            (loss, _), gradients = value_and_grad(params, state, key, *batch)
            updates, moments = optimiser.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments, loss

        params, losses = training.params, []
        moments = jax.tree.map(jnp.array, optimiser.init(params))
        for key, *batch in zip(KEYS, *training.batches, strict=True):
            params, moments, loss = step(params, moments, training.state, key, *batch)
            losses.append(loss)
        return {"losses": losses, "params": params, "state": held(training.state)}

    both = name == "adamw on a schedule"
    assert_the_same_training(train, *((gradient_of, jaxs_gradient_of) if both else (gradient_of,)))


def test_a_whole_training_is_one_scan():
    def train(wrap, differentiate):
        training = references_closed_over()
        value_and_grad = differentiate(wrap(training.loss))

        def step(carried, given):
            params, moments = carried
            (loss, _), gradients = value_and_grad(params, None, *given)
            return update(params, moments, gradients), loss

        start = training.params, OPTIMISER.init(training.params)
        (params, _), losses = jax.jit(lambda *args: lax.scan(step, *args))(start, (KEYS, *training.batches))
        return {"losses": losses, "params": params, "state": held(training.beside)}

    assert_the_same_training(train, gradient_of, jaxs_gradient_of)


def test_parameters_held_in_references_are_updated_where_they_are():
    def train(wrap, differentiate):
        training = references_in_a_tree()
        value_and_grad = differentiate(wrap(training.loss))
        params = jax.tree.map(jax.new_ref, training.params)

        @jax.jit
        def step(params, state, key, *batch):
            (loss, _), gradients = value_and_grad(jax.tree.map(lambda ref: ref[...], params), state, key, *batch)
            jax.tree.map(lambda ref, g: ref.addupdate(-0.1 * g), params, gradients)
            return loss

        losses = [step(params, training.state, *given) for given in zip(KEYS, *training.batches, strict=True)]
        return {"losses": losses, "params": held(params), "state": held(training.state)}

    assert_the_same_training(train, gradient_of, jaxs_gradient_of)


def test_a_line_search_of_optax_takes_it_as_its_function():
    """It calls and differentiates the loss in a `while_loop` of its own."""
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=8, store_grad=True)
    optimiser = optax.chain(optax.sgd(4.0), search)

    def loss(params, x, labels):
        return cross_entropy(jnp.tanh(x @ params["first"]) * params["scale"] @ params["last"], labels)

    def losses(loss):
        @jax.jit
        def step(params, moments):
            value, gradients = optax.value_and_grad_from_state(on_first)(params, state=moments)
            updates, moments = optimiser.update(
                gradients, moments, params, value=value, grad=gradients, value_fn=on_first
            )
            return optax.apply_updates(params, updates), moments, value

        def on_first(params):
            return loss(params, ROWS[0], LABELS[0])

        params = weights()
        moments, seen = optimiser.init(params), []
        for _ in range(STEPS):
            params, moments, value = step(params, moments)
            seen.append(value)
        return seen

    want = losses(loss)
    assert want[-1] < 0.5 * want[0]
    assert_near(losses(aot.function(loss)), want)


def test_state_that_is_given_up_to_the_step_comes_back_as_auxiliary_output():
    make = linen_boxes_and_batch_statistics
    want = trained(make(), plain)
    assert_near(trained(make(), lambda loss: aot.function(loss, has_aux=True, donate_argnums=1).value_and_grad), want)
