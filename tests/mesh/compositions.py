"""Run on eight devices of the host: ways of laying a step over a mesh, each with the gradients of plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from claims import tell
from jointcut import aot
from jointcut.aot.report.gradient_error import relative_error

LINE = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
GRID = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
DRAWS = np.random.default_rng(0)
W = {name: DRAWS.normal(size=(16, 16)).astype("f") / 4 for name in ("q", "k", "up", "down")}
X = DRAWS.normal(size=(32, 16)).astype("f")


def as_plain(function, w=W, x=X):
    """Whether the step called, in jit and its own gradient in jit have the gradients of plain JAX."""
    want = jax.jit(jax.grad(function))(w, x)
    cut = aot.function(function)
    for got in (cut.grad(w, x), jax.jit(jax.grad(lambda w, x: cut(w, x)))(w, x), jax.jit(cut.grad)(w, x)):
        assert relative_error(got, want) < 1e-5


def ring_attention_by_ppermute():
    def on_each(w, x):
        q, k = x @ w["q"], x @ w["k"]

        def step(carry, _):
            total, weight, k = carry
            scores = jnp.exp(jnp.tanh(q @ k.T))
            k_next = lax.ppermute(k, "d", [(i, (i + 1) % 8) for i in range(8)])
            return (total + scores @ k, weight + jnp.sum(scores, 1, keepdims=True), k_next), None

        start = jnp.zeros_like(q), jnp.zeros_like(q[:, :1]), k
        (total, weight, _), _ = lax.scan(step, start, None, length=8)
        return lax.pmean(jnp.mean(jnp.sin(total / weight) ** 2), "d")

    as_plain(jax.shard_map(on_each, mesh=LINE, in_specs=(P(), P("d")), out_specs=P()))


def experts_by_all_to_all():
    def on_each(w, x):
        sent = lax.all_to_all(jnp.tanh(x @ w["q"])[None].reshape(4, -1, 16), "m", 0, 0)
        made = jnp.sin(sent @ w["up"]) @ w["down"]
        back = lax.all_to_all(made, "m", 0, 0).reshape(x.shape)
        return lax.pmean(jnp.mean((x + back) ** 2), ("d", "m"))

    as_plain(jax.shard_map(on_each, mesh=GRID, in_specs=(P(), P(("d", "m"))), out_specs=P()))


def a_mesh_that_is_manual_in_part():
    def on_each(w, x):
        return lax.pmean(jnp.mean(jnp.sin(jnp.tanh(x @ w["up"]) @ w["down"]) ** 2), "d")

    mapped = jax.shard_map(on_each, mesh=GRID, in_specs=(P(), P("d")), out_specs=P(), axis_names={"d"})
    places = dict.fromkeys(W, P()) | {"up": P(None, "m"), "down": P("m")}
    w = {name: jax.device_put(a, NamedSharding(GRID, places[name])) for name, a in W.items()}
    as_plain(mapped, w, jax.device_put(X, NamedSharding(GRID, P("d"))))


def perceptron(w, x):
    return jnp.mean(jnp.sin(jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)


def laid():
    w = {name: jax.device_put(a, NamedSharding(LINE, P(None, "d"))) for name, a in W.items()}
    return w, jax.device_put(X, NamedSharding(LINE, P("d")))


def an_ensemble_by_vmap():
    ws = {name: jax.device_put(np.stack([a] * 8), NamedSharding(LINE, P("d"))) for name, a in W.items()}
    cut = aot.function(perceptron)
    got = jax.jit(jax.vmap(jax.grad(lambda w, x: cut(w, x)), (0, None)))(ws, X)
    assert relative_error(got, jax.vmap(jax.grad(perceptron), (0, None))(ws, X)) < 1e-5


def second_derivatives():
    w, x = laid()
    cut = aot.function(perceptron)

    def along(function):
        return lambda w: jax.jvp(jax.grad(lambda w: function(w, x)), (w,), (w,))[1]

    assert relative_error(jax.jit(along(cut))(w), along(perceptron)(w)) < 1e-4


def gradients_of_several_batches_are_added_up_once():
    w, _ = laid()
    w = jax.device_put(W, NamedSharding(LINE, P()))
    xs = jax.device_put(np.stack([X, 2 * X]), NamedSharding(LINE, P(None, "d")))

    def total(function):
        def on_each(w, xs):
            w = jax.tree.map(lambda a: lax.pcast(a, "d", to="varying"), w)
            add = lambda sums, x: (jax.tree.map(jnp.add, sums, jax.grad(function)(w, x)), None)  # noqa: E731
            sums, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, w), xs)
            return jax.tree.map(lambda a: lax.psum(a, "d"), sums)

        return jax.jit(jax.shard_map(on_each, mesh=LINE, in_specs=(P(), P(None, "d")), out_specs=P()))

    cut = aot.function(perceptron)
    ours, plain = total(lambda w, x: cut(w, x)), total(perceptron)
    assert relative_error(ours(w, xs), plain(w, xs)) < 1e-5
    texts = [step.lower(w, xs).compile().as_text() for step in (ours, plain)]
    assert texts[0].count(" all-reduce(") <= texts[1].count(" all-reduce("), [t.count(" all-reduce(") for t in texts]


def updates_of_parameters_and_state_in_parts():
    w, x = laid()
    state = jax.tree.map(jnp.zeros_like, w)

    def update(w, state, grads):
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, w, state), state

    @jax.jit
    def plain(w, state, x):
        value, grads = jax.value_and_grad(perceptron)(w, x)
        return value, *update(w, state, grads)

    @jax.jit
    def ours(w, state, x):
        value, grads = aot.function(perceptron).value_and_grad(w, x)
        return value, *update(w, state, grads)

    got, want = ours(w, state, x), plain(w, state, x)
    assert relative_error(got, want) < 1e-5
    alike = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), got, want)
    assert all(jax.tree.leaves(alike)), alike


def one_shard_map_in_another():
    """With `check_vma` JAX cannot lower the gradient of such a program."""

    def laid(around, within):
        def inner(w, x):
            return lax.psum(jnp.sum(jnp.sin(jnp.tanh(x @ w["up"]) @ w["down"])), "m")

        def outer(w, x):
            on = jax.sharding.get_abstract_mesh()
            parts = (dict.fromkeys(W, P()), P("m"))
            summed = jax.shard_map(
                within(inner), mesh=on, in_specs=parts, out_specs=P(), axis_names={"m"}, check_vma=False
            )
            return lax.pmean(summed(w, x), "d")

        parts = (dict.fromkeys(W, P()), P("d"))
        return around(jax.shard_map(outer, mesh=GRID, in_specs=parts, out_specs=P(), axis_names={"d"}, check_vma=False))

    def alone(function):
        return function

    want = jax.jit(jax.grad(laid(alone, alone)))(W, X)
    for ways in ((aot.function, alone), (alone, aot.function)):
        assert relative_error(jax.jit(jax.grad(laid(*ways)))(W, X), want) < 1e-5


CLAIMS = [
    ring_attention_by_ppermute,
    experts_by_all_to_all,
    a_mesh_that_is_manual_in_part,
    an_ensemble_by_vmap,
    second_derivatives,
    gradients_of_several_batches_are_added_up_once,
    updates_of_parameters_and_state_in_parts,
    one_shard_map_in_another,
]


if __name__ == "__main__":
    tell(CLAIMS)
