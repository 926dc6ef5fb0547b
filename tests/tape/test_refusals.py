"""Bad input to tapes and hooks is told with the place, the cause and the cure."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jointcut import aot

X = jnp.ones(3)


def shrink(g):
    return g[:1]


def recast(g):
    return g.astype(jnp.int32)


def named(g):
    return "twice"


KEPT: list[jax.Array] = []


def keeps(w):
    KEPT.append(jnp.sin(w))
    return jnp.sum(KEPT[0] * w)


def check(value):
    return aot.tape(lambda x: jnp.sum(value(x)), check="nonfinite").grad


IN_VMAP = (
    "The hook noted at FILE is called back, once for each cotangent, which jax.vmap cannot do for a batch of them.\n"
    "Set it outside of jax.vmap, on the batch; or let JAX trace it: aot.on_cotangent(..., traced=True)."
)

REFUSALS = {
    "shape of a hook": (
        lambda: aot.tape(lambda w: jnp.sum(aot.on_cotangent(jnp.sin(w), shrink))).grad(X),
        "The hook shrink at FILE returned float32[1], but is set (on_cotangent) on float32[3] at FILE (<lambda>).\n"
        "Return float32[3], or None.",
    ),
    "dtype of a hook": (
        lambda: aot.tape(lambda w: jnp.sum(aot.on_cotangent(jnp.sin(w), recast))).grad(X),
        "The hook recast at FILE returned int32[3], but is set (on_cotangent) on float32[3] at FILE (<lambda>).\n"
        "Return float32[3], or None.",
    ),
    "no array from a hook": (
        lambda: aot.tape(lambda w: jnp.sum(aot.on_cotangent(jnp.sin(w), named))).grad(X),
        "The hook named at FILE returned a str, but is set (on_cotangent) on float32[3] at FILE (<lambda>).\n"
        "Return float32[3], or None.",
    ),
    "no gradient": (
        lambda: aot.tape(lambda w: jnp.sum(w * aot.on_cotangent(X, named))).grad(X),
        "on_cotangent is set on float32[3], to which no gradient flows: it is not computed from a parameter.\n"
        "Set it on a value that depends on a differentiated argument.",
    ),
    "no parameter": (
        lambda: aot.tape(lambda w: jnp.sum(aot.post_accumulate(jnp.sin(w), named))).grad(X),
        "post_accumulate is set on float32[3], which was computed by sin.\n"
        "Set it on a parameter, or use aot.on_cotangent.",
    ),
    "no function": (
        lambda: aot.Hook("twice"),
        "aot.Hook was given str, which cannot be called.\nGive a function of the cotangent.",
    ),
    "another tape": (
        lambda: [aot.tape(keeps).grad(X) for _ in range(2)],
        "keeps at FILE (keeps) reads float32[3] that another call recorded, whose tape has ended.\n"
        "Return what later calls need, or take its numbers: jax.lax.stop_gradient(x) inside the function.",
    ),
    "a hook on another tape": (
        lambda: [aot.tape(keeps).grad(X), aot.tape(lambda w: jnp.sum(aot.on_cotangent(KEPT[0], named) * w)).grad(X)],
        "<lambda> at FILE (<lambda>) reads float32[3] that another call recorded, whose tape has ended.\n"
        "Return what later calls need, or take its numbers: jax.lax.stop_gradient(x) inside the function.",
    ),
    "a hook on a tape that has ended": (
        lambda: [aot.tape(keeps).grad(X), aot.on_cotangent(KEPT[0], named)],
        "on_cotangent is set on float32[3] of a tape that has ended.\nSet it in the function of the tape.",
    ),
    "a hook that keeps a tracer": (
        lambda: aot.tape(reading).grad(X),
        "The hook <lambda> at FILE is set (on_cotangent) and reads y, float32[3], whose time is over when the hook is "
        "called.\n"
        "Read jax.lax.stop_gradient of it on a tape. Elsewhere write a jax.custom_vjp that saves it.",
    ),
    "a hook that keeps a tracer of a function": (
        lambda: aot.function(reading).grad(X),
        "The hook <lambda> at FILE is set (on_cotangent) and reads y, float32[3], whose time is over when the hook is "
        "called.\n"
        "Read jax.lax.stop_gradient of it on a tape. Elsewhere write a jax.custom_vjp that saves it.",
    ),
    "no arrays beside others": (
        lambda: aot.tape(lambda w: (jnp.sum(w), "small")).vjp(X),
        "<lambda> returned a str (result[1]), not an array.\nReturn arrays, or other things as aux with has_aux=True.",
    ),
    "a pullback that was released": (
        lambda: _given_up()(1.0),
        "The pullback of <lambda> was released, and its residuals are gone.\nCall release() after the last backward.",
    ),
    "no arrays": (
        lambda: aot.tape(lambda w: {"loss": "small"}).grad(X),
        "<lambda> returned a str (result['loss']), not an array.\n"
        "Return arrays, or other things as aux with has_aux=True.",
    ),
    "no scalar": (
        lambda: aot.tape(jnp.sin).grad(X),
        "sin returned float32[3]: value_and_grad needs a real scalar.\n"
        "Reduce it to one real number (jnp.mean, jnp.sum), return extras as aux with has_aux=True, or use vjp.",
    ),
    "integers": (
        lambda: aot.tape(lambda p: p["n"]).grad({"n": 3}),
        "args[0]['n'] is int32[]: value_and_grad differentiates floating-point arguments.\n"
        "Leave its argument out of argnums, convert it, or use vjp.",
    ),
    "no aux": (
        lambda: aot.tape(jnp.sum, has_aux=True).grad(X),
        "has_aux=True needs a pair, but the function returned one array, float32[].\n"
        "Return (output, aux), or leave has_aux out.",
    ),
    "no argument": (
        lambda: aot.tape(jnp.sum, argnums=2).grad(X),
        "argnums=2 names an argument that is missing: the call has 1 by position.\n"
        "Pass it by position, or change argnums.",
    ),
    "no tape of a number": (
        lambda: aot.tape(3),
        "aot.tape was given a int, not a function.\nPass a function: aot.tape(f), or @aot.tape above its definition.",
    ),
    "an unknown check": (
        lambda: aot.tape(jnp.sum, check="nan"),
        "check 'nan' is unknown.\nKnown names: 'nonfinite'.",
    ),
    "a forward that is not finite": (
        lambda: check(jnp.log)(0 * X),
        "The forward of <lambda> is not finite: log made an infinity at FILE (<lambda>).\n"
        "See aot.first_nonfinite and aot.derivatives for cures; print what goes in there.",
    ),
    "a backward that is not finite": (
        lambda: check(jnp.sqrt)(0 * X),
        "The backward of <lambda> is not finite: sqrt made an infinity at FILE (<lambda>).\n"
        "See aot.first_nonfinite and aot.derivatives for cures; print what goes in there.",
    ),
    "a hook that is not finite": (
        lambda: check(lambda x: aot.on_cotangent(jnp.sin(x), lambda g: g / 0))(X),
        "The backward of <lambda> is not finite: the hook <lambda> at FILE made an infinity at FILE (<lambda>).\n"
        "See aot.first_nonfinite and aot.derivatives for cures; print what goes in there.",
    ),
    "references in another tree": (
        lambda: aot.tape(jnp.sum).accumulate_into([])(X),
        "accumulate_into was given references in the structure PyTreeDef([]), the gradients are PyTreeDef(*).\n"
        "Give a jax.Ref for each array, or None where no gradient is wanted.",
    ),
    "a reference of another shape": (
        lambda: aot.tape(jnp.sum).accumulate_into(jax.new_ref(jnp.ones(2)))(X),
        "accumulate_into needs a jax.Ref of float32[3] for args[0], but was given float32[2].\n"
        "Make it with jax.new_ref(jnp.zeros_like(array)).",
    ),
    "one reference for two arguments": (
        lambda: aot.tape(jnp.dot, argnums=(0, 1)).accumulate_into((jax.new_ref(X),) * 2)(X, X),
        "accumulate_into was given one jax.Ref for args[0] and for args[1].\n"
        "Make one for each, with jax.new_ref(jnp.zeros_like(array)).",
    ),
    "entries in another tree": (
        lambda: aot.tape(jnp.sum).vjp(X)[1].with_refs([])(1.0),
        "with_refs was given entries in the structure PyTreeDef(([],)), the arguments are PyTreeDef((*,)).\n"
        "Give a jax.Ref, jax.ad.GradValue() or jax.ad.DontWant() for each array.",
    ),
    "no reference": (
        lambda: aot.tape(jnp.sum).vjp(X)[1].with_refs(X)(1.0),
        "with_refs needs a jax.Ref of float32[3] for args[0], but was given an array.\n"
        "Make it with jax.new_ref(jnp.zeros_like(array)).",
    ),
    "an update that joins gradients": (
        lambda: _released(lambda g, s, p: (jax.tree.map(lambda x: x - sum(map(jnp.sum, g.values())), p), s)),
        "update joins the gradients of args[0]['a'] and args[0]['b'] in add at FILE (<lambda>).\n"
        "One sweep updates each leaf alone: pass sweeps=2, which goes back twice, or take value_and_grad first, and "
        "update after it.",
    ),
    "an update that joins whole gradients": (
        lambda: _released(lambda g, s, p: (dict.fromkeys(p, g["a"] + g["b"]), s), sweeps=2, size=99),
        "update joins more than 16 numbers of the gradients of args[0]['a'] and args[0]['b'] in add at FILE "
        "(<lambda>), or joins twice.\n"
        "Two sweeps join a few numbers of each gradient: take value_and_grad, and update after it.",
    ),
    "three sweeps": (
        lambda: _released(lambda g, s, p: (p, s), sweeps=3),
        "sweeps is 3.\nGive 1, or 2 for an update that joins gradients, as a global norm does.",
    ),
    "a hook in two sweeps": (
        lambda: _released(_by_norm, sweeps=2, hook=keeps),
        "value_and_update with two sweeps goes back twice, but the hook keeps at FILE is called back, and would "
        "see each cotangent twice.\n"
        "Remove it, or let JAX trace it: aot.on_cotangent(..., traced=True).",
    ),
    "an update of argument 1": (
        lambda: aot.function(jnp.dot, argnums=1).value_and_update(X, (), X, update=_by_norm),
        "value_and_update updates all of argument 0, but argnums is 1, or sparse_gradients or filter is given.\n"
        "Put the parameters first, and leave these options out.",
    ),
    "an update of another tree": (
        lambda: _released(lambda g, s, p: p),
        "update does not return parameters and state in the trees that it is given.\nReturn (params, state).",
    ),
    "an update of two arguments": (
        lambda: _released(lambda gradients, state: state),
        "update takes (gradients, state), not three arguments.\n"
        "Give an Optax transformation, or a function (gradients, state, params) -> (params, state).",
    ),
    "no update": (
        lambda: _released(0.1),
        "update is a float.\n"
        "Give an Optax transformation, or a function (gradients, state, params) -> (params, state).",
    ),
    "a hook that is called back in vmap": (
        lambda: jax.vmap(aot.function(_hooked_call).grad)(jnp.ones((2, 3))),
        IN_VMAP,
    ),
    "the same in plain JAX": (lambda: jax.vmap(jax.grad(_hooked_call))(jnp.ones((2, 3))), IN_VMAP),
    "the same around vmap": (
        lambda: aot.tape(lambda w: jnp.sum(jax.vmap(_hooked_call)(w))).grad(jnp.ones((2, 3))),
        IN_VMAP,
    ),
    "the same in jax.grad": (lambda: jax.vmap(jax.grad(aot.function(_hooked_call)))(jnp.ones((2, 3))), IN_VMAP),
    "saved inside a transformation": (
        lambda: jax.jit(lambda x: _saved(x))(X),
        "saved_arrays is used inside a transformation (jax.jit, jax.grad, aot.function), where nothing is saved yet.\n"
        "Use it in a function of aot.tape, around such calls, or give it to aot.function(saved_arrays=...).",
    ),
}


def _hooked_call(w):
    return jnp.sum(aot.hooked(jnp.sin, post_hook=noted)(w))


def noted(gradients, cotangents):
    KEPT.append(gradients)


def reading(x):
    y = jnp.sin(x)
    return jnp.sum(aot.on_cotangent(y, lambda g: g * y))


def _given_up():
    _, pullback = aot.tape(lambda w: jnp.sum(w)).vjp(X)
    pullback.release()
    return pullback


def _saved(x):
    with aot.saved_arrays(named, named):
        return x


def _released(update, sweeps=1, size=3, hook=None):
    def loss(p):
        return jnp.sum(p["a"] * (p["b"] if hook is None else aot.on_cotangent(p["b"], hook)))

    params = {"a": jnp.ones(size), "b": jnp.ones(size)}
    return aot.tape(loss).value_and_update(params, (), update=update, sweeps=sweeps)


def _by_norm(g, s, p):
    norm = jnp.sqrt(sum(jnp.sum(x**2) for x in g.values()))
    return jax.tree.map(lambda x, y: x - y / norm, p, g), s


def everywhere(error):
    """The text of an error, without lines and without the functions around a function."""
    text = re.sub(r"[^ ]*test_refusals\.py:\d+", "FILE", str(error))
    return re.sub(r"([\w<>]+\.<locals>\.)+", "", text)


@pytest.mark.parametrize("name", REFUSALS)
def test_the_whole_text(name):
    KEPT.clear()
    call, text = REFUSALS[name]
    with pytest.raises((TypeError, ValueError, FloatingPointError)) as raised:
        call()
    assert everywhere(raised.value) == text


def test_a_differentiated_value_in_a_reference():
    ref = jax.new_ref(jnp.zeros(()))

    @aot.tape
    def loss(w):
        ref[...] = jnp.sum(w)
        return jnp.sum(w)

    with pytest.raises(TypeError) as raised:
        loss.grad(X)
    assert everywhere(raised.value) == (
        "swap at FILE (loss) writes a value that is differentiated to a jax.Ref from outside, to which no gradient "
        "flows.\nWrite jax.lax.stop_gradient(value), or make the reference inside."
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda: aot.tape(jnp.sum).grad(X),
        lambda: aot.tape(jnp.sum).vjp(X),
        lambda: aot.tape(jnp.sum).value_and_update(X, (), update=lambda g, s, p: (p, s)),
        lambda: aot.tape(jnp.sum).accumulate_into(jax.new_ref(X))(X),
    ],
)
def test_disabled_jit(call):
    with jax.disable_jit(), pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == (
        "sum is called under jax.disable_jit, and a tape compiles its backward.\n"
        "Leave it out: a taped function runs op by op already, on numbers."
    )


def decides(g):
    return g if float(g[0]) > 0 else -g


TRACED_HOOK = (
    "This happened while jointcut traced the hook {}. It is part of the compiled backward: it sees arrays that have no "
    "numbers yet, and cannot write to objects. Leave out traced=True and jax.jit, and it is called back with real "
    "arrays."
)
WAYS = {"tape": lambda f: aot.tape(f).grad, "function": lambda f: aot.function(f).grad}


def first_note(error):
    return next(text for text in error.__notes__ if "jointcut traced" in text)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_traced_hook_that_needs_a_number_is_named(way):
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        way(lambda w: jnp.sum(aot.on_cotangent(jnp.sin(w), decides, traced=True)))(X)
    assert re.sub(r"at \S+:\d+", "at FILE", first_note(caught.value)) == TRACED_HOOK.format("decides at FILE")
    assert sum("jointcut traced" in text for text in caught.value.__notes__) == 1


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_module_that_a_traced_hook_changes_is_told_with_the_hook(way):
    errors, norm = pytest.importorskip("flax.errors"), nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def counts(g):
        norm(g[None])

    with pytest.raises(errors.TraceContextError) as caught:
        way(lambda w: jnp.sum(aot.on_cotangent(jnp.sin(w), counts, traced=True)))(X)
    name = "test_a_module_that_a_traced_hook_changes_is_told_with_the_hook.<locals>.counts at FILE"
    assert re.sub(r"at \S+:\d+", "at FILE", first_note(caught.value)) == TRACED_HOOK.format(name)
    assert sum("jointcut traced" in text for text in caught.value.__notes__) == 1
    gradient = way(lambda w: jnp.sum(aot.on_cotangent(jnp.sin(w), counts)))(X)  # called back: the cure
    assert jnp.allclose(gradient, jnp.cos(X)) and float(norm.mean[...][0]) != 0


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_module_from_outside_that_is_written_is_told_with_the_cure(way):
    errors, norm = pytest.importorskip("flax.errors"), nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def loss(w):
        return jnp.sum(norm(w[None]))

    with pytest.raises(errors.TraceContextError) as caught:
        way(loss)(X)
    assert first_note(caught.value) == (
        "This happened while jointcut traced loss, which writes to an object from outside. Pass the object as an "
        "argument: what is written to it is then kept."
    )
