"""A gradient against differences of its function: right ones pass, wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut.aot.command.differences import ALLOWED, missed, wide

EPS = {dtype: float(jnp.finfo(dtype).eps) for dtype in ("float32", "bfloat16")}


def layers(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w + b) ** 2)


def kinks(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.nn.relu(x @ w + b))


def powers(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(jnp.sin(w))) * jnp.sum(b**3) + jnp.sum(x)


def weighted(function: Callable[..., jax.Array]) -> Callable[[Sequence[np.ndarray]], tuple[float, float]]:
    """A function of one number as `missed` takes it."""
    compiled = jax.jit(function)

    def run(arrays: Sequence[np.ndarray]) -> tuple[float, float]:
        value = float(compiled(*arrays))
        return value, abs(value)

    return run


def points(seed: int, dtype: str = "float32") -> list[np.ndarray]:
    numbers = np.random.default_rng(seed)
    return [np.asarray(jnp.asarray(numbers.normal(size=s), dtype)) for s in ((8, 5), (5,), (4, 8))]


@cache
def gradient(function: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """The gradient of a function, compiled once."""
    return jax.jit(jax.grad(function, (0, 1, 2)))


def gradients(function: Callable[..., jax.Array], at: Sequence[np.ndarray]) -> list[np.ndarray]:
    return list(map(np.asarray, gradient(function)(*at)))


@pytest.mark.parametrize("function", [layers, kinks, powers])
def test_the_gradient_of_jax_passes(function):
    run = weighted(function)
    for seed in range(6):
        at = points(seed)
        share = missed(run, at, gradients(function, at), EPS["float32"])
        assert share is not None and share <= ALLOWED


@pytest.mark.parametrize("function", [layers, kinks, powers])
def test_a_gradient_that_is_wrong_by_a_fifth_anywhere_fails(function):
    run = weighted(function)
    for seed in range(6):
        at = points(seed)
        right = gradients(function, at)
        largest = int(np.argmax([np.linalg.norm(g * x) for g, x in zip(right, at, strict=True)]))
        for wrong in (1.2 * right[largest], -right[largest], 0 * right[largest]):
            given = [wrong.astype(np.float32) if i == largest else g for i, g in enumerate(right)]
            share = missed(run, at, given, EPS["float32"])
            assert share is not None and share > ALLOWED, seed


def test_a_part_that_one_direction_hides_shows_in_another():
    run = weighted(layers)
    for seed in range(60):
        at = points(seed)
        right = gradients(layers, at)
        share = missed(run, at, [np.float32(1.2) * right[0], *right[1:]], EPS["float32"])
        assert share is not None and share > ALLOWED, seed


def test_rounding_twenty_times_that_of_the_result_is_not_held_against_the_gradient():
    exact, noise = weighted(layers), np.random.default_rng(0)

    def run(arrays: Sequence[np.ndarray]) -> tuple[float, float]:
        value, size = exact(arrays)
        return value + 20 * EPS["float32"] * size * noise.uniform(-1, 1), size

    for seed in range(30):
        at = points(seed)
        share = missed(run, at, gradients(layers, at), EPS["float32"])
        assert share is not None and share <= ALLOWED, seed


def test_a_permuted_gradient_fails():
    run = weighted(layers)
    for seed in range(6):
        at = points(seed)
        right = gradients(layers, at)
        share = missed(run, at, [right[0][::-1], *right[1:]], EPS["float32"])
        assert share is not None and share > ALLOWED, seed


def test_where_rounding_hides_the_change_nothing_is_decided():
    def large(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        return 1e6 + layers(w, b, x)

    at = points(0)
    for given in (gradients(layers, at), [0 * g for g in at]):
        assert missed(weighted(large), at, given, EPS["float32"]) is None


def test_narrow_numbers_are_decided_only_where_they_can_be():
    for seed in range(4):
        at = points(seed, "bfloat16")
        share = missed(weighted(layers), at, gradients(layers, at), EPS["bfloat16"])
        assert share is None or share <= ALLOWED


def test_a_constant_may_hide_a_change_unless_it_is_zero():
    at = points(0)
    for value, share in ((3.0, None), (0.0, 0.0)):
        assert missed(lambda arrays, value=value: (value, value), at, [0 * x for x in at], EPS["float32"]) == share


def test_complex_numbers_follow_the_convention_of_jax():
    def function(z: jax.Array) -> jax.Array:
        return jnp.sum(jnp.abs(z) ** 2 + jnp.real(z * z * (1 + 2j)))

    at = [np.asarray([1 + 2j, -0.5j, 3], np.complex64)]
    right = np.asarray(jax.grad(function)(at[0]))
    for gradient, passes in ((right, True), (np.conj(right), False)):
        share = missed(weighted(function), at, [gradient], EPS["float32"])
        assert share is not None and (share <= ALLOWED) == passes


def test_all_that_is_summed_has_64_bits():
    assert wide(np.ones(2, np.float32)).dtype == np.float64
    assert wide(np.ones(2, np.complex64)).dtype == np.complex128
    assert wide(np.asarray(jnp.ones(2, jnp.bfloat16))).dtype == np.float64
