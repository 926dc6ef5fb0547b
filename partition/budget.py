"""List the plans worth trying for a budget, with the peak and the time of each.

A `Planner` knows one program and its prices. Its *menu* are plans worth trying: the default cut, the vertices of the
front of (bytes saved, seconds recomputed), cuts with the forward divided into pieces that are run again one at a time
(below the knee, where what is recomputed outweighs what is saved: Chen et al. 2016, "Training Deep Nets with Sublinear
Memory Cost"), and long loops in segments. Each has its predicted peak from a replay, and its time: what it computes
again, and what it writes and reads of memory. `ranked` leaves those that no other betters in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jointcut.partition import segments
from jointcut.partition.classify import classify
from jointcut.partition.cost import CostModel, recompute_seconds, saving_bytes
from jointcut.partition.emit import Halves
from jointcut.partition.errors import PlanError
from jointcut.partition.front import Choice, Front, front
from jointcut.partition.graph import LITERAL, STEP, TOP, Graph
from jointcut.partition.memory import Replay, replay, residual_bytes, spared
from jointcut.partition.mincut import min_cut, save_all
from jointcut.partition.network import Network, network
from jointcut.partition.plan import Plan
from jointcut.partition.policy import FUSED, Constraint, Demand, Verdict, judge

#: Into how many pieces the forward is divided.
PIECES = (2, 3, 4, 6, 8, 12, 16, 24, 32)

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

    `model` prices ops in seconds. `constraints` are demands on single values. Without a budget's pressure a plan saves
    a byte rather than spend more on it than `model.saving_seconds(1)`, what it takes to write and read it.
    """

    def __init__(
        self, graph: Graph, model: CostModel, constraints: Iterable[Constraint] = (), on_cpu: bool = False
    ) -> None:
        """Price the values and the ops of a graph."""
        self.graph, self.model, self.on_cpu = graph, model, on_cpu
        self.constraints = tuple(constraints)
        self.facts = classify(graph)
        self.prices = saving_bytes(graph, self.facts)
        self.verdicts = judge(graph, self.facts, self.constraints)
        again = recompute_seconds(graph, self.facts, model)
        # Computed within the loop of whatever reads it, an op of one instruction takes no time of its own.
        self.seconds = [0.0 if op.name in FUSED else s for op, s in zip(graph.ops, again, strict=True)]

    @property
    def most_bytes_per_s(self) -> float:
        """Bytes that are worth keeping to save a second: more take as long to write and read."""
        return 1 / self.model.saving_seconds(1)

    @cached_property
    def network(self) -> Network:
        """The flow network in which rules of cost have become seconds."""
        return network(self.graph, self.facts, self.prices, self.verdicts, self.seconds)

    @cached_property
    def front(self) -> Front:
        """Fewest seconds for every number of bytes saved."""
        return front(self.network, self.most_bytes_per_s)

    def plan(self, choice: Choice, strategy: str, verdicts: Sequence[Verdict] | None = None) -> Plan:
        """The plan of one cut of the network."""
        side, net = choice.sink_side, self.network
        at = np.flatnonzero(net.value_in >= 0)
        inner = net.value_in[at]
        saved = at[~side[inner] & side[inner + 1]].tolist()
        known = verdicts or self.verdicts
        reasons = {v: _why(known[v]) for v in saved}
        return self.priced(self._of(saved, strategy, reasons))

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

    def candidate(self, plan: Plan) -> Candidate:
        """A plan with its figures."""
        halves = self._halves(plan)
        seconds = (plan.seconds or 0.0) + self.model.saving_seconds(residual_bytes(halves))
        return Candidate(spared(plan, halves), replay(halves, self.graph).peak_bytes, seconds)

    def replay(self, plan: Plan) -> Replay:
        """The peak of a plan, by the model, and what is alive there."""
        return replay(self._halves(plan), self.graph)

    def _halves(self, plan: Plan) -> Halves:
        return segments.written(self.graph, self.facts, plan, on_cpu=self.on_cpu)

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
        for count in PIECES if samples > _FEWEST_SAMPLES else PIECES[2::3]:
            yield from self.in_pieces(count)

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

    def in_pieces(self, count: int) -> Iterator[Plan]:
        """Plans that save what passes between `count` pieces of the forward, and within them only what must be."""
        kept = boundaries(self, count)
        if not kept:
            return
        reason = f"one of {count} pieces that run again begins with it"
        demands = [Constraint(v, Demand.SAVE, reason) for v in kept]
        verdicts = judge(self.graph, self.facts, (*demands, *self.constraints))  # what the user asks for comes last
        try:
            net = network(self.graph, self.facts, self.prices, verdicts, self.seconds)
        except PlanError:
            return
        found = front(net, self.most_bytes_per_s)
        for choice in spread(found.choices, 4):
            yield self.plan(choice, f"{count} pieces", verdicts)

    def in_segments(self, plan: Plan) -> Iterator[Plan]:
        """The same plan with its long loops run in segments, if that would keep fewer bytes."""
        lengths = []
        kept_whole = {self.graph.values[c.value].loop for c in self.constraints if c.demand is Demand.SAVE}
        for loop, found in segments.segmentable(self.graph, self.facts, plan).items():
            steps = segments.best_length(found.length, found.carry_bytes, found.residual_bytes)
            kept = -(-found.length // steps) * found.carry_bytes + steps * found.residual_bytes
            inside = any(loop in self.graph.ancestors[other] for other in kept_whole)
            if kept < found.length * found.residual_bytes and not inside:
                lengths.append((loop, steps))
        if lengths:
            yield self.priced(replace(plan, strategy=f"{plan.strategy}, segments", segments=tuple(lengths)))

    @cached_property
    def menu(self) -> tuple[Candidate, ...]:
        """All candidates, the fastest first."""
        return tuple(sorted(map(self.candidate, self.plans()), key=lambda c: (c.step_seconds, c.peak_bytes)))


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


def boundaries(planner: Planner, count: int) -> frozenset[int]:
    """What passes between `count` pieces of the forward that hold about equally many bytes.

    Each boundary is moved to where fewest bytes pass, within half a piece.
    """
    graph, facts = planner.graph, planner.facts
    top = [i for i in graph.regions[TOP].ops if i in facts.forward and graph.ops[i].name not in (STEP, LITERAL)]
    if len(top) < 2 * count:
        return frozenset()
    place = {i: t for t, i in enumerate(top)}
    passing = np.zeros(len(top) + 1, np.int64)
    made = np.zeros(len(top), np.int64)
    spans: list[tuple[int, int, int]] = []
    for i in top:
        for v in graph.ops[i].outputs:
            last = max((place[c] for c in graph.consumers[v] if c in place), default=place[i])
            made[place[i]] += graph.values[v].saved_bytes
            if last > place[i]:
                spans.append((v, place[i], last))
                passing[place[i]] += planner.prices[v]
                passing[last] -= planner.prices[v]
    width, load = np.cumsum(passing)[:-1], np.cumsum(made)
    cuts: set[int] = set()
    for k in range(1, count):
        lo, hi = (int(np.searchsorted(load, load[-1] * (k + side) / count)) for side in (-0.5, 0.5))
        window = width[lo : hi + 1]
        cuts.add(lo + int(np.argmin(window)) if window.size else lo)
    return frozenset(v for v, start, last in spans if any(start <= t < last for t in cuts))
