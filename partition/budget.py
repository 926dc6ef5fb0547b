"""List the plans worth trying for a budget, with the peak and the time of each.

A `Planner` knows one program and its prices. Its *menu* are plans worth trying: the default cut, the vertices of the
front of (bytes saved, seconds recomputed) and cuts between them, divisions of the forward into pieces that run again
one at a time (`chain`: below the knee, where what is recomputed outweighs what is saved), and long loops in segments.
Each has its time, what it computes again and what it writes and reads of memory, and its predicted peak from a replay.
For a large program a replay takes seconds, so `by_time` replays a plan only when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jointcut.partition import segments
from jointcut.partition.backend import PORTABLE, Backend
from jointcut.partition.chain import divisions
from jointcut.partition.classify import classify
from jointcut.partition.cost import CostModel, Roofline, op_seconds, recompute_seconds, saving_bytes
from jointcut.partition.emit import Halves
from jointcut.partition.errors import PlanError
from jointcut.partition.front import Choice, Front, front
from jointcut.partition.graph import TOP, Graph
from jointcut.partition.jaxprs import paused_collection
from jointcut.partition.memory import Replay, replay, spared
from jointcut.partition.mincut import min_cut, save_all
from jointcut.partition.network import Network, network
from jointcut.partition.plan import Plan
from jointcut.partition.policy import FUSED, Constraint, Demand, Verdict, judge

#: How many plans of the front are replayed, by the most ops that the program may have for it.
_SAMPLES = ((3_000, 24), (20_000, 10))
_FEWEST_SAMPLES = 5


@dataclass(frozen=True)
class Candidate:
    """A plan with what the model promises: `peak_bytes` of temporaries, and `step_seconds` beyond those that every plan
    takes: recomputation, and writing and reading what is saved.
    """

    plan: Plan
    peak_bytes: int
    step_seconds: float


class Planner:
    """The plans of one program.

    `model` prices ops in seconds; a `Roofline` becomes that of as much as the program keeps at most. `constraints` are
    demands on single values. Without a budget's pressure a plan saves a byte rather than spend more on it than
    `model.saving_seconds(1)`, what it takes to write and read it. `told` is called before each replay with its number
    and with how many plans there are.
    """

    def __init__(
        self,
        graph: Graph,
        model: CostModel,
        constraints: Iterable[Constraint] = (),
        backend: Backend = PORTABLE,
        told: Callable[[int, int], None] = lambda number, most: None,
    ) -> None:
        """Price the values and the ops of a graph."""
        self.graph, self.backend, self.told = graph, backend, told
        self.constraints = tuple(constraints)
        self.facts = classify(graph)
        self.prices = saving_bytes(graph, self.facts)
        self.model = model.within(save_all(graph).bytes_saved) if isinstance(model, Roofline) else model
        self.verdicts = judge(graph, self.facts, self.constraints)
        again = recompute_seconds(graph, self.facts, model)
        # Computed within the loop of whatever reads it, an op of one instruction takes no time of its own.
        self.seconds = [0.0 if op.name in FUSED else s for op, s in zip(graph.ops, again, strict=True)]
        self._known: dict[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], Candidate] = {}

    @property
    def most_bytes_per_s(self) -> float:
        """Bytes that are worth keeping to save a second: more take as long to write and read."""
        return 1 / self.model.saving_seconds(1)

    @property
    def num_replayed(self) -> int:
        """How many plans of the menu were replayed so far."""
        return len(self._known)

    @cached_property
    def common_seconds(self) -> float:
        """What every plan computes, once, by the model; what XLA fuses takes no time of its own."""
        graph = self.graph
        ops = [op for op in graph.ops if op.name not in FUSED and op.outputs]
        trips = [graph.values[op.outputs[0]].copies for op in ops]
        return sum(n * op_seconds(graph, op, self.model) for n, op in zip(trips, ops, strict=True))

    @cached_property
    def network(self) -> Network:
        """The flow network in which rules of cost have become seconds."""
        return network(self.graph, self.facts, self.prices, self.verdicts, self.seconds)

    @cached_property
    def front(self) -> Front:
        """Fewest seconds for every number of bytes saved."""
        return front(self.network, self.most_bytes_per_s)

    def plan(self, choice: Choice, strategy: str) -> Plan:
        """The plan of one cut of the network."""
        side, net = choice.sink_side, self.network
        at = np.flatnonzero(net.value_in >= 0)
        inner = net.value_in[at]
        saved = at[~side[inner] & side[inner + 1]].tolist()
        return self.priced(self._of(saved, strategy, {v: _why(self.verdicts[v]) for v in saved}))

    def _of(self, saved: Iterable[int], strategy: str, reasons: Mapping[int, str]) -> Plan:
        facts, verdicts = self.facts, self.verdicts
        return Plan.of(self.graph, saved, strategy=strategy, reasons=reasons, facts=facts, verdicts=verdicts)

    def priced(self, plan: Plan) -> Plan:
        """The plan with what it computes again in seconds, and the least that its bytes allow."""
        seconds = float(sum(self.seconds[i] for i in (*plan.recomputed, *self._rerun(plan))))
        bound = self.front.bound_seconds(plan.bytes_saved + plan.bytes_spared)
        return replace(plan, seconds=seconds, bound_seconds=min(seconds, bound))

    def _rerun(self, plan: Plan) -> Iterator[int]:
        """Ops that run again because their loop runs in segments."""
        found = segments.segmentable(self.graph, self.facts, plan) if plan.segments else {}
        for loop, _ in plan.segments:
            yield from found[loop].rerun_ops

    def step_seconds(self, plan: Plan) -> float:
        """What a plan computes again, and writing and reading what it saves."""
        return (plan.seconds or 0.0) + self.model.saving_seconds(plan.bytes_saved)

    def candidate(self, plan: Plan) -> Candidate:
        """A plan with its figures."""
        with paused_collection():
            halves = self._halves(plan)
            plan = spared(plan, halves)
            return Candidate(plan, replay(halves, self.graph).peak_bytes, self.step_seconds(plan))

    def replay(self, plan: Plan) -> Replay:
        """The peak of a plan, by the model, and what is alive there."""
        return replay(self._halves(plan), self.graph)

    def _halves(self, plan: Plan) -> Halves:
        return segments.written(self.graph, self.facts, plan, self.backend)

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
        if not self.constraints:
            everything = save_all(self.graph)
            yield self.priced(everything)
            if default is not None and len(self.graph.loops) > 1:
                yield self.loops_kept(default, everything)
        samples = next((count for most, count in _SAMPLES if len(self.graph.ops) <= most), _FEWEST_SAMPLES)
        for choice in sampled(self.front, samples):
            yield self.plan(choice, "front")
        yield from self.divided()

    def default(self) -> Plan | None:
        """The default cut; None where a demand forbids what its rules of cost leave."""
        try:
            return self.priced(min_cut(self.graph, self.constraints))
        except PlanError:
            return None

    def loops_kept(self, outside: Plan, inside: Plan) -> Plan:
        """What one plan saves outside loops with what another saves inside: segments have room for it."""
        values, escaping = self.graph.values, self.facts.escaping
        saved = [v for v in outside.values if values[v].loop == TOP or v in escaping]
        saved += [v for v in inside.values if values[v].loop != TOP]
        reasons = {s.value: s.reason for s in (*outside.saved, *inside.saved)}
        return self.priced(self._of(saved, f"{outside.strategy}, loops kept", reasons))

    def divided(self) -> Iterator[Plan]:
        """Plans that divide the forward into pieces which run again one at a time."""
        given = self.graph, self.facts, self.prices, self.seconds, self.verdicts, self.front
        for found in divisions(*given, self.model.saving_seconds(1)):
            yield self.priced(self._of(found.saved, str(found), found.reasons))

    def in_segments(self, plan: Plan) -> Iterator[Plan]:
        """The same plan with its long loops run in segments, if that would keep fewer bytes."""
        lengths, bytes_spared = [], 0
        kept_whole = {self.graph.values[c.value].loop for c in self.constraints if c.demand is Demand.SAVE}
        for loop, found in segments.segmentable(self.graph, self.facts, plan).items():
            steps = segments.best_length(found.length, found.carry_bytes, found.residual_bytes)
            kept = -(-found.length // steps) * found.carry_bytes + steps * found.residual_bytes
            inside = any(loop in self.graph.ancestors[other] for other in kept_whole)
            if kept < found.length * found.residual_bytes and not inside:
                lengths.append((loop, steps))
                bytes_spared += found.length * found.residual_bytes - -(-found.length // steps) * found.carry_bytes
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
    """At most `count` corners of the hull, and the best cuts found for as many budgets between its ends."""
    corners = spread(whole.choices, count)
    budgets = np.linspace(corners[0].bytes, corners[-1].bytes, count, dtype=np.int64).tolist()
    between = [found for b in budgets if (found := whole.best(b)) is not None]
    return sorted({(c.bytes, c.seconds): c for c in (*between, *corners)}.values(), key=lambda c: c.bytes)
