"""List the plans worth trying for a budget, with the peak and the time of each.

A `Planner` knows one program and its prices. Its *menu* is the list of plans worth trying: the default cut, the
vertices of the front of (bytes saved, seconds recomputed) and cuts between them, divisions of the forward into pieces
that run again one at a time (`chain`: for small budgets, where recomputed values take more memory than saved ones), and
long loops in segments. Each plan has a time, for recomputing and for writing and reading what it saves, and a predicted
peak from a replay. Where a budget falls between two plans that lie far apart, `fastest` looks for others between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from jointcut.partition.errors import PlanError, message
from jointcut.partition.lower.replay import Replay, Replayer, Rows, spared
from jointcut.partition.lower.reruns import segmentable
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.lower.steps import Schedule
from jointcut.partition.plans.asjax import residuals_of_jax
from jointcut.partition.plans.backend import scattered_bytes
from jointcut.partition.plans.plan import Plan, PlanKey
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import Roofline, op_seconds
from jointcut.partition.program.graph import TOP
from jointcut.partition.program.jaxprs import paused_collection
from jointcut.partition.program.primitives import FUSED
from jointcut.partition.search.between import in_segments, kept_share, mixed, partly
from jointcut.partition.search.candidates import FRONT, Candidate, Menu, first_within, is_between, ranked
from jointcut.partition.search.chain import divisions
from jointcut.partition.search.copies import Copies, bound_seconds, copies, in_parts, seconds_of, sending
from jointcut.partition.search.front import Choice, Front, front, sampled
from jointcut.partition.search.mincut import min_cut, save_all
from jointcut.partition.search.network import Network, network

#: How many plans of the front, and how many divisions, are replayed, by the most ops that the program may have for it.
_SAMPLES = ((1_000, 24, 24), (3_000, 16, 24), (20_000, 4, 4))
_FEWEST_SAMPLES = 2, 3

#: How many plans that are faster than the one found are looked at, by the most ops that the program may have for it.
_LOOKS = (3_000, 4), (8_000, 1)

#: How often the gap around a budget is divided at most, and which share of the larger neighbour's peak is near enough.
_MOST_HALVINGS = 6
_DENSE = 0.93

#: Which shares of the steps are kept whole where plans of the menu run loops partly in segments, and the most ops that
#: the program may have for it, and for loops that offload in part.
_KEPT_SHARES = 0.75, 0.5, 0.25
_MOST_OPS_PARTLY = 3_000

#: The most ops that a program may have for the compiler's fusions to be followed. A loop over elements may take in the
#: whole chain of sums of a deep network, so that this takes the square of the depth.
_MOST_FOLLOWED = 20_000


class Planner:
    """The plans of one problem, whose ops have prices in seconds.

    `model` is the problem's; a `Roofline` is taken `within` the most bytes that the program may save. Where no budget
    forbids it, a plan saves a byte if computing it again would take longer than `model.saving_seconds(1)`, the time to
    write and read it. `told` is called before each replay with its number and with how many plans there are. With the
    rate of the link to the host, plans may offload more than the problem demands.
    """

    def __init__(
        self,
        problem: Problem,
        told: Callable[[int, int], None] = lambda number, most: None,
        host_bytes_per_s: float | None = None,
    ) -> None:
        """Search for nothing yet. Raises `PlanError` where the ops of the problem have no prices in seconds."""
        if problem.model is None:
            cure = "Give it a cost model: problem.timed(model)."
            raise PlanError(message("The problem", "has no prices in seconds.", cure))
        self.problem, self.graph, self.told, self.host_bytes_per_s = problem, problem.graph, told, host_bytes_per_s
        model = problem.model
        self.most_bytes = sum(problem.prices[v] for v in residuals_of_jax(problem))
        self.model = model.within(self.most_bytes) if isinstance(model, Roofline) else model
        self._replayer = Replayer(self.graph)
        self._predicted: dict[PlanKey, float] = {}
        self._known: dict[PlanKey, Candidate] = {}
        self._between: dict[tuple[int, int], list[Candidate]] = {}

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
    def _bounds(self) -> Front:
        """The front in true seconds, which bounds every plan; that of the search unless something is preferred."""
        return self.front if not self.problem.preferences else front(network(self.problem.without_preferences))

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
        return self.priced(self._of(saved, strategy, {v: self.problem.verdicts[v].why_under_budget for v in saved}))

    def _of(self, saved: Iterable[int], strategy: str, reasons: Mapping[int, str]) -> Plan:
        return Plan.of(self.problem, saved, strategy=strategy, reasons=reasons)

    def priced(self, plan: Plan) -> Plan:
        """The plan with the seconds of the ops that it runs again, and a lower bound on these for its bytes.

        Where the rate of the link to the host is known, the seconds for which it waits for copies are among them, and
        the bound is one on plans that offload, too.
        """
        seconds, on_device = self._again(plan, self.problem.seconds), plan.bytes_saved + plan.bytes_spared
        rate = self.host_bytes_per_s
        if not seconds and not plan.offloaded:
            return replace(plan, seconds=seconds, bound_seconds=seconds)
        bounds = self._bounds
        if rate is None:
            bound = bounds.bound_seconds(on_device)
        else:
            seconds += self.waiting_seconds(plan)
            bound = bound_seconds(bounds.bound_seconds, on_device, self.most_bytes, self.halves_seconds, rate)
        return replace(plan, seconds=seconds, bound_seconds=min(seconds, bound))

    @cached_property
    def halves_seconds(self) -> tuple[float, float]:
        """The time of forward and backward by the model, without what runs again; what may run on either is in both."""
        sides, ops = self.problem.sides, self.graph.ops
        times = [(op.id, seconds_of(self.problem, self.model, op.id)) for op in ops if op.outputs]
        forward = sum(seconds for i, seconds in times if i not in sides.backward)
        return forward, sum(seconds for i, seconds in times if i not in sides.forward)

    def copies(self, plan: Plan) -> Copies:
        """The copies of a plan between the memories, in its schedule, by the rate of the link."""
        assert self.host_bytes_per_s is not None, "the rate of the link is known"
        return copies(self.problem, schedule(self.problem, plan), self.model, self.host_bytes_per_s)

    def waiting_seconds(self, plan: Plan) -> float:
        """The time for which a plan waits for copies between the memories."""
        return self.copies(plan).waiting_seconds if plan.offloaded else 0.0

    def _again(self, plan: Plan, seconds: Sequence[float]) -> float:
        """The sum, over all ops that run again, of the seconds given for each; loops in segments without kept steps."""
        loops = segmentable(self.problem, plan) if plan.segments else {}
        in_segments = sum(
            (1.0 - kept / loops[loop].length) * sum(seconds[i] for i in loops[loop].rerun_ops)
            for loop, _, kept in plan.loops_in_segments
        )
        return float(sum(seconds[i] for i in plan.reruns(self.graph)) + in_segments)

    def step_seconds(self, plan: Plan) -> float:
        """The time to run ops again, and to write and read the saved values."""
        return (plan.seconds or 0.0) + self.model.saving_seconds(plan.bytes_saved + plan.bytes_offloaded)

    def weighed_seconds(self, plan: Plan) -> float:
        """`step_seconds` as plans are compared by, with what preferences weigh."""
        if not self.problem.preferences:
            return self.step_seconds(plan)
        weighed, seconds = self.problem.weighed, self.problem.seconds
        late = sum(weighed[i] - seconds[i] for i in plan.deferred)
        return self.step_seconds(plan) + self._again(plan, weighed) - self._again(plan, seconds) + late

    def candidate(self, plan: Plan) -> Candidate:
        """Return a plan with its figures."""
        with paused_collection():
            steps = schedule(self.problem, plan)
            plan = spared(self.graph, plan, steps)
            follow = partial(self._followed, plan.key, steps) if self.is_followed else None
            seconds, peak = self.weighed_seconds(plan), self._replayer.rows(steps).peak_bytes
            preferred, calibration = seconds - self.step_seconds(plan), self.problem.backend.calibration
            return Candidate(plan, peak, seconds, follow, preferred, calibration)

    def replay(self, plan: Plan) -> Replay:
        """The peak of a plan, by the model, and what is alive there."""
        return self.rows(plan).replay()

    def rows(self, plan: Plan) -> Rows:
        """The rows of a plan's schedule, as the backend runs them: the buffers that each step makes and reads.

        Where the program is too large to follow the backend, they are those of the schedule itself.
        """
        return self._follower.rows(schedule(self.problem, plan))

    @property
    def is_followed(self) -> bool:
        """Whether peaks are predicted from what the backend fuses, and where it puts each buffer."""
        return self.problem.backend.is_followed and len(self.graph.ops) <= _MOST_FOLLOWED

    @cached_property
    def scattered_bytes(self) -> int:
        """The sum over all scatters of the bytes of the largest array that each reads."""
        return scattered_bytes(self.graph)

    @cached_property
    def _follower(self) -> Replayer:
        backend = self.problem.backend
        return Replayer(self.graph, backend if self.is_followed else replace(backend, is_followed=False))

    def _followed(self, key: PlanKey, steps: Schedule) -> float:
        if key not in self._predicted:
            with paused_collection():
                self._predicted[key] = float(self._follower.rows(steps).peak_bytes)
        return self._predicted[key]

    # ------------------------------------------------------------------------------------------------- the menu

    def plans(self) -> Iterator[Plan]:
        """Plans worth trying: the default one, the front's, those in pieces, and each with its loops in segments."""
        seen: set[PlanKey] = set()
        for plan in self._plans():
            for form in (plan, *self.in_segments(plan), *self.offloading(plan)):
                if form.key not in seen:
                    seen.add(form.key)
                    yield form

    def _plans(self) -> Iterator[Plan]:
        if (default := self.default()) is not None:
            yield default
        if (everything := self.everything()) is not None:
            yield everything
            if default is not None and len(self.graph.loops) > 1:
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

    def everything(self) -> Plan | None:
        """The plan that saves what plain JAX saves; None where a demand may forbid it."""
        is_free = not any(c.demand.is_must for c in self.problem.constraints)
        return self.priced(save_all(self.problem)) if is_free else None

    def loops_kept(self, outside: Plan, inside: Plan) -> Plan:
        """A plan that saves what `outside` saves outside loops and `inside` saves in loops, to be run in segments."""
        values, escaping = self.graph.values, self.problem.sides.escaping
        saved = [v for v in outside.values if values[v].loop == TOP or v in escaping]
        saved += [v for v in inside.values if values[v].loop != TOP]
        reasons = {s.value: s.reason for s in (*outside.saved, *inside.saved)}
        return self.priced(self._of(saved, f"{outside.strategy}, loops kept", reasons))

    def divided(self, most: int = _SAMPLES[0][2]) -> Iterator[Plan]:
        """Plans that divide the forward into pieces which run again one at a time, at most so many."""
        for division in divisions(self.problem, self.front, self.model.saving_seconds(1), most):
            reasons, dropped = division.reasons, division.dropped
            yield self.priced(
                Plan.of(self.problem, division.saved, strategy=str(division), reasons=reasons, dropped=dropped)
            )

    def offloading(self, plan: Plan) -> Iterator[Plan]:
        """The same plan with more of its values in host memory, if the rate of the link is known."""
        if self.host_bytes_per_s is not None:
            hidden = self.host_bytes_per_s * min(self.halves_seconds)
            for more in (sending, in_parts) if len(self.graph.ops) <= _MOST_OPS_PARTLY else (sending,):
                yield from map(self.priced, more(self.problem, plan, self.waiting_seconds, hidden))

    def in_segments(self, plan: Plan) -> Iterator[Plan]:
        """The same plan with its long loops run in segments, if that would keep fewer bytes."""
        if (segmented := in_segments(self.problem, plan)) is not None:
            yield self.priced(segmented)

    def partly(self, plan: Plan, share: float) -> Plan:
        """A plan in segments, with about a share of the steps of each such loop kept whole; raises as `partly` does."""
        return self.priced(partly(self.problem, plan, share))

    @cached_property
    def menu(self) -> tuple[Candidate, ...]:
        """All candidates, the fastest first."""
        with paused_collection():
            return tuple(self._menu.all())

    def small(self, most_bytes: float, spread: float) -> list[Candidate]:
        """The candidates of the menu that may take at most so many bytes, or the least times `spread`; by peak."""
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

        They may better all plans between that one and those without segments, so that none would be found from these.
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
        """How many plans are looked at that are not expected to fit but might."""
        return next((looks for most, looks in _LOOKS if len(self.graph.ops) <= most), 0)

    @cached_property
    def ranked(self) -> list[Candidate]:
        """The candidates of the menu that no other betters in both time and peak, the fastest and largest first."""
        return ranked(self.menu)

    def fastest(
        self, most_bytes: float, expected: Callable[[Candidate], float] = lambda c: c.peak_bytes
    ) -> Candidate | None:
        """The fastest known plan that is `expected` to take at most so many bytes; None where there is none.

        Plans of smaller peaks, by the model's own replay, are mostly expected to take less: of those that are faster
        than the fastest one found so, a few are looked at. By these peaks, more bytes never give a slower plan.
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

        So what is found for a budget is never slower than what is found for a smaller one.
        """
        pair = id(large), id(small)
        if pair not in self._between:
            with paused_collection():
                found = map(self.known, self._middle(large.plan, small.plan))
                self._between[pair] = [c for c in found if is_between(large, c, small)]
        return self._between[pair]

    def _middle(self, large: Plan, small: Plan) -> Iterator[Plan]:
        """Plans that may lie between two others."""
        handed = [plan.bytes_saved + plan.bytes_spared for plan in (large, small)]  # without segments
        choice = self.front.best(sum(handed) // 2)
        plans = [] if choice is None else [self.plan(choice, FRONT)]
        plans += map(self.priced, mixed(self.problem, large, small))
        yield from plans
        for plan in plans:
            yield from self.offloading(plan)
        if small.segments:
            share = (kept_share(self.graph, small) + kept_share(self.graph, large)) / 2
            forms = [form for plan in plans for form in self.in_segments(plan)]
            yield from forms
            if share:
                wholes = () if large.segments else self.in_segments(large)
                yield from (self.partly(form, share) for form in (small, *forms, *wholes))
