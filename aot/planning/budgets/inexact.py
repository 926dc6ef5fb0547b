"""Let values wait in a smaller form under a budget, as far as a bound on the error of the gradient permits.

A smaller form is one more way to make room, beside computing again and host memory. No model tells its effect on a
gradient, so it is measured at the arguments of the call. The backward of a plan runs once with the residuals of the
forward, and once with some of them rounded. No other program is compiled for it. If the error is above the bound, as
many values as hold it keep the form, those first that save the most bytes for their error. Then another plan is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.aot.planning.budgets.attempts import Fitted
from jointcut.aot.run.pullback import Pullback
from jointcut.aot.run.runner import Runner
from jointcut.partition.errors import BudgetError
from jointcut.partition.packing.forms import FORMS
from jointcut.partition.plans.saved import GradientError, Saved, grouped
from jointcut.partition.program.jax import abstract, runtime
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.metadata.convention import is_inexact

#: The form that a search may take: gradients with it may be differentiated again.
FORM = "bfloat16"

#: The most plans that are made, each with fewer values in that form.
MOST_PLANS = 4

#: A smaller form has to spare this part of the time of a step.
WORTH = 0.01

_T = TypeVar("_T")


@dataclass(frozen=True)
class Examples:
    """The arguments at which errors are measured: a call's own, or random ones."""

    bound: Bound
    are_drawn: bool = False

    @classmethod
    def of(cls, given: Bound | None, shapes: Bound) -> Self | None:
        """Return a call's arguments if they are at hand, else random ones of these types; None where there are none."""
        return cls(given) if given is not None and is_at_hand(given) else cls._drawn(shapes)

    @classmethod
    def _drawn(cls, bound: Bound) -> Self | None:
        """Normally distributed numbers, of the size of weights; integers and booleans that are zero.

        None where an argument is no array of numbers or keys.
        """
        draws = np.random.default_rng(0)
        leaves: list[Any] = []
        for leaf in bound.leaves:
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaves.append(jnp.broadcast_to(jax.random.key(0), leaf.shape))
            elif abstract.is_reference(leaf):
                return None
            else:
                size = is_inexact(leaf.dtype) / math.sqrt((1, *leaf.shape)[-2] if leaf.ndim > 1 else 1)
                leaves.append(jnp.asarray(draws.standard_normal(leaf.shape) * size, leaf.dtype))
        is_same = all(x.dtype == leaf.dtype for x, leaf in zip(leaves, bound.leaves, strict=True))
        return cls(replace(bound, leaves=tuple(leaves)), True) if is_same else None


def is_at_hand(bound: Bound) -> bool:
    """Whether the arguments of a call are arrays that can be read."""
    return all(
        isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex)
        and not runtime.is_tracer(x)
        and not (isinstance(x, jax.Array) and x.is_deleted())
        for x in bound.leaves
    )


# ---------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Rounding:
    """The gradients of one plan at some arguments, with some of its residuals rounded as `FORM` rounds them.

    `values` are the values of the residuals that the pullback holds, in order; None for an output.
    """

    pullback: Pullback
    cotangent: Any
    values: tuple[int | None, ...]
    exact: Any

    @classmethod
    def of(cls, runner: Runner, bound: Bound) -> Self:
        """Run the forward of a plan that has no smaller forms, and its backward once."""
        main, _, pullback = runner.vjp(bound)
        cotangent = jax.tree.map(one, main)
        held = [r for r in runner.residuals if r.kind != "input"]
        values = tuple(r.value if r.kind == "saved" else None for r in held)
        return cls(pullback, cotangent, values, pullback(cotangent, keep_residuals=True))

    def error(self, values: Collection[int]) -> float:
        """Return the relative error of the gradient with these values rounded."""
        pairs = zip(self.values, self.pullback.saved or (), strict=True)
        saved = [_rounded(x) if v in values else x for v, x in pairs]
        other = Pullback(saved, self.pullback.inputs, self.pullback.backward)
        return relative_error(other(self.cotangent, keep_residuals=True), self.exact)


def _rounded(x: Any) -> Any:
    """Return an array after a round trip through the form, by two programs, which XLA cannot merge."""
    here = jnp.asarray(np.asarray(x)) if abstract.lies_on_host(x.sharding) else x
    numbers = FORMS[FORM].pack(here)
    return jax.device_put(FORMS[FORM].unpack(x.dtype, numbers), x.sharding)


def one(x: Any) -> Any:
    """Return the cotangent of an output: ones, or the zeros of JAX where there is no derivative."""
    return np.ones(x.shape, x.dtype) if is_inexact(x.dtype) else np.zeros(x.shape, jax.dtypes.float0)


def relative_error(found: Any, exact: Any) -> float:
    """Return the norm of the difference of two trees of arrays over the norm of the second; integers do not count."""
    return relative(arrays(found), arrays(exact))


def arrays(tree: Any) -> list[np.ndarray]:
    """Return the arrays of a tree that have a derivative, in double precision."""
    leaves = (x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact))
    return [np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in leaves]


def relative(found: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    """Return the norm of arrays' difference over the norm of the exact ones; infinite where only these are zero."""
    apart, size = _norm(a - b for a, b in zip(found, exact, strict=True)), _norm(exact)
    if size == 0:
        return math.inf if apart else 0.0
    return apart / size


def _norm(arrays: Iterable[np.ndarray]) -> float:
    return math.sqrt(sum(float(np.sum(np.abs(x) ** 2)) for x in arrays))


# ---------------------------------------------------------------------------------------------------- searching


def searched(
    most: float,
    may_wait: Mapping[int, int],
    planned: Callable[[tuple[int, ...]], Fitted[_T]],
    rounding: Callable[[Fitted[_T]], Rounding],
) -> tuple[Fitted[_T] | None, float]:
    """Return a plan with values in the smaller form and its error; without one, None and the least error found.

    The error is at most `most`. `may_wait` are the values that may have the form, each with the value whose form it
    shares. `planned` makes a plan in which some of them have it, and `rounding` measures a plan.
    """
    least = math.inf
    for _ in range(MOST_PLANS):
        try:
            fitted = planned(tuple(sorted(may_wait)))
        except BudgetError:
            break
        stored = fitted.plan.stored
        if not stored:
            break
        measured = rounding(fitted)
        error = measured.error(stored)
        if error <= most:
            return fitted, error
        least = min(least, error) if not math.isnan(error) else error
        kept = _kept(most, measured, fitted.plan.saved)
        shared = {may_wait[v] for v in kept} - {may_wait[v] for v in stored if v not in kept}
        may_wait = {v: first for v, first in may_wait.items() if first in shared}
        if not may_wait:
            break
    return None, least


def _kept(most: float, measured: Rounding, saved: Iterable[Saved]) -> frozenset[int]:
    """Return as many values in the form as hold the bound, those first that save the most bytes for their error.

    Values that read the same, such as the values of equal layers, stay together.
    """
    units = [own for own in ([s for s in rows if s.form] for rows in grouped(saved)) if own]
    values = [frozenset(s.value for s in own) for own in units]
    less = [sum(s.plain_bytes - s.bytes for s in own) for own in units]
    errors = [measured.error(own) for own in values]
    row = sorted((i for i, error in enumerate(errors) if error <= most), key=lambda i: errors[i] / less[i])
    holds, fails = 0, len(row) + 1
    while fails - holds > 1:
        middle = (holds + fails) // 2
        is_held = measured.error(frozenset[int]().union(*(values[i] for i in row[:middle]))) <= most
        holds, fails = (middle, fails) if is_held else (holds, middle)
    return frozenset[int]().union(*(values[i] for i in row[:holds]))


def why_none(most: float, least: float, found: object) -> str:
    """Say why a plan has no smaller forms, given the result of a search, and the least error found (or infinity)."""
    if found is not None or math.isinf(least):
        return "no plan with one holds the budget and is faster"
    return f"the error of the gradient would be {least:.1e}, more than {most:.1e}"


def telling(fitted: Fitted[Any], error: GradientError) -> Fitted[Any]:
    """Return the result of a search with the measured error of its smaller forms."""
    return replace(fitted, plan=replace(fitted.plan, gradient_error=error))
