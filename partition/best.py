"""Choose the default plan: the minimum cut, or a plan of the front that is smaller and faster.

The minimum cut computes no product twice. On a CPU that is not always best: a program is given its temporaries anew at
each call, and the system hands out large buffers page by page, so that less memory is less time too. Where the model
says so clearly, a plan that keeps less is taken, also when it computes products again.

The rates are fixed, not measured: one program has one plan, in every process and on every machine. They are those of
two cores; a machine with more computes faster beside the same memory, so that these plans cost it less.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from jointcut.partition import mincut
from jointcut.partition.budget import Planner, spread
from jointcut.partition.cost import CostModel, Roofline
from jointcut.partition.graph import Graph
from jointcut.partition.plan import Plan

#: What a backend does in a second, for the default plan. Others have not been measured: there the minimum cut stands.
RATES: dict[str, CostModel] = {"cpu": Roofline(1.6e11, 2.6e10, 3.1e10, 3.9e9)}

#: Temporaries of fewer bytes, by the model, cost no pages: C libraries keep buffers up to 32 MB for the next call, and
#: XLA takes about a quarter more than the model says.
LEAST_BYTES = 24_000_000

#: The share of the step's predicted time that a plan must save, and of its peak. Of plans that promised less time, by
#: 1 or 2 %, those measured took 3 to 8 % more; those that promised 6 % took 1 to 10 % less.
LEAST_TIME = 0.04
LEAST_PEAK = 0.1

#: How many plans of the front are replayed.
TRIED = 3


def best(graph: Graph, cost: CostModel | None = None) -> Plan:
    """The best plan known: less memory than the minimum cut in clearly less time, or the minimum cut.

    `cost` prices ops in the place of the fixed rates. Raises as `min_cut`, and `PlanError` for a price that is none.
    """
    plan = mincut.min_cut(graph)
    backend = jax.default_backend()
    model = cost or RATES.get(backend)
    if model is None or plan.bytes_saved < LEAST_BYTES / 2:
        return plan
    planner = Planner(graph, model, on_cpu=backend == "cpu")
    return better(planner, plan) or plan


def better(planner: Planner, default: Plan) -> Plan | None:
    """The smallest plan of the front that is clearly smaller and faster than the default, by the model; or None."""
    taken = planner.step_seconds(planner.priced(default))
    most_seconds = taken - LEAST_TIME * (planner.common_seconds + taken)
    saving = planner.model.saving_seconds
    faster = [c for c in planner.front.choices if c.seconds + saving(c.bytes) <= most_seconds]
    if not faster:
        return None
    peak_bytes = planner.candidate(default).peak_bytes
    if peak_bytes < LEAST_BYTES:
        return None
    found = [planner.candidate(planner.plan(choice, "front")) for choice in spread(faster, TRIED)]
    smallest = min(found, key=lambda c: (c.peak_bytes, c.step_seconds))
    return smallest.plan if smallest.peak_bytes <= (1 - LEAST_PEAK) * peak_bytes else None


#: The strategies that go by a name.
STRATEGIES: dict[str, Callable[[Graph], Plan]] = {"best": best, **mincut.STRATEGIES}
