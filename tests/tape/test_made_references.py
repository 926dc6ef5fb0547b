"""References that a function makes, reads and writes on a tape carry gradients, as in eager `jax.grad`."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.errors import TraceError

W, X = jnp.array([0.1, 0.2, 0.3]), jnp.array([1.0, 2.0])


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


class Held:
    """What a reference is, without one: JAX's own gradient fails where a jitted function writes one, and elsewhere."""

    def __init__(self, x):
        self.x = jnp.asarray(x)

    def __getitem__(self, at):
        return self.x[at]

    def __setitem__(self, at, x):
        self.x = self.x.at[at].set(x)


def mixed(a, ref):
    ref[1] = a.sum()
    ref[0] *= 2
    return ref[...] * 3


def counts(w, x):
    ref, count = jax.new_ref(jnp.zeros(3)), jax.new_ref(0)
    for i in range(2):
        ref[...] += jnp.tanh(w * x[i])
        count[...] += 1
    ref[0] = 2 * ref[1]
    return jnp.sum(jax.freeze(ref) ** 2) * count[...]


def made_of_a_parameter(w, x):
    ref = jax.new_ref(w)
    ref[...] = ref[...] * x[1]
    return jnp.sum(ref[...] ** 2)


def scanned(w, x):
    ref = jax.new_ref(jnp.zeros(()))

    def step(c, i):
        ref[...] += jnp.sum(jnp.sin(c)) * w[0] * x[i % 2]
        return c * w, ref[...]

    c, ys = lax.scan(step, w, jnp.arange(3))
    return ref[...] + jnp.sum(c) + jnp.sum(ys)


def passed_to_jit(w, x, new=jax.new_ref, jit=jax.jit):
    ref = new(w * x[1])
    y = jit(mixed)(jnp.sin(w), ref)
    for i in range(3):
        ref[i] += y[i] * x[0]
    ref[2] = 0.0
    return jnp.sum(ref[...] * y)


def closed_over(w, x):
    ref, factor = jax.new_ref(w * 1.0), jnp.full(3, 1.5)

    @jax.jit
    def scale(a):
        ref[...] = ref[...] * a * factor

    scale(w)
    scale(2.0)
    return jnp.sum(ref[...] * x[1])


def in_branches(w, x):
    ref = jax.new_ref(jnp.zeros(3))

    def whole():
        ref[...] = w * w

    def first():
        ref[0] = w[0]

    lax.cond(x[0] > 0, whole, first)
    return jnp.sum(ref[...] ** 2)


def written_over(w, x, new=jax.new_ref, jit=None):
    ref = new(w)
    ref[...] = lax.stop_gradient(w) * x[1]
    return jnp.sum(ref[...] * w)


PROGRAMS = [counts, made_of_a_parameter, scanned, passed_to_jit, closed_over, in_branches, written_over]


def gradient(loss):
    """Return JAX's value and gradient."""
    if "new" in loss.__code__.co_varnames:
        loss = functools.partial(loss, new=Held, jit=lambda f: f)
    return jax.value_and_grad(loss)


each = pytest.mark.parametrize("loss", PROGRAMS, ids=lambda loss: loss.__name__)


@each
def test_the_gradient_is_that_of_eager_jax_grad_and_a_second_call_uses_the_capture(loss):
    taped = aot.tape(loss)
    for w in (W, 2 * W):
        same(taped.value_and_grad(w, X), gradient(loss)(w, X))
    assert len(taped.captures) == 1
    with aot.tape.disabled():
        same(taped.grad(W, X), gradient(loss)(W, X)[1])


@each
def test_with_a_policy_the_ops_run_again(loss):
    same(aot.tape(loss, policy={"*": aot.PREFER_RECOMPUTE}).grad(W, X), gradient(loss)(W, X)[1])


def drawn(seed):
    """Return a function that uses two references in a random way."""

    def loss(w, x, new=jax.new_ref, jit=jax.jit):
        draw = np.random.default_rng(seed)
        refs = [new(jnp.ones(3)), new(jnp.tanh(w) if draw.integers(2) else w)]
        total = jnp.zeros(())
        for _ in range(10):
            ref, other = (refs[i] for i in draw.permutation(2))
            i = int(draw.integers(3))
            kind = draw.integers(7)
            if kind == 0:
                ref[...] = jnp.sin(other[...]) * x[0]
            elif kind == 1:
                ref[i] = other[i] * w[i]
            elif kind == 2:
                ref[...] += w * float(draw.normal())
            elif kind == 3:
                total = total + jnp.sum(jit(mixed)(jnp.cos(w), ref))
            elif kind == 4:
                total = total + jnp.sum(ref[...] * other[...])
            elif kind == 5:
                ref[...] = jnp.full(3, float(draw.normal()))
            else:
                ref[:2] += jnp.tanh(w[1:])
        return total + jnp.sum(refs[0][...] * refs[1][...])

    return loss


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_with_references_have_the_gradient_of_jax(seed):
    loss = drawn(seed)
    same(aot.tape(loss).value_and_grad(W, X), gradient(loss)(W, X))


def test_the_reference_holds_numbers_for_all_who_read_it():
    seen = []

    def loss(w):
        ref = jax.new_ref(w)
        ref[...] = 2 * ref[...]
        seen.append(np.asarray(ref[...]).tolist())
        if float(ref[0]) > 0.1:
            ref[1] = 0.0
        return jnp.sum(ref[...] ** 2)

    same(aot.tape(loss).grad(W), jnp.array([8 * W[0], 0.0, 8 * W[2]]))
    np.testing.assert_allclose(seen[0], 2 * W)


def test_a_reference_from_outside_takes_statistics_also_inside_jit():
    @jax.jit
    def normalised(x, ref):
        mean = jnp.mean(x)
        ref[...] = 0.5 * ref[...] + lax.stop_gradient(mean)
        return jnp.sum((x - mean) ** 2) * ref[...]

    mine, theirs = jax.new_ref(jnp.ones(())), jax.new_ref(jnp.ones(()))
    taped = aot.tape(lambda x: normalised(x * x, mine))
    for _ in range(2):
        same(taped.grad(W), jax.grad(lambda x: normalised(x * x, theirs))(W))
        same(mine[...], theirs[...])
    assert len(taped.captures) == 1


def test_what_a_reference_held_is_freed_with_the_reference():
    held = []

    def loss(w):
        x = jnp.sin(w)
        ref = jax.new_ref(x)
        held.append(weakref.ref(x.value))
        ref[...] = jnp.ones(3)
        del x
        gone = held[0]() is None
        return jnp.sum(w * ref[...]) * float(gone)

    gc.disable()
    try:
        same(aot.tape(loss).value_and_grad(W)[0], jnp.sum(W))
    finally:
        gc.enable()


def test_a_rule_of_its_own_that_takes_a_reference_is_refused_with_its_line():
    @jax.custom_vjp
    def doubled(x, ref):
        return 2 * x + ref[...]

    doubled.defvjp(lambda x, ref: (2 * x + ref[...], None), lambda _, g: (2 * g, None))

    @aot.tape
    def loss(w):
        return jnp.sum(doubled(w, jax.new_ref(jnp.ones(3))))

    code = loss.__wrapped__.__code__
    line = f"{__file__}:{code.co_firstlineno + 2} ({code.co_qualname})"
    with pytest.raises(TraceError) as caught:
        loss.grad(W)
    assert str(caught.value) == (
        f"custom_vjp_call at {line} has a derivative rule of its own and takes a jax.Ref, which the rule cannot give a "
        "gradient.\n"
        "Give the function what the reference holds: ref[...]."
    )
