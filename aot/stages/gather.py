"""Gather a report from a cut, its planner and its front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax

from jointcut.aot.choices.limits import Budget
from jointcut.aot.fitting.pareto import Pareto, ParetoPoint
from jointcut.aot.report import sections
from jointcut.aot.report.derived import derived, derived_section
from jointcut.aot.report.held import held, one_after_the_other
from jointcut.aot.report.lists import AgainRow, Lists
from jointcut.aot.report.report import JSON, Account, Report, Totals
from jointcut.aot.report.rivals import rivals
from jointcut.aot.report.tried import Met, Tried, try_budgets
from jointcut.aot.run.compile import ProgramMemory
from jointcut.aot.stages.compiled import Compiled
from jointcut.partition.drawing.displays import table
from jointcut.partition.drawing.picture import graph_view, timeline
from jointcut.partition.errors import PlanError
from jointcut.partition.figures import human_bytes
from jointcut.partition.lower.lifetimes import Lifetime, Lifetimes, lifetimes
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.outline import outline
from jointcut.partition.program.places import place_of
from jointcut.partition.program.roles import Side
from jointcut.partition.search.best import best
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.candidates import Candidate
from jointcut.partition.search.mincut import save_all

if TYPE_CHECKING:
    import jointcut.aot.stages.cut


@dataclass(frozen=True)
class Measurements:
    """XLA's figures for a step and for plain JAX's, and the arrays alive at each instruction of both, if known."""

    account: Account
    lives: tuple[Lifetimes, Lifetimes] | None

    @classmethod
    def of(cls, run: Compiled | None, plain: jax.stages.Compiled) -> Measurements:
        """Read a compiled step (None if it is plain JAX's own) and plain JAX's step."""
        uncut, plains = ProgramMemory.of(plain), held(plain)
        if run is None:
            mine, figures = plains, (uncut.temp_bytes, uncut.peak_bytes)
        else:
            mine, figures = _held(run), (run.activation_bytes, run.peak_bytes)
        lives = None if mine is None or plains is None else (mine, plains)
        return cls(Account(*figures, uncut.temp_bytes, uncut.peak_bytes), lives)

    @classmethod
    def beside(cls, run: Compiled, plain: ProgramMemory) -> Measurements:
        """A compiled step's beside the account of plain JAX's, which has no room."""
        return cls(Account(run.activation_bytes, run.peak_bytes, plain.temp_bytes, plain.peak_bytes), None)


def _held(run: Compiled) -> Lifetimes | None:
    lives = [life for program in run.programs if (life := held(program)) is not None]
    if len(lives) < len(run.programs):
        return None
    return lives[0] if len(lives) == 1 else one_after_the_other(*lives, residuals=_residuals(run))


def _residuals(run: Compiled) -> list[Lifetime]:
    """The residuals, with the op that made each."""
    graph = run.cut.split.graph
    makers = [(s, graph.ops[maker]) for s in run.cut.plan.saved if (maker := graph.values[s.value].maker) is not None]
    return [Lifetime(s.bytes, s.dtype, s.op, place_of(op.payload), 0, 0) for s, op in makers]


def _default(problem: Problem) -> Plan | None:
    """The default plan; None where none fits the rules of cost and the demands."""
    try:
        return best(problem)
    except PlanError:
        return None


def gather(
    cut: jointcut.aot.stages.cut.Cut,
    planner: Planner,
    front: Pareto,
    point: Callable[[Candidate], ParetoPoint],
    partition: Callable[[Budget], jointcut.aot.stages.cut.Cut],
    measured: Measurements | None = None,
) -> Report:
    """Report what a cut's plan saves, recomputes and costs.

    The chosen plan of `front` is the cut's. `point` converts a plan to a point of the front, `partition` cuts within a
    budget. Without `measured`, no budget is tried.
    """
    name, plan, fixed = cut.traced.name, cut.plan, cut.traced.program.fixed_bytes
    goal = cut.traced.options.goal
    here = front.chosen
    assert here is not None, "the front of a cut has its plan chosen"
    plain = cut.traced.as_jax.planner
    uncut = plain.priced(save_all(plain.graph))
    there, rows = point(plain.candidate(uncut)), Lists(planner, outline(planner.graph, name))
    account, lives = (None, None) if measured is None else (measured.account, measured.lives)
    scale = _Scale.of(account, here, fixed, planner.model.saving_seconds)
    mine, plains = lives or (_replayed(planner, plan), _replayed(plain, uncut))
    again, tried = rows.again(plan), _tried(account, fixed, front, scale, partition)
    less = rows.less(plan, front, here) if tried is None else rows.tried(plan, tried.met, here)
    flops, default = rows.step_flops(), _default(cut.traced.problem) if plan.strategy == uncut.strategy else None
    report = Report(
        name, plan, _totals(mine, plan, here, fixed, again, flops), _totals(plains, uncut, there, fixed, (), flops),
        rows.saved(plan), again, less, scale.front(front, there, account), account,
        jax.default_backend() if goal is None else goal.name,
        mine, plains, (), None if default is None else default.bytes_saved, tried,
        derived(cut.traced.program.changes, cut.traced.options.conventions), goal,
    )  # fmt: skip
    marks = [(rival, scale.point(point(planner.candidate(candidate)))) for rival, candidate in rivals(planner)]
    return replace(report, sections=_sections(report, planner, _budgets(report, marks), lives is None))


def _totals(
    life: Lifetimes, plan: Plan, here: ParetoPoint, fixed_bytes: int, again: tuple[AgainRow, ...], flops: float
) -> Totals:
    """The figures of a plan; `life` lists its buffers, `here` is its point on the front, `flops` are of a step."""
    return Totals(
        plan.bytes_saved,
        len(plan.saved),
        life.peak_bytes(Side.FORWARD),
        life.peak_bytes(Side.BACKWARD),
        here.peak_bytes,
        fixed_bytes,
        sum(row.count for row in again),
        sum(row.flops for row in again),
        sum(row.seconds for row in again),
        flops,
        plan.bytes_offloaded,
    )


@dataclass(frozen=True)
class _Scale:
    """Scales the model's peaks to XLA's, by the one plan that was compiled: temporaries are multiplied by a factor.

    XLA may recompute saved values by itself, and then does not write them. A plan writes at most its temporaries, and
    bytes beyond these are not charged. `saving_seconds` gives the time of saving a number of bytes.
    """

    predicted_fixed: int
    fixed: int
    factor: float
    saving_seconds: Callable[[int], float]

    @classmethod
    def of(cls, account: Account | None, here: ParetoPoint, fixed: int, saving: Callable[[int], float]) -> _Scale:
        """The scale by XLA's account of the plan `here`; without an account, peaks are unchanged."""
        if account is None:
            return cls(0, 0, 1.0, saving)
        predicted, temp = here.peak_bytes - fixed, account.temp_bytes
        return cls(fixed, account.peak_bytes - temp, temp / predicted if predicted else 1.0, saving)

    def point(self, point: ParetoPoint) -> ParetoPoint:
        """A point at its expected peak."""
        if not self.fixed:  # nothing was compiled
            return point
        return self._moved(point, self.fixed + round(self.factor * (point.peak_bytes - self.predicted_fixed)))

    def front(self, front: Pareto, plain: ParetoPoint, account: Account | None) -> Pareto:
        """A front with scaled peaks, and with plain JAX at its own peak if there is an account."""
        chosen = front.chosen and self.point(front.chosen)
        plain = plain if account is None else self._moved(plain, account.plain_peak_bytes)
        return replace(front, points=tuple(map(self.point, front.points)), chosen=chosen, plain=plain)

    def _moved(self, point: ParetoPoint, peak_bytes: int) -> ParetoPoint:
        """A point at another peak, with its seconds adjusted."""
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
    """Try smaller budgets; None if nothing was compiled."""
    if account is None:
        return None
    predicted = {p.plan.key: p.peak_bytes - fixed for p in front}
    least = min(predicted.values(), default=0)

    def expected(met: Met | None) -> float:
        known = 0 if met is None else predicted.get(met.plan.key, 0)
        return least * (scale.factor if met is None or not known else (met.peak_bytes - scale.fixed) / known)

    tried = try_budgets(account.peak_bytes, scale.fixed, expected, partition)
    return replace(tried, fewer=any(loop.is_adjustable for point in front for loop in point.plan.nested))


def _explained(report: Report) -> Plan:
    """The report's plan, with the report's reasons."""
    reasons = {row.value: row.reason for row in report.saved}
    return replace(report.plan, saved=tuple(replace(s, reason=reasons[s.value]) for s in report.plan.saved))


def _budgets(report: Report, marks: list[tuple[str, ParetoPoint]]) -> JSON:
    """The page's section on budgets: the front, `jax.checkpoint` policies as marks, and plain JAX."""
    section, plain = report.front.section(marks), None if report.is_plain else report.front.plain
    points = [
        {**p, "saved": table(_explained(report), shown=8)} if i == section["chosen"] else p
        for i, p in enumerate(section["points"])
    ]
    place = None if plain is None else {**report.front.place(plain), "name": report.plan.baseline}
    lead = section["lead"] + _POLICIES + ("" if report.account is None else _SCALED)
    if not report.less:
        lead = " ".join([lead, *map(sections.sentence, sections.promises(report.less, report.tried))])
    return {**section, "title": "Other budgets", "lead": lead, "points": points, "plain": place}


def _sections(report: Report, planner: Planner, budgets: JSON, is_replay: bool) -> tuple[JSON, ...]:
    """The sections of the page, in order."""
    how = _REPLAYED if is_replay else _ASSIGNED
    heading = {"id": "graph", "title": "The graph and the cut", "lead": _GRAPH}
    graph = graph_view(planner.graph, _explained(report), planner.problem.seconds, root=report.name, **heading)
    memory = timeline(
        report.life,
        None if report.is_plain else (report.plan.baseline, report.plain_life),
        id="memory",
        title="Memory over a step",
        lead=f"Every array that is alive while the step runs, by what made it. {_sum(report)}",
        lines=[{"name": "the compiled step", "bytes": report.account.temp_bytes}]
        if report.account and is_replay
        else [],
        note=how,
    )
    return (
        memory,
        graph,
        sections.saved(report.saved, {v: i for i, v in enumerate(graph["values"]["id"])}, report.bounds),
        *([sections.again(report.again)] if report.again else []),
        *([sections.less(report.less, report.peak_bytes, report.tried)] if report.less else []),
        *([derived_section(report.derived)] if report.derived else []),
        budgets,
        sections.words(),
    )


def _sum(report: Report) -> str:
    """A sentence that relates the picture's highest point to the peak."""
    peak, fixed = human_bytes(report.peak_bytes), human_bytes(report.totals.fixed_bytes)
    kinds = "arguments, results and gradients, which are not drawn"
    if report.account is None:
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
