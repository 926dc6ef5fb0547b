"""Run a long loop in segments: keep the carry between them, and run each segment again.

The forward of such a loop hands over the carry at the start of each segment of k steps, and no stacks. The backward,
segment by segment from the last, first runs the loop again from there, then its own steps: L residuals become L/k
carries and k residuals, for one more run of what the residuals are computed from. Several lengths, `(k1, k2, ...)`,
cut each segment into smaller ones for one more run each, as in Griewank and Walther's treeverse (TOMS 2000), though
with segments of one length.

The halves are rewritten, not the graph: which loops `reruns` allows, `sweeps` writes, and here the pieces are put in
their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jointcut.partition import jaxprs
from jointcut.partition.backend import Backend
from jointcut.partition.classify import Facts
from jointcut.partition.emit import Halves, Residual, emit
from jointcut.partition.errors import PlanError, message
from jointcut.partition.graph import LITERAL, SCAN, Graph, Op
from jointcut.partition.plan import Plan
from jointcut.partition.reruns import Segmentable as Segmentable
from jointcut.partition.reruns import best_length as best_length
from jointcut.partition.reruns import segmentable as segmentable
from jointcut.partition.rewrite import live, renamed
from jointcut.partition.roles import Role
from jointcut.partition.schedule import schedule
from jointcut.partition.sweeps import Rerun, sweep_program, unwind_program

Lengths = int | tuple[int, ...]


def written(graph: Graph, facts: Facts, plan: Plan, backend: Backend) -> Halves:
    """The two jaxprs of a plan, its loops in segments where it says so; as `emit.emit`."""
    halves = emit(graph, plan, schedule(graph, facts, plan, backend))
    return segmented(halves, graph, facts, plan, dict(plan.segments)) if plan.segments else halves


def segmented(halves: Halves, graph: Graph, facts: Facts, plan: Plan, lengths: Mapping[int, Lengths]) -> Halves:
    """The halves with some loops in segments: `lengths` says by loop id how many steps a segment has.

    The kept carries are saved results of the forward, as is what the loop reads and the backward did not have so far.
    Barriers tie each segment to the cotangent. A loop of whose stacks none is handed over, since no gradient comes of
    what reads them, stays as it is. Raises `PlanError` for a loop that cannot run in segments, or such a length.
    """
    known = segmentable(graph, facts, plan)
    asked = {loop: _checked(known, loop, given) for loop, given in lengths.items()}
    handed = {r.value for r in halves.residuals}
    chosen = {loop: ks for loop, ks in asked.items() if handed.intersection(known[loop].values)}
    work = _Work.of(halves, graph)
    by_origin = _Names.of(graph)
    matched = {loop: work.matched(known[loop]) for loop in chosen}
    names = {loop: by_origin.operands(work, found.forward) for loop, found in matched.items()}
    for loop, ks in chosen.items():
        with jaxprs.paused_collection():
            _rewrite(work, graph, known[loop], ks, names[loop])
    return work.halves()


def _checked(known: Mapping[int, Segmentable], loop: int, given: Lengths) -> tuple[int, ...]:
    where = f"lengths[{loop}]"
    if loop not in known:
        cure = f"Those that can: {sorted(known)}."
        raise PlanError(message(where, "names a loop that cannot run in segments.", cure))
    ks = given if isinstance(given, tuple) else (given,)
    bounds = (known[loop].length + 1, *ks)
    if not ks or any(not 1 <= k < most for k, most in zip(ks, bounds, strict=False)):
        cure = f"Give a length from 1 to {known[loop].length}, or several in a tuple, each shorter than the one before."
        raise PlanError(message(where, f"is {given}, and the loop has {known[loop].length} steps.", cure))
    return ks


@dataclass(frozen=True)
class _Link:
    """A residual while the halves are rewritten: what the forward calls it, and what the backward does."""

    made: Any
    read: Any
    value: int


@dataclass(frozen=True)
class _Match:
    """The scan equations of a loop in both halves; `fed` maps what the backward scans over to the forward's stacks."""

    forward: Any
    backward: Any
    fed: dict[Any, Any]


@dataclass
class _Work:
    """Both halves, taken apart into lists."""

    primals: list[Any]
    eqns: list[Any]
    outputs: list[Any]
    saved: list[Any]
    links: list[_Link]
    cotangents: list[Any]
    back: list[Any]
    gradients: list[Any]
    waits: bool

    @classmethod
    def of(cls, halves: Halves, graph: Graph) -> _Work:
        forward, backward = jaxprs.opened(halves.forward)[0], jaxprs.opened(halves.backward)[0]
        count = len(graph.role_outputs(Role.OUTPUT))
        outputs, saved = list(forward.outvars[:count]), list(forward.outvars[count:])
        places = {"input": forward.invars, "output": outputs, "saved": saved}
        pairs = zip(halves.residuals, backward.invars, strict=False)
        links = [_Link(places[r.kind][r.index], var, r.value) for r, var in pairs]
        cotangents = list(backward.invars[len(links) :])
        primals, eqns, back = list(forward.invars), list(forward.eqns), list(backward.eqns)
        return cls(primals, eqns, outputs, saved, links, cotangents, back, list(backward.outvars), halves.waits)

    def halves(self) -> Halves:
        forward = jaxprs.build(self.primals, [*self.outputs, *self.saved], self.eqns)
        backward = jaxprs.build([*(link.read for link in self.links), *self.cotangents], self.gradients, self.back)
        return Halves(forward, backward, tuple(map(self.residual, self.links)), self.waits)

    def residual(self, link: _Link) -> Residual:
        for kind, atoms in (("input", self.primals), ("output", self.outputs), ("saved", self.saved)):
            for index, atom in enumerate(atoms):
                if atom is link.made:
                    return Residual(kind, index, link.value)
        raise AssertionError("a residual is lost")

    def at_hand(self, atom: Any, value: int | None) -> Any:
        """What the backward calls an atom of the forward, which is handed over if it was not so far."""
        if isinstance(atom, jaxprs.Literal) or value is None:
            return atom
        for link in self.links:
            if link.made is atom:
                return link.read
        if not any(atom is a for a in (*self.primals, *self.outputs, *self.saved)):
            self.saved.append(atom)
        return self.link(atom, jaxprs.fresh(atom.aval), value)

    def link(self, made: Any, read: Any, value: int) -> Any:
        """Note a residual; returns what the backward calls it."""
        self.links.append(_Link(made, read, value))
        return read

    def matched(self, record: Segmentable) -> _Match:
        """Find a loop's scans by the stacks that pass between them."""
        stacks = {link.read: link.made for link in self.links if link.value in record.values}
        makers = {v: eqn for eqn in self.eqns for v in eqn.outvars}
        forward = list({id(makers[v]): makers[v] for v in stacks.values() if v in makers}.values())
        backward = [eqn for eqn in self.back if any(v in stacks for v in _scanned(eqn))]
        if not len(forward) == len(backward) == 1:
            cure = "Pass the halves that emit wrote for this graph and this plan."
            raise PlanError(message(f"loop {record.loop}", "is not to be found in these halves.", cure))
        fed = {v: stacks[v] for v in _scanned(backward[0]) if v in stacks}
        return _Match(forward[0], backward[0], fed)

    def replace_forward(self, old: Any, new: Any, results: Sequence[Any]) -> list[Any]:
        """Put a program in the place of an equation of the forward, its first results in that of `results`; returns
        the others.
        """
        ends = [*self.outputs, *self.saved, *(link.made for link in self.links)]
        self.eqns, ends, others = _spliced(self.eqns, ends, old, new, old.invars, results)
        a, b = len(self.outputs), len(self.outputs) + len(self.saved)
        self.outputs, self.saved = ends[:a], ends[a:b]
        self.links = [_Link(v, link.read, link.value) for v, link in zip(ends[b:], self.links, strict=True)]
        return others

    def unread(self) -> list[Any]:
        """Drop what the backward does not need any more; returns the forward's atoms that need not be saved now."""
        part = live(self.back, self.gradients)
        self.back = [eqn for i, eqn in enumerate(self.back) if i in part.places]
        gone = [link.made for link in self.links if link.read not in part.read]
        self.links = [link for link in self.links if link.read in part.read]
        self.saved = [v for v in self.saved if not any(v is g for g in gone)]
        return gone


def _scanned(eqn: Any) -> list[Any]:
    """What a scan equation scans over; nothing for others."""
    if eqn.primitive.name != "scan":
        return []
    layout = jaxprs.scan_layout(eqn)
    xs = eqn.invars[layout.num_consts + layout.num_carry :]
    return [v for v in xs if not isinstance(v, jaxprs.Literal)]


def _rewrite(work: _Work, graph: Graph, record: Segmentable, ks: tuple[int, ...], names: Sequence[int | None]) -> None:
    """Put one loop into segments, in both halves."""
    match = work.matched(record)
    eqn, layout = match.forward, jaxprs.scan_layout(match.forward)
    stacks = list(dict.fromkeys(match.fed.values()))
    rerun = Rerun.of(eqn, stacks)
    count, rest = divmod(record.length, ks[0])
    carried = graph.ops[record.scan].outputs[layout.num_carry :]
    kept = [carried[j] for j in rerun.carries]
    starts = [jaxprs.fresh(jaxprs.stacked(eqn.invars[i].aval, [count])) for i in rerun.starts]
    last = [jaxprs.fresh(eqn.invars[i].aval) for i in rerun.starts] if rest else []
    if layout.reverse and rest:
        last = [work.at_hand(eqn.invars[i], names[i]) for i in rerun.starts]
    consts, xs = ([work.at_hand(eqn.invars[i], names[i]) for i in places] for places in (rerun.consts, rerun.xs))
    gone = _rewrite_backward(work, match, rerun, ks, [*consts, *xs], [*starts, *last])
    new = sweep_program(eqn, gone, rerun, ks[0])
    left = [v for v in eqn.outvars if v not in gone]
    noted = work.replace_forward(eqn, new, left)
    for made, read, value in zip(noted, [*starts, *last], [*kept, *kept], strict=False):
        work.saved.append(made)
        work.link(made, read, value)


def _rewrite_backward(
    work: _Work, match: _Match, rerun: Rerun, ks: tuple[int, ...], read: Sequence[Any], starts: Sequence[Any]
) -> list[Any]:
    """Put a loop's backward into segments; returns the forward's stacks that are not read any more."""
    back, layout = match.backward, jaxprs.scan_layout(match.backward)
    stacks = list(dict.fromkeys(match.fed.values()))
    scanned = back.invars[layout.num_consts + layout.num_carry :]
    sources = [None if isinstance(v, jaxprs.Literal) else match.fed.get(v) for v in scanned]
    fed = [None if v is None else stacks.index(v) for v in sources]
    others = [v for v, stack in zip(scanned, fed, strict=True) if stack is None]
    new = unwind_program(match.forward, rerun, back, fed, ks)
    operands = [*read, *back.invars[: layout.num_consts + layout.num_carry], *others, *starts]
    work.back, work.gradients, _ = _spliced(work.back, work.gradients, back, new, operands, back.outvars)
    return [v for v in work.unread() if v in stacks]


def _spliced(
    eqns: Sequence[Any], ends: Sequence[Any], old: Any, new: Any, operands: Sequence[Any], results: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Equations and ends with a program in the place of one equation; returns the program's further results too."""
    inner, _ = jaxprs.opened(new)
    body, outs = renamed(inner, dict(zip(inner.invars, operands, strict=True)))
    place = next(i for i, eqn in enumerate(eqns) if eqn is old)
    whole, _ = jaxprs.opened(jaxprs.build([], ends, [*eqns[:place], *body, *eqns[place + 1 :]]))
    eqns, ends = renamed(whole, dict(zip(results, outs, strict=False)))
    return eqns, ends, outs[len(results) :]


# ------------------------------------------------------------------------------------- what the graph calls an atom


@dataclass(frozen=True)
class _Names:
    """Which value of the graph a variable of the emitted forward holds; an equation is known by where it came from."""

    graph: Graph
    ops: dict[tuple[int, str], Op]

    @classmethod
    def of(cls, graph: Graph) -> _Names:
        made = [op for op in graph.ops if op.payload is not None and op.name != LITERAL]
        return cls(graph, {_origin(op.payload): op for op in made})

    def operands(self, work: _Work, eqn: Any) -> list[int | None]:
        """The values that an equation of the forward reads, None for literals."""
        known = dict(zip(work.primals, self.graph.role_inputs(Role.PRIMAL), strict=True))
        atoms = [None if isinstance(v, jaxprs.Literal) else v for v in eqn.invars]
        return [None if v is None else known[v] if v in known else self.name(work.eqns, v) for v in atoms]

    def name(self, eqns: Sequence[Any], var: Any) -> int:
        """The value that one of some equations computes."""
        eqn = next(eqn for eqn in eqns if any(v is var for v in eqn.outvars))
        place, op = eqn.outvars.index(var), self.ops.get(_origin(eqn))
        if op is None:  # it holds back or rounds its last operands
            held = eqn.invars[len(eqn.invars) - len(eqn.outvars) + place]
            return self.name(eqns, held)
        return self.stack(op, eqn, place) if op.name == SCAN else op.outputs[place]

    def stack(self, op: Op, eqn: Any, place: int) -> int:
        """A result of a loop's scan: a final carry, a stack of what its body makes, or a repeated constant."""
        layout = jaxprs.scan_layout(eqn)
        own = len(op.outputs) - 2 * layout.num_carry
        if place < layout.num_carry:
            return op.outputs[place]
        if place >= len(eqn.outvars) - own:
            return op.outputs[place - len(eqn.outvars)]
        end = layout.body.outvars[place]
        for i, var in enumerate(layout.body.invars[layout.num_consts :]):
            if var is end:
                return op.outputs[layout.num_carry + i]
        return self.name(layout.body.eqns, end)


def _origin(eqn: Any) -> tuple[int, str]:
    return id(eqn.source_info), eqn.primitive.name
