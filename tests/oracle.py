"""The oracle: what plain JAX answers for a program, and how near to it an answer must come."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from programs import Program

STRATEGIES = ("min_cut", "save_all")

# Given a program and a function that stands for it, the function that a law compiles and calls.
Transform = Callable[[Program, Callable[..., Any]], Callable[..., Any]]


@cache
def plain(program: Program, transform: Transform) -> Any:
    """What the transform of the program's own function answers, compiled by plain jax.jit.

    JAX does not check its own jaxprs for it: the tests are of ours.
    """
    with program.precision(), jax.enable_checks(False):
        return jax.jit(transform(program, program.function))(*program.args)


@cache
def plain_vjp(program: Program) -> tuple[Any, Any, Any, Any]:
    """Output, auxiliary output, and the cotangents that plain JAX pulls back from two seeds, by one program; unchecked
    as well.
    """

    def run(*args: Any) -> Any:
        out, pullback, *aux = jax.vjp(partial(program.function, **program.kwargs), *args, has_aux=program.has_aux)
        return out, aux, pullback(cotangents(out, 1)), pullback(cotangents(out, 2))

    with program.precision(), jax.enable_checks(False):
        return jax.jit(run)(*program.args)


def value_and_grad(program: Program, function: Callable[..., Any]) -> Callable[..., Any]:
    """The transform that every user of jax.value_and_grad writes."""
    differentiated = jax.value_and_grad(function, argnums=program.argnums, has_aux=program.has_aux)
    return partial(differentiated, **program.kwargs)


def called(program: Program, function: Callable[..., Any]) -> Callable[..., Any]:
    """No transform."""
    return partial(function, **program.kwargs)


def loss(program: Program, function: Callable[..., Any]) -> Callable[..., jax.Array]:
    """The function as a real scalar: without its auxiliary output, weighed where it is no scalar."""

    def scalar(*args: Any) -> jax.Array:
        out = function(*args, **program.kwargs)
        if program.has_aux:
            out, _ = out
        return out if program.scalar else weigh(out)

    return scalar


def weigh(tree: Any) -> jax.Array:
    """A real number to which each inexact element contributes by another weight, and by its square."""
    total = jnp.zeros((), _wide())
    for leaf in filter(is_inexact, jax.tree.leaves(tree)):
        flat = jnp.ravel(leaf)
        weights = np.cos(np.arange(flat.size)).astype(_wide())
        wide = flat.astype(np.result_type(flat.dtype, _wide()))
        total += jnp.sum(weights * jnp.real(wide)) + 0.1 * jnp.sum(jnp.abs(wide * wide))
    return total


def cotangents(out: Any, seed: int) -> Any:
    """Random cotangents for an output: float0 zeros where its dtype has no derivative."""
    draws = np.random.default_rng(seed)

    def one(leaf: Any) -> Any:
        shape, dtype = jnp.shape(leaf), jax.dtypes.result_type(leaf)
        if not is_inexact(leaf):
            return np.zeros(shape, jax.dtypes.float0)
        numbers = draws.standard_normal(shape) + (1j * draws.standard_normal(shape) if dtype.kind == "c" else 0)
        return jnp.asarray(numbers, dtype)

    return jax.tree.map(one, out)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf has a derivative: not so integers, Booleans and keys."""
    return jax.dtypes.issubdtype(jax.dtypes.result_type(leaf), np.inexact)


def assert_same(got: Any, want: Any, program: Program, *, slack: float = 1.0) -> None:
    """Equal trees, and leaf by leaf equal types and, within the program's tolerance, equal numbers."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, have), expected in pairs:
        where = f"{program.name}: result{jax.tree_util.keystr(path)}"
        assert kind(have) == kind(expected), where
        np.testing.assert_allclose(
            numbers(have), numbers(expected), program.rtol * slack, program.atol * slack, err_msg=where
        )


def kind(leaf: Any) -> tuple[Any, ...]:
    """All that must be equal about a leaf beside its numbers."""
    return (isinstance(leaf, jax.Array), jnp.shape(leaf), leaf.dtype, getattr(leaf, "weak_type", False))


def numbers(leaf: Any) -> np.ndarray:
    """The numbers of a leaf in a type wide enough to compare."""
    if leaf.dtype == jax.dtypes.float0:
        return np.zeros(leaf.shape)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).astype(np.complex128 if leaf.dtype.kind == "c" else np.float64)


def _wide() -> np.dtype:
    return np.dtype(np.float64 if jax.config.jax_enable_x64 else np.float32)
