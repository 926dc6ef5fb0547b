"""Find the gradients that a step takes, and compile the step with these cut.

The step is traced anew. Meanwhile each `jax.grad` and `jax.value_and_grad` shows its loss, and may get another in its
place that has the same gradient: the loss as an `aot.function` with a budget.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax

from jointcut.aot.call.doctor.subject import Subject
from jointcut.aot.call.function import Function, function
from jointcut.aot.options.limits import Budget
from jointcut.aot.options.options import name_of
from jointcut.aot.report.tried import typed
from jointcut.partition.errors import JointcutError
from jointcut.partition.program.jax import abstract, jitting

Loss = Callable[..., Any]
_MOST_TRIED = 3  # budgets
_AHEAD = 2  # a budget for the loss is lowered by the bytes that the step takes too much, times this
_OURS: Any = Function.value_and_grad


@dataclass(frozen=True)
class GradientTaken:
    """A gradient that a step takes: the name of its loss, the bytes of the arguments, and whether we cut it already."""

    name: str
    argument_bytes: int
    is_ours: bool


@dataclass(frozen=True)
class BudgetTried:
    """A budget that was tried in a step: the bytes that the compiled step takes, or the error of the cut."""

    budget: Budget
    peak_bytes: int | None
    error: str = ""


def gradients(subject: Subject) -> list[GradientTaken]:
    """Return the gradients that a step takes, in the order of its trace."""
    with _replaced(lambda loss: loss) as found:
        _ = subject.anew().traced
    return found


def budget_for(subject: Subject, found: Sequence[GradientTaken], memory_bytes: int) -> BudgetTried:
    """Try budgets for all losses of a step, and return the first one with which it fits, or else the least."""
    own = max(gradient.argument_bytes for gradient in found)
    room = memory_bytes - max(0, subject.account.argument_bytes - own)
    for _ in range(_MOST_TRIED - 1):
        if room <= own:
            break
        tried = _tried(subject, typed(room))
        if tried.peak_bytes is None:
            break
        if tried.peak_bytes <= memory_bytes:
            return tried
        room -= _AHEAD * (tried.peak_bytes - memory_bytes)
    return _tried(subject, 0.0)


def _tried(subject: Subject, budget: Budget) -> BudgetTried:
    """Compile the step with each loss cut within a budget."""

    def cut(loss: Loss) -> Loss:
        if isinstance(loss, Function):
            return Function(loss._function, replace(loss._options, budget=budget))
        return function(loss, budget=budget)

    try:
        with warnings.catch_warnings(action="ignore"), _replaced(cut):
            return BudgetTried(budget, subject.anew().account.peak_bytes)
    except JointcutError as error:
        return BudgetTried(budget, None, str(error).partition("\n")[0])


@contextmanager
def _replaced(cut: Callable[[Loss], Loss]) -> Iterator[list[GradientTaken]]:
    """Put `cut(loss)` in place of each loss; yields a list to which each gradient is added when it is taken."""
    found: list[GradientTaken] = []
    inside: list[Loss] = []

    def other(loss: Loss, arguments: Any) -> Loss:
        if inside:  # a gradient that a loss takes
            return loss
        found.append(GradientTaken(name_of(loss), _bytes(arguments), isinstance(loss, Function)))
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


def _bytes(arguments: Any) -> int:
    leaves = [leaf for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "dtype")]
    return sum(abstract.aval_bytes(jax.typeof(leaf)) for leaf in leaves)
