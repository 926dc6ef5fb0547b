"""Evaluate our functions and JAX's as PyTorch's were: value, first order, second order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.derivatives.case import Case, Inputs, direction
from jointcut.aot import derivatives


def ours(case: Case) -> Callable[..., Any]:
    """Our function, with the options of the case."""
    if not isinstance(case.ours, str):
        return partial(case.ours, derivatives, **case.options)
    return partial(reduce(getattr, case.ours.split("."), derivatives), **case.options)


def theirs(case: Case) -> Callable[..., Any] | None:
    """JAX's function, with the options of the case; None if JAX has none."""
    if isinstance(case.jax, str):
        return partial(reduce(getattr, case.jax.split("."), jax), **case.options)
    return partial(case.jax, jax) if case.jax else None


def smooth(function: Callable[..., Any], inputs: Inputs, places: tuple[int, ...]) -> Callable[..., list[jax.Array]]:
    """The function of its differentiated inputs alone, with those of its results that have derivatives."""

    def varied(*given: jax.Array) -> list[jax.Array]:
        full: list[Any] = list(inputs)
        for place, value in zip(places, given, strict=True):
            full[place] = value
        results = function(*full)
        return [r for r in jax.tree.leaves(results) if jnp.issubdtype(r.dtype, jnp.inexact)]

    return varied


def pulled(function: Callable[..., list[jax.Array]], cotangents: Any, varied: Any) -> tuple[jax.Array, ...]:
    """First order: the cotangents pulled back."""
    return jax.vjp(function, *varied)[1](cotangents)


def evaluator(case: Case, function: Callable[..., Any], places: tuple[int, ...]) -> Callable[..., Any]:
    """A function of inputs, cotangents and directions that returns values, first order and second order."""

    def evaluate(inputs: Any, cotangents: Any, aside: Any) -> Any:
        varied = tuple(inputs[n] for n in places)
        first = partial(pulled, smooth(function, inputs, places), cotangents)
        grads, pull = jax.vjp(lambda *xs: first(xs), *varied)
        return jax.tree.leaves(function(*inputs)), list(grads), list(pull(tuple(aside)))

    return evaluate


def weights(function: Callable[..., Any], inputs: Inputs, places: tuple[int, ...]) -> tuple[Any, Any]:
    """The fixed cotangents and directions for a function at inputs of these shapes."""
    results = jax.eval_shape(smooth(function, inputs, places), *(inputs[n] for n in places))
    cotangents = [direction(np.zeros(r.shape, r.dtype), "cotangent", n) for n, r in enumerate(results)]
    return cotangents, [direction(inputs[place], "second", n) for n, place in enumerate(places)]


@dataclass(frozen=True)
class Batch:
    """Named inputs of equal shapes, stacked, and the compiled function of all of them at once."""

    names: tuple[str, ...]
    stacked: Inputs
    cotangents: list[np.ndarray]
    aside: list[np.ndarray]
    run: Callable[..., Any]

    def evaluated(self, cotangents: list[np.ndarray] | None = None) -> dict[str, Any]:
        """Values, first and second order at each input; for other cotangents if they are given."""
        outcome = self.run(self.stacked, self.cotangents if cotangents is None else cotangents, self.aside)
        outcome = jax.tree.map(np.asarray, outcome)
        return {name: jax.tree.map(lambda batch, row=row: batch[row], outcome) for row, name in enumerate(self.names)}


def batches(case: Case, function: Callable[..., Any], named: list[tuple[str, Inputs]]) -> list[Batch]:
    """One batch for all inputs of equal shapes and types."""
    groups: dict[Any, list[tuple[str, Inputs]]] = {}
    for name, inputs in named:
        groups.setdefault(tuple((x.shape, x.dtype.str) for x in inputs), []).append((name, inputs))
    made = []
    for group in groups.values():
        names, given = zip(*group, strict=True)
        places = case.places(given[0])
        run = jax.jit(jax.vmap(evaluator(case, function, places), in_axes=(0, None, None)))
        stacked = tuple(np.stack(same) for same in zip(*given, strict=True))
        made.append(Batch(names, stacked, *weights(function, given[0], places), run))
    return made


def evaluate_all(case: Case, function: Callable[..., Any], named: list[tuple[str, Inputs]]) -> dict[str, Any]:
    """Values, first and second order at every named input, as numpy arrays."""
    return {name: found for batch in batches(case, function, named) for name, found in batch.evaluated().items()}
