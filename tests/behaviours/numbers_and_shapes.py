"""Precision, shapes that change from call to call, and how long arrays live."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from behaviours.behaviour import assert_as_jax, assert_near, assert_pulls_back_as_jax, behaviour, primitives, refusal
from corpus.program import normal
from jointcut import aot
from jointcut.partition.errors import CallError

X, Y = normal(60, 3), normal(61, 3)
M = normal(62, 3, 3)
ONE = jnp.float32(1)

# ------------------------------------------------------------------------------------------------ mixed precision


def mixed(weights, x):
    """Weights in float32, computed with in bfloat16, summed up in float32."""
    hidden = jnp.tanh(x.astype(jnp.bfloat16) @ weights.astype(jnp.bfloat16))
    return jnp.sum(hidden.astype(jnp.float32) ** 2)


@behaviour("autocast / the forward in another precision", "Casts are ops; gradients have the types of the arguments.")
def casts_are_differentiated():
    value, gradient = aot.function(mixed).value_and_grad(M, X)
    want_value, want = jax.jit(jax.value_and_grad(mixed))(M, X)
    assert (value.dtype, gradient.dtype) == (jnp.float32, jnp.float32)
    assert_near((value, gradient), (want_value, want), rtol=2e-2, atol=2e-2)


@behaviour(
    "autocast / the backward in the precision of the forward", "Products of the backward are those that JAX traces."
)
def the_backward_has_the_precision_of_the_forward():
    traced = aot.function(mixed).trace(M, X)
    products = [eqn for eqn in traced.partition().backward.eqns if eqn.primitive.name == "dot_general"]
    assert products and all(eqn.outvars[0].aval.dtype == jnp.bfloat16 for eqn in products)


@behaviour("autocast / float16 arguments", "Gradients of float16 arguments are float16, as in JAX.")
def half_precision_arguments():
    x = X.astype(jnp.float16)
    value, gradient = aot.function(lambda x: jnp.sum(jnp.sin(x) * x)).value_and_grad(x)
    want = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x) * x))(x)
    assert_near((value, gradient), want, rtol=1e-2, atol=1e-2)


@behaviour(
    "autocast / precision that is set around the call", "A call under other settings is traced anew, under them."
)
def settings_around_the_call():
    made = aot.function(lambda a, b: jnp.sum(jnp.sin(a @ b)))
    made.value_and_grad(M, M)
    with jax.default_matmul_precision("float32"):
        assert "HIGHEST" in str(made.trace(M, M).joint)
        assert_near(made.value_and_grad(M, M), jax.value_and_grad(lambda a: jnp.sum(jnp.sin(a @ M)))(M))
    assert "HIGHEST" not in str(made.trace(M, M).joint)


@behaviour(
    "autocast / double precision", "With 64-bit types switched on for a call, the same function computes in them."
)
def double_precision_around_the_call():
    made = aot.function(lambda x: jnp.sum(jnp.sin(x) ** 2))
    assert made.grad(X).dtype == jnp.float32
    with jax.enable_x64(True):
        x = jnp.asarray(np.linspace(0.1, 0.9, 3))
        gradient = made.grad(x)
        assert gradient.dtype == jnp.float64
        np.testing.assert_allclose(gradient, np.sin(2 * np.asarray(x)), rtol=1e-12)
    assert made.grad(X).dtype == jnp.float32


@behaviour("autocast / a loss in another type", "value_and_grad takes a bfloat16 loss, with a cotangent of its type.")
def a_loss_in_bfloat16():
    value, gradient = aot.function(lambda x: jnp.sum(jnp.sin(x).astype(jnp.bfloat16))).value_and_grad(X)
    assert (value.dtype, gradient.dtype) == (jnp.bfloat16, jnp.float32)
    assert_near(gradient, jnp.cos(X), rtol=1e-2, atol=1e-2)


# ------------------------------------------------------------------------------------------------ shapes


def counting():
    """A loss and the list of its traces."""
    traces = []

    def loss(x, y):
        traces.append((x.shape, y.shape))
        return jnp.sum(jnp.sin(x) * y)

    return loss, traces


@behaviour("dynamic shapes / another shape", "Is traced and compiled once for each shape, and right for each.")
def each_shape_is_traced_once():
    loss, traces = counting()
    made = aot.function(loss)
    for size in (3, 4, 3, 4, 5, 3):
        x, y = normal(size, size), normal(size + 1, size)
        assert_near(made.value_and_grad(x, y), jax.value_and_grad(lambda x, y: jnp.sum(jnp.sin(x) * y))(x, y))
    settled = len(traces)
    made.value_and_grad(X, Y)
    assert len(traces) == settled
    assert len(set(traces)) == 3


@behaviour("dynamic shapes / broadcasting shapes", "Shapes that broadcast against each other have summed gradients.")
def shapes_that_broadcast():
    def loss(x, y):
        return jnp.sum(jnp.sin(x + y))

    made = aot.function(loss, argnums=(0, 1))
    for y in (X[:1], X[0], normal(63, 2, 3), normal(64, 2, 1)):
        assert_near(made.value_and_grad(X, y), jax.jit(jax.value_and_grad(loss, (0, 1)))(X, y))


@behaviour("dynamic shapes / a compiled program and another shape", "Refused, with the path and both shapes.")
def a_compiled_program_refuses_another_shape():
    loss, _ = counting()
    for executables in (1, 2):
        compiled = aot.function(loss).trace(X, Y).partition().compile(executables)
        said = refusal(CallError, compiled.value_and_grad, X, normal(0, 4))
        assert said.startswith("args[1] is float32[4], but float32[3] was traced.\n")


@behaviour(
    "dynamic shapes / integers that are sizes", "A size is a Python value: static, and traced anew where it changes."
)
def a_size_is_static():
    def loss(x, size):
        return jnp.sum(jnp.sin(x[:size]))

    made = aot.function(loss, static_argnums=1)
    for size in (1, 3, 2, 1):
        assert_near(made.value_and_grad(X, size), jax.value_and_grad(lambda x, n=size: loss(x, n))(X))


@behaviour("dynamic shapes / sizes as outputs", "A size that is returned is a weakly typed integer without cotangent.")
def a_size_is_returned():
    def sized(x):
        return jnp.sin(x), x.shape[0], x.size * 2

    out, rows, twice = aot.function(sized)(X)
    assert (rows, twice) == (3, 6) and isinstance(rows, jax.Array)
    assert_near(out, jnp.sin(X))
    assert [info.requires_grad for info in aot.function(sized).trace(X).metadata.output_info] == [True, False, False]


@behaviour("dynamic shapes / a numpy scalar of another value", "Values of traced numbers do not trace anew.")
def values_of_numbers_do_not_trace_anew():
    traces = []

    def loss(x, factor):
        traces.append(None)
        return jnp.sum(jnp.sin(x)) * factor

    made = aot.function(loss)
    made.value_and_grad(X, 2.0)
    count = len(traces)
    assert_near(made.value_and_grad(X, 3.0)[1], 3 * jnp.cos(X))
    assert len(traces) == count


@behaviour("dynamic shapes / shapes without arrays", "Stages take jax.ShapeDtypeStruct, and compile without data.")
def shapes_are_enough_to_compile():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    compiled = aot.function(lambda x, y: jnp.sum(jnp.sin(x) * y)).trace(shape, shape).partition().compile()
    assert_near(compiled.value_and_grad(X, Y), jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x) * Y))(X))


@behaviour("dynamic shapes / a loop of another length", "Each length of a scan is a program of its own.")
def loops_of_several_lengths():
    def loss(x, rows):
        return jnp.sum(lax.scan(lambda h, row: (jnp.sin(h * row), None), x, rows)[0])

    made = aot.function(loss)
    for length in (0, 1, 4):
        rows = normal(65, length, 3)
        assert_near(made.value_and_grad(X, rows), jax.jit(jax.value_and_grad(loss))(X, rows))


@behaviour(
    "saved sizes / sizes are saved, not the arrays that have them",
    "Shapes are static: the gradient of a sum keeps nothing.",
)
def a_sum_keeps_nothing():
    cut = aot.function(lambda x: jnp.sum(x, 1)).trace(M).partition()
    assert (cut.plan.bytes_saved, cut.residuals) == (0, ())
    assert_pulls_back_as_jax(lambda x: jnp.sum(x, 1), M)


@behaviour("saved sizes / a mean over a dimension", "The divisor is a number of the program.")
def a_mean_keeps_nothing():
    cut = aot.function(lambda x: jnp.mean(x, 0) * 2).trace(M).partition()
    assert (cut.plan.bytes_saved, cut.residuals) == (0, ())
    assert_pulls_back_as_jax(lambda x: jnp.mean(x, 0) * 2, M)


@behaviour("saved sizes / reshapes", "Shapes of what was flattened are not kept at run time.")
def a_reshape_keeps_nothing():
    cut = aot.function(lambda x: x.reshape(9).reshape(3, 3).T * 3).trace(M).partition()
    assert cut.residuals == ()
    assert "reshape" not in primitives(cut.forward) or cut.plan.bytes_saved == 0


# ------------------------------------------------------------------------------------------------ memory


def arrays_alive():
    """The arrays of JAX that are alive: who keeps this list sees later that none is new."""
    gc.collect()
    return jax.live_arrays()


def heavy(x):
    """A loss that saves the results of products."""
    return jnp.sum(jnp.tanh(jnp.sin(x @ x) @ x) ** 2)


@behaviour("memory / no leak from saved tensors", "Once pullback and output are gone, nothing of a call is alive.")
def nothing_of_a_call_stays_alive():
    made = aot.function(heavy)
    compiled = made.trace(M).partition().compile(2)
    ways = (made, made.value_and_grad, made.vjp, compiled.value_and_grad, compiled.vjp, jax.grad(made))

    def run():
        for way in ways:
            jax.block_until_ready(jax.tree.leaves(way(M)))

    run()
    before = arrays_alive()
    for _ in range(3):
        run()
    assert len(arrays_alive()) == len(before)


@behaviour("memory / residuals die with the pullback", "What was saved is freed as soon as the pullback is.")
def residuals_die_with_the_pullback():
    made = aot.function(lambda x: jnp.sin(x @ x) @ x)
    _, pullback = made.vjp(M)
    kept = [weakref.ref(leaf) for leaf in pullback.saved]
    assert kept
    pullback(M)
    del pullback
    gc.collect()
    assert all(ref() is None for ref in kept)


@behaviour("memory / inputs die after the call", "Neither a function nor its cuts keep a caller's array alive.")
def inputs_die_after_the_call():
    made = aot.function(lambda x, y: jnp.sum(jnp.sin(x @ y)), argnums=(0, 1))
    cuts, refs = [], []
    for way in (made, made.value_and_grad, made.vjp, jax.grad(made)):
        given, other = M + 1, M + 2
        refs += [weakref.ref(given), weakref.ref(other)]
        way(given, other)
        way(given, given)
        cuts.append(made.trace(given, other).partition())
        del given, other
    gc.collect()
    assert [ref() for ref in refs] == [None] * 8


@behaviour("memory / no cycle holds the graph", "A call frees what it made without the garbage collector.")
def a_call_makes_no_cycles_of_arrays():
    made = aot.function(heavy)
    made.vjp(M)[1](ONE)
    gc.collect()
    gc.disable()
    try:
        _, pullback = made.vjp(M)
        kept = [weakref.ref(leaf) for leaf in pullback.saved]
        pullback(ONE)
        del pullback
        assert all(ref() is None for ref in kept)
    finally:
        gc.enable()


@behaviour(
    "memory / outputs that alias an input keep no other", "Handing an input back does not keep its neighbours alive."
)
def an_output_keeps_only_its_own_input():
    given, other = X + 1, X + 2
    ref = weakref.ref(other)
    out = aot.function(lambda x, y: (x, jnp.sin(x) * y))(given, other)[0]
    del other
    gc.collect()
    assert out is given and ref() is None


@behaviour("memory / only what is needed is saved", "The pullback of a cheap chain holds the input and nothing else.")
def the_pullback_of_a_cheap_chain_holds_its_input():
    def chain(x):
        for _ in range(6):
            x = x * x / (1 + x)
        return x

    _, pullback = aot.function(chain).vjp(X)
    assert pullback.nbytes == X.nbytes
    assert pullback.saved == [] and pullback.inputs[0] is X
    assert_pulls_back_as_jax(chain, X)


@behaviour("memory / residuals that are given up", "The compiled backward may overwrite what only it reads.")
def residuals_are_given_up():
    cut = aot.function(lambda x: jnp.sin(x @ x) @ x).trace(M).partition()
    compiled = cut.compile(2)
    _, residuals = compiled.forward(M)
    gone = cut.metadata.bw_donated_idxs
    assert gone and all(cut.residuals[i].kind == "saved" for i in gone)
    compiled.backward(residuals, M)
    assert not M.is_deleted()
    assert any(residuals[i].is_deleted() for i in gone)


@behaviour("memory / captured arrays are not copied into programs", "A closed-over array is an input of the program.")
def captured_arrays_are_inputs():
    table = normal(66, 3, 3)
    traced = aot.function(lambda x: jnp.sum(jnp.sin(x @ table))).trace(M)
    assert traced.metadata.num_constants == 1
    assert traced.consts[0] is table
    assert_as_jax(lambda x: jnp.sum(jnp.sin(x @ table)), M)
