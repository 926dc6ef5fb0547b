"""Measure the bytes that smaller forms of saved values save, and the error of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jointcut.aot.planning.budgets.inexact import arrays, relative, relative_error
from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.plans.plan import Plan


@dataclass(frozen=True)
class FormRow:
    """One smaller form: the number of values saved in it, and the error of the gradient with this form alone.

    `bytes` is the size of the values in this form, `plain_bytes` their size in their own form.
    """

    form: str
    values: int
    bytes: int
    plain_bytes: int
    error: float


@dataclass(frozen=True)
class CheckedForms:
    """The effect of smaller forms on a gradient, measured at some arguments.

    Attributes:
        rows: each form on its own.
        error: the relative error of the gradient with all forms. It compares with the exact gradient, by the same plan
            without forms: the Euclidean norm of the difference, over the norm of the exact gradient, for all
            differentiated arrays together.
        largest: the largest relative error of one differentiated array; infinite where only its exact gradient is zero.
        bytes_saved: the bytes between the halves with the forms.
        plain_bytes_saved: the bytes between the halves without the forms.
    """

    rows: tuple[FormRow, ...]
    error: float
    largest: float
    bytes_saved: int
    plain_bytes_saved: int

    def __str__(self) -> str:
        """Return a line for each form, and a line for all together."""
        sizes = human_bytes(self.bytes_saved), human_bytes(self.plain_bytes_saved)
        last = f"all: {sizes[0]} saved instead of {sizes[1]}, relative error of the gradient {self.error:.1e}"
        return "\n".join([*map(_line, self.rows), f"{last}, of one array at most {self.largest:.1e}"])


def _line(row: FormRow) -> str:
    sizes = f"{human_bytes(row.bytes)} instead of {human_bytes(row.plain_bytes)}"
    return f"{row.form}: {counted(row.values, 'value')}, {sizes}, relative error of the gradient {row.error:.1e}"


def checked_forms(plan: Plan, plain_bytes_saved: int, gradients: Callable[[frozenset[str]], Any]) -> CheckedForms:
    """Measure the forms of a plan; `gradients` returns the gradients with given forms alone, at the same arguments."""
    forms = list(dict.fromkeys(plan.stored.values()))
    exact, whole = gradients(frozenset()), gradients(frozenset(forms))
    rows: list[FormRow] = []
    for form in forms:
        error = relative_error(whole if len(forms) == 1 else gradients(frozenset({form})), exact)
        own = [s for s in plan.saved if s.form == form]
        rows.append(FormRow(form, len(own), sum(s.bytes for s in own), sum(s.plain_bytes for s in own), error))
    pairs = zip(arrays(whole), arrays(exact), strict=True)
    largest = max((relative([a], [b]) for a, b in pairs), default=0.0)
    return CheckedForms(tuple(rows), relative_error(whole, exact), largest, plan.bytes_saved, plain_bytes_saved)
