"""Gather a report from a cut, its planner and its front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax

from jointcut.aot.budget.pareto import Pareto, ParetoPoint
from jointcut.aot.limits import Budget
from jointcut.aot.report import sections
from jointcut.aot.report.held import held, one_after_the_other
from jointcut.aot.report.lists import Lists
from jointcut.aot.report.report import JSON, Account, Report, totals
from jointcut.aot.report.rivals import rivals
from jointcut.aot.report.tried import Met, Tried, try_budgets
from jointcut.aot.run.compile import ProgramMemory
from jointcut.aot.stages.compiled import Compiled
from jointcut.partition.drawing.displays import table
from jointcut.partition.drawing.picture import graph_view, timeline
from jointcut.partition.figures import human_bytes
from jointcut.partition.lower.lifetimes import Lifetime, Lifetimes, lifetimes
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program.outline import outline
from jointcut.partition.program.places import place_of
from jointcut.partition.search.budget import Candidate, Planner
from jointcut.partition.search.mincut import save_all

if TYPE_CHECKING:
    import jointcut.aot.stages.cut


@dataclass(frozen=True)
class Measured:
    """What XLA says of a step and of plain JAX's: its figures, and what both hold at each instruction if it tells."""

    account: Account
    lives: tuple[Lifetimes, Lifetimes] | None

    @classmethod
    def of(cls, run: Compiled | None, plain: jax.stages.Compiled) -> Measured:
        """Read the compiled step, None for plain JAX's own, and plain JAX's."""
        uncut, plains = ProgramMemory.of(plain), held(plain)
        if run is None:
            mine, figures = plains, (uncut.temp_bytes, uncut.peak_bytes)
        else:
            mine, figures = _held(run), (run.activation_bytes, run.peak_bytes)
        lives = None if mine is None or plains is None else (mine, plains)
        return cls(Account(*figures, uncut.temp_bytes, uncut.peak_bytes), lives)


def _held(run: Compiled) -> Lifetimes | None:
    found = [held(program) for program in run.programs]
    known = [life for life in found if life is not None]
    if len(known) < len(found):
        return None
    return known[0] if len(known) == 1 else one_after_the_other(*known, residuals=_residuals(run))


def _residuals(run: Compiled) -> list[Lifetime]:
    """What the forward hands to the backward, by what made it."""
    graph = run.cut.split.graph
    makers = [(s, graph.ops[maker]) for s in run.cut.plan.saved if (maker := graph.values[s.value].maker) is not None]
    return [Lifetime(s.bytes, s.dtype, s.op, place_of(op.payload), 0, 0) for s, op in makers]


def gather(
    cut: jointcut.aot.stages.cut.Cut,
    planner: Planner,
    front: Pareto,
    point: Callable[[Candidate], ParetoPoint],
    partition: Callable[[Budget], jointcut.aot.stages.cut.Cut],
    measured: Measured | None = None,
) -> Report:
    """What a cut's plan keeps, runs again, and costs.

    `front` has the cut's plan as its chosen one, `point` gives the place of a plan on it, `partition` the cut within a
    budget. Where nothing was `measured`, no budget is tried.
    """
    name, plan, fixed = cut.traced.name, cut.plan, cut.traced.program.fixed_bytes
    here = front.chosen
    assert here is not None, "the front of a cut has its plan chosen"
    uncut = planner.priced(save_all(planner.graph))
    there, rows = point(planner.candidate(uncut)), Lists(planner, outline(planner.graph, name))
    account, lives = (None, None) if measured is None else (measured.account, measured.lives)
    scale = _Scale.of(account, here, fixed, planner.model.saving_seconds)
    mine, plains = lives or (_replayed(planner, plan), _replayed(planner, uncut))
    again, tried = rows.again(plan), _tried(account, fixed, front, scale, partition)
    less = rows.less(plan, front, here) if tried is None else rows.tried(plan, tried.met, here)
    flops, default = rows.step_flops(), planner.default() if plan.strategy == uncut.strategy else None
    told = Report(
        name, plan, totals(mine, plan, here, fixed, again, flops), totals(plains, uncut, there, fixed, (), flops),
        rows.saved(plan), again, less, scale.front(front, there, account), account, jax.default_backend(),
        mine, plains, (), None if default is None else default.bytes_saved, tried,
    )  # fmt: skip
    marks = [(rival, scale.point(point(planner.candidate(found)))) for rival, found in rivals(planner)]
    return replace(told, sections=_sections(told, planner, _budgets(told, marks), lives is None))


@dataclass(frozen=True)
class _Scale:
    """How the model's peaks become those of XLA, by the one plan that was compiled: temporaries by a factor.

    What XLA computes again of its own accord is not written: a plan writes its temporaries at most, so it takes less
    time than one that saves more. `saving_seconds` prices what is saved.
    """

    predicted_fixed: int
    fixed: int
    factor: float
    saving_seconds: Callable[[int], float]

    @classmethod
    def of(cls, account: Account | None, here: ParetoPoint, fixed: int, saving: Callable[[int], float]) -> _Scale:
        """By XLA's account of the plan `here`; without one everything stays as it is."""
        if account is None:
            return cls(0, 0, 1.0, saving)
        predicted, temp = here.peak_bytes - fixed, account.temp_bytes
        return cls(fixed, account.peak_bytes - temp, temp / predicted if predicted else 1.0, saving)

    def point(self, point: ParetoPoint) -> ParetoPoint:
        """A plan at the peak that is expected of it."""
        if not self.fixed:  # nothing was compiled
            return point
        return self._moved(point, self.fixed + round(self.factor * (point.peak_bytes - self.predicted_fixed)))

    def front(self, front: Pareto, plain: ParetoPoint, account: Account | None) -> Pareto:
        """A front with plain JAX beside it, whose own peak is known where XLA was asked."""
        chosen = front.chosen and self.point(front.chosen)
        plain = plain if account is None else self._moved(plain, account.plain_peak_bytes)
        return replace(front, points=tuple(map(self.point, front.points)), chosen=chosen, plain=plain)

    def _moved(self, point: ParetoPoint, peak_bytes: int) -> ParetoPoint:
        """A plan at a peak of XLA's account."""
        unwritten = max(0, point.plan.bytes_saved - (peak_bytes - self.fixed))
        seconds = max(0.0, point.seconds - (self.saving_seconds(unwritten) if unwritten else 0.0))
        return replace(point, peak_bytes=peak_bytes, seconds=seconds, plan=replace(point.plan, peak_bytes=peak_bytes))


def _tried(
    account: Account | None,
    fixed: int,
    front: Pareto,
    scale: _Scale,
    partition: Callable[[Budget], jointcut.aot.stages.cut.Cut],
) -> Tried | None:
    """The smaller budgets that hold, where something was compiled to begin with."""
    if account is None:
        return None
    predicted = {(p.plan.values, p.plan.segments): p.peak_bytes - fixed for p in front}
    least = min(predicted.values(), default=0)

    def expected(met: Met | None) -> float:
        known = 0 if met is None else predicted.get((met.plan.values, met.plan.segments), 0)
        return least * (scale.factor if met is None or not known else (met.peak_bytes - scale.fixed) / known)

    return try_budgets(account.peak_bytes, scale.fixed, expected, partition)


def _explained(told: Report) -> Plan:
    """The plan with the reasons that the report gives."""
    reasons = {row.value: row.reason for row in told.saved}
    return replace(told.plan, saved=tuple(replace(s, reason=reasons[s.value]) for s in told.plan.saved))


def _budgets(told: Report, marks: list[tuple[str, ParetoPoint]]) -> JSON:
    """The front with the plan's own reasons, the policies as marks, and plain JAX."""
    section, plain = told.front.section(marks), None if told.is_plain else told.front.plain
    points = [
        {**p, "saved": table(_explained(told), shown=8)} if i == section["chosen"] else p
        for i, p in enumerate(section["points"])
    ]
    place = None if plain is None else told.front.place(plain)
    lead = section["lead"] + _POLICIES + ("" if told.account is None else _SCALED)
    if not told.less:
        lead = " ".join([lead, *map(sections.sentence, sections.promises(told.less, told.tried))])
    return {**section, "title": "Other budgets", "lead": lead, "points": points, "plain": place}


def _sections(told: Report, planner: Planner, budgets: JSON, is_replay: bool) -> tuple[JSON, ...]:
    """What the page shows, in order."""
    how = _REPLAYED if is_replay else _ASSIGNED
    heading = {"id": "graph", "title": "The graph and the cut", "lead": _GRAPH}
    graph = graph_view(planner.graph, _explained(told), planner.problem.seconds, root=told.name, **heading)
    memory = timeline(
        told.life,
        None if told.is_plain else ("plain JAX", told.plain_life),
        id="memory",
        title="Memory over a step",
        lead=f"Every array that is alive while the step runs, by what made it. {_sum(told)}",
        lines=[{"name": "the compiled step", "bytes": told.account.temp_bytes}] if told.account and is_replay else [],
        note=how,
    )
    return (
        memory,
        graph,
        sections.saved(told.saved, {v: i for i, v in enumerate(graph["values"]["id"])}, told.bounds),
        *([sections.again(told.again)] if told.again else []),
        *([sections.less(told.less, told.peak_bytes, told.tried)] if told.less else []),
        budgets,
        sections.words(),
    )


def _sum(told: Report) -> str:
    """How the picture's highest point goes together with the peak."""
    peak, fixed = human_bytes(told.peak_bytes), human_bytes(told.totals.fixed_bytes)
    kinds = "arguments, results and gradients, which are not drawn"
    if told.account is None:
        return f"Of the predicted peak of {peak}, {fixed} are {kinds}."
    return f"The peak of {peak} is the highest point and {fixed} of {kinds}."


_POLICIES = (
    " The other marks are policies of jax.checkpoint around the whole loss, in jointcut's order of the backward."
)
_SCALED = " Peaks are scaled by one factor, so that this plan's is that of the compiled step."
_GRAPH = "Forward at the left, backward at the right, and what is saved crossing the cut between them."
_ASSIGNED = "As XLA scheduled the compiled step and assigned its memory; a loop's body is shown once."
_REPLAYED = (
    "A replay of the two programs, before anything is compiled: arrays that XLA computes within their readers have no "
    "bytes, a loop's body is shown once. XLA needs about a quarter more, and plain JAX often more than that."
)


def _replayed(planner: Planner, plan: Plan) -> Lifetimes:
    return lifetimes(planner.rows(plan), planner.graph)
