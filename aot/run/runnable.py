"""Run a traced call that was cut, in every way: inside a trace, jitted, or compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jointcut.aot.hooks.spilling import is_spilled
from jointcut.aot.progress.progress import Stage
from jointcut.aot.run.again import differentiated_again
from jointcut.aot.run.compile import Memory, ProgramMemory, donated
from jointcut.aot.run.flat import Open, executables, in_a_trace, jitted, of_cut
from jointcut.aot.run.jits import Jits
from jointcut.aot.run.runner import Programs, Runner
from jointcut.aot.run.spilled import refuse_spill, spilled
from jointcut.aot.trace.data import Trace
from jointcut.aot.trace.signature import graph_signature
from jointcut.partition.lower import verify
from jointcut.partition.lower.emit import Halves
from jointcut.partition.packing.packing import HOOK
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.roles import Role
from jointcut.partition.split import Split
from jointcut.wrappers.built_in import alias
from jointcut.wrappers.built_in.autograd import JITTED, Wrap
from jointcut.wrappers.metadata.signatures import GraphSignature
from jointcut.wrappers.table import Table


@dataclass(frozen=True)
class Runnable:
    """A traced call and its halves, with all programs that were made of them.

    A `count` is the number of programs of `value_and_grad`: 1 for forward and backward together, or 2.
    """

    trace: Trace
    split: Split
    _made: Table[Any] = field(default_factory=Table, repr=False, compare=False)

    # ----------------------------------------------------------------------------------------- runners

    @property
    def open(self) -> Runner:
        """The runner inside an outer trace, which the halves become part of."""
        if self.trace.options.spill is not None:
            refuse_spill(self.trace.name)
        return self._made.of("open", lambda: self.running(in_a_trace(self._open(self.split.halves, self.again))))

    @property
    def jitted(self) -> Runner:
        """The runner of programs that are compiled at the first call."""

        def make() -> Runner:
            by_options = bool(self.trace.options.compiler_options)
            backward = None if by_options else self._open(self.own, self.again).backward
            return self.running(jitted(self.jits, backward), self.is_apart)

        return self._made.of("jitted", make)

    @property
    def executables(self) -> Runner:
        """The runner of programs that are compiled for the types of the signature."""
        return self._made.of("executables", lambda: self.running(executables(self.jits)))

    def running(self, programs: Programs, is_apart: bool = False) -> Runner:
        """Return a runner of some programs of the halves."""
        trace = self.trace
        if (spill := trace.options.spilled) is not None:
            count = len(trace.program.results.avals) - len(trace.handed_back)
            programs = spilled(programs, spill.packing.disk, trace.name, self.bytes_spilled, count)
        known = trace.consts, trace.handed_back, self.split.halves.residuals, lambda: self.signature, is_apart
        return Runner(trace.call, programs, *known)

    @property
    def jits(self) -> Jits:
        """The programs of both halves, each jitted and compiled at most once."""
        how = self._open(self.own), self.trace.structs, self._residual_structs
        return self._made.of("jits", lambda: of_cut(*how, self.donated))

    @property
    def signature(self) -> GraphSignature:
        """The names and positions of the halves' inputs and outputs."""
        return self._made.of("signature", lambda: graph_signature(self.trace))

    @property
    def again(self) -> Wrap:
        """Return how the halves are differentiated once more; halves with references are differentiated by JAX."""
        if self._touches_references:
            return JITTED
        return differentiated_again(self.trace.options.conventions, self.trace.name)

    @property
    def own(self) -> Halves:
        """The halves of programs of ours, outside of all transformations."""
        return self._made.of("own", lambda: self.split.underived)

    @property
    def donated(self) -> tuple[int, ...]:
        """The positions of residuals whose buffers the backward may overwrite: `bw_donated_idxs` of the metadata."""
        return donated(self.own)

    @property
    def is_apart(self) -> bool:
        """Whether the halves run as two programs although one could run both: otherwise they would offload nothing.

        Halves that spill run so too: then a full disk is an error before the backward starts.
        """
        if self.trace.options.spill is not None:
            return True
        return bool(self.split.plan.offloaded) and not self.split.problem.backend.moves_inside

    @property
    def bytes_spilled(self) -> int:
        """The bytes that wait in files, without the starts of segments; 0 unless the options spill."""
        if self.trace.options.spill is None:
            return 0
        values = self.split.schedule.graph.values
        waiting = (values[v] for v, forms in self.split.schedule.stored.items() if HOOK in forms)
        return sum(value.saved_bytes for value in waiting if is_spilled(value.payload))

    @property
    def _touches_references(self) -> bool:
        return any(map(jaxprs.touches_references, jaxprs.opened(self.trace.joint)[0].eqns))

    def _open(self, halves: Halves, wrap: Wrap = JITTED) -> Open:
        return Open.of(self.trace.call, halves, self.trace.handed_back, wrap)

    def _residual_structs(self, jits: Jits) -> list[Any]:
        """Return the types of the backward's inputs; residuals have the shardings that the forward gives them."""
        trace, inputs, residuals = self.trace, self.trace.structs, self.split.halves.residuals
        structs = trace.placed(map(abstract.unplaced, abstract.input_structs(self.own.backward)))
        if self._touches_references:  # `output_shardings` below would also count references
            references = {i: r.index for i, r in enumerate(residuals) if abstract.is_reference(structs[i])}
            return [inputs[references[i]] if i in references else s for i, s in enumerate(structs)]
        before = [getattr(s, "sharding", None) for s in inputs]
        leaves = [before[len(trace.consts) + p] for p in trace.bound.places]
        after = alias.inserted(list(jits.compiled("forward").output_shardings), trace.handed_back, leaves)
        shardings = verify.routed(residuals, before, after, len(trace.program.results.avals))
        for i, sharding in enumerate(shardings):
            if sharding is not None and abstract.lies_on_host(sharding):
                weak = structs[i].weak_type
                structs[i] = abstract.HostStruct(structs[i].shape, structs[i].dtype, weak_type=weak, sharding=sharding)
            elif sharding is not None and (len(sharding.device_set) > 1 or any(before)):
                structs[i] = structs[i].update(sharding=sharding)
        return structs

    # -------------------------------------------------------------------- programs of `value_and_grad`

    def count(self, asked: int | None = None) -> int:
        """Return the number of programs that is asked for, or else the function's own."""
        return asked or (1 if self.trace.is_scalar and not self.is_apart else 2)

    def compile(self, count: int) -> None:
        """Compile the programs, unless they are compiled already."""
        if not self.jits.has_compiled(*names_of(count)):
            with Stage("compile", self.trace.name):
                _ = self.programs(count)

    def programs(self, count: int) -> tuple[Any, ...]:
        """Return the executables."""
        return tuple(map(self.jits.compiled, names_of(count)))

    def compile_ms(self, count: int) -> float:
        """Return the wall time of compiling the programs."""
        return sum(self.jits.compile_ms.get(name, 0.0) for name in names_of(count))

    def peak_bytes(self, count: int) -> int:
        """Return the peak of the step, arguments and results included, by XLA's figures."""
        return self._memory_of("step").peak_bytes if count == 1 else self.memory(count).peak_bytes

    def activation_bytes(self, count: int) -> int:
        """Return the memory of the step beyond arguments and results, by XLA's figures."""
        return self._memory_of("step").temp_bytes if count == 1 else self.memory(count).activation_bytes

    def memory(self, count: int) -> Memory:
        """Return XLA's figures for both halves and for the step."""
        graph, halves = self.split.graph, self.split.halves
        residuals = {r.value for r in halves.residuals if r.kind != "saved"}  # not an input changed by hooks
        outside = {*graph.role_inputs(Role.PRIMAL), *graph.role_outputs(Role.OUTPUT)} - residuals - {None}
        beside = sum(graph.values[v].saved_bytes for v in outside if v is not None)
        step = self._memory_of("step") if count == 1 else None
        forward, backward = map(self._memory_of, ("forward", "backward"))
        return Memory(forward, backward, step, self.split.residual_bytes, beside, halves.host_bytes)

    def _memory_of(self, program: str) -> ProgramMemory:
        size = self.split.halves.host_bytes
        on_host = {"forward": (0, size), "backward": (size, 0)}.get(program, (0, 0))
        return ProgramMemory.of(self.jits.compiled(program), on_host)


def names_of(count: int) -> tuple[str, ...]:
    """Return the names of the programs of `value_and_grad`."""
    return ("step",) if count == 1 else ("forward", "backward")
