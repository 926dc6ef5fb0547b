"""What the caller writes into his own arrays after a call changes nothing that the call returned or will return.

XLA:CPU reads an array of numpy's where it lies if it is aligned to 64 bytes, so both kinds are tried, and large ones,
which are copied while the program goes on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot

LARGE = 1 << 16
ONE = jnp.float32(1)


def numbers(aligned, size=LARGE):
    """Ones whose memory starts at a multiple of 64 bytes, or 4 bytes behind it."""
    raw = np.empty(4 * size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + (0 if aligned else 4)
    made = raw[start : start + 4 * size].view(np.float32)
    made[:] = 1
    return made


def squares(x):
    return jnp.sum(x * x)


def and_itself(x):
    return jnp.sum(x * x), x


def debugged(function, x):
    def vjp(x):
        with aot.debug():
            return function.vjp(x)

    return vjp


WAYS = {
    "method": lambda f, x, folder: aot.function(f).vjp,
    "compiled": lambda f, x, folder: aot.function(f).trace(x).partition().compile().vjp,
    "compiled from two programs": lambda f, x, folder: aot.function(f).trace(x).partition().compile(2).vjp,
    "cached": lambda f, x, folder: aot.function(f, cache=folder).vjp,
    "loaded": lambda f, x, folder: aot.load(aot.function(f).export(folder / "artefact", x, platforms="cpu")).vjp,
    "debugged": lambda f, x, folder: debugged(aot.function(f), x),
}
every_way = pytest.mark.parametrize("way", WAYS)


def of_one(gradient):
    return np.asarray(jax.tree.leaves(gradient)[0])


@every_way
def test_a_pullback_differentiates_where_the_function_was_called(way, tmp_path):
    for size in (3, LARGE):
        vjp = WAYS[way](squares, numbers(True, size), tmp_path / str(size))
        for aligned in (True, False):
            x = numbers(aligned, size)
            out, pullback = vjp(x)
            x[:] = 2
            assert np.array_equal(of_one(pullback(ONE)), np.full(size, 2, np.float32))
            assert float(out) == size


@every_way
def test_an_output_that_is_an_input_keeps_its_numbers(way, tmp_path):
    vjp = WAYS[way](and_itself, numbers(True), tmp_path)
    for aligned in (True, False):
        x = numbers(aligned)
        (_, same), pullback = vjp(x)
        x[:] = 2
        assert np.array_equal(same, np.ones(LARGE, np.float32))
        assert np.array_equal(of_one(pullback((ONE, jnp.zeros(LARGE)))), np.full(LARGE, 2, np.float32))


def test_the_forward_of_a_compiled_pair_returns_residuals_of_its_own():
    x = numbers(True)
    compiled = aot.function(squares).trace(x).partition().compile(2)
    _, residuals = compiled.forward(x)
    x[:] = 2
    assert np.array_equal(compiled.backward(residuals, ONE)[0], np.full(LARGE, 2, np.float32))


def test_an_array_that_stands_twice_is_copied_once():
    x = numbers(True)
    out, pullback = aot.function(lambda a, b: jnp.sum(a * b * b)).vjp(x, x)
    x[:] = 3
    first, second = pullback(ONE)
    assert (first[0], second[0], out) == (1, 2, LARGE)
    assert len(pullback.inputs) == 1


CALLS = {
    "jax.jit": lambda f, x, folder: jax.jit(jax.value_and_grad(f)),
    "method": lambda f, x, folder: aot.function(f).value_and_grad,
    "compiled": lambda f, x, folder: aot.function(f).trace(x).partition().compile().value_and_grad,
    "cached": lambda f, x, folder: aot.function(f, cache=folder).value_and_grad,
    "in somebody's grad": lambda f, x, folder: jax.value_and_grad(aot.function(f)),
    "in somebody's jit": lambda f, x, folder: jax.jit(jax.value_and_grad(aot.function(f))),
}


@pytest.mark.parametrize("way", CALLS)
def test_a_constant_of_numpy_is_read_when_the_function_is_traced(way, tmp_path):
    """As `jax.jit` has it: a program holds the numbers that stood there."""
    weights, x = numbers(True), np.ones(LARGE, np.float32)
    call = CALLS[way](lambda x: jnp.sum(x * x * weights), x, tmp_path)
    call(x)
    weights[:] = 3
    value, gradient = call(x)
    assert (float(value), float(gradient[0])) == (LARGE, 2)


@every_way
def test_a_constant_of_numpy_stays_until_the_pullback_is_called(way, tmp_path):
    weights, x = numbers(True), np.ones(LARGE, np.float32)
    _, pullback = WAYS[way](lambda x: jnp.sum(jnp.sin(x) * weights), x, tmp_path)(x)
    weights[:] = 3
    np.testing.assert_allclose(of_one(pullback(ONE)), np.cos(x), 1e-5)
