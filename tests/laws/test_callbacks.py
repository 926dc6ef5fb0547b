"""A function calls back as often as in plain JAX, in forward mode, mapped and in loops too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jointcut import aot

X = jnp.linspace(0.1, 0.7, 4)


class Counter:
    """Callbacks that count themselves, and hand the number to the program where `hands` says so."""

    def __init__(self, ordered, hands):
        self.calls, self.ordered, self.hands = 0, ordered, hands

    def loss(self, x):
        """A loss that calls back once."""
        if not self.hands:
            jax.debug.callback(self.count, ordered=self.ordered)
            return jnp.sum(jnp.sin(x) * jnp.exp(x))
        number = io_callback(self.count, jax.ShapeDtypeStruct((), np.float32), ordered=self.ordered)
        return jnp.sum(jnp.sin(x) * jnp.exp(x) * number)

    def count(self, *given):
        self.calls += 1
        return np.float32(self.calls)

    def after(self, transform, function):
        """The result of a transform, and how often it called back."""
        self.calls = 0
        result = jax.tree.map(np.asarray, transform(function))
        jax.effects_barrier()
        return result, self.calls


def summed(f):
    """A loop around a function."""
    return lambda x: lax.scan(lambda sofar, _: (sofar + f(x), None), jnp.float32(0), None, length=2)[0]


FORWARD = {
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "jit of jvp": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(X),
    "jvp of a loop": lambda f: jax.jvp(summed(f), (X,), (X,)),
    "grad of a loop": lambda f: jax.value_and_grad(summed(f))(X),
    "linearize": lambda f: jax.linearize(f, X)[1](X),
    "jvp of grad": lambda f: jax.jvp(jax.grad(f), (X,), (X,)),
    "grad of jvp": lambda f: jax.value_and_grad(lambda x: jax.jvp(f, (x,), (x,))[1])(X),
}
MAPPED = {
    "grad of vmap": lambda f: jax.value_and_grad(lambda x: jnp.sum(jax.vmap(f)(x)))(jnp.stack([X, 0.5 * X])),
    "vmap of grad": lambda f: jax.vmap(jax.value_and_grad(f))(jnp.stack([X, 0.5 * X])),
    "jvp of vmap": lambda f: jax.jvp(jax.vmap(f), (jnp.stack([X, 0.5 * X]),), (jnp.stack([X, X]),)),
}
CHECKPOINTED = {"grad of checkpoint": lambda f: jax.value_and_grad(jax.checkpoint(f))(X)}


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("hands", [False, True], ids=["debug", "io"])
def test_callbacks_run_as_often_as_in_plain_jax(ordered, hands):
    """JAX maps no ordered callback and has no effects but those of debugging under `jax.checkpoint`."""
    mapped, checkpointed = ({} if ordered else MAPPED), ({} if hands else CHECKPOINTED)
    counter = Counter(ordered, hands)
    function = aot.function(counter.loss)
    for name, transform in (FORWARD | mapped | checkpointed).items():
        want, calls = counter.after(transform, counter.loss)
        got, own_calls = counter.after(transform, function)
        assert own_calls == calls, name
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)
