"""Tell what the smaller forms of saved values do to gradients: bytes, and the error that was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jointcut.aot.fitting.inexact import arrays, relative, relative_error
from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.plans.plan import Plan


@dataclass(frozen=True)
class FormRow:
    """One smaller form: how many values wait in it, and the error of the gradient if only these do.

    `bytes` are what they take, `plain_bytes` what they would take as they are.
    """

    form: str
    values: int
    bytes: int
    plain_bytes: int
    error: float


@dataclass(frozen=True)
class CheckedForms:
    """What smaller forms do to a gradient, measured at some arguments.

    Attributes:
        rows: each form on its own.
        error: the relative error of the gradient with all of them: the Euclidean norm of the difference from the
            gradient by the same plan without them, over the norm of that, all differentiated arrays taken together.
        largest: the greatest such error of one differentiated array; infinite where only the exact one is zero.
        bytes_saved: bytes between the halves with the forms.
        plain_bytes_saved: without them.
    """

    rows: tuple[FormRow, ...]
    error: float
    largest: float
    bytes_saved: int
    plain_bytes_saved: int

    def __str__(self) -> str:
        """A line for each form, and one for all together."""
        sizes = human_bytes(self.bytes_saved), human_bytes(self.plain_bytes_saved)
        last = f"all: {sizes[0]} saved instead of {sizes[1]}, relative error of the gradient {self.error:.1e}"
        return "\n".join([*map(_line, self.rows), f"{last}, of one array at most {self.largest:.1e}"])


def _line(row: FormRow) -> str:
    sizes = f"{human_bytes(row.bytes)} instead of {human_bytes(row.plain_bytes)}"
    return f"{row.form}: {counted(row.values, 'value')}, {sizes}, relative error of the gradient {row.error:.1e}"


def checked_forms(plan: Plan, plain_bytes_saved: int, gradients: Callable[[frozenset[str]], Any]) -> CheckedForms:
    """Measure the forms of a plan; `gradients` are those with the given forms alone, at the same arguments."""
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
