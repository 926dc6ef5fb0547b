"""Gather a report from a cut, its planner and its front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax

from jointcut.aot.compile import ProgramMemory
from jointcut.aot.compiled import Compiled
from jointcut.aot.cut import CutCall
from jointcut.aot.pareto import Pareto, ParetoPoint
from jointcut.aot.report import sections
from jointcut.aot.report.held import held, one_after_the_other
from jointcut.aot.report.report import JSON, Account, Report, totals
from jointcut.aot.report.rivals import rivals
from jointcut.aot.report.rows import Rows
from jointcut.partition import segments
from jointcut.partition.budget import Candidate, Planner
from jointcut.partition.displays import table
from jointcut.partition.figures import human_bytes
from jointcut.partition.lifetimes import Lifetime, Lifetimes, lifetimes
from jointcut.partition.mincut import save_all
from jointcut.partition.outline import outline
from jointcut.partition.picture import graph_view, timeline
from jointcut.partition.places import place_of
from jointcut.partition.plan import Plan


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
    cut: CutCall,
    planner: Planner,
    front: Pareto,
    point: Callable[[Candidate], ParetoPoint],
    measured: Measured | None = None,
) -> Report:
    """What a cut's plan keeps, runs again, and costs.

    `front` has the cut's plan as its chosen one, `point` gives the place of a plan on it.
    """
    name, plan = cut.traced.name, cut.plan
    here = front.chosen
    assert here is not None, "the front of a cut has its plan chosen"
    uncut = planner.priced(save_all(planner.graph))
    rows = Rows(planner, outline(planner.graph, name))
    account, lives = (None, None) if measured is None else (measured.account, measured.lives)
    mine, plains = lives or (_replayed(planner, plan), _replayed(planner, uncut))
    again, less = rows.again(plan), rows.less(plan, front, here)
    fixed, flops = cut.traced.program.fixed_bytes, rows.step_flops()
    ours = totals(mine, plan, here, fixed, again, flops)
    there = point(planner.candidate(uncut))
    front = replace(front, plain=there)
    plain = totals(plains, uncut, there, fixed, (), flops)
    default = planner.default() if plan.strategy == uncut.strategy else None
    told = Report(
        name, plan, ours, plain, rows.saved(plan), again, less, front, account, jax.default_backend(),
        mine, plains, (), None if default is None else default.bytes_saved,
    )  # fmt: skip
    marks = [(name, point(planner.candidate(rival))) for name, rival in rivals(planner)]
    budgets = _budgets(told, marks, None if told.is_plain else there)
    return replace(told, sections=_sections(told, planner, budgets, lives is None))


def _explained(told: Report) -> Plan:
    """The plan with the reasons that the report gives."""
    reasons = {row.value: row.reason for row in told.saved}
    return replace(told.plan, saved=tuple(replace(s, reason=reasons[s.value]) for s in told.plan.saved))


def _budgets(told: Report, marks: list[tuple[str, ParetoPoint]], plain: ParetoPoint | None) -> JSON:
    """The front with the plan's own reasons, the policies as marks, and plain JAX."""
    section = told.front.section(marks)
    points = [
        {**p, "saved": table(_explained(told), shown=8)} if i == section["chosen"] else p
        for i, p in enumerate(section["points"])
    ]
    place = None if plain is None else told.front.place(plain)
    lead = section["lead"] + _POLICIES + _peaks(told)
    return {**section, "title": "Other budgets", "lead": lead, "points": points, "plain": place}


def _peaks(told: Report) -> str:
    """How far the predicted peaks lie from XLA's account, where that is known."""
    if told.account is None:
        return ""
    ours, plain = human_bytes(told.account.peak_bytes), human_bytes(told.account.plain_peak_bytes)
    mine, other = human_bytes(told.totals.peak_bytes), human_bytes(told.plain.peak_bytes)
    if told.is_plain:
        return f" Predicted for plain JAX are {other}; XLA's account says {plain}."
    return f" Predicted for this plan are {mine}, and XLA's account says {ours}; for plain JAX {other} and {plain}."


def _sections(told: Report, planner: Planner, budgets: JSON, is_replay: bool) -> tuple[JSON, ...]:
    """What the page shows, in order."""
    how = _REPLAYED if is_replay else _ASSIGNED
    heading = {"id": "graph", "title": "The graph and the cut", "lead": _GRAPH}
    graph = graph_view(planner.graph, _explained(told), planner.seconds, root=told.name, **heading)
    fixed = human_bytes(told.totals.fixed_bytes)
    memory = timeline(
        told.life,
        None if told.is_plain else ("plain JAX", told.plain_life),
        id="memory",
        title="Memory over a step",
        lead="Every array that is alive while the step runs, by what made it.",
        lines=[{"name": "XLA's account", "bytes": told.account.temp_bytes}] if told.account and is_replay else [],
        note=f"Arguments, results and gradients take {fixed} more and are not drawn. {how}",
    )
    return (
        memory,
        graph,
        sections.saved(told.saved, {v: i for i, v in enumerate(graph["values"]["id"])}, told.bounds),
        *([sections.again(told.again)] if told.again else []),
        *([sections.less(told.less, told.totals.peak_bytes, _peaks(told))] if told.less else []),
        budgets,
        sections.words(),
    )


_POLICIES = (
    " The other marks are policies of jax.checkpoint around the whole loss, in jointcut's order of the backward."
)
_GRAPH = "Forward at the left, backward at the right, and what is saved crossing the cut between them."
_ASSIGNED = "As XLA scheduled the compiled step and assigned its memory; a loop's body is shown once."
_REPLAYED = (
    "A replay of the two programs, before anything is compiled: arrays that XLA computes within their readers have no "
    "bytes, a loop's body is shown once. XLA needs about a quarter more, and plain JAX often more than that."
)


def _replayed(planner: Planner, plan: Plan) -> Lifetimes:
    halves = segments.written(planner.graph, planner.facts, plan, on_cpu=planner.on_cpu)
    return lifetimes(halves, planner.graph)
