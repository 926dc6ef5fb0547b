"""List the plans worth trying for a budget, with the peak and the time of each.

A `Planner` knows one program and its prices. Its *menu* is the list of plans worth trying:

- the default cut,
- the vertices of the front of (bytes saved, seconds recomputed), and cuts between them,
- divisions of the forward into pieces that run again one at a time (`chain`): for small budgets, where recomputed
  values take more memory than saved ones,
- long loops in segments,
- loops with more checkpoints, or fewer.

Each plan has a time, for recomputing and for writing and reading its saved values, and a predicted peak from a replay.
If a budget falls between two plans that lie far apart, `fastest` looks for others between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from jointcut.partition.bodies.checkpoints import Numbers
from jointcut.partition.errors import PlanError, message
from jointcut.partition.lower.memory.replay import Replay, Replayer, Rows, spared
from jointcut.partition.lower.reruns import segmentable
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.plans.asjax import residuals_of_jax
from jointcut.partition.plans.backend import scattered_bytes
from jointcut.partition.plans.plan import Plan, PlanKey
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import Roofline, op_seconds
from jointcut.partition.program.jax.runtime import paused_collection
from jointcut.partition.program.primitives import FUSED
from jointcut.partition.search.candidates import FRONT, Candidate, Menu, first_within, is_between, ranked
from jointcut.partition.search.chain import divisions
from jointcut.partition.search.copies import Copies, bound_seconds, copies, in_parts, seconds_of, sending
from jointcut.partition.search.front import Choice, Front, front, sampled
from jointcut.partition.search.mincut import min_cut, save_all
from jointcut.partition.search.mixtures import NumbersOfCheckpoints, in_segments, kept_share, mixed, partly
from jointcut.partition.search.network import Network, network

#: How many plans of the front, and how many divisions, are replayed, by the most ops that the program may have.
_SAMPLES = ((1_000, 24, 24), (3_000, 16, 24), (20_000, 4, 4))
_FEWEST_SAMPLES = 2, 3

#: How many plans that are faster than the one found are tried, by the most ops that the program may have.
_LOOKS = (3_000, 4), (8_000, 1)

#: How often the gap around a budget is halved at most, and how near is near enough, as a share of the larger
#: neighbour's peak.
_MOST_HALVINGS = 6
_DENSE = 0.93

#: The shares of steps kept whole where plans of the menu run loops partly in segments, and the most ops that the
#: program may have for that, and for loops that offload in part.
_KEPT_SHARES = 0.75, 0.5, 0.25
_MOST_OPS_PARTLY = 3_000


class Planner:
    """The plans of one problem, whose ops have prices in seconds.

    `model` is the problem's; a `Roofline` is taken `within` the most bytes that the program may save. Where no budget
    forbids it, a plan saves a byte if computing it again would take longer than `model.saving_seconds(1)`, the time to
    write and read it. `told` is called before each replay with its number and the number of plans. If the rate of the
    link to the host is known, plans may offload more than the problem demands.
    """

    def __init__(
        self,
        problem: Problem,
        told: Callable[[int, int], None] = lambda number, most: None,
        host_bytes_per_s: float | None = None,
    ) -> None:
        """Start without a search. Raises `PlanError` where the ops of the problem have no prices in seconds."""
        if problem.model is None:
            raise PlanError(message("The problem", "has no prices in seconds.", "Give a model: problem.timed(model)."))
        self.problem, self.graph, self.told, self.host_bytes_per_s = problem, problem.graph, told, host_bytes_per_s
        model = problem.model
        self.most_bytes = sum(problem.prices[v] for v in residuals_of_jax(problem))
        self.model = model.within(problem.of_process(self.most_bytes)) if isinstance(model, Roofline) else model
        self.checkpoints = NumbersOfCheckpoints(problem, self.model)
        self._replayer = Replayer(self.graph)
        self._known: dict[PlanKey, Candidate] = {}
        self._between: dict[tuple[int, int], list[Candidate]] = {}

    @property
    def most_bytes_per_s(self) -> float:
        """The bytes that are worth saving to spare a second: writing and reading them takes a second."""
        return 1 / self.model.saving_seconds(1)

    @property
    def num_replayed(self) -> int:
        """The number of plans of the menu replayed so far."""
        return len(self._known)

    @cached_property
    def common_seconds(self) -> float:
        """The time that every plan takes by the model: each op once, except ops that XLA fuses."""
        graph = self.graph
        timed = (op for op in graph.ops if op.name not in FUSED and op.outputs)
        return sum(graph.values[op.outputs[0]].copies * op_seconds(graph, op, self.model) for op in timed)

    @cached_property
    def network(self) -> Network:
        """The flow network of the problem, in which seconds replace the rules of cost."""
        return network(self.problem)

    @cached_property
    def _bounds(self) -> Front:
        """The front in true seconds, which bounds every plan.

        It is the search's own front unless something is preferred, or loops may keep other numbers of checkpoints.
        """
        fewest = self.checkpoints.fewest
        is_own = not self.problem.preferences and not fewest
        return self.front if is_own else front(network(self.problem.at(fewest).without_preferences))

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
        reasons = {v: self.problem.verdicts[v].why_under_budget for v in saved}
        return self.priced(Plan.of(self.problem, saved, strategy=strategy, reasons=reasons))

    def priced(self, plan: Plan) -> Plan:
        """The plan with the seconds of the ops that it runs again, and a lower bound on these for its bytes.

        With a known rate of the link to the host, the seconds include waiting for copies, and the bound covers them.
        """
        seconds, on_device = self._again(plan, self.problem.seconds), plan.bytes_saved + plan.bytes_spared
        rate = self.host_bytes_per_s
        if not seconds and not plan.offloaded:
            return replace(plan, seconds=seconds, bound_seconds=seconds)
        if rate is None:
            bound = self._bounds.bound_seconds(on_device)
        else:
            seconds += self.waiting_seconds(plan)
            bound = bound_seconds(self._bounds.bound_seconds, on_device, self.most_bytes, self.halves_seconds, rate)
        is_less = bound < (1 - 1e-9) * seconds  # else the difference is rounding
        return replace(plan, seconds=seconds, bound_seconds=bound if is_less else seconds)

    @cached_property
    def halves_seconds(self) -> tuple[float, float]:
        """The time of forward and backward by the model, without reruns; ops that may run in either count in both."""
        sides, ops = self.problem.sides, self.graph.ops
        times = [(op.id, seconds_of(self.problem, self.model, op.id)) for op in ops if op.outputs]
        forward = sum(seconds for i, seconds in times if i not in sides.backward)
        return forward, sum(seconds for i, seconds in times if i not in sides.forward)

    def copies(self, plan: Plan) -> Copies:
        """The copies of a plan between the memories, in its schedule, by the rate of the link."""
        assert self.host_bytes_per_s is not None, "the rate of the link is known"
        steps = schedule(self.problem, plan)
        return copies(self.problem.at(plan.checkpoints), steps, self.model, self.host_bytes_per_s)

    def waiting_seconds(self, plan: Plan) -> float:
        """The time for which a plan waits for copies between the memories."""
        return self.copies(plan).waiting_seconds if plan.offloaded else 0.0

    def _again(self, plan: Plan, seconds: Sequence[float]) -> float:
        """The sum of the given seconds over all ops that run again, with the steps that lack checkpoints.

        Loops in segments count without kept steps.
        """
        loops = segmentable(self.problem, plan) if plan.segments else {}
        in_segments = sum(
            (1.0 - kept / loops[loop].length) * sum(seconds[i] for i in loops[loop].rerun_ops)
            for loop, _, kept in plan.loops_in_segments
        )
        again = sum(seconds[i] for i in plan.reruns(self.graph))
        return float(again + in_segments + self.checkpoints.seconds(plan.checkpoints))

    def step_seconds(self, plan: Plan) -> float:
        """The time to run ops again, and to write and read the saved values."""
        return (plan.seconds or 0.0) + self.model.saving_seconds(plan.bytes_saved + plan.bytes_offloaded)

    def weighed_seconds(self, plan: Plan) -> float:
        """`step_seconds` plus the weight of preferences, as plans are compared."""
        if not self.problem.preferences:
            return self.step_seconds(plan)
        weighed, seconds = self.problem.weighed, self.problem.seconds
        late = sum(weighed[i] - seconds[i] for i in plan.deferred)
        return self.step_seconds(plan) + self._again(plan, weighed) - self._again(plan, seconds) + late

    def candidate(self, plan: Plan) -> Candidate:
        """Return a plan with its figures."""
        with paused_collection():
            steps = schedule(self.problem, plan)
            plan = spared(steps.graph, plan, steps)
            seconds, peak = self.weighed_seconds(plan), self._replayer.rows(steps).peak_bytes
            preferred, calibration = seconds - self.step_seconds(plan), self.problem.backend.calibration
            return Candidate(plan, peak, seconds, preferred, calibration)

    def replay(self, plan: Plan) -> Replay:
        """The peak of a plan, by the model, and the buffers alive there."""
        return self.rows(plan).replay()

    def rows(self, plan: Plan) -> Rows:
        """The rows of a plan's schedule: the buffers that each step makes and reads."""
        return self._replayer.rows(schedule(self.problem, plan))

    @cached_property
    def scattered_bytes(self) -> int:
        """The sum over all scatters of the bytes of the largest array that each reads."""
        return scattered_bytes(self.graph)

    def plans(self) -> Iterator[Plan]:
        """Plans worth trying: the default, the front's, the divisions; and each with other checkpoints, in segments."""
        seen: set[PlanKey] = set()
        for plan in (plan for chosen in self._plans() for plan in (chosen, *self.numbered(chosen))):
            for form in (plan, *self.in_segments(plan), *self.offloading(plan)):
                if form.key not in seen:
                    seen.add(form.key)
                    yield form

    def _plans(self) -> Iterator[Plan]:
        if (default := self.default()) is not None:
            yield default
        if (everything := self.everything()) is not None:
            yield everything
            if default is not None and len(self.graph.loops) > len(self.graph.once):
                yield self.loops_kept(default, everything)
        samples, divided = next((n for most, *n in _SAMPLES if len(self.graph.ops) <= most), _FEWEST_SAMPLES)
        for choice in sampled(self.front, samples):
            yield self.plan(choice, FRONT)
        yield from self.divided(divided)

    def default(self) -> Plan | None:
        """The default cut; None where no cut fits the rules of cost and the demands."""
        try:
            return self.priced(min_cut(self.problem))
        except PlanError:
            return None

    def large(self, default: Plan) -> Candidate:
        """The plan for a large budget: the default one, in which loops keep more checkpoints if that is faster."""
        numbers = self.checkpoints.largest
        plans = [self.priced(default), *([self._numbered(default, numbers)] if numbers else [])]
        return min(map(self.known, plans), key=lambda c: c.step_seconds)

    def everything(self) -> Plan | None:
        """The plan that saves the values that plain JAX saves; None where a demand may forbid it."""
        is_free = not any(c.demand.is_must for c in self.problem.constraints)
        return self.priced(save_all(self.problem)) if is_free else None

    def loops_kept(self, outside: Plan, inside: Plan) -> Plan:
        """A plan that saves like `outside` outside loops and like `inside` in loops, to be run in segments."""
        values, escaping = self.graph.values, self.problem.sides.escaping
        saved = [v for v in outside.values if values[v].loop in self.graph.once or v in escaping]
        saved += [v for v in inside.values if values[v].loop not in self.graph.once]
        reasons = {s.value: s.reason for s in (*outside.saved, *inside.saved)}
        strategy = f"{outside.strategy}, loops kept"
        return self.priced(Plan.of(self.problem, saved, strategy=strategy, reasons=reasons))

    def divided(self, most: int = _SAMPLES[0][2]) -> Iterator[Plan]:
        """At most `most` plans that divide the forward into pieces which run again one at a time."""
        for division in divisions(self.problem, self.front, self.model.saving_seconds(1), most):
            how = {"strategy": str(division), "reasons": division.reasons, "dropped": division.dropped}
            yield self.priced(Plan.of(self.problem, division.saved, **how))

    def offloading(self, plan: Plan) -> Iterator[Plan]:
        """The same plan with more of its values in host memory, if the rate of the link is known."""
        if self.host_bytes_per_s is not None:
            hidden = self.host_bytes_per_s * min(self.halves_seconds)
            for more in (sending, in_parts) if len(self.graph.ops) <= _MOST_OPS_PARTLY else (sending,):
                yield from map(self.priced, more(self.problem, plan, self.waiting_seconds, hidden))

    def numbered(self, plan: Plan) -> Iterator[Plan]:
        """The same plan with other numbers of checkpoints of its loops."""
        yield from (self._numbered(plan, numbers) for numbers in self.checkpoints.choices)

    def _numbered(self, plan: Plan, numbers: Numbers) -> Plan:
        return self.priced(self.checkpoints.plan(plan, numbers))

    def in_segments(self, plan: Plan) -> Iterator[Plan]:
        """The same plan with its long loops run in segments, if that would keep fewer bytes."""
        if (segmented := in_segments(self.problem, plan)) is not None:
            yield self.priced(segmented)

    def partly(self, plan: Plan, share: float) -> Plan:
        """A plan in segments that keeps about a share of the steps of each such loop whole; raises as `partly` does."""
        return self.priced(partly(self.problem, plan, share))

    @cached_property
    def menu(self) -> tuple[Candidate, ...]:
        """All candidates, the fastest first."""
        with paused_collection():
            return tuple(self._menu.all())

    def small(self, most_bytes: float, spread: float) -> list[Candidate]:
        """The candidates of the menu that may take at most `most_bytes`, or the least times `spread`; by peak."""
        with paused_collection():
            return self._menu.small(most_bytes, spread)

    @cached_property
    def _menu(self) -> Menu:
        with paused_collection():
            plans = sorted(self.plans(), key=lambda plan: (self.weighed_seconds(plan), plan.bytes_saved))

        def replayed(plan: Plan) -> Candidate:
            if plan.key not in self._known:
                self.told(min(self.num_replayed + 1, len(plans)), len(plans))
            return self.known(plan)

        return Menu(plans, replayed, self._with_kept_steps)

    def _with_kept_steps(self, plan: Plan) -> Iterator[Plan]:
        """The plan in segments with shares of the steps kept whole.

        These plans may better all plans between the plan in segments and the plans without. Then no search between
        those would find them.
        """
        if len(self.graph.ops) <= _MOST_OPS_PARTLY:
            yield from (self.partly(plan, share) for share in _KEPT_SHARES)

    def known(self, plan: Plan) -> Candidate:
        """The candidate of a plan that has its seconds, replayed once."""
        if (key := plan.key) not in self._known:
            self._known[key] = self.candidate(plan)
        return self._known[key]

    @property
    def looks(self) -> int:
        """How many plans are tried that are not expected to fit but might."""
        return next((looks for most, looks in _LOOKS if len(self.graph.ops) <= most), 0)

    @cached_property
    def ranked(self) -> list[Candidate]:
        """The candidates of the menu that no other betters in both time and peak, the fastest and largest first."""
        return ranked(self.menu)

    def smallest(self, most_seconds: float) -> Candidate | None:
        """The smallest candidate that takes at most so long."""
        return self._menu.smallest(lambda plan: self.weighed_seconds(plan) <= most_seconds)

    def fastest(
        self, most_bytes: float, expected: Callable[[Candidate], float] = lambda c: c.peak_bytes
    ) -> Candidate | None:
        """The fastest known plan that is `expected` to take at most `most_bytes`; None where there is none.

        A plan of a smaller replayed peak is mostly expected to take less. So a plan is found by the peaks first. Then a
        few of the faster plans are tried. By these peaks, more bytes never give a slower plan.
        """
        with paused_collection():
            row = self._menu.row(most_bytes, expected)
        k = first_within(row, most_bytes, expected)
        faster = range(max(0, k - self.looks), k)
        k = next((i for i in faster if expected(row[i]) <= most_bytes), k)
        if k == len(row):
            return None
        for _ in range(_MOST_HALVINGS):
            if k == 0 or row[k].peak_bytes >= _DENSE * row[k - 1].peak_bytes:
                break
            found = self.between(row[k - 1], row[k])
            if not found:
                break
            row = ranked([row[k - 1], *found, row[k]])
            k = first_within(row[:-1], most_bytes, expected)
        return row[k]

    def between(self, large: Candidate, small: Candidate) -> list[Candidate]:
        """Candidates strictly between two others in peak and in time; `large` takes more bytes and less time.

        So the plan found for a budget is never slower than the plan found for a smaller one.
        """
        pair = id(large), id(small)
        if pair not in self._between:
            with paused_collection():
                found = map(self.known, self._middle(large.plan, small.plan))
                self._between[pair] = [c for c in found if is_between(large, c, small)]
        return self._between[pair]

    def _middle(self, large: Plan, small: Plan) -> Iterator[Plan]:
        """Plans that may lie between two others."""
        numbers, ends = self.checkpoints.between(large, small), (large, small)
        whole = [self.checkpoints.plan(plan, ()) for plan in ends]  # without segments
        choice = self.front.best(sum(plan.bytes_saved + plan.bytes_spared for plan in whole) // 2)
        plans = [] if choice is None else [self.plan(choice, FRONT)]
        plans += mixed(self.problem, large, small)
        plans, moved = ([self._numbered(plan, numbers) for plan in row] for row in (plans, ends))
        yield from plans if large.checkpoints == small.checkpoints else (*moved, *plans)
        for plan in plans:
            yield from self.offloading(plan)
        if small.segments:
            share = (kept_share(self.graph, small) + kept_share(self.graph, large)) / 2
            forms = [form for plan in plans for form in self.in_segments(plan)]
            yield from forms
            if share:
                wholes = () if large.segments else self.in_segments(large)
                yield from (self.partly(form, share) for form in (small, *forms, *wholes))
