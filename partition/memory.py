"""Replay a plan and count the bytes alive at every step.

The two halves are walked equation by equation as one program: a buffer lives from the equation that writes it to the
last one that reads it. What XLA fuses into its readers has no buffer, and its operands live until those readers run; a
reshape or a barrier is another name for the same buffer; an elementwise result takes the place of an operand of its
size that ends there. The body of a loop adds its own peak once. Arguments, outputs and gradients lie in buffers of
their own and are not counted, as in XLA's `temp_size_in_bytes`. This is a model: the compiler reorders, copies and
reuses as it likes, and its own account decides whether a budget holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jointcut.partition import jaxprs
from jointcut.partition.emit import Halves
from jointcut.partition.figures import human_bytes
from jointcut.partition.graph import Graph
from jointcut.partition.jaxprs import Equation, Literal, Var
from jointcut.partition.places import line_of
from jointcut.partition.plan import Plan
from jointcut.partition.policy import CALLS, DEAR, ELEMENTWISE, MOVEMENT, REDUCTIONS
from jointcut.partition.roles import Role, Side

_BARRIER = "optimization_barrier"

#: Another name for the same bytes.
RENAMING = frozenset({_BARRIER, "copy_p", "expand_dims", "reshape", "squeeze", "random_unwrap", "random_wrap"})

#: XLA computes them within what reads them, or within what they read.
FUSED_AWAY = (ELEMENTWISE | MOVEMENT | CALLS) - RENAMING
READS_FUSED = FUSED_AWAY | REDUCTIONS | {"dynamic_update_slice"}

#: They write into an operand if nothing reads it later.
UPDATING = frozenset({"dynamic_update_slice", "scatter", "scatter-add", "scatter_add"})

#: They may write over an operand that nothing reads later.
_IN_PLACE = ELEMENTWISE | CALLS | UPDATING | {"while", "scan"}

#: They bring an operand into the layout that they like by themselves.
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


#: They have no body, which most equations are told by without a look at their parameters.
_BODILESS = (ELEMENTWISE | MOVEMENT | REDUCTIONS | RENAMING | _PRODUCTS) - CALLS


@dataclass(frozen=True)
class Buffer:
    """One array that is alive at the peak: its `bytes`, type, the op that wrote it and the user's line."""

    bytes: int
    type: str
    op: str
    source: str

    def __str__(self) -> str:
        """`8.39 MB float32[16,128,1024] dot_general at model.py:40`."""
        where = f" at {self.source}" if self.source else ""
        return f"{human_bytes(self.bytes)} {self.type} {self.op}{where}"


@dataclass(frozen=True)
class Replay:
    """The peak of a program in bytes, the side and the op where it is reached, and what is alive there, largest first.

    Inside a loop what lies around the loop counts too.
    """

    peak_bytes: int
    side: Side
    op: str
    alive: tuple[Buffer, ...]


def residual_bytes(halves: Halves) -> int:
    """Bytes alive between the halves, beyond what the caller holds."""
    backward, _ = jaxprs.opened(halves.backward)
    pairs = zip(backward.invars, halves.residuals, strict=False)
    return sum(jaxprs.aval_bytes(v.aval) for v, r in pairs if r.kind == "saved")


def spared(plan: Plan, halves: Halves) -> Plan:
    """The plan, with what its loops in segments do not hand over."""
    if not plan.segments:
        return plan
    return replace(plan, bytes_spared=sum(s.bytes for s in plan.saved) - residual_bytes(halves))


def replay(halves: Halves, graph: Graph) -> Replay:
    """Walk the two halves of a graph's plan as one program."""
    sweep, count = sweep_of(halves, graph)
    peak, at, alive = sweep.peak()
    side = Side.FORWARD if at < count else Side.BACKWARD
    name = sweep.eqns[at].primitive.name if sweep.eqns else ""
    return Replay(peak, side, name, tuple(sorted(alive, key=lambda b: -b.bytes)))


def sweep_of(halves: Halves, graph: Graph) -> tuple[Sweep, int]:
    """The two halves of a graph's plan as one program, and how many equations of it are the forward's."""
    forward, _ = jaxprs.opened(halves.forward)
    backward, _ = jaxprs.opened(halves.backward)
    count = len(graph.role_outputs(Role.OUTPUT))
    places = {"input": forward.invars, "output": forward.outvars, "saved": forward.outvars[count:]}
    pairs = zip(backward.invars, halves.residuals, strict=False)
    handed = {var: atom for var, r in pairs if isinstance(atom := places[r.kind][r.index], Var)}
    ends = [*forward.outvars[:count], *(handed.get(v, v) for v in backward.outvars if isinstance(v, Var))]
    given = [*forward.invars, *(v for v in backward.invars if v not in handed)]
    eqns = [*forward.eqns, *backward.eqns]
    return Sweep(eqns, given, [v for v in ends if isinstance(v, Var)], handed), len(forward.eqns)


class Sweep:
    """The equations of one level, in order, with what is known of each buffer.

    `given` and `ends` lie in buffers of somebody else; `handed` are other names for variables. In the body of a loop
    `carried` results are kept until its end, and `stacks` go into their stacks at once.
    """

    def __init__(
        self,
        eqns: Sequence[Equation],
        given: Iterable[Var],
        ends: Iterable[Var],
        handed: Mapping[Var, Any] | None = None,
        carried: Iterable[Var] = (),
        stacks: Iterable[Var] = (),
    ) -> None:
        self.eqns = eqns
        self._peaks: dict[int, tuple[int, list[Buffer]]] = {}
        self.names: dict[Var, Var] = dict(handed or {})
        self.made: dict[Var, int] = {}
        self.reads: list[tuple[Var, ...]] = []
        for i, eqn in enumerate(eqns):
            self.reads.append(tuple(dict.fromkeys(self.name(v) for v in eqn.invars if not isinstance(v, Literal))))
            if eqn.primitive.name in RENAMING:
                pairs = zip(eqn.outvars, eqn.invars, strict=False)
                self.names.update((out, self.name(v)) for out, v in pairs if not isinstance(v, Literal))
            self.made.update((v, i) for v in eqn.outvars if v not in self.names)
        self.ends = {self.name(v) for v in ends}
        self.free = {self.name(v) for v in given} | self.ends
        self.carried = {self.name(v) for v in carried}
        barriers = (v for eqn in eqns if eqn.primitive.name == _BARRIER for v in eqn.invars)
        self.written = {self.name(v) for v in barriers if not isinstance(v, Literal)} | self.carried | self.ends
        self.stacks = {self.name(v) for v in stacks}
        self.last = self._last_reads()
        for i in range(len(eqns) - 1, -1, -1):  # what a result of somebody else's buffer is made of lies there already
            eqn = eqns[i]
            if eqn.primitive.name in UPDATING and self.name(eqn.outvars[0]) in self.free:
                updated = self.name(eqn.invars[0]) if not isinstance(eqn.invars[0], Literal) else None
                if updated is not None and self.last.get(updated) == i:
                    self.free.add(updated)

    def inside(self, i: int) -> tuple[int, list[Buffer]]:
        """The peak of the bodies of an equation, beyond what it reads and returns, and what is alive there."""
        if i not in self._peaks:
            body = self.body(i)
            peak, _, alive = (0, 0, []) if body is None else body.peak()
            self._peaks[i] = peak, alive
        return self._peaks[i]

    def body(self, i: int) -> Sweep | None:
        """What runs inside an equation, None for one that has no body."""
        return None if self.eqns[i].primitive.name in _BODILESS else _inside(self.eqns[i])

    def name(self, v: Any) -> Any:
        """The variable that a buffer goes by."""
        return self.names.get(v, v)

    def _last_reads(self) -> dict[Var, int]:
        """For each variable that has a buffer the last equation that reads it, itself or through fused ones."""
        readers: dict[Var, list[int]] = {}
        for i, eqn in enumerate(self.eqns):
            if eqn.primitive.name not in RENAMING:
                for v in self.reads[i]:
                    readers.setdefault(v, []).append(i)
        last = {v: self.made.get(v, 0) for v in self.stacks} | {v: len(self.eqns) for v in self.ends | self.carried}
        self.fused: set[Var] = set()
        for i in range(len(self.eqns) - 1, -1, -1):
            eqn = self.eqns[i]
            if eqn.primitive.name in RENAMING:
                continue
            out = eqn.outvars[0] if len(eqn.outvars) == 1 else None
            when = i
            if out is not None and self._is_fused(i, out, readers.get(out, ())):
                self.fused.add(out)
                when = last.pop(out, i)
            for v in self.reads[i]:
                last[v] = max(last.get(v, -1), when)
        return last

    def _is_fused(self, i: int, out: Var, readers: Sequence[int]) -> bool:
        """Whether XLA computes a result within each equation that reads it, so that it has no buffer."""
        name = self.eqns[i].primitive.name
        if name not in FUSED_AWAY or out in self.written or (name in CALLS and self.inside(i)[0]):
            return False
        repeated = name in DEAR or name in CALLS
        if repeated and len(readers) + (out in self.stacks) > 1:
            return False
        moved = name == "transpose"
        return all(
            (found := self.eqns[r].primitive.name) in READS_FUSED or (moved and found in _PRODUCTS) for r in readers
        )

    def peak(self) -> tuple[int, int, list[Buffer]]:
        """The most bytes at once, the equation where, and the buffers that are alive there."""
        ending = self.ending()
        now = most = at = 0
        for i, eqn in enumerate(self.eqns):
            reused = sum(jaxprs.aval_bytes(v.aval) for v in self.replaced(i, ending[i]))
            now += sum(jaxprs.aval_bytes(v.aval) for v in eqn.outvars if self.has_buffer(v, i))
            inside, _ = self.inside(i)
            if now - reused + inside > most:
                most, at = now - reused + inside, i
            now -= sum(jaxprs.aval_bytes(v.aval) for v in ending[i])
        return most, at, self._alive(at)

    def ending(self) -> list[list[Var]]:
        """For each equation, and for the end, the buffers that nothing reads after it."""
        found: list[list[Var]] = [[] for _ in range(len(self.eqns) + 1)]
        for v, i in self.last.items():
            if v in self.made and v not in self.free:
                found[max(i, self.made[v])].append(v)
        return found

    def replaced(self, i: int, ending: Iterable[Var]) -> list[Var]:
        """Of the buffers that end with an equation, those whose place its results take."""
        if self.eqns[i].primitive.name not in _IN_PLACE:
            return []
        dying = [v for v in ending if self.made[v] < i]
        found: list[Var] = []
        for out in self.eqns[i].outvars:
            if self.has_buffer(out, i):
                size = jaxprs.aval_bytes(out.aval)
                fitting = next((v for v in dying if jaxprs.aval_bytes(v.aval) == size), None)
                if fitting is not None:
                    dying.remove(fitting)
                    found.append(fitting)
        return found

    def has_buffer(self, v: Var, i: int) -> bool:
        """Whether an equation writes a result into a buffer of its own."""
        return self.made.get(v) == i and v not in self.free and v not in self.fused and v in self.last

    def _alive(self, at: int) -> list[Buffer]:
        """The buffers that are there while an equation runs, those inside its loop included."""
        found = [
            Buffer(jaxprs.aval_bytes(v.aval), v.aval.str_short(), eqn.primitive.name, line_of(eqn))
            for v, last in self.last.items()
            if v in self.made and v not in self.free and v not in self.fused and self.made[v] <= at <= last
            for eqn in [self.eqns[self.made[v]]]
        ]
        return found + (self.inside(at)[1] if self.eqns else [])


def _inside(eqn: Equation) -> Sweep | None:
    """The body of an equation, of several that with the highest peak."""
    if eqn.primitive.name == "scan":
        layout = jaxprs.scan_layout(eqn)
        body = layout.body
        carried = [v for v in body.outvars[: layout.num_carry] if isinstance(v, Var)]
        stacks = [v for v in body.outvars[layout.num_carry :] if isinstance(v, Var)]
        return Sweep(body.eqns, body.invars, [], None, carried, stacks)
    bodies = [Sweep(b.eqns, b.invars, [v for v in b.outvars if isinstance(v, Var)]) for b in jaxprs.inner_jaxprs(eqn)]
    return max(bodies, key=lambda body: body.peak()[0], default=None)
