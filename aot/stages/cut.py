"""Hold one cut: the plan and the two jaxprs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax

from jointcut.aot.choices.limits import limit
from jointcut.aot.export.export import export, known_platforms, platforms_for
from jointcut.aot.export.pair import Pair
from jointcut.aot.fitting.attempts import Fitted
from jointcut.aot.fitting.inexact import one
from jointcut.aot.fitting.pareto import Pareto
from jointcut.aot.hooks.spilling import is_spilled
from jointcut.aot.progress.progress import Stage
from jointcut.aot.report.inexact import CheckedForms, checked_forms
from jointcut.aot.report.report import Report
from jointcut.aot.run import compile as compiling
from jointcut.aot.run.flat import Open, executables, in_a_trace, jitted, of_cut
from jointcut.aot.run.jits import Jits
from jointcut.aot.run.runner import Programs, Runner
from jointcut.aot.run.spilled import refuse_spill, spilled
from jointcut.aot.stages.again import differentiated_again
from jointcut.aot.stages.compiled import Compiled, names_of
from jointcut.aot.stages.debug import Checked
from jointcut.aot.stages.gather import Measurements, gather
from jointcut.aot.stages.gradient import Gradient, gradient
from jointcut.aot.trace.signature import graph_signature
from jointcut.partition.drawing.displays import graph_page
from jointcut.partition.drawing.page.page import framed, page
from jointcut.partition.errors import CallError, RoomError, message
from jointcut.partition.figures import counted
from jointcut.partition.lower import verify
from jointcut.partition.lower.emit import Halves, Residual
from jointcut.partition.lower.steps import Schedule
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program import jaxprs
from jointcut.partition.split import Split, halved
from jointcut.partition.stored.packing import HOOK
from jointcut.wrappers.built_in import alias
from jointcut.wrappers.built_in.autograd import JITTED, Wrap
from jointcut.wrappers.metadata.schemas import ViewAndMutationMeta
from jointcut.wrappers.metadata.signatures import GraphSignature
from jointcut.wrappers.table import Table

if TYPE_CHECKING:  # pyright reads this file under two names, with a class each: hence the `ignore` comments below
    from jointcut.aot.stages.traced import Traced


@dataclass(frozen=True)
class Cut:
    """A traced function cut in two, ready to be compiled.

    Attributes:
        traced: the traced function.
        split: the plan and the two jaxprs.
        fitted: the search that found the plan, if there was a budget.
    """

    traced: Traced
    split: Split
    fitted: Fitted[Any] | None = field(default=None, repr=False, compare=False)
    _runners: Table[Any] = field(default_factory=Table, repr=False, compare=False)

    def __repr__(self) -> str:
        """`<Cut loss: 3 values saved, 49152 bytes>`."""
        return (
            f"<Cut {self.traced.name}: {counted(len(self.plan.values), 'value')} saved, {self.plan.bytes_saved} bytes>"
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The graph with its cut and the saved values, for notebooks."""
        data = graph_page(self.traced.name, repr(self), self.split.graph, self.plan)
        return {"text/plain": repr(self), "text/html": framed(page(data))}

    @property
    def plan(self) -> Plan:
        """The values saved, the ops recomputed, and the reasons."""
        return self.split.plan

    @property
    def schedule(self) -> Schedule:
        """The steps of both halves, in the order in which they run; `print` it."""
        return self.split.schedule

    @property
    def forward(self) -> Any:
        """The forward as a closed jaxpr: `(constants, arguments) -> (outputs, saved residuals)`."""
        return self.split.forward

    @property
    def backward(self) -> Any:
        """The backward as a closed jaxpr: `(residuals, cotangents) -> gradients`."""
        return self.split.backward

    @property
    def residuals(self) -> tuple[Residual, ...]:
        """The origin of each leading input of the backward."""
        return self.split.halves.residuals

    @property
    def metadata(self) -> ViewAndMutationMeta:
        """`Traced.metadata` with the residuals that the backward may overwrite."""
        return replace(self.traced.metadata, bw_donated_idxs=compiling.donated(self._own))

    @cached_property
    def signature(self) -> GraphSignature:
        """The names and positions of the halves' inputs and outputs."""
        return graph_signature(self.traced)

    @cached_property
    def gradient(self) -> Gradient:
        """The halves in the form of TorchScript's `Gradient`."""
        traced = self.traced
        wanted = [traced.bound.places[i] for i in traced.owners]
        return gradient(self.split, traced.consts, traced.program.carries, wanted)

    # ------------------------------------------------------------------------------------- what to do with it

    def pareto(self) -> Pareto:
        """The front of (peak bytes, seconds, plan), one point per budget, with this plan marked."""
        return self.traced._pareto(self.plan)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        platforms: str | Sequence[str] | None = None,
        order: int = 1,
        overwrite: bool = False,
    ) -> Path:
        """Write this cut as an artefact that others can run, and return its path; see `Function.export`."""
        platforms = known_platforms(platforms_for(platforms, self.traced.options.goal))
        pair = Pair.of(self, platforms)  # pyright: ignore[reportArgumentType]
        return export(pair, path, platforms, order, overwrite)

    def explain(self, *, measure: bool = True) -> Report:
        """Report what is saved and why, what is recomputed, the cost, and the cost of less memory.

        With `measure`, the step and plain JAX's are compiled, memory is by XLA's figures, and smaller budgets are
        tried. Without, nothing is compiled and all figures are predicted.
        """
        traced = self.traced
        front = self.pareto()
        measured = None
        if measure:
            run = None if self.plan.strategy == "save_all" else self.compile()
            with Stage("compile", f"{traced.name}, plain JAX"):
                measured = self._measured(run)
        return gather(
            self,  # pyright: ignore[reportArgumentType]
            planner=traced.planner,
            front=front,
            point=traced._point,
            partition=lambda budget: traced._within(limit(budget), to_run=False),
            measured=measured,
        )

    def _measured(self, run: Compiled | None) -> Measurements:
        """The figures of a compiled step (None if it is plain JAX's own) beside those of plain JAX's."""
        try:
            return Measurements.of(run, self.traced.plain_program)
        except RoomError as error:
            if run is None:
                raise
            return Measurements.beside(
                run, compiling.ProgramMemory.without_room(self.traced.plain_lowered, error.temp_bytes)
            )

    def check_forms(self, *args: Any, **kwargs: Any) -> CheckedForms:
        """Measure what the smaller forms of saved values (see `aot.SAVE_AS`) do to the gradient at these arguments.

        Gradients are computed with each form alone, with all and with none, for the cotangent 1 of a scalar output, or
        ones for the arrays of another. The halves are compiled for each. Effects of the function happen each time.
        Raises `CallError` if the arguments do not fit.
        """
        stored = self.plan.stored

        def gradients(forms: frozenset[str]) -> Any:
            own = {v: form for v, form in stored.items() if form in forms}
            cut = self if own == stored else self.storing(own)
            main, pullback = Compiled(cut, 2).vjp(*args, **kwargs)  # pyright: ignore[reportArgumentType]
            return pullback(jax.tree.map(one, main[0] if self.traced.options.has_aux else main))

        return checked_forms(self.plan, self.storing({}).plan.bytes_saved, gradients)

    def storing(self, forms: Mapping[int, str]) -> Cut:
        """The same cut with other values in smaller forms."""
        plan, problem = self.plan, self.split.problem.without_forms
        kept = {"segments": plan.segments, "kept_steps": plan.kept_steps, "dropped": plan.dropped}
        other = Plan.of(problem, plan.values, offloaded=plan.offloaded, stored=forms, **kept)
        return Cut(self.traced, halved(problem, lambda graph: other, self.split.passes))

    def compile(self, executables: int | None = None) -> Compiled:
        """Compile for the target, or for the default backend.

        `executables` is the number of programs of `value_and_grad`: 1 (the default for a scalar output) or 2. One
        program needs less memory, since it frees residuals early; two are a little faster (`make bench` shows both).
        For a plan that offloads the default is 2 on a CPU, where one program keeps all its arrays in one memory.

        For a GPU that is not here XLA times no kernels: `explain` says how much a device took over such an account.
        """
        if isinstance(executables, bool) or executables not in (None, 1, 2):
            raise CallError(message("executables", f"is {executables!r}.", "Give 1, 2, or nothing."))
        executables = executables or (1 if self.traced.is_scalar and not self.is_apart else 2)
        compiled = Compiled(self, executables)  # pyright: ignore[reportArgumentType]
        if not self.jits.has_compiled(*names_of(executables)):
            with Stage("compile", self.traced.name):
                _ = compiled.programs
        return compiled

    # ---------------------------------------------------------------------------------------- how it is run

    @property
    def open(self) -> Runner:
        """The runner inside an outer trace, which the halves become part of."""
        if self.traced.options.spill is not None:
            refuse_spill(self.traced.name)
        return self._runners.of("open", lambda: self._running(in_a_trace(self._open(self.split.halves, self._again))))

    @property
    def jits(self) -> Jits:
        """The programs of both halves, each jitted and compiled at most once."""
        return self._runners.of(
            "jits", lambda: of_cut(self._open(self._own), self.traced.structs, self._residual_structs)
        )

    @property
    def jitted(self) -> Runner:
        """The runner of programs that are compiled at the first call."""
        make = self._running
        return self._runners.of(
            "jitted", lambda: make(jitted(self.jits, self._open(self._own, self._again).backward), self.is_apart)
        )

    @property
    def executables(self) -> Runner:
        """The runner of programs that are compiled for the types of the signature."""
        return self._runners.of("executables", lambda: self._running(executables(self.jits)))

    @property
    def is_apart(self) -> bool:
        """Whether the halves run as two programs although one could run both: only so they offload anything.

        Those that spill do too, so that a disk that fills up is an error before the backward starts.
        """
        if self.traced.options.spill is not None:
            return True
        return bool(self.plan.offloaded) and not self.split.problem.backend.moves_inside

    def checked(self) -> Runner:
        """A runner of one call, half by half, that checks every result; see `aot.debug`."""
        programs = Checked(self.traced, self.split, self.jits)
        return self._running(Programs(programs.run, programs.backward))

    def chosen(self, fitted: Fitted[Any], cut_ms: float) -> Self:
        """The same cut with the search that found its plan; programs compiled during the search are reused."""
        known = self.plan  # a plan that was read from a note knows nothing of the policy
        plan = replace(fitted.plan, problem=known.problem, packed=known.packed)
        plan = replace(plan, overruled=plan.overruled or known.overruled)
        return replace(self, split=replace(self.split, plan=plan, cut_ms=cut_ms), fitted=fitted)

    @property
    def bytes_spilled(self) -> int:
        """Bytes that wait in files, but for the starts of segments; 0 unless the options spill."""
        if self.traced.options.spill is None:
            return 0
        values = self.split.graph.values
        waiting = (values[v] for v, forms in self.schedule.stored.items() if HOOK in forms)
        return sum(value.saved_bytes for value in waiting if is_spilled(value.payload))

    @property
    def _again(self) -> Wrap:
        """How the halves are differentiated once more; those with references, by JAX."""
        traced = self.traced
        if any(map(jaxprs.touches_references, jaxprs.opened(traced.joint)[0].eqns)):
            return JITTED
        return differentiated_again(traced.call.options.conventions, traced.name)

    @property
    def _own(self) -> Halves:
        """The halves of programs of ours, outside of all transformations."""
        return self._runners.of("own", lambda: self.split.underived)

    def _open(self, halves: Halves, wrap: Wrap = JITTED) -> Open:
        return Open.of(self.traced.call, halves, self.traced.handed_back, wrap)

    def _running(self, programs: Programs, is_apart: bool = False) -> Runner:
        traced, signed = self.traced, lambda: self.signature
        if (spill := traced.options.spilled) is not None:
            count = len(traced.program.results.avals) - len(traced.handed_back)
            programs = spilled(programs, spill.packing.disk, traced.name, self.bytes_spilled, count)
        known = traced.consts, traced.handed_back, self.residuals, signed, is_apart
        return Runner(traced.call, programs, *known)

    def _residual_structs(self, jits: Jits) -> list[Any]:
        """The types of the backward's inputs; residuals have the shardings that the forward gives them."""
        traced, inputs = self.traced, self.traced.structs
        closed = self._own.backward
        structs = traced.placed(map(jaxprs.unplaced, jaxprs.input_structs(closed)))
        if any(map(jaxprs.touches_references, jaxprs.opened(traced.joint)[0].eqns)):
            # `output_shardings` below would also count references.
            references = {i: r.index for i, r in enumerate(self.residuals) if jaxprs.is_reference(structs[i])}
            return [inputs[references[i]] if i in references else s for i, s in enumerate(structs)]
        before = [getattr(s, "sharding", None) for s in inputs]
        leaves = [before[len(traced.consts) + p] for p in traced.bound.places]
        after = alias.inserted(list(jits.compiled("forward").output_shardings), traced.handed_back, leaves)
        shardings = verify.routed(self.residuals, before, after, len(traced.program.results.avals))
        for i, sharding in enumerate(shardings):
            if sharding is not None and jaxprs.lies_on_host(sharding):
                weak = structs[i].weak_type
                structs[i] = jaxprs.HostStruct(structs[i].shape, structs[i].dtype, weak_type=weak, sharding=sharding)
            elif sharding is not None and len(sharding.device_set) > 1:
                structs[i] = structs[i].update(sharding=sharding)
        return structs
