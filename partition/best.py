"""Choose the default plan: the minimum cut, or a plan of the front that is smaller and no slower.

The minimum cut computes no product twice. On a CPU that is not always best: a program is given its temporaries anew at
each call, and the system hands out large buffers page by page, so that less memory is less time too. Where the model
finds a plan clearly smaller and no slower, that is taken, also when it computes products again.

The rates are fixed, not measured: one program has one plan, in every process and on every machine. They lie between
those that were measured on two cores in several hours, which for fresh memory were from 3.9 to 6.3 GB in a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jointcut.partition import mincut
from jointcut.partition.backend import Backend
from jointcut.partition.budget import Planner, spread
from jointcut.partition.cost import REUSED_BYTES, CostModel, Roofline
from jointcut.partition.graph import Graph, Op
from jointcut.partition.plan import Plan

#: How much longer a flop of a convolution takes than one of a matrix product, in XLA's code for a CPU.
_CONVOLUTION = 2.0


@dataclass(frozen=True)
class Processor(Roofline):
    """What a CPU does in a second; `flops_per_s` are those of matrix products."""

    def seconds(self, graph: Graph, op: Op) -> float:
        """As every roofline says, and longer for a convolution."""
        seconds = super().seconds(graph, op)
        return _CONVOLUTION * seconds if op.name == "conv_general_dilated" else seconds


#: What a backend does in a second, for the default plan. Others have not been measured: there the minimum cut stands.
RATES: dict[str, CostModel] = {
    "cpu": Processor(flops_per_s=1.25e11, elementwise_per_s=2.9e10, bytes_per_s=3.1e10, fresh_bytes_per_s=5e9)
}

#: The share of the minimum cut's peak that a plan must save. Of plans that promised a tenth, some saved nothing.
LEAST_PEAK = 0.25

#: How many plans of the front are replayed.
TRIED = 3


def best(graph: Graph, cost: CostModel | None = None) -> Plan:
    """The best plan known: clearly less memory than the minimum cut in no more time, or the minimum cut.

    `cost` prices ops in the place of the fixed rates. Raises as `min_cut`, and `PlanError` for a price that is none.
    """
    plan = mincut.min_cut(graph)
    backend = Backend.here()
    model = cost or RATES.get(backend.name)
    if model is None or plan.bytes_saved < REUSED_BYTES / 2:
        return plan
    planner = Planner(graph, model, backend=backend)
    return better(planner, plan) or plan


def better(planner: Planner, default: Plan) -> Plan | None:
    """The smallest plan of the front that is clearly smaller than the default and no slower, by the model; or None."""
    most_seconds = planner.step_seconds(planner.priced(default))
    saving = planner.model.saving_seconds
    fast_enough = [c for c in planner.front.choices if c.seconds + saving(c.bytes) <= most_seconds]
    if not fast_enough:
        return None
    peak_bytes = planner.candidate(default).peak_bytes
    if peak_bytes < REUSED_BYTES:
        return None
    found = [planner.candidate(planner.plan(choice, "front")) for choice in spread(fast_enough, TRIED)]
    smallest = min(found, key=lambda c: (c.peak_bytes, c.step_seconds))
    return smallest.plan if smallest.peak_bytes <= (1 - LEAST_PEAK) * peak_bytes else None


#: The strategies that go by a name.
STRATEGIES: dict[str, Callable[[Graph], Plan]] = {"best": best, **mincut.STRATEGIES}
