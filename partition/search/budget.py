"""List the plans worth trying for a budget, with the peak and the time of each.

A `Planner` knows one program and its prices. Its *menu* is the list of plans worth trying: the default cut, the
vertices of the front of (bytes saved, seconds recomputed) and cuts between them, divisions of the forward into pieces
that run again one at a time (`chain`: for small budgets, where recomputed values take more memory than saved ones), and
long loops in segments. Each plan has a time, for recomputing and for writing and reading what it saves, and a predicted
peak from a replay. For a large program a replay takes seconds, so `by_time` replays a plan only when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jointcut.partition.errors import PlanError, message
from jointcut.partition.lower.replay import Replay, Replayer, Rows, spared
from jointcut.partition.lower.reruns import best_length, segmentable
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import Roofline, op_seconds
from jointcut.partition.prices.rules import Demand, Verdict
from jointcut.partition.program.graph import TOP
from jointcut.partition.program.jaxprs import paused_collection
from jointcut.partition.program.primitives import FUSED
from jointcut.partition.search.chain import divisions
from jointcut.partition.search.front import Choice, Front, front
from jointcut.partition.search.mincut import min_cut, residuals_of_jax, save_all
from jointcut.partition.search.network import Network, network

#: How many plans of the front are replayed, by the most ops that the program may have for it.
_SAMPLES = ((3_000, 24), (20_000, 10))
_FEWEST_SAMPLES = 5


@dataclass(frozen=True)
class Candidate:
    """A plan with the figures of the model.

    `peak_bytes` are those of temporaries. `step_seconds` is the time to recompute, and to write and read the saved
    values; the time that every plan takes is not in it.
    """

    plan: Plan
    peak_bytes: int
    step_seconds: float


class Planner:
    """The plans of one problem, whose ops have prices in seconds.

    `model` is the problem's; a `Roofline` is taken `within` the most bytes that the program may save. Where no budget
    forbids it, a plan saves a byte if computing it again would take longer than `model.saving_seconds(1)`, the time to
    write and read it. `told` is called before each replay with its number and with how many plans there are.
    """

    def __init__(self, problem: Problem, told: Callable[[int, int], None] = lambda number, most: None) -> None:
        """Search for nothing yet. Raises `PlanError` where the ops of the problem have no prices in seconds."""
        if problem.model is None:
            cure = "Give it a cost model: problem.timed(model)."
            raise PlanError(message("The problem", "has no prices in seconds.", cure))
        self.problem, self.graph, self.told = problem, problem.graph, told
        model = problem.model
        most_bytes = sum(problem.prices[v] for v in residuals_of_jax(problem))
        self.model = model.within(most_bytes) if isinstance(model, Roofline) else model
        self._replayer = Replayer(self.graph, problem.backend)
        self._known: dict[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], Candidate] = {}

    @property
    def most_bytes_per_s(self) -> float:
        """The bytes that are worth saving to spare a second: writing and reading them takes a second."""
        return 1 / self.model.saving_seconds(1)

    @property
    def num_replayed(self) -> int:
        """How many plans of the menu were replayed so far."""
        return len(self._known)

    @cached_property
    def common_seconds(self) -> float:
        """The time that every plan takes by the model: each op once, except those that XLA fuses."""
        graph = self.graph
        ops = [op for op in graph.ops if op.name not in FUSED and op.outputs]
        trips = [graph.values[op.outputs[0]].copies for op in ops]
        return sum(n * op_seconds(graph, op, self.model) for n, op in zip(trips, ops, strict=True))

    @cached_property
    def network(self) -> Network:
        """The flow network of the problem, in which seconds replace the rules of cost."""
        return network(self.problem)

    @cached_property
    def front(self) -> Front:
        """The front of the network, up to `most_bytes_per_s`."""
        return front(self.network, self.most_bytes_per_s)

    def plan(self, choice: Choice, strategy: str) -> Plan:
        """The plan of one cut of the network."""
        side, net = choice.sink_side, self.network
        at = np.flatnonzero(net.value_in >= 0)
        inner = net.value_in[at]
        saved = at[~side[inner] & side[inner + 1]].tolist()
        return self.priced(self._of(saved, strategy, {v: _why(self.problem.verdicts[v]) for v in saved}))

    def _of(self, saved: Iterable[int], strategy: str, reasons: Mapping[int, str]) -> Plan:
        return Plan.of(self.problem, saved, strategy=strategy, reasons=reasons)

    def priced(self, plan: Plan) -> Plan:
        """The plan with the seconds of the ops that it runs again, and a lower bound on these for its bytes."""
        seconds = float(sum(self.problem.seconds[i] for i in (*plan.recomputed, *self._rerun(plan))))
        bound = self.front.bound_seconds(plan.bytes_saved + plan.bytes_spared)
        return replace(plan, seconds=seconds, bound_seconds=min(seconds, bound))

    def _rerun(self, plan: Plan) -> Iterator[int]:
        """Ops that run again because their loop runs in segments."""
        loops = segmentable(self.problem, plan) if plan.segments else {}
        for loop, _ in plan.segments:
            yield from loops[loop].rerun_ops

    def step_seconds(self, plan: Plan) -> float:
        """The time to run ops again, and to write and read the saved values."""
        return (plan.seconds or 0.0) + self.model.saving_seconds(plan.bytes_saved)

    def candidate(self, plan: Plan) -> Candidate:
        """Return a plan with its figures."""
        with paused_collection():
            steps = schedule(self.problem, plan)
            plan = spared(self.graph, plan, steps)
            return Candidate(plan, self._replayer.rows(steps).peak_bytes, self.step_seconds(plan))

    def replay(self, plan: Plan) -> Replay:
        """The peak of a plan, by the model, and what is alive there."""
        return self.rows(plan).replay()

    def rows(self, plan: Plan) -> Rows:
        """The rows of a plan's schedule: the buffers that each step makes and reads."""
        return self._replayer.rows(schedule(self.problem, plan))

    # ------------------------------------------------------------------------------------------------- the menu

    def plans(self) -> Iterator[Plan]:
        """Plans worth trying: the default one, the front's, those in pieces, and each with its loops in segments."""
        seen: set[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = set()
        for plan in self._plans():
            for form in (plan, *self.in_segments(plan)):
                key = (form.values, form.segments)
                if key not in seen:
                    seen.add(key)
                    yield form

    def _plans(self) -> Iterator[Plan]:
        if (default := self.default()) is not None:
            yield default
        if not self.problem.constraints:
            everything = save_all(self.problem)
            yield self.priced(everything)
            if default is not None and len(self.graph.loops) > 1:
                yield self.loops_kept(default, everything)
        samples = next((count for most, count in _SAMPLES if len(self.graph.ops) <= most), _FEWEST_SAMPLES)
        for choice in sampled(self.front, samples):
            yield self.plan(choice, "front")
        yield from self.divided()

    def default(self) -> Plan | None:
        """The default cut; None where no cut fits the rules of cost and the demands."""
        try:
            return self.priced(min_cut(self.problem))
        except PlanError:
            return None

    def loops_kept(self, outside: Plan, inside: Plan) -> Plan:
        """A plan that saves what `outside` saves outside loops and `inside` saves in loops, to be run in segments."""
        values, escaping = self.graph.values, self.problem.sides.escaping
        saved = [v for v in outside.values if values[v].loop == TOP or v in escaping]
        saved += [v for v in inside.values if values[v].loop != TOP]
        reasons = {s.value: s.reason for s in (*outside.saved, *inside.saved)}
        return self.priced(self._of(saved, f"{outside.strategy}, loops kept", reasons))

    def divided(self) -> Iterator[Plan]:
        """Plans that divide the forward into pieces which run again one at a time."""
        for division in divisions(self.problem, self.front, self.model.saving_seconds(1)):
            yield self.priced(self._of(division.saved, str(division), division.reasons))

    def in_segments(self, plan: Plan) -> Iterator[Plan]:
        """The same plan with its long loops run in segments, if that would keep fewer bytes."""
        lengths, bytes_spared = [], 0
        kept_whole = {self.graph.values[c.value].loop for c in self.problem.constraints if c.demand is Demand.SAVE}
        for loop, sizes in segmentable(self.problem, plan).items():
            steps = best_length(sizes.length, sizes.carry_bytes, sizes.residual_bytes)
            carries = -(-sizes.length // steps) * sizes.carry_bytes
            holds_whole = any(loop in self.graph.ancestors[other] for other in kept_whole)
            if carries + steps * sizes.residual_bytes < sizes.length * sizes.residual_bytes and not holds_whole:
                lengths.append((loop, steps))
                bytes_spared += sizes.length * sizes.residual_bytes - carries
        if lengths:
            strategy = f"{plan.strategy}, segments"
            yield self.priced(replace(plan, strategy=strategy, segments=tuple(lengths), bytes_spared=bytes_spared))

    @cached_property
    def _by_time(self) -> list[Plan]:
        with paused_collection():
            return sorted(self.plans(), key=self.step_seconds)

    def by_time(self, most_bytes: float) -> Iterator[Candidate]:
        """The candidates that save at most so many bytes, the fastest first."""
        return (self._replayed(plan) for plan in self._by_time if plan.bytes_saved <= most_bytes)

    @cached_property
    def menu(self) -> tuple[Candidate, ...]:
        """All candidates, the fastest first."""
        return tuple(sorted(map(self._replayed, self._by_time), key=lambda c: (c.step_seconds, c.peak_bytes)))

    def _replayed(self, plan: Plan) -> Candidate:
        key = plan.values, plan.segments
        if key not in self._known:
            self.told(len(self._known) + 1, len(self._by_time))
            self._known[key] = self.candidate(plan)
        return self._known[key]


def _why(verdict: Verdict) -> str:
    if verdict.not_recomputed and not verdict.is_costly:
        return f"not recomputed: {verdict.not_recomputed}"
    return "at this budget its bytes cost less than computing it again"


def ranked(menu: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that no other betters in both time and peak, the fastest (and largest) first."""
    best: list[Candidate] = []
    for c in sorted(menu, key=lambda c: (c.step_seconds, c.peak_bytes)):
        if not best or c.peak_bytes < best[-1].peak_bytes:
            best.append(c)
    return best


def spread(choices: Sequence[Choice], count: int) -> list[Choice]:
    """At most `count` of the choices, the ends among them, evenly spread in the logarithm of their bytes."""
    if len(choices) <= count:
        return list(choices)
    sizes = np.log2([c.bytes + 4096 for c in choices])
    wanted = np.linspace(sizes[0], sizes[-1], count)
    places = sorted({int(np.argmin(abs(sizes - w))) for w in wanted} | {0, len(choices) - 1})
    return [choices[i] for i in places]


def sampled(whole: Front, count: int) -> list[Choice]:
    """At most `count` cuts of the hull, and the best cuts known for as many budgets between its ends."""
    corners = spread(whole.choices, count)
    budgets = np.linspace(corners[0].bytes, corners[-1].bytes, count, dtype=np.int64).tolist()
    between = [choice for b in budgets if (choice := whole.best(b)) is not None]
    return sorted({(c.bytes, c.seconds): c for c in (*between, *corners)}.values(), key=lambda c: c.bytes)
