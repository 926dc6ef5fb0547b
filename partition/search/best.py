"""Choose the default plan: the minimum cut, or a plan of the front that is smaller and no slower, or JAX's own.

The minimum cut computes no product twice. On a CPU that is not always best. A program gets fresh memory for its
temporaries at each call, and the system hands out large buffers page by page, so less memory also takes less time.
If the model finds a plan that is clearly smaller and no slower, this plan is taken, even if it computes products
again.

Recomputing takes longer than the model knows: XLA cannot fuse it with the forward, and may copy its operands once more.
If the model sees no clear gain in the values that the minimum cut recomputes, JAX's own plan is taken.

The rates are fixed, not measured: one program has one plan, in every process and on every machine. The rates of a CPU
lie between rates measured on two cores in several hours; for fresh memory these were from 3.9 to 6.3 GB per second.

On a GPU or TPU whose rates are known (`prices.targets`), writing and reading saved values takes as long as recomputing
many products. So all plans of the menu are compared, not only the plans of the front. The smallest plan is taken that
takes hardly longer than the minimum cut, and no longer than JAX's own plan. If the device has too little memory for it,
the fastest plan is taken that should fit.

Over several devices, results that devices would exchange again are saved, too, where they take little memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jointcut.partition.plans.backend import Backend
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem, as_problem
from jointcut.partition.plans.runs import needed
from jointcut.partition.prices.cost import REUSED_BYTES, CostModel, Roofline
from jointcut.partition.prices.flops import is_fused
from jointcut.partition.program.graph import Graph, Op
from jointcut.partition.program.primitives import CALLS
from jointcut.partition.program.roles import Side
from jointcut.partition.search import mincut
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.candidates import FRONT, Candidate
from jointcut.partition.search.front import spread

#: How much longer a flop of a convolution takes than a flop of a matrix product, in XLA's code for a CPU.
_CONVOLUTION = 2.0

#: The least time of an op that is no part of a loop over elements. In the steps of a simulator the smallest matrix
#: products took 10 to 16 microseconds, and computing them again took twice the time that their flops predict.
_LEAST_S = 1.2e-5


@dataclass(frozen=True)
class Processor(Roofline):
    """The rates of a CPU; `flops_per_s` is the rate of matrix products."""

    def seconds(self, graph: Graph, op: Op) -> float:
        """The seconds of any roofline, times `_CONVOLUTION` for a convolution; `_LEAST_S` or more for a separate op."""
        seconds = super().seconds(graph, op)
        if op.name == "conv_general_dilated":
            return _CONVOLUTION * seconds
        return max(seconds, _LEAST_S) if seconds and not is_fused(op.name) and op.name not in CALLS else seconds


#: The rates of each backend, for the default plan of a problem without `rates`. Without rates, the plan is the minimum
#: cut.
RATES: dict[str, CostModel] = {
    "cpu": Processor(flops_per_s=1.25e11, elementwise_per_s=2.9e10, bytes_per_s=3.1e10, fresh_bytes_per_s=5e9)
}

#: The share of the minimum cut's peak that a plan must save. Some plans that promised a tenth saved nothing.
LEAST_PEAK = 0.25

#: How many plans of the front are replayed.
TRIED = 3

#: How much longer than the minimum cut a plan may take on a GPU or TPU, as a share of the step's time. The model knows
#: the time of a step less well than this. For a GPT of 12 layers on an H100, 3% more time spares two thirds of the
#: memory.
SLOWER = 0.03

#: The share of the device's memory that plans are expected to find.
ROOM = 0.9

#: The shares of the peak and of the step's time that count as a gain over JAX's own plan. Programs for which JAX keeps
#: fewer bytes than `NOTICED` are too small for either.
GAIN_BYTES, GAIN_SECONDS, NOTICED = 0.05, 0.01, 1 << 16

#: The share of a plan's peak that is spent on saving results that devices would exchange again.
LITTLE = 0.05


def best(program: Graph | Problem, cost: CostModel | None = None) -> Plan:
    """Return the best plan known.

    This is a plan that takes clearly less memory than the minimum cut in no more time, or else the minimum cut. If that
    is no clear gain over JAX's own plan, it is JAX's own plan. On a device with `rates` it is the `leanest`. The plan
    of a graph is for JAX's default backend. `cost` prices ops instead of the fixed rates. Raises the errors of
    `min_cut`, and `PlanError` where `cost` gives a price that is negative, infinite or not a number.
    """
    problem = as_problem(program, Backend.here())
    plan = mincut.min_cut(problem)
    model = cost or problem.rates or RATES.get(problem.backend.name)
    if model is None:
        return plan
    planner = Planner(problem.timed(model))
    return exchanging_less(planner, _chosen(planner, plan))


def _chosen(planner: Planner, plan: Plan) -> Plan:
    """The best plan beside the minimum cut."""
    problem = planner.problem
    if problem.rates is not None:
        return leanest(planner, plan)
    if problem.of_process(plan.bytes_saved) >= REUSED_BYTES / 2 and (smaller := better(planner, plan)) is not None:
        return smaller
    whole = mincut.save_all(problem)
    if not plan.recomputed or problem.of_process(whole.bytes_saved) < NOTICED or is_gain(planner, plan, whole):
        return plan
    return whole


def is_gain(planner: Planner, plan: Plan, whole: Plan) -> bool:
    """Whether a plan is clearly faster or clearly smaller than JAX's own plan `whole`, by the model."""
    spared = planner.weighed_seconds(planner.priced(whole)) - planner.weighed_seconds(planner.priced(plan))
    if spared > GAIN_SECONDS * planner.common_seconds:
        return True
    peak_bytes, most_bytes = (planner.candidate(planner.priced(p)).predicted_bytes for p in (plan, whole))
    return peak_bytes < (1 - GAIN_BYTES) * most_bytes


def leanest(planner: Planner, default: Plan) -> Plan:
    """The smallest plan of the menu that takes hardly longer than the default, and no longer than JAX's own plan.

    Returns JAX's own plan where no such plan is smaller, and where JAX's own keeps too few bytes to be noticed.
    """
    plain, cut = planner.everything(), planner.known(planner.priced(default))
    whole = cut if plain is None else planner.known(plain)  # None where a demand forbids it
    if plain is not None and plain.bytes_saved < NOTICED:
        return plain
    step_seconds = planner.common_seconds + min(cut.step_seconds, whole.step_seconds)
    most_seconds = cut.step_seconds + SLOWER * step_seconds
    if plain is not None:
        most_seconds = min(most_seconds, whole.step_seconds)
    found = planner.smallest(most_seconds)
    chosen = found if found is not None and found.peak_bytes < whole.peak_bytes else whole
    return _with_room(planner, chosen, whole).plan


def _with_room(planner: Planner, chosen: Candidate, whole: Candidate) -> Candidate:
    """The chosen plan, or the fastest plan that should fit on the device.

    If none fits, this is the smallest plan; but where the compiler may recompute by itself, it gets JAX's own plan.
    """
    room_bytes = planner.problem.room_bytes
    if room_bytes is None or chosen.predicted_bytes <= ROOM * room_bytes:
        return chosen
    fitting = [c for c in planner.ranked if c.predicted_bytes <= ROOM * room_bytes]
    if fitting:
        return fitting[0]
    return whole if planner.problem.backend.remats else planner.ranked[-1]


def better(planner: Planner, default: Plan) -> Plan | None:
    """The smallest plan of the front that is clearly smaller than the default and no slower, by the model; or None.

    Over several devices some values have more parts than others, and no plan of the front may keep the right ones. Then
    the smallest plan of the menu is taken that is no slower.
    """
    most_seconds = planner.weighed_seconds(planner.priced(default))
    saving = planner.model.saving_seconds
    fast_enough = [c for c in planner.front.choices if c.seconds + saving(c.bytes) <= most_seconds]
    if not fast_enough:
        return None
    peak_bytes = planner.candidate(default).peak_bytes
    if planner.problem.of_process(peak_bytes) < REUSED_BYTES:
        return None
    candidates = [planner.candidate(planner.plan(choice, FRONT)) for choice in spread(fast_enough, TRIED)]
    most_bytes = (1 - LEAST_PEAK) * peak_bytes
    if planner.graph.devices > 1 and min(c.peak_bytes for c in candidates) > most_bytes:
        candidates += [c for c in planner.menu if c.step_seconds <= most_seconds]
    smallest = min(candidates, key=lambda c: (c.peak_bytes, c.step_seconds))
    return smallest.plan if smallest.peak_bytes <= most_bytes else None


def exchanging_less(planner: Planner, plan: Plan) -> Plan:
    """The plan, with those results saved that devices would exchange again, those of one line together, the smallest
    first, in `LITTLE` memory.
    """
    problem, graph = planner.problem, planner.graph
    if plan.segments or not (lines := _exchanging(problem, plan)):
        return plan
    left, more = LITTLE * planner.candidate(plan).peak_bytes, list[int]()
    for values in sorted(lines, key=lambda values: sum(problem.prices[v] for v in values)):
        left -= sum(problem.prices[v] for v in values)
        more += values if left >= 0 else []
    if not more:
        return plan
    reasons = dict.fromkeys(more, "devices would exchange something again for it")
    reasons |= {s.value: s.reason for s in plan.saved}
    values = {*plan.values, *more}
    runs = needed(problem, frozenset(values)).ops
    dropped = [v for v in plan.dropped if graph.values[v].maker in runs and v not in values]
    kept = {name: getattr(plan, name) for name in ("kept_steps", "offloaded", "checkpoints")}
    made = Plan.of(problem, values, strategy=plan.strategy, reasons=reasons, dropped=dropped, **kept)
    return planner.priced(made)


def _exchanging(problem: Problem, plan: Plan) -> list[list[int]]:
    """The results, by line, of the ops that run again and exchange something.

    What the backward needs whole is gathered for it in any case.
    """
    graph, again = problem.graph, {*plan.recomputed}
    anyway = {m.op for m in graph.moves if any(graph.ops[i].origin is Side.BACKWARD for i, _ in m.readers)}
    lines: dict[str, list[int]] = {}
    for op in (graph.ops[i] for i in dict.fromkeys(m.op for m in graph.moves if m.op in again - anyway)):
        lines.setdefault(op.source, []).extend(v for v in op.outputs if graph.consumers[v])
    return [values for values in lines.values() if not any(problem.verdicts[v].not_saved for v in values)]


#: The strategies by name.
STRATEGIES: dict[str, Callable[[Graph | Problem], Plan]] = {"best": best, **mincut.STRATEGIES}
