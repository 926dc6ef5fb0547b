"""Weigh the plans of one program at fixed budgets, and print the figures as JSON.

python -m benchmarks.house_plans PROGRAM             # eight budgets between plain's peak and the least found
python -m benchmarks.house_plans PROGRAM BYTES ...   # these budgets

`house` runs this, each program in a process of its own.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.census import ROOT
from benchmarks.measure import memory_of
from benchmarks.programs import Program, load
from jointcut import aot
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.prices.flops import jaxpr_flops

#: What a device does in a second, the same on every machine, so that a budget leads to one plan.
RATES = Roofline(1.6e11, 1.6e10, 4.0e10, 5.0e9)
BUDGETS = 8


@dataclass(frozen=True)
class Point:
    """One plan of a program.

    Attributes:
        budget_bytes: what it was asked to hold, None for the default plan.
        peak_bytes: XLA's peak of the step, None where no plan holds the budget.
        recomputed_flops: of both halves, beyond those of the joint program.
        strategy: how the plan came about.
        tried: plans compiled for it.
    """

    budget_bytes: int | None
    peak_bytes: int | None
    recomputed_flops: float
    strategy: str
    tried: int


def points_of(program: Program, budgets: Sequence[int]) -> list[Point]:
    """The default plan, and a plan for each budget; without budgets eight from plain's peak down to the least found."""
    default = aot.function(program.loss, has_aux=program.has_aux).trace(*program.arguments).partition()
    point = Point(None, default.compile().peak_bytes, recomputed_flops(default), default.plan.strategy, 1)
    traced = aot.function(program.loss, has_aux=program.has_aux, cost=RATES).trace(*program.arguments)
    chosen = budgets or spread(plain_peak(program), traced.partition(budget=0.0).compile().peak_bytes)
    return [point, *(within(traced, budget) for budget in chosen)]


def plain_peak(program: Program) -> int:
    """The peak of `jax.jit(jax.value_and_grad(loss))`."""
    plain = jax.jit(jax.value_and_grad(program.loss, has_aux=program.has_aux))
    return memory_of(plain.lower(*program.arguments).compile()).peak


def spread(most: int, least: int) -> list[int]:
    """Eight budgets, evenly spread."""
    return [int(b) for b in np.linspace(most, least, BUDGETS)]


def within(traced: aot.Traced, budget: int) -> Point:
    """The plan for one budget."""
    try:
        cut = traced.partition(budget=budget)
    except aot.BudgetError as error:
        return Point(budget, None, 0.0, str(error).replace(f"{ROOT}/", ""), 0)
    step = cut.compile()
    return Point(budget, step.peak_bytes, recomputed_flops(cut), cut.plan.strategy, len(step.trail))


def recomputed_flops(cut: Any) -> float:
    """The flops of both halves beyond those of the joint program."""
    return sum(map(jaxpr_flops, (cut.forward, cut.backward))) - jaxpr_flops(cut.traced.joint)


if __name__ == "__main__":
    found = points_of(load(sys.argv[1], "small"), [int(budget) for budget in sys.argv[2:]])
    print(json.dumps([asdict(point) for point in found]))
