"""Record a decision: what is saved, what is recomputed, and why.

A `Plan` may come from a solver or be written by hand: `Plan.of(graph, saved=[...])` completes a list of value ids. A
plan *closes* when every value that the backward reads is an input, is saved, or can be computed from inputs and saved
values by ops that may run again. Where it does not, `validated` raises an error that names the value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NoReturn

from jointcut.partition.bodies.checkpoints import Numbers
from jointcut.partition.errors import PlanError, message
from jointcut.partition.figures import counted, per_device
from jointcut.partition.packing.forms import FORMS
from jointcut.partition.plans.asjax import JaxPolicy, to_policy, underived
from jointcut.partition.plans.demands import Overruled, in_bounds, overruled, steps_fit, told, unused
from jointcut.partition.plans.loops_told import in_segments, in_steps
from jointcut.partition.plans.problem import Problem, as_problem
from jointcut.partition.plans.runs import Needed, exchanged, needed
from jointcut.partition.plans.saved import (
    DEVICE,
    GradientError,
    PackedBytes,
    Saved,
    in_cheaper_forms,
    in_smaller_forms,
    listed,
)
from jointcut.partition.plans.sharing import in_shared_space
from jointcut.partition.program.bodies import Nested
from jointcut.partition.program.graph import ONCE, OPEN, STEP, Form, Graph
from jointcut.partition.program.jax.abstract import HOST
from jointcut.partition.program.notebook import Shown
from jointcut.partition.program.roles import Tile

#: The saved values of a plan, its loops in segments, their kept steps, the dropped values, the offloaded values, the
#: values that wait in another form, and the numbers of checkpoints.
PlanKey = tuple[
    tuple[int, ...],
    tuple[tuple[int, int], ...],
    tuple[tuple[int, int], ...],
    tuple[int, ...],
    tuple[int, ...],
    tuple[tuple[int, str], ...],
    Numbers,
]


#: The names of the programs that plans are compared with.
PLAIN_JAX, ALL_SAVED = "plain JAX", "all saved"


@dataclass(frozen=True)
class Plan(Shown):
    """The values that cross from the forward to the backward, and the ops that the backward runs again.

    Attributes:
        strategy: the name of the strategy that chose it.
        saved: the residuals in program order, without inputs (the caller holds them).
        recomputed: ids of the forward ops that the backward runs again.
        deferred: ids of the ops that only the backward runs.
        bound_bytes: a lower bound on the bytes that any plan under the same rules must save, None where none was
            proved.
        seconds: the time that the recomputed ops take by a cost model, None where no model was asked.
        bound_seconds: a certified lower bound on the seconds of any plan that saves at most as many bytes.
        segments: the loops that run in segments, each as its id and the steps of one segment.
        kept_steps: the loops whose last steps are treated apart, each as its id and the number of these steps. Their
            residuals are kept on the device. If the loop runs in segments, these steps are in none; otherwise only the
            residuals of the other steps are offloaded.
        peak_bytes: the peak of the whole step, as the memory model predicts it.
        bytes_spared: bytes of `saved` that loops in segments do not hand over, less the carries that they keep instead.
        dropped: recomputed values that the backward does not keep for readers that stand far apart: it computes them
            once more.
        offloaded: the saved values that wait in host memory, and are copied back for the backward.
        checkpoints: the loops that keep other numbers of checkpoints than without a budget, each as the id of the op
            that leaves these and their number.
        nested: the loops whose steps are cut on their own, each with its own plan.
        forms: the cheaper forms of values that it takes: it keeps their sources.
        overruled: the preferences that it does not follow, and the cost of following them.
        problem: the problem that it solves.
        packed: the bytes of saved values that a user's functions pack, if there are any; `bytes_saved` is without them.
        gradient_error: the measured error of its smaller forms, if a bound on the error permits them.
    """

    strategy: str
    saved: tuple[Saved, ...]
    recomputed: tuple[int, ...]
    deferred: tuple[int, ...]
    bound_bytes: int | None = None
    seconds: float | None = None
    bound_seconds: float | None = None
    segments: tuple[tuple[int, int], ...] = ()
    peak_bytes: int | None = None
    bytes_spared: int = 0
    kept_steps: tuple[tuple[int, int], ...] = ()
    dropped: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    checkpoints: Numbers = ()
    nested: tuple[Nested, ...] = field(default=(), compare=False, repr=False)
    forms: tuple[Form, ...] = field(default=(), compare=False, repr=False)
    overruled: tuple[Overruled, ...] = field(default=(), compare=False, repr=False)
    problem: Problem | None = field(default=None, compare=False, repr=False)
    packed: PackedBytes | None = field(default=None, compare=False, repr=False)
    gradient_error: GradientError | None = field(default=None, compare=False, repr=False)

    @cached_property
    def values(self) -> tuple[int, ...]:
        """Ids of the saved values."""
        return tuple(s.value for s in self.saved)

    @property
    def key(self) -> PlanKey:
        """The plan's identity among the plans of its program: equal keys, equal programs."""
        stored = tuple(self.stored.items())
        return self.values, self.segments, self.kept_steps, self.dropped, self.offloaded, stored, self.checkpoints

    @cached_property
    def stored(self) -> dict[int, str]:
        """The saved values that wait in a smaller form, each with the form's name."""
        return {s.value: s.form for s in self.saved if s.form}

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The rows of its program that run block by block."""
        return () if self.problem is None else self.problem.graph.tiles

    @property
    def baseline(self) -> str:
        """The plan to compare with: plain JAX, or this program with all saved if plain JAX has no gradient."""
        return ALL_SAVED if underived(self.problem, self.nested) else PLAIN_JAX

    @property
    def loops_in_segments(self) -> tuple[tuple[int, int, int], ...]:
        """The loops in segments, each as its id, the steps of one segment, and the number of last steps in none."""
        kept = dict(self.kept_steps)
        return tuple((loop, steps, kept.get(loop, 0)) for loop, steps in self.segments)

    @property
    def bytes_saved(self) -> int:
        """Bytes alive in the device's memory between the halves, beyond the arrays that the caller holds."""
        return sum(s.bytes for s in self.saved) - self.bytes_spared - self.bytes_offloaded

    @property
    def bytes_offloaded(self) -> int:
        """Bytes that wait in host memory between the halves."""
        return sum(s.host_bytes for s in self.saved)

    @property
    def partly_offloaded(self) -> dict[int, int]:
        """The loops that offload only the residuals of their first steps, with the number of the other steps."""
        segments = dict(self.segments)
        return {loop: steps for loop, steps in self.kept_steps if loop not in segments}

    @property
    def wholly_offloaded(self) -> frozenset[int]:
        """The offloaded values of which all steps wait in host memory."""
        return frozenset(s.value for s in self.saved if s.is_offloaded and not s.loop_steps)

    @property
    def is_told(self) -> bool:
        """Whether a user said of some values that they must be saved, or computed again."""
        return self.problem is not None and any(c.demand.is_must for c in self.problem.constraints)

    @property
    def runs_again(self) -> bool:
        """Whether any op of the forward runs in the backward too."""
        return bool(self.recomputed or self.segments)

    def reruns(self, graph: Graph) -> tuple[int, ...]:
        """Ids of the recomputed ops; ops of dropped values appear twice, since the backward runs them twice."""
        return *self.recomputed, *sorted({i for v in self.dropped if (i := graph.values[v].maker) is not None})

    @property
    def gap(self) -> float | None:
        """The excess of `seconds` over `bound_seconds`, as a fraction of the bound; None where one is not known."""
        if self.seconds is None or self.bound_seconds is None:
            return None
        if self.bound_seconds == 0:
            return math.inf if self.seconds else 0.0
        return (self.seconds - self.bound_seconds) / self.bound_seconds

    def to_policy(self) -> JaxPolicy:
        """The policy of plain `jax.checkpoint` that saves the values of the plan, as far as JAX can be told.

        Print it for Python to paste. It also says where the policy belongs, which values it misses, and which values it
        saves beyond the plan. Raises `PlanError` for a plan that was not made by `Plan.of`, a strategy or a budget.
        """
        if self.problem is None:
            raise PlanError(message("plan", "does not know its program.", "Make it with Plan.of(graph, saved=[...])."))
        dropped = f"drops {counted(len(self.dropped), 'value')} between its readers and computes each once more"
        away = f"offloads {counted(len(self.offloaded), 'value')}, and the policy below keeps them on the device"
        notes = [*(f"runs {text}" for text in in_segments(self.loops_in_segments))]
        forms = (
            f"keeps {counted(len(self.stored), 'value')} in smaller forms, and the policy below keeps them as they are"
        )
        notes += [*[dropped] * bool(self.dropped), *[away] * bool(self.offloaded), *[forms] * bool(self.stored)]
        return to_policy(self.problem.without_forms, self.values, notes)

    def __str__(self) -> str:
        """The summary, then the saved values, the largest first; values that read the same share a line."""
        return "\n".join([*self.summary(), *(f"{size:>14,}  {text}" for size, text in listed(self.saved))])

    def summary(self) -> list[str]:
        """A line of totals, one of seconds and peak if known, and the remarks."""
        total = f"{self.strategy}: {counted(len(self.saved), 'value')}, {self.bytes_saved:,} bytes{self.per} saved"
        bound = ""
        if self.bound_bytes is not None:
            bound = f"; no plan under the same rules saves less than {self.bound_bytes:,} bytes{self.per}"
        lines = [f"{total}; {counted(len(self.recomputed), 'op')} recomputed{bound}"]
        if figures := "; ".join(self._figures()):
            lines.append(figures)
        return [*lines, *self.remarks]

    @property
    def remarks(self) -> list[str]:
        """A line for each kind of cheaper form, each loop cut by its steps, each budget, each demand without effect."""
        cut = [*in_cheaper_forms(self.forms), *in_steps(self.nested)]
        cut += [f"in blocks: {tile}" for tile in self.tiles]
        cut += in_bounds(self.problem, set(self.values) - self.wholly_offloaded)
        measured = [str(each) for each in (self.packed, self.gradient_error) if each is not None]
        without_effect = [*told(self.overruled), *unused(self.problem, self.values)]
        if self.problem is not None:
            graph = self.problem.graph
            without_effect += [*exchanged(graph, self.reruns(graph), dict(self.segments)), *self.problem.remarks]
        return [*cut, *in_smaller_forms(self.saved), *measured, *without_effect]

    @property
    def per(self) -> str:
        """What its figures in bytes say beside themselves: " per device" where several devices run it together."""
        return "" if self.problem is None else per_device(self.problem.graph.devices)

    def _figures(self) -> Iterator[str]:
        if self.seconds is not None:
            yield f"recomputing takes {1e3 * self.seconds:,.3f} ms"
        if self.bound_seconds is not None and (self.bound_seconds or not self.seconds):
            gap = "" if self.gap is None else f" (gap {self.gap:.1%})"
            yield f"no plan of as few bytes takes less than {1e3 * self.bound_seconds:,.3f} ms{gap}"
        if self.peak_bytes is not None:
            yield f"peak {self.peak_bytes:,} bytes{self.per}"
        if self.offloaded:
            waits = f"{self.bytes_offloaded:,} bytes{self.per} offloaded to host memory"
            yield f"{counted(len(self.offloaded), 'value')}, {waits}"
        if self.dropped:
            yield f"{counted(len(self.dropped), 'value')} dropped between their readers"
        yield from in_segments(self.loops_in_segments)
        for loop, steps in self.partly_offloaded.items():
            yield f"loop {loop} keeps on the device what its last {counted(steps, 'step')} would offload"

    @classmethod
    def of(
        cls,
        program: Graph | Problem,
        saved: Iterable[int],
        *,
        strategy: str = "by hand",
        reasons: Mapping[int, str] | None = None,
        bound_bytes: int | None = None,
        seconds: float | None = None,
        bound_seconds: float | None = None,
        segments: Iterable[tuple[int, int]] = (),
        peak_bytes: int | None = None,
        bytes_spared: int = 0,
        kept_steps: Iterable[tuple[int, int]] = (),
        dropped: Iterable[int] = (),
        offloaded: Iterable[int] | None = None,
        stored: Mapping[int, str] | None = None,
        checkpoints: Iterable[tuple[int, int]] = (),
    ) -> Plan:
        """Complete a list of value ids to a plan: the saved values determine which ops must run again.

        The other arguments fill the fields of the same names. By default, the saved values are `offloaded` that the
        problem's constraints demand to be, and `packing` in the forms that the problem gives them. Raises `PlanError`
        where the plan does not close.
        """
        problem, numbers = as_problem(program), tuple(sorted(checkpoints))
        there, sides, reasons = problem.at(numbers), problem.sides, reasons or {}
        graph = there.graph
        chosen = sorted(set(saved))
        _existing(problem, chosen)
        runs = needed(problem, frozenset(chosen))
        again = sorted(runs.ops)
        away = sorted(problem.to_host.intersection(chosen) if offloaded is None else set(offloaded))
        forms = problem.form_of if stored is None else stored
        kept_steps, segments = tuple(kept_steps), tuple(segments)
        parts = dict(kept_steps) if away and kept_steps else {}
        records = tuple(_saved(there, v, v in away, reasons.get(v, ""), forms.get(v, ""), parts) for v in chosen)
        records = in_shared_space(graph, [r for r in records if graph.values[r.value].maker is not None])
        recomputed = tuple(i for i in again if i in sides.forward)
        deferred = tuple(i for i in again if i not in sides.forward)
        figures = bound_bytes, seconds, bound_seconds, segments, peak_bytes, bytes_spared, kept_steps
        figures += (tuple(sorted(set(dropped))), tuple(away), numbers)
        kept = sides.outputs.union(chosen)
        cheaper = tuple(form for form in graph.forms if form.source in kept)
        plan = cls(strategy, records, recomputed, deferred, *figures, tuple(graph.nested.values()), cheaper)
        return _lawful(problem, plan, runs)


def _saved(problem: Problem, v: int, is_away: bool, reason: str, form: str, parts: Mapping[int, int]) -> Saved:
    graph, value = problem.graph, problem.graph.values[v]
    op = graph.maker_of(v)
    name, (scope, source) = (op.name, graph.origin_of(op)) if op else ("input", ("", value.label))
    is_free = v in problem.sides.outputs or not op
    size, memory = 0 if is_free else problem.bytes_as(v, form), HOST if is_away else DEVICE
    loop = next((i for i in graph.ancestors[value.loop] if is_away and i in parts), None)
    steps = (0, 0) if loop is None else (graph.loops[loop].length - parts[loop], graph.loops[loop].length)
    return Saved(v, value.shape, value.dtype, value.copies, size, name, scope, source, reason, memory, form, *steps)


def _existing(problem: Problem, values: Iterable[int]) -> None:
    graph = problem.graph
    for v in values:
        if not 0 <= v < len(graph.values) or problem.sides.is_late(v):
            cure = "Save values of the forward only: see Graph.values and Value.maker."
            raise PlanError(message(f"plan.saved[%{v}]", "does not exist in the forward.", cure))
        maker = graph.values[v].maker
        if maker is not None and graph.ops[maker].name == STEP:
            cure = "Save the stack that it is taken from."
            raise PlanError(message(f"plan.saved[{graph.where(v)}]", "is one step of a stack.", cure))


def validated(problem: Problem, plan: Plan) -> Plan:
    """Return the plan if it closes and breaks no rule, else raise `PlanError` naming the value and the rule."""
    graph = problem.graph
    _existing(problem, plan.values)
    _fits_program(problem.at(plan.checkpoints).graph, plan)
    runs = needed(problem, frozenset(plan.values))
    if differing := sorted(runs.ops ^ {*plan.recomputed, *plan.deferred}):
        where = f"op {differing[0]} ({graph.ops[differing[0]].name})"
        _refuse_other(where, "runs in the backward by the plan and not by what it saves, or the other way round.")
    return _lawful(problem, plan, runs)


def _lawful(problem: Problem, plan: Plan, runs: Needed) -> Plan:
    """Return the plan if no op runs again that must not; `runs` are the ops that the backward runs for the plan."""
    graph, verdicts, saved, read = problem.graph, problem.verdicts, frozenset(plan.values), runs.values
    _stored(problem, plan)
    for i in (*plan.recomputed, *plan.deferred):
        for v in graph.ops[i].outputs:
            why = verdicts[v].not_recomputed
            if (v in read or (graph.ops[i].effects and v not in saved)) and why and not verdicts[v].is_costly:
                cure = f"Save it, or save what the backward computes from it. It is not recomputed because {why}."
                raise PlanError(message(graph.where(v), "is neither saved nor can it be recomputed.", cure))
    _dropped(graph, plan)
    steps_fit(graph, plan.segments, plan.kept_steps, plan.offloaded)
    _offloaded(problem, plan)
    found = overruled(problem, saved, read, plan.wholly_offloaded)
    is_known = plan.problem is problem and plan.overruled == found
    return plan if is_known else replace(plan, problem=problem, overruled=found)


def _dropped(graph: Graph, plan: Plan) -> None:
    again = {v: i for i in (*plan.recomputed, *plan.deferred) for v in graph.ops[i].outputs}
    for v in plan.dropped:
        where = f"plan.dropped[%{v}]"
        if v not in again:
            cure = "Drop results of ops in plan.recomputed: there is nothing else to compute again."
            raise PlanError(message(where, "is not computed again in the backward.", cure))
        if (name := graph.ops[again[v]].name) in OPEN:
            what = f"is made by a {'conditional' if name in ONCE else 'loop'}, which runs again only once."
            raise PlanError(message(where, what, "Drop other values."))


def _offloaded(problem: Problem, plan: Plan) -> None:
    graph, in_segments = problem.graph, {loop for loop, _ in plan.segments}
    for v in plan.offloaded:
        where = f"plan.offloaded[%{v}]"
        if v not in plan.values:
            raise PlanError(message(where, "is not saved.", "Offload values of plan.saved."))
        if why := problem.not_offloaded(v):
            raise PlanError(message(where, f"cannot be offloaded: {why}.", "Save it on the device, or not at all."))
        if not in_segments.isdisjoint(graph.ancestors[graph.values[v].loop]):
            cure = "Let the loop run whole: segments make what they need again."
            raise PlanError(message(where, "is made in a loop that runs in segments.", cure))


def _stored(problem: Problem, plan: Plan) -> None:
    for s in plan.saved:
        where = f"plan.stored[%{s.value}]"
        if s.form and (s.value in problem.sides.outputs or not FORMS[s.form].is_smaller(s.shape, s.dtype)):
            what = f"is {s.form}, and {problem.graph.where(s.value)} would not be smaller so."
            raise PlanError(message(where, what, "Store arrays of floats that are no outputs."))
        if (asked := problem.form_of.get(s.value, s.form)) != s.form:
            what = f"is {s.form or 'not there'}, and the policy says {asked} for {problem.graph.where(s.value)}."
            raise PlanError(message(where, what, "Make the plan under this policy, or take that key out of it."))


def _fits_program(graph: Graph, plan: Plan) -> None:
    for s in plan.saved:
        value = graph.values[s.value]
        if (s.shape, s.dtype, s.copies) != (value.shape, value.dtype, value.copies):
            _refuse_other(f"plan.saved[%{s.value}]", f"is {s.dtype}{list(s.shape)} in the plan, but {value} here.")


def _refuse_other(where: str, what: str) -> NoReturn:
    raise PlanError(message(where, what, "Give a plan that was made for this program."))
