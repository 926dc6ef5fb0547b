"""A user's own wrapper is part of every way of calling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jointcut import aot
from jointcut.partition.errors import ArtefactError, TraceError
from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.wrappers.metadata.convention import Slot
from jointcut.wrappers.wrapper import Target

X, W = jnp.linspace(0.1, 1.0, 6).reshape(2, 3), jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)


class RealPairs:
    """Give each complex argument to the compiler as two real ones."""

    def pre_compile(self, target):
        given = target.convention.inputs

        def function(*arrays):
            left = iter(arrays)
            return target.function(*(jax.lax.complex(next(left), next(left)) if c else next(left) for c in complexes))

        complexes = [jnp.issubdtype(s.dtype, jnp.complexfloating) for s in given]
        real = [r for s, c in zip(given, complexes, strict=True) for r in (self.halves(s) if c else [s])]
        return Target(function, replace(target.convention, inputs=tuple(real)))

    def halves(self, slot):
        return [Slot(f"{slot.path}.{part}", slot.shape, np.dtype(np.float32)) for part in ("real", "imag")]

    def post_compile(self, call, target):
        def on_complex(*arrays):
            return call(*(part for a in arrays for part in ([a.real, a.imag] if jnp.iscomplexobj(a) else [a])))

        return on_complex


@dataclass
class Scaled:
    """Compute with arguments that are larger, and say what was seen."""

    by: float = 2.0
    seen: Any = None

    def pre_compile(self, target):
        self.seen = [slot.path for slot in target.convention.inputs]
        return replace(target, function=lambda *xs: target.function(*(x / self.by for x in xs)))

    def post_compile(self, call, target):
        return lambda *xs: call(*(x * self.by for x in xs))


def loss(w, x):
    h = jnp.tanh(x @ w)
    return jnp.sum(h**2), {"h": h}


def filtered(response, signal):
    return jnp.mean(jnp.tanh(jnp.fft.irfft(jnp.fft.rfft(signal) * response, n=6)) ** 2)


def near(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def in_debug_mode(function):
    with aot.debug():
        return function.value_and_grad(W, X)


def by_vjp(function, w, x):
    out, pullback, aux = function.vjp(w, x)
    return (out, aux), pullback(jnp.float32(1))[0]


WAYS = {
    "value_and_grad": lambda f: f.value_and_grad(W, X),
    "grad": lambda f: (f(W, X), f.grad(W, X)[0]),
    "vjp": lambda f: by_vjp(f, W, X),
    "jax.value_and_grad around": lambda f: jax.value_and_grad(f, has_aux=True)(W, X),
    "jax.jit around": lambda f: jax.jit(f.value_and_grad)(W, X),
    "jax.vmap around": lambda f: jax.tree.map(lambda x: x[0], jax.vmap(f.value_and_grad)(W[None], X[None])),
    "debug mode": in_debug_mode,
    "stages": lambda f: f.trace(W, X).partition().compile().value_and_grad(W, X),
    "two programs": lambda f: f.trace(W, X).partition().compile(executables=2).value_and_grad(W, X),
    "a budget": lambda f: f.trace(W, X).partition(budget=1.0).compile().value_and_grad(W, X),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_wrapper_of_the_users_holds_in_every_way_of_calling(way):
    wrapper = Scaled()
    near(way(aot.function(loss, has_aux=True, wrappers=(wrapper,))), jax.value_and_grad(loss, has_aux=True)(W, X))
    assert wrapper.seen == ["args[0]", "args[1]"]


def test_a_wrapper_may_change_the_arguments_that_are_compiled():
    response, signal = jnp.ones(4, jnp.complex64) * (0.6 + 0.3j), X.reshape(6)
    ours = aot.function(filtered, wrappers=(RealPairs(), Scaled()))
    near(ours(response, signal), filtered(response, signal))
    near(ours.grad(response, signal), jax.grad(filtered)(response, signal))


def test_wrappers_stand_outermost_first():
    inner, outer = Scaled(), RealPairs()
    aot.function(filtered, wrappers=(outer, inner)).trace(jnp.ones(4, jnp.complex64), X.reshape(6))
    assert inner.seen == ["args[0].real", "args[0].imag", "args[1]"]


def test_a_wrapper_meets_trees_static_arguments_and_the_same_array_twice():
    def powers(tree, same, power, *, scale):
        return jnp.sum(tree["a"] ** power * same) * scale, tree["a"]

    given = ({"a": X}, X, 2)
    ours = aot.function(powers, argnums=(0, 1), has_aux=True, static_argnums=2, wrappers=[Scaled()])
    near(
        ours.value_and_grad(*given, scale=jnp.float32(3)),
        jax.value_and_grad(powers, argnums=(0, 1), has_aux=True)(*given, scale=3.0),
    )


def test_what_an_object_was_written_leaves_through_a_wrapper():
    class Counting(nnx.Module):
        def __init__(self):
            self.w, self.uses = nnx.Param(W), nnx.BatchStat(jnp.float32(0))

        def __call__(self, x):
            self.uses[...] += 1
            return jnp.sum(jnp.tanh(x @ self.w[...]))

    model, plain = Counting(), Counting()
    ours = aot.function(lambda model, x: model(x), wrappers=(Scaled(1.0),))
    near(ours(model, X), plain(X))
    near(ours.grad(model, X).w[...], jax.grad(lambda w: jnp.sum(jnp.tanh(X @ w)))(W))
    assert model.uses[...] == 2


def test_a_wrapper_is_part_of_what_is_exported(tmp_path):
    aot.function(loss, has_aux=True, wrappers=(Scaled(),)).export(tmp_path / "made", W, X, platforms="cpu")
    near(aot.load(tmp_path / "made").value_and_grad(W, X), jax.value_and_grad(loss, has_aux=True)(W, X))


class Knowing(Scaled):
    """A wrapper that asks for the arrays of the function."""

    def pre_compile(self, target):
        self.known = target.describe()
        return super().pre_compile(target)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_wrapper_is_told_of_the_functions_arrays(way):
    wrapper = Knowing()
    near(way(aot.function(loss, has_aux=True, wrappers=(wrapper,))), jax.value_and_grad(loss, has_aux=True)(W, X))
    known = wrapper.known
    assert [(d.path, d.dtype) for d in known.inputs] == [("args[0]", "float32"), ("args[1]", "float32")]
    assert [info.path for info in known.metadata.fw_metadata.output_info] == ["result[0]", "result[1]['h']"]


def test_a_wrapper_knows_what_is_differentiated():
    wrapper = Knowing()
    ours = aot.function(loss, argnums=1, has_aux=True, wrappers=(Scaled(), wrapper))
    near(ours.grad(W, X)[0], jax.grad(loss, 1, has_aux=True)(W, X)[0])
    assert [(g.of, g.path, g.type) for g in wrapper.known.gradients] == [("primals_2", "args[1]", "float32[2,3]")]
    assert [t.of for t in wrapper.known.tangents] == ["output_1"]
    near(ours(W, X), loss(W, X))
    assert wrapper.known.gradients == ()


class Doubled:
    """Breaks the law: another value."""

    def pre_compile(self, target):
        return target

    def post_compile(self, call, target):
        return lambda *xs: jax.tree.map(lambda y: y * 2, call(*xs))


def test_programs_in_the_cache_know_their_wrappers(tmp_path):
    def square(x):
        return jnp.sum(x**2)

    for _ in range(2):
        plain = aot.function(square, cache=tmp_path)
        doubled = aot.function(square, cache=tmp_path, wrappers=(Doubled(),))
        near((plain(X), plain.grad(X)), (square(X), 2 * X))
        near((doubled(X), doubled.grad(X)), (2 * square(X), 4 * X))


def broken(how):
    class Broken:
        def pre_compile(self, target):
            return target

        def post_compile(self, call, target):
            return how(call)

    return aot.function(loss, has_aux=True, wrappers=(Scaled(), Broken()))


CURE = "Return what the function that pre_compile was given returns for the same arrays."
BREAKS = {
    "another structure": (
        lambda call: lambda *xs: call(*xs)[0],
        "gave a result of the structure PyTreeDef(*), where the function returns PyTreeDef((*, {'h': *})).",
    ),
    "another shape": (
        lambda call: lambda *xs: (call(*xs)[0], {"h": call(*xs)[1]["h"].T}),
        "gave float32[3,2] at result[1]['h'], where the function returns float32[2,3].",
    ),
    "another type": (
        lambda call: lambda *xs: (call(*xs)[0].astype(jnp.bfloat16), call(*xs)[1]),
        "gave bfloat16[] at result[0], where the function returns float32[].",
    ),
    "no call of the function": (
        lambda call: lambda *xs: None,
        "gave a result of the structure PyTreeDef(None), where the function returns PyTreeDef((*, {'h': *})).",
    ),
    "no function": (lambda call: None, "returned a NoneType, not a function."),
}


@pytest.mark.parametrize(("how", "what"), BREAKS.values(), ids=BREAKS)
def test_a_wrapper_that_gives_another_result_is_named(how, what):
    for run in (broken(how), broken(how).value_and_grad, broken(how).vjp, jax.jit(broken(how)), broken(how).trace):
        with pytest.raises(TraceError) as caught:
            run(W, X)
        assert str(caught.value) == f"post_compile of Broken {what}\n{CURE}"


def test_a_pre_compile_that_gives_no_target_is_named():
    class Forgetful(Doubled):
        def pre_compile(self, target):
            return None

    with pytest.raises(TraceError) as caught:
        aot.function(loss, wrappers=(Forgetful(),))(W, X)
    assert str(caught.value) == (
        "pre_compile of Forgetful returned a NoneType, not a Target.\n"
        "Return jointcut.wrappers.Target(function, convention), or the one that was given."
    )


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (3, "is a int, which has neither pre_compile and post_compile nor before_cut nor pre_lower.\n"
         "Give a jointcut.wrappers.CompilerWrapper or JointPass, or a jointcut.partition.HalfPass."),
        (Doubled, "is the class Doubled.\nGive an object of it, Doubled()."),
    ],
)  # fmt: skip
def test_what_is_no_wrapper_is_refused(given, what):
    with pytest.raises(TraceError) as caught:
        aot.function(loss, wrappers=(Scaled(), given))
    assert str(caught.value) == f"wrappers[1] {what}"


# ------------------------------------------------------------------------------------- passes over the halves


@dataclass
class Sines:
    """Put the sine in the place of each tanh of the forward, and remember what was seen."""

    seen: Any = None

    def pre_lower(self, half, jaxpr):
        self.seen = [*(self.seen or ()), half]
        inner, _ = jaxprs.opened(jaxpr)
        eqns = [e.replace(primitive=jax.lax.sin_p, params={"accuracy": None}) if e.primitive.name == "tanh" else e
                for e in inner.eqns]  # fmt: skip
        return jaxprs.build(inner.invars, inner.outvars, eqns)


def tanh_sum(w, x):
    return jnp.sum(jnp.tanh(w) * x)


def test_a_pass_rewrites_the_halves_in_every_way_of_calling(tmp_path):
    """Only the value changes: the pass here is no honest one, so that one sees where it runs."""
    want = jnp.sum(jnp.sin(X) * X)
    sines = Sines()
    ours = aot.function(tanh_sum, wrappers=(sines,))
    compiled = ours.trace(X, X).partition()
    ours.export(tmp_path / "made", X, X, platforms="cpu")
    values = {
        "value_and_grad": ours.value_and_grad(X, X)[0],
        "vjp": ours.vjp(X, X)[0],
        "jax.value_and_grad": jax.value_and_grad(ours)(X, X)[0],
        "stages": compiled.compile().value_and_grad(X, X)[0],
        "two programs": compiled.compile(executables=2).value_and_grad(X, X)[0],
        "a budget": aot.function(tanh_sum, wrappers=(sines,), budget=1.0).value_and_grad(X, X)[0],
        "exported": aot.load(tmp_path / "made").value_and_grad(X, X)[0],
    }
    for way, value in values.items():
        np.testing.assert_allclose(value, want, rtol=1e-5, err_msg=way)
    near(ours(X, X), tanh_sum(X, X))  # a call without a gradient has no halves
    assert set(sines.seen) == {"forward", "backward"}


def test_programs_whose_halves_are_rewritten_are_not_kept_in_the_cache(tmp_path, caplog):
    ours = aot.function(tanh_sum, wrappers=(Sines(),), cache=tmp_path)
    np.testing.assert_allclose(ours.value_and_grad(X, X)[0], jnp.sum(jnp.sin(X) * X), rtol=1e-5)
    assert "tanh_sum (step) is not kept in the cache: Sines rewrites its halves." in caplog.text
    near(aot.function(tanh_sum, cache=tmp_path).value_and_grad(X, X), jax.value_and_grad(tanh_sum)(X, X))


def test_a_plan_is_searched_for_each_pass_anew():
    plain = aot.function(tanh_sum, budget=0.9)
    near(plain.value_and_grad(X, X)[0], tanh_sum(X, X))
    ours = aot.function(tanh_sum, budget=0.9, wrappers=(Sines(),))
    np.testing.assert_allclose(ours.value_and_grad(X, X)[0], jnp.sum(jnp.sin(X) * X), rtol=1e-5)


HALVES = {
    "no jaxpr": (lambda half, jaxpr: None, "returned a NoneType for the forward, not a jaxpr."),
    "other inputs": (
        lambda half, jaxpr: jax.make_jaxpr(lambda x: x)(X) if half == "backward" else jaxpr,
        "returned a backward (float32[2,3]) -> (float32[2,3]), where it was given one "
        "(float32[2,3], float32[2,3], float32[]) -> (float32[2,3]).",
    ),
}


@pytest.mark.parametrize(("rewrite", "what"), HALVES.values(), ids=HALVES)
def test_a_pass_that_gives_another_signature_is_named(rewrite, what):
    class Wild:
        def pre_lower(self, half, jaxpr):
            return rewrite(half, jaxpr)

    with pytest.raises(TraceError) as caught:
        aot.function(tanh_sum, wrappers=(Wild(),)).grad(X, X + 1)
    assert str(caught.value) == (
        f"pre_lower of Wild {what}\nReturn a closed jaxpr with the inputs and outputs of the one that it is given."
    )


def test_a_half_that_closes_over_arrays_is_refused():
    class Holding:
        def pre_lower(self, half, jaxpr):
            return jax.make_jaxpr(lambda *xs: runtime.evaluate(jaxpr, xs[0] + W[:2], *xs[1:]))(
                *abstract.input_structs(jaxpr)
            )

    with pytest.raises(TraceError) as caught:
        aot.function(tanh_sum, wrappers=(Holding(),)).grad(X, X + 1)
    assert str(caught.value) == (
        "pre_lower of Holding returned a forward that closes over 1 arrays.\n"
        "Compute them in the jaxpr, or write numbers there: a half has no constants."
    )


def test_halves_of_symbolic_sizes_are_not_rewritten(tmp_path):
    ours = aot.function(tanh_sum, wrappers=(Sines(),))
    with pytest.raises(ArtefactError) as caught:
        ours.export(tmp_path / "made", *[aot.shapes("b", "float32")] * 2, sizes={"b": 3})
    assert str(caught.value) == (
        "The wrapper Sines rewrites halves, and those of tanh_sum have symbolic sizes.\n"
        "Export with numbers for all sizes, or leave that wrapper out."
    )
