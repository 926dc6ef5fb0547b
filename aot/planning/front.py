"""Compare a program's plans: the front of peak and time, without a budget."""

from __future__ import annotations

import math
from dataclasses import replace

from jointcut.aot.planning.budgets.pareto import Pareto, ParetoPoint
from jointcut.aot.planning.request import Request
from jointcut.aot.progress.progress import Stage
from jointcut.partition.plans.plan import Plan
from jointcut.partition.search.candidates import Candidate, ranked


def pareto(request: Request, chosen: Plan | None = None) -> Pareto:
    """Return the front of the budgets: plans that no other plan beats in both peak and time, by the model."""
    with Stage("weigh", request.name) as now:
        planner = (request.unmoved or request).planner
        menu = planner.menu
        smallest = sorted(menu, key=lambda c: c.peak_bytes)[: 2 * planner.looks]
        front = ranked([*ranked(menu), *smallest], lambda c: c.predicted_bytes)
        candidate = None if chosen is None else request.planner.candidate(request.planner.priced(chosen))
        of_jax = request.as_jax.planner
        plain = None if (everything := of_jax.everything()) is None else of_jax.known(everything)
        now.ends(lambda: f"weighed {len(menu)} plans in {now}, {len(front)} on the front")

    points = tuple(point(request, c) for c in front)
    common = planner.common_seconds
    marked = candidate and point(request, candidate), plain and point(request, plain)
    return Pareto(request.name, points, *marked, common)


def point(request: Request, c: Candidate) -> ParetoPoint:
    """Return a plan as a point of the front."""
    peak = request.program.fixed_bytes + math.ceil(c.predicted_bytes)
    return ParetoPoint(peak, c.step_seconds - c.preferred_seconds, replace(c.plan, peak_bytes=peak))
