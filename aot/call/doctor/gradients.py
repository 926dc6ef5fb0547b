"""Find the gradients that a step takes, and compile the step with these cut.

The step is traced anew. Meanwhile each `jax.grad` and `jax.value_and_grad` shows its loss, and may get another in its
place that has the same gradient: the loss as an `aot.function` with a budget.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax

from jointcut.aot.call import under_transform
from jointcut.aot.call.decorator import function
from jointcut.aot.call.doctor.subject import Subject
from jointcut.aot.call.function import Function
from jointcut.aot.options.limits import Budget
from jointcut.aot.options.options import name_of
from jointcut.aot.planning.weighing import Answer
from jointcut.aot.report.tried import typed
from jointcut.partition.errors import BudgetError, JointcutError
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program.jax import abstract, jitting
from jointcut.partition.program.roles import Tile

Loss = Callable[..., Any]
_MOST_TRIED = 3  # budgets, before the least
_SHARE = 0.1  # of plain JAX's activations: a budget for a step whose arguments alone take what there is
_AHEAD = 2  # a budget for the loss is lowered by the bytes that the step takes too much, times this
_OURS: Any = Function.value_and_grad
_ANSWERED: Any = under_transform.answered


@dataclass(frozen=True)
class GradientTaken:
    """A gradient that a step takes: the name of its loss, the bytes of the arguments, and whether we cut it already."""

    name: str
    argument_bytes: int
    is_ours: bool


@dataclass(frozen=True)
class BudgetTried:
    """A budget that was tried in a step: the bytes that the compiled step takes, or the error of the cut.

    `tiles` are the rows that run in blocks, `least_bytes` what the loss takes at least where the budget was refused.
    """

    budget: Budget
    peak_bytes: int | None
    error: str = ""
    tiles: tuple[Tile, ...] = ()
    least_bytes: int | None = None


def gradients(subject: Subject) -> list[GradientTaken]:
    """Return the gradients that a step takes, in the order of its trace."""
    with _replaced(lambda loss: loss) as found:
        _ = subject.anew().traced
    return found


@contextmanager
def gradients_taken() -> Iterator[list[GradientTaken]]:
    """Yield a list of the gradients that are taken while this lasts."""
    with _replaced(lambda loss: loss) as found:
        yield found


def budget_for(subject: Subject, found: Sequence[GradientTaken], memory_bytes: int) -> BudgetTried:
    """Try budgets for all losses of a step, and return the first one with which it fits, or else the least.

    The least is `budget=0.0`, or what a refused budget names: that may run rows in blocks, which 0.0 does not.
    """
    own = max(gradient.argument_bytes for gradient in found)
    room = memory_bytes - max(0, subject.account.argument_bytes - own)
    tries = list[BudgetTried]()
    for _ in range(_MOST_TRIED - 1):
        tries.append(_tried(subject, typed(room) if room > own else _SHARE))
        peak_bytes = tries[-1].peak_bytes
        if peak_bytes is not None and peak_bytes <= memory_bytes:
            return tries[-1]
        if peak_bytes is None or room <= own:
            break
        room -= _AHEAD * (peak_bytes - memory_bytes)
    least = _tried(subject, 0.0)
    if (refused := tries[-1].least_bytes) is not None and refused < (least.peak_bytes or math.inf):
        tries.append(_tried(subject, typed(refused, up=True)))
    return min((least, *tries), key=lambda tried: math.inf if tried.peak_bytes is None else tried.peak_bytes)


def _tried(subject: Subject, budget: Budget) -> BudgetTried:
    """Compile the step with each loss cut within a budget."""

    def cut(loss: Loss) -> Loss:
        if isinstance(loss, Function):
            return Function(loss._function, replace(loss._options, budget=budget))
        return function(loss, budget=budget)

    plans = list[Plan]()

    def answered(*args: Any, **kwargs: Any) -> Answer:
        answer = _ANSWERED(*args, **kwargs)
        plans.append(answer.plan)
        return answer

    try:
        with jitting.replaced(under_transform, "answered", answered):
            peak_bytes = peak_with(subject, cut)
        return BudgetTried(budget, peak_bytes, tiles=tuple(tile for plan in plans for tile in plan.tiles))
    except JointcutError as error:
        least_bytes = error.least_bytes if isinstance(error, BudgetError) else None
        return BudgetTried(budget, None, str(error).partition("\n")[0], least_bytes=least_bytes)


def peak_with(subject: Subject, cut: Callable[[Loss], Loss]) -> int:
    """Return the bytes that a step takes with `cut(loss)` in place of each loss."""
    with warnings.catch_warnings(action="ignore"), _replaced(cut):
        return subject.anew().account.peak_bytes


@contextmanager
def _replaced(cut: Callable[[Loss], Loss]) -> Iterator[list[GradientTaken]]:
    """Put `cut(loss)` in place of each loss; yields a list to which each gradient is added when it is taken."""
    found: list[GradientTaken] = []
    inside: list[Loss] = []

    def other(loss: Loss, arguments: Any) -> Loss:
        if inside:  # a gradient that a loss takes
            return loss
        users = _users(loss)
        found.append(GradientTaken(name_of(users), _bytes(arguments), isinstance(users, Function)))
        chosen = cut(loss)

        def run(*args: Any, **kwargs: Any) -> Any:
            inside.append(loss)
            try:
                return chosen(*args, **kwargs)
            finally:
                inside.pop()

        return run

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(GradientTaken(name_of(self), _bytes((args, kwargs)), True))
        return _OURS(cut(self), *args, **kwargs)

    with jitting.losses_replaced(other), jitting.replaced(Function, "value_and_grad", method):
        yield found


def _users(loss: Loss) -> Any:
    """Return the user's loss; Equinox's `filter_grad` differentiates a function of its own around it."""
    if getattr(loss, "__module__", "").partition(".")[0] != "equinox":
        return loss
    return getattr(inspect.getclosurevars(loss).nonlocals.get("self"), "_fun", loss)


def _bytes(arguments: Any) -> int:
    leaves = [leaf for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "dtype")]
    return sum(abstract.aval_bytes(jax.typeof(leaf)) for leaf in leaves)
