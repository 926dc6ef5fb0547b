"""Gather a report from a plan, its planner and its front."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax

from jointcut.aot.options.limits import Budget, limit
from jointcut.aot.planning.budgets.fit import default_plan
from jointcut.aot.planning.budgets.pareto import Pareto, ParetoPoint
from jointcut.aot.planning.front import point as on_front
from jointcut.aot.planning.request import Request
from jointcut.aot.planning.weighing import Answer
from jointcut.aot.progress.progress import Stage
from jointcut.aot.report import sections
from jointcut.aot.report.compare.collectives import Collectives
from jointcut.aot.report.compare.exchanges import exchanges
from jointcut.aot.report.derived import derived, derived_section
from jointcut.aot.report.held import held, one_after_the_other
from jointcut.aot.report.lists import AgainRow, Lists
from jointcut.aot.report.report import JSON, Account, Report, Totals
from jointcut.aot.report.rivals import rivals
from jointcut.aot.report.tried import Met, Tried, try_budgets
from jointcut.aot.run.compile import ProgramMemory, compiled
from jointcut.aot.run.runnable import Runnable
from jointcut.partition.drawing.displays import table
from jointcut.partition.drawing.picture import graph_view, timeline
from jointcut.partition.errors import RoomError
from jointcut.partition.figures import human_bytes
from jointcut.partition.lower.memory.lifetimes import Lifetime, Lifetimes, lifetimes
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program.outline import outline
from jointcut.partition.program.places import place_of
from jointcut.partition.program.roles import Side
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.mincut import save_all
from jointcut.partition.split import Split


@dataclass(frozen=True)
class Measurements:
    """XLA's figures for a step and for plain JAX's, and if known the arrays alive at each instruction of both.

    `collectives` is what the devices of a mesh exchange; None on one device.
    """

    account: Account
    lives: tuple[Lifetimes, Lifetimes] | None
    collectives: Collectives | None = None

    @classmethod
    def of(cls, made: Runnable | None, plain: jax.stages.Compiled) -> Measurements:
        """Read the step of a cut (None if it is plain JAX's own) and plain JAX's step."""
        uncut, plains = ProgramMemory.of(plain), held(plain)
        if made is None:
            mine, figures, programs = plains, (uncut.temp_bytes, uncut.peak_bytes), [plain]
        else:
            mine, figures, programs = lives_of(made), _figures(made), made.programs(made.count())
        lives = None if mine is None or plains is None else (mine, plains)
        told = Collectives(exchanges(programs), exchanges([plain]))
        return cls(Account(*figures, uncut.temp_bytes, uncut.peak_bytes), lives, told or None)


def measured(request: Request, made: Runnable) -> Measurements:
    """Compile a step for its figures, and return them beside the figures of plain JAX's step."""
    trace, is_plain = made.trace, made.split.plan.strategy == "save_all"
    if not is_plain:
        made.compile(made.count())
    with Stage("compile", f"{trace.name}, plain JAX"):
        try:
            return Measurements.of(None if is_plain else made, compiled(trace.plain_lowered, request.options.goal))
        except RoomError as error:
            if is_plain:
                raise
            plain = ProgramMemory.without_room(trace.plain_lowered, error.temp_bytes)
            return Measurements(Account(*_figures(made), plain.temp_bytes, plain.peak_bytes), None)


def _figures(made: Runnable) -> tuple[int, int]:
    return made.activation_bytes(made.count()), made.peak_bytes(made.count())


def lives_of(made: Runnable) -> Lifetimes | None:
    """Return the arrays alive at each instruction of a compiled step; None where its device does not say."""
    programs = made.programs(made.count())
    lives = [life for program in programs if (life := held(program)) is not None]
    if len(lives) < len(programs):
        return None
    return lives[0] if len(lives) == 1 else one_after_the_other(*lives, residuals=_residuals(made.split))


def _residuals(split: Split) -> list[Lifetime]:
    """Return the residuals, with the op that made each."""
    graph = split.graph
    makers = [(s, graph.ops[maker]) for s in split.plan.saved if (maker := graph.values[s.value].maker) is not None]
    return [Lifetime(s.bytes, s.dtype, s.op, place_of(op.payload), 0, 0) for s, op in makers]


def gather(request: Request, plan: Plan, front: Pareto, measured: Measurements | None = None) -> Report:
    """Report a plan's saved values, recomputed ops and cost; the plan is the chosen one of `front`.

    Without `measured`, no budget is tried.
    """
    name, program, planner, point = request.name, request.program, request.planner, functools.partial(on_front, request)
    fixed, goal = program.fixed_bytes, request.options.goal
    here = front.chosen
    assert here is not None, "the front of a cut has its plan chosen"
    plain = request.as_jax.planner
    uncut = plain.priced(save_all(plain.graph))
    there, rows = point(plain.candidate(uncut)), Lists(planner, outline(planner.graph, name))
    account, lives = (None, None) if measured is None else (measured.account, measured.lives)
    scale = _PeakScale.of(account, here, fixed, planner.model.saving_seconds)
    mine, plains = lives or (_replayed(planner, plan), _replayed(plain, uncut))
    again, tried = rows.again(plan), _tried(account, fixed, front, scale, _within(request))
    less = rows.less(plan, front, here) if tried is None else rows.tried(plan, tried.met, here)
    default = default_plan(request.opened.problem) if plan.strategy == uncut.strategy else None
    flops = rows.step_flops()
    report = Report(
        name, plan, _totals(mine, plan, here, fixed, again, flops), _totals(plains, uncut, there, fixed, (), flops),
        rows.saved(plan), again, less, scale.front(front, there, account), account,
        jax.default_backend() if goal is None else goal.name,
        mine, plains, (), None if default is None else default.bytes_saved, tried,
        derived(program.changes, request.options.conventions), goal, measured and measured.collectives,
    )  # fmt: skip
    marks = [(rival, scale.point(point(planner.candidate(candidate)))) for rival, candidate in rivals(planner)]
    return replace(report, sections=_sections(report, planner, _budgets(report, marks), lives is None))


def _within(request: Request) -> Callable[[Budget], Answer]:
    """Return a function that cuts within a budget; plans that are only to be weighed are not compiled."""
    return lambda budget: (request.unmoved or request).within(limit(budget), to_run=False)


def _totals(
    life: Lifetimes, plan: Plan, here: ParetoPoint, fixed_bytes: int, again: tuple[AgainRow, ...], flops: float
) -> Totals:
    """Return a plan's figures; `life` lists its buffers, `here` is its point on the front, `flops` are of a step."""
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
class _PeakScale:
    """Scales the model's peaks to XLA's, by the one plan that was compiled: temporaries are multiplied by a factor.

    XLA may recompute saved values by itself, and then does not write them. A plan writes at most its temporaries, and
    bytes beyond these are not charged. `saving_seconds` gives the time of saving a number of bytes.
    """

    predicted_fixed: int
    fixed: int
    factor: float
    saving_seconds: Callable[[int], float]

    @classmethod
    def of(cls, account: Account | None, here: ParetoPoint, fixed: int, saving: Callable[[int], float]) -> _PeakScale:
        """Return the scale by XLA's account of the plan `here`; without an account, peaks are unchanged."""
        if account is None:
            return cls(0, 0, 1.0, saving)
        predicted, temp = here.peak_bytes - fixed, account.temp_bytes
        return cls(fixed, account.peak_bytes - temp, temp / predicted if predicted else 1.0, saving)

    def point(self, point: ParetoPoint) -> ParetoPoint:
        """Return a point at its expected peak."""
        if not self.fixed:  # nothing was compiled
            return point
        return self._moved(point, self.fixed + round(self.factor * (point.peak_bytes - self.predicted_fixed)))

    def front(self, front: Pareto, plain: ParetoPoint, account: Account | None) -> Pareto:
        """Return a front with scaled peaks, and with plain JAX at its own peak if there is an account."""
        chosen = front.chosen and self.point(front.chosen)
        plain = plain if account is None else self._moved(plain, account.plain_peak_bytes)
        return replace(front, points=tuple(map(self.point, front.points)), chosen=chosen, plain=plain)

    def _moved(self, point: ParetoPoint, peak_bytes: int) -> ParetoPoint:
        """Return a point at another peak, with its seconds adjusted."""
        unwritten = max(0, point.plan.bytes_saved - (peak_bytes - self.fixed))
        seconds = max(0.0, point.seconds - (self.saving_seconds(unwritten) if unwritten else 0.0))
        return replace(point, peak_bytes=peak_bytes, seconds=seconds, plan=replace(point.plan, peak_bytes=peak_bytes))


def _tried(
    account: Account | None,
    fixed: int,
    front: Pareto,
    scale: _PeakScale,
    partition: Callable[[Budget], Answer],
) -> Tried | None:
    """Try smaller budgets; None if nothing was compiled."""
    if account is None:
        return None
    predicted = {p.plan.key: p.peak_bytes - fixed for p in front}
    least = min(predicted.values(), default=0)

    def expected(met: Met | None) -> float:
        known = 0 if met is None else predicted.get(met.plan.key, 0)
        return least * (scale.factor if met is None or not known else (met.peak_bytes - scale.fixed) / known)

    return try_budgets(account.peak_bytes, scale.fixed, expected, partition)


def _explained(report: Report) -> Plan:
    """Return the report's plan, with the report's reasons."""
    reasons = {row.value: row.reason for row in report.saved}
    return replace(report.plan, saved=tuple(replace(s, reason=reasons[s.value]) for s in report.plan.saved))


def _budgets(report: Report, marks: list[tuple[str, ParetoPoint]]) -> JSON:
    """Return the page's section on budgets: the front, `jax.checkpoint` policies as marks, and plain JAX."""
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
    """Return the sections of the page, in order."""
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
        sections.saved(
            report.saved, {v: i for i, v in enumerate(graph["values"]["id"])}, report.bounds, report.front.per
        ),
        *([sections.again(report.again)] if report.again else []),
        *([sections.less(report.less, report.peak_bytes, report.tried, report.front.per)] if report.less else []),
        *([report.collectives.section] if report.collectives else []),
        *([derived_section(report.derived)] if report.derived else []),
        budgets,
        sections.words(),
    )


def _sum(report: Report) -> str:
    """Return a sentence that relates the picture's highest point to the peak."""
    peak, fixed = (
        f"{human_bytes(count)}{report.front.per}" for count in (report.peak_bytes, report.totals.fixed_bytes)
    )
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
