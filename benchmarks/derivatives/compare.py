"""Count what is not finite, and measure how far ours is from PyTorch's.

A probe counts where the function's value is finite and a finite derivative exists: PyTorch's is finite, or ours is, or
nobody says that there is none. What the case calls undefined, and an infinity that PyTorch has with the same sign, is
infinite by nature, and counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.derivatives.case import Case
from benchmarks.derivatives.evaluate import evaluate_all, ours, theirs
from benchmarks.derivatives.figures import Figures


@dataclass
class Tally:
    """What was found in one family: counts of probes, in first and second order, and the worst relative errors."""

    family: str
    cases: int = 0
    probes: int = 0
    natural: int = 0
    not_finite: dict[str, list[int]] = field(
        default_factory=lambda: {who: [0, 0] for who in ("ours", "jax", "pytorch")}
    )
    jax_probes: int = 0
    pytorch_probes: int = 0
    worst: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    complaints: list[str] = field(default_factory=list)


TOLERANCES = (1e-12, 1e-10, 1e-8)  # of values, first order and second order, relative to the largest element or 1
ORDERS = ("value", "first order", "second order")


def finite(arrays: Iterable[np.ndarray]) -> bool:
    """Whether all are finite."""
    return all(bool(np.isfinite(array).all()) for array in arrays)


def distance(mine: list[np.ndarray], other: list[np.ndarray]) -> float:
    """The largest difference over 1 or the largest element; infinite if NaN or infinity stand in different places."""
    worst = 0.0
    for a, b in zip(mine, other, strict=True):
        if a.shape != b.shape:
            return np.inf
        same = np.isfinite(a) & np.isfinite(b)
        matching = (a == b) | (np.isnan(a) & np.isnan(b))
        if not (same | matching).all():
            return np.inf
        if same.any():
            worst = max(worst, float(np.abs(a[same] - b[same]).max() / max(1.0, np.abs(b[same]).max())))
    return worst


def is_natural(case: Case, name: str, order: int, mine: list[np.ndarray], figure: list[np.ndarray] | None) -> bool:
    """Whether there is no finite derivative: the case says so, or ours and PyTorch's have the same infinities."""
    if name in case.undefined or (order == 2 and name in case.undefined_second):
        return True
    if finite(mine) or figure is None or len(figure) != len(mine):
        return False
    return all(bool(((a == b) | np.isfinite(a)).all()) for a, b in zip(mine, figure, strict=True))


def tally(family: str, chosen: list[Case], figures: Figures, count: int) -> Tally:
    """Compare the cases of a family at `count` random inputs and at all probes."""
    found = Tally(family, cases=len(chosen))
    for case in chosen:
        named = list(case.inputs(family, count))
        mine = evaluate_all(case, ours(case), named)
        their_function = theirs(case)
        jaxs = evaluate_all(case, their_function, named) if their_function else {}
        for name, _ in named:
            _count(found, case, name, mine[name], jaxs.get(name), figures.get((case.name, name)))
    return found


def _count(found: Tally, case: Case, name: str, mine: Any, jaxs: Any, figure: Any) -> None:
    """Add one input to the tally."""
    is_probe = not name.startswith("random")
    is_finite = finite(mine[0])
    if is_probe and is_finite:
        found.probes += 1
        found.jax_probes += jaxs is not None
        found.pytorch_probes += figure is not None
    for order in (1, 2):
        given = figure[order] if figure and figure[order] else None
        if is_probe and is_finite:
            _count_order(found, case, name, order, mine[order], jaxs[order] if jaxs else None, given)
        compared = given is not None and name not in case.differs and is_finite and finite(given)
        if compared:
            _measure(found, case, name, order, mine[order], given)
    if figure and name not in case.differs:
        _measure(found, case, name, 0, mine[0], figure[0])


def _count_order(found: Tally, case: Case, name: str, order: int, mine: Any, jaxs: Any, given: Any) -> None:
    """Count who is not finite in this order at one probe."""
    if is_natural(case, name, order, mine, given):
        found.natural += 1
        return
    for who, theirs_ in (("ours", mine), ("jax", jaxs), ("pytorch", given)):
        if theirs_ is not None and not finite(theirs_):
            found.not_finite[who][order - 1] += 1
            if who == "ours":
                found.complaints.append(f"{case.name} at {name}: {ORDERS[order]} is not finite: {mine}")


def _measure(found: Tally, case: Case, name: str, order: int, mine: list[np.ndarray], given: list[np.ndarray]) -> None:
    """Note how far ours is from PyTorch's."""
    error = distance(mine, given)
    if TOLERANCES[order] < error <= case.loose:
        return
    found.worst[order] = max(found.worst[order], error)
    if error > TOLERANCES[order]:
        text = f"{case.name} at {name}: {ORDERS[order]} is off by {error:.1e}: ours {mine}, PyTorch's {given}"
        found.complaints.append(text.replace("\n", " "))
