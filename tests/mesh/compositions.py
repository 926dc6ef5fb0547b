"""Run on eight devices of the host: ways of laying a step over a mesh, each with the gradients of plain JAX."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from tempfile import TemporaryDirectory

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from claims import tell
from jointcut import aot
from jointcut.aot.report.gradient_error import relative_error
from jointcut.partition.errors import CallError, TraceError

LINE = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
TYPED = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
GRID = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
DRAWS = np.random.default_rng(0)
W = {name: DRAWS.normal(size=(16, 16)).astype("f") / 4 for name in ("q", "k", "up", "down")}
X = DRAWS.normal(size=(32, 16)).astype("f")


def as_plain(function, w=W, x=X):
    """Whether the step called, in jit and its own gradient in jit have the gradients of plain JAX."""
    as_plain_with(aot.function(function), w, x, function)


def as_plain_with(cut, w, x, function=None):
    want = jax.jit(jax.grad(function or perceptron))(w, x)
    for got in (cut.grad(w, x), jax.jit(jax.grad(lambda w, x: cut(w, x)))(w, x), jax.jit(cut.grad)(w, x)):
        assert relative_error(got, want) < 1e-5


def lie_alike(got, want):
    """Equal numbers, and results that lie as plain JAX's."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert relative_error(got, want) < 1e-5
    alike = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), got, want)
    assert all(alike), [(a.sharding, b.sharding) for a, b in zip(got, want, strict=True)]


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


def gradients_that_wait_unreduced_are_added_up_once():
    def whole(tree):
        return jax.tree.map(lambda a: jax.reshard(a, P()), tree)

    def total(function):
        @jax.jit
        def step(w, xs):
            w = jax.tree.map(lambda a: jax.reshard(a, P(None, None, reduced={"d"})), w)
            first, second = (jax.grad(function)(w, x) for x in xs)
            return whole(jax.tree.map(jnp.add, first, second))

        return step

    with jax.set_mesh(TYPED):
        w = jax.device_put(W, NamedSharding(TYPED, P()))
        xs = [jax.device_put(x, NamedSharding(TYPED, P("d"))) for x in (X, 2 * X)]
        want, cut = total(perceptron)(w, xs), aot.function(perceptron)
        for function in (cut, aot.function(perceptron, budget=1.0)):
            step = total(lambda w, x, function=function: function(w, x))
            assert relative_error(step(w, xs), want) < 1e-5
            assert step.lower(w, xs).compile().as_text().count(" all-reduce(") == 1
        waiting = jax.tree.map(lambda a: jax.reshard(a, P(None, None, reduced={"d"})), w)
        grads = cut.grad(waiting, xs[0])
        assert {a.sharding.spec.unreduced for name, a in grads.items() if name in ("up", "down")} == {frozenset("d")}
        both = jax.jit(lambda one, other: whole(jax.tree.map(jnp.add, one, other)))
        assert relative_error(both(grads, cut.grad(waiting, xs[1])), want) < 1e-5
        with pytest.raises(TraceError) as refusal:
            aot.function(perceptron, tiles={"args[1]": 2}).grad(waiting, xs[0])
    assert str(refusal.value) == (
        "tiles asks for blocks, and args[0]['down'] is `reduced` or `unreduced` along an axis of its mesh.\n"
        "Leave tiles out, or add up after the function: jax.reshard(x, P())."
    )


def state_in_parts_beside_whole_parameters():
    for mesh, put in ((LINE, lax.with_sharding_constraint), (TYPED, jax.reshard)):

        def update(grads, state, w, mesh=mesh, put=put):
            parts, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
            state = jax.tree.map(lambda m, g: 0.9 * m + put(g, parts), state, grads)
            return jax.tree.map(lambda p, m: p - 0.1 * put(m, whole), w, state), state

        def plain(w, state, x, update=update):
            value, grads = jax.value_and_grad(perceptron)(w, x)
            return value, *update(grads, state, w)

        def given(mesh=mesh):
            state = jax.tree.map(np.ones_like, W)
            where = (P(), P("d"), P("d"))
            return [jax.device_put(a, NamedSharding(mesh, at)) for a, at in zip((W, state, X), where, strict=True)]

        step = functools.partial(aot.function(perceptron).value_and_update, update=update)
        with jax.set_mesh(mesh) if mesh is TYPED else nullcontext():
            want = jax.jit(plain)(*given())
            for ours in (step, jax.jit(lambda w, state, x, step=step: step(w, state, x))):
                lie_alike(ours(*given()), want)


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

    lie_alike(ours(w, state, x), plain(w, state, x))


def an_nnx_module_whose_parameters_lie_in_parts():
    class Layers(nnx.Module):
        def __init__(self):
            self.up, self.down = nnx.Param(w["up"]), nnx.Param(w["down"])

        def __call__(self, x):
            return jnp.mean(jnp.sin(jnp.tanh(x @ self.up) @ self.down) ** 2)

    w, x = laid()
    of = lambda model, x: model(x)  # noqa: E731
    want = nnx.jit(nnx.value_and_grad(of))(Layers(), x)
    for step in (aot.function(of).value_and_grad, nnx.jit(nnx.value_and_grad(aot.function(of)))):
        lie_alike(step(Layers(), x), want)


def equinox_with_filter_shard():
    keys = jax.random.split(jax.random.key(0), 2)
    of = lambda model, x: jnp.mean(jnp.sin(jax.vmap(model)(x)) ** 2)  # noqa: E731
    cut = aot.function(of, filter=eqx.is_inexact_array)

    def stepping(function):
        @eqx.filter_jit
        def step(model, x):
            model, x = eqx.filter_shard((model, x), NamedSharding(LINE, P("d")))
            return function(model, x)

        return step

    model, x = eqx.nn.MLP(16, 16, 32, 2, key=keys[0]), laid()[1]
    want = stepping(eqx.filter_value_and_grad(of))(model, x)
    lie_alike(stepping(eqx.filter_value_and_grad(lambda model, x: cut(model, x)))(model, x), want)
    put = eqx.filter_shard(model, NamedSharding(LINE, P("d")))
    assert relative_error(jax.tree.leaves(cut.value_and_grad(put, x)), jax.tree.leaves(want)) < 1e-5


def donated_arrays_are_used_up_as_by_plain_jax():
    used_up = []
    for spec in (P(), P(None, "d")):
        plain = jax.jit(jax.value_and_grad(perceptron), donate_argnums=0)
        for step in (plain, aot.function(perceptron, donate_argnums=0).value_and_grad):
            w, x = {name: jax.device_put(a, NamedSharding(LINE, spec)) for name, a in W.items()}, laid()[1]
            assert relative_error(step(w, x), jax.value_and_grad(perceptron)(W, X)) < 1e-5
            used_up.append({name for name, a in w.items() if a.is_deleted()})
    assert used_up[0] == used_up[1] == {"up", "down"}
    assert used_up[2] == used_up[3]


def parts_wait_on_the_host():
    w, x = laid()
    cut = aot.function(perceptron, policy={"tanh": aot.MUST_OFFLOAD})
    _, pullback = cut.vjp(w, x)
    waiting = [a.sharding for a in jax.tree.leaves(pullback) if isinstance(a, jax.Array)]
    assert P("d") in [s.spec for s in waiting if s.memory_kind == "pinned_host"], waiting
    as_plain_with(cut, w, x)


def an_exported_pair_is_loaded_on_another_mesh_of_as_many_devices():
    whole = jax.device_put(W, NamedSharding(TYPED, P())), jax.device_put(X, NamedSharding(TYPED, P("d")))
    for (w, x), rows in ((laid(), P(None, "d")), (whole, P())):
        mesh = x.sharding.mesh
        want = jax.jit(jax.value_and_grad(perceptron))(w, x)
        with TemporaryDirectory() as folder:
            aot.function(perceptron).trace(w, x).partition().export(f"{folder}/pair", platforms=("cpu",))
            loaded = aot.load(f"{folder}/pair")
        turned = Mesh(mesh.devices[::-1], mesh.axis_names, axis_types=mesh.axis_types)
        there = jax.device_put(W, NamedSharding(turned, rows)), jax.device_put(X, NamedSharding(turned, P("d")))
        for step in (loaded.value_and_grad, jax.jit(jax.value_and_grad(lambda w, x, loaded=loaded: loaded(w, x)))):
            lie_alike(step(w, x), want)
            assert relative_error(step(*there), want) < 1e-5
        four = Mesh(mesh.devices[:4], mesh.axis_names, axis_types=mesh.axis_types)
        for given, number in ((jax.device_put((W, X), NamedSharding(four, P())), 4), ((W, X), 1)):
            for step in (loaded.value_and_grad, jax.jit(jax.grad(lambda w, x, loaded=loaded: loaded(w, x)))):
                with pytest.raises(CallError) as refusal:
                    step(*given)
                assert str(refusal.value) == (
                    f"perceptron was exported for 8 devices, and its arguments lie on {number}.\n"
                    "Lay them over a mesh of as many devices, in any order, or export it for these."
                )


def the_largest_batch_is_one_that_the_devices_divide():
    for mesh, tiles in ((LINE, True), (TYPED, False)):
        w = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P())) for name, a in W.items()}
        x = aot.shapes("b, 16", "float32").update(sharding=NamedSharding(mesh, P("d")))
        found = aot.largest(perceptron, "b", "400 kB", w, x, tiles=tiles)
        assert found.size % 8 == 0
        assert found.peak_bytes <= 400_000
        assert [tile.over for tile in found.plan.tiles] == [("d",)] * tiles, found
        assert found.cut.compile().peak_bytes == found.peak_bytes
        rows = jax.device_put(np.ones((found.size, 16), "f"), NamedSharding(mesh, P("d")))
        got = found.cut.compile().value_and_grad(jax.device_put(W, NamedSharding(mesh, P())), rows)
        assert relative_error(got, jax.value_and_grad(perceptron)(W, np.ones((found.size, 16), "f"))) < 1e-5


def one_shard_map_in_another():
    """With `check_vma` JAX lowers the gradient of such a program only if its inner part keeps nothing for it."""

    def kept(w, x):
        return lax.psum(jnp.sum(jnp.sin(jnp.tanh(x @ w["up"]) @ w["down"])), "m")

    def laid(around, within, inner=kept, checks=False):

        def outer(w, x):
            on = jax.sharding.get_abstract_mesh()
            parts = (dict.fromkeys(W, P()), P("m"))
            summed = jax.shard_map(
                within(inner), mesh=on, in_specs=parts, out_specs=P(), axis_names={"m"}, check_vma=checks
            )
            return lax.pmean(summed(w, x), "d")

        parts = (dict.fromkeys(W, P()), P("d"))
        mapped = jax.shard_map(outer, mesh=GRID, in_specs=parts, out_specs=P(), axis_names={"d"}, check_vma=checks)
        return around(mapped)

    def alone(function):
        return function

    want = jax.jit(jax.grad(laid(alone, alone)))(W, X)
    for ways in ((aot.function, alone), (alone, aot.function)):
        for how in ((kept, False), (jax.checkpoint(kept), True)):
            assert relative_error(jax.jit(jax.grad(laid(*ways, *how)))(W, X), want) < 1e-5


CLAIMS = [
    gradients_that_wait_unreduced_are_added_up_once,
    state_in_parts_beside_whole_parameters,
    ring_attention_by_ppermute,
    experts_by_all_to_all,
    a_mesh_that_is_manual_in_part,
    an_ensemble_by_vmap,
    second_derivatives,
    gradients_of_several_batches_are_added_up_once,
    updates_of_parameters_and_state_in_parts,
    an_nnx_module_whose_parameters_lie_in_parts,
    equinox_with_filter_shard,
    donated_arrays_are_used_up_as_by_plain_jax,
    parts_wait_on_the_host,
    an_exported_pair_is_loaded_on_another_mesh_of_as_many_devices,
    the_largest_batch_is_one_that_the_devices_divide,
    one_shard_map_in_another,
]


if __name__ == "__main__":
    tell(CLAIMS)
