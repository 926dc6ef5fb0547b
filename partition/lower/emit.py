"""Write a schedule out as two jaxprs.

The forward is `primals -> (outputs, residuals)`, the backward `(residuals, primals, cotangents) -> gradients`. Both are
written step by step: a loop's forward gets new stacks for what is saved and loses those that are not, its backward
gets the recomputation in its body. A value waits, or is written out, by an optimisation barrier. Equations keep their
name stack and source line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jointcut.partition.errors import PlanError, message
from jointcut.partition.lower.follow import Followed, flat, lengths_between
from jointcut.partition.lower.steps import Enter, Keep, Parts, Schedule, Segments
from jointcut.partition.nesting.kinds import KINDS
from jointcut.partition.program import jaxprs
from jointcut.partition.program.bodies import Apart, Body, DividingKind
from jointcut.partition.program.graph import TOP, Graph, Op, Region
from jointcut.partition.program.roles import Role, Side
from jointcut.partition.rewrite.simplify import renamed
from jointcut.partition.stored.packing import HOOK, Packed, Packings

#: A value of a loop that is divided, and whether its stack of the last steps is meant, or else the starts of segments.
_Key = tuple[int, bool]


@dataclass(frozen=True)
class Residual:
    """Where the backward finds one value of the forward: `kind` is "saved", "output" or "input", `index` its place
    among the forward's saved results, its outputs, or the program's primals.
    """

    kind: str
    index: int
    value: int


@dataclass(frozen=True)
class Halves:
    """The two jaxprs; `residuals` describes the leading inputs of the backward, in order.

    `waits` says that the backward computes something again, so that in one program with the forward its residuals
    wait for the cotangents.
    """

    forward: Any
    backward: Any
    residuals: tuple[Residual, ...]
    waits: bool = False

    @property
    def residual_bytes(self) -> int:
        """Bytes alive in the device's memory between the halves, beyond what the caller holds."""
        return sum(jaxprs.aval_bytes(aval) for aval in self._saved() if not jaxprs.is_on_host(aval))

    @property
    def host_bytes(self) -> int:
        """Bytes alive in host memory between the halves."""
        return sum(jaxprs.aval_bytes(aval) for aval in self._saved() if jaxprs.is_on_host(aval))

    def _saved(self) -> Iterator[Any]:
        """The types of what the forward returns for the backward alone."""
        backward, _ = jaxprs.opened(self.backward)
        pairs = zip(backward.invars, self.residuals, strict=False)
        return (v.aval for v, r in pairs if r.kind == "saved")


def emit(graph: Graph, schedule: Schedule, packings: Packings | None = None) -> Halves:
    """Write both halves as a schedule says, with the forms that it names.

    Raises `PlanError` where the graph was read from text.
    """
    if any(v.payload is None for v in graph.values):
        what = "was read from text, so it has no equations that halves could be written of."
        raise PlanError(message("The graph", what, "Trace a function; of text, plans are made by min_cut and Front."))
    with jaxprs.paused_collection():
        top = _Writer(graph, graph.regions[TOP], None, packings=packings or Packings())
        forward, kept = _forward(graph, schedule, top)
        top = _Writer(graph, graph.regions[TOP], None, packings=top.packings)
        return Halves(forward, *_backward(graph, schedule, kept, top), schedule.waits)


def _forward(graph: Graph, schedule: Schedule, top: _Writer) -> tuple[Any, list[tuple[_Key, Any]]]:
    """The forward, and what it hands over of loops in segments, each with its type."""
    outputs = graph.role_outputs(Role.OUTPUT)
    handed = [v for v in schedule.handed if v not in outputs or v in schedule.stored]
    primals = graph.role_inputs(Role.PRIMAL)
    invars = [top.define(v, top.fresh(v, TOP)) for v in primals]
    top.run(schedule.forward)
    results = [lit if v is None else top.want(v) for v, lit in _ends(graph, Role.OUTPUT)]
    kept = [(key, atom) for key, atoms in top.kept.items() for atom in atoms]
    left = flat(map(top.leaving, handed))
    waiting = [part for (v, _), atom in kept for part in top.hooked(v, atom)]
    closed = jaxprs.build(invars, [*results, *left, *waiting], top.eqns)
    return closed, [(key, atom.aval) for key, atom in kept]


def _backward(
    graph: Graph, schedule: Schedule, kept: Sequence[tuple[_Key, Any]], top: _Writer
) -> tuple[Any, tuple[Residual, ...]]:
    primals = graph.role_inputs(Role.PRIMAL)
    values = [*schedule.handed, *(v for v in primals if v not in schedule.stored)]
    top.on_host.update(schedule.offloaded)
    top.forms.update(schedule.stored)
    fed = [top.define(v, top.given(v, schedule.steps_apart.get(v))) for v in values]
    first = [[*map(jaxprs.fresh, top.types_of_kept(aval))] for _, aval in kept]
    for (key, aval), atoms in zip(kept, first, strict=True):
        top.kept.setdefault(key, []).append(top.unhooked(key[0], aval, atoms))
    cotangents = [top.define(v, top.fresh(v, TOP)) for v in graph.role_inputs(Role.COTANGENT)]
    top.run(schedule.backward)
    results = [lit if v is None else top.want(v) for v, lit in _ends(graph, Role.GRADIENT)]
    read = {v for eqn in top.eqns for v in eqn.invars if not isinstance(v, jaxprs.Literal)}
    read.update(v for v in results if not isinstance(v, jaxprs.Literal))
    counts = {v: len(atom) for v, atom in zip(values, fed, strict=True) if isinstance(atom, tuple)}
    parts = [v for ((v, _), _), atoms in zip(kept, first, strict=True) for _ in atoms]
    places = _residuals(graph, schedule, parts, counts)
    residuals = [(r, var) for r, var in zip(places, [*flat(fed), *itertools.chain(*first)], strict=True) if var in read]
    invars = [*(var for _, var in residuals), *cotangents]
    return jaxprs.build(invars, results, top.eqns), tuple(r for r, _ in residuals)


def _residuals(graph: Graph, schedule: Schedule, kept: Iterable[int], counts: Mapping[int, int]) -> Iterator[Residual]:
    """Where the forward has what is handed over, the program's inputs, and what it keeps of loops in segments.

    `counts` are how many arrays there are of a value in another form.
    """
    outputs = graph.role_outputs(Role.OUTPUT)
    saved = 0
    for v in schedule.handed:
        if v in outputs and v not in schedule.stored:
            yield Residual("output", outputs.index(v), v)
        else:
            count = counts.get(v, 1)
            yield from (Residual("saved", i, v) for i in range(saved, saved + count))
            saved += count
    for i, v in enumerate(graph.role_inputs(Role.PRIMAL)):
        if v not in schedule.stored:
            yield Residual("input", i, v)
    for i, v in enumerate(kept, saved):
        yield Residual("saved", i, v)


def _ends(graph: Graph, role: Role) -> list[tuple[int | None, Any]]:
    pairs = zip(graph.outputs, graph.literals or (None,) * len(graph.outputs), strict=True)
    return [(v, lit) for (v, r), lit in pairs if r is role]


@dataclass
class _Writer(Followed[Any]):
    """The equations of one region while they are written; atoms are variables and literals.

    `kept` is what the forward keeps of loops in segments or in two parts. Of a carried value it is what the loop
    carries where segments start, `(v, False)`: a stack, and the start of a shorter last segment. Of a value of the last
    steps, which are apart, it is the stack, `(v, True)`.
    """

    eqns: list[Any] = field(default_factory=list)
    kept: dict[_Key, list[Any]] = field(default_factory=dict)
    packings: Packings = field(default_factory=Packings)

    def fresh(self, v: int, loop: int) -> Any:
        """A new variable, or several where the value is in other forms; in host memory if the value is there."""
        lengths, forms = lengths_between(self.graph, v, loop), self.forms.get(v, ())
        avals = [jaxprs.stacked(aval, lengths) for aval in self.packings.types(self.graph.values[v].payload, forms)]
        made = tuple(jaxprs.fresh(jaxprs.on_host(aval) if v in self.on_host else aval) for aval in avals)
        return made if forms else made[0]

    def given(self, v: int, steps: int | None) -> Any:
        """A new variable of the top, or several, as `fresh`; of a loop in two parts for so many steps alone."""
        atom = self.fresh(v, TOP)
        if steps is None:
            return atom
        made = [jaxprs.fresh(jaxprs.stacked(jaxprs.unstacked(each.aval), [steps])) for each in flat([atom])]
        return tuple(made) if isinstance(atom, tuple) else made[0]

    def after(self, atom: Any, cotangent: int) -> Any:
        """Write a barrier."""
        *held, _ = self.barrier([*flat([atom]), self.want(cotangent)])
        return tuple(held) if isinstance(atom, tuple) else held[0]

    def packed(self, v: int, form: str) -> Any:
        """Write what makes the arrays of a form."""
        made: list[Any] = []
        for atom, known in zip(flat([self.leaving(v)]), self.forms_at(v, form, self.left.get(v, ())), strict=True):
            made += self.called(v, known.pack, [atom])
        return tuple(made)

    def unpacked(self, v: int, atom: Any) -> Any:
        """Write what makes arrays of those of a form."""
        *before, form = self.forms[v]
        atoms, made = list(atom), list[Any]()
        for known in self.forms_at(v, form, before):
            made += self.called(v, known.unpack, [atoms.pop(0) for _ in known.types])
        return tuple(made) if before else made[0]

    def forms_at(self, v: int, form: str, before: Sequence[str]) -> list[Packed]:
        """The form of each array of a value, as it is seen here, that is in forms `before`."""
        lengths = lengths_between(self.graph, v, self.region.loop)
        types = self.packings.types(self.graph.values[v].payload, before)
        for aval in types:
            self.packings.named(form).check(aval, lambda: self.graph.where(v))
        return [self.packings.of(form, jaxprs.stacked(aval, lengths), len(lengths)) for aval in types]

    def hooked(self, v: int, atom: Any) -> list[Any]:
        """Write what a user's functions make of what a loop in segments keeps; without them, what it keeps."""
        if HOOK not in self.packings.more:
            return [atom]
        self.packings.named(HOOK).check(atom.aval, lambda: self.graph.where(v))
        return self.called(v, self.packings.of(HOOK, atom.aval).pack, [atom])

    def types_of_kept(self, aval: Any) -> Sequence[Any]:
        """The types of what `hooked` gives for an atom of a type."""
        return self.packings.of(HOOK, aval).types if HOOK in self.packings.more else [aval]

    def unhooked(self, v: int, aval: Any, atoms: Sequence[Any]) -> Any:
        """Write what makes the atom of this type again that was `hooked`."""
        if HOOK not in self.packings.more:
            return atoms[0]
        return self.called(v, self.packings.of(HOOK, aval).unpack, atoms)[0]

    def called(self, v: int, call: Any, invars: Sequence[Any]) -> list[Any]:
        """Write a call, at the line of the op that makes a value."""
        outvars, maker = [jaxprs.fresh(var.aval) for var in call.outvars], self.graph.maker_of(v)
        eqn = jaxprs.rebound(call, invars, outvars)
        if maker is not None and maker.payload is not None:
            eqn = eqn.replace(source_info=maker.payload.source_info, ctx=maker.payload.ctx)
        self.eqns.append(eqn)
        return outvars

    def copied_out(self, v: int) -> Any:
        """Write a copy to host memory."""
        return self.moved(self.leaving(v), True)

    def copied_in(self, v: int, atom: Any) -> Any:
        """Write a copy from host memory."""
        return self.moved(atom, False)

    def moved(self, atom: Any, to_host: bool) -> Any:
        """Write a copy from one memory to the other."""
        if isinstance(atom, tuple):
            return tuple(self.moved(each, to_host) for each in atom)
        eqn, copy = jaxprs.moved(atom, to_host)
        self.eqns.append(eqn)
        return copy

    def literal(self, payload: Any) -> Any:
        """The literal itself."""
        return payload

    def barrier(self, atoms: Sequence[Any]) -> list[Any]:
        """Write a barrier."""
        eqn, held = jaxprs.barrier(atoms)
        self.eqns.append(eqn)
        return held

    def rounded(self, v: int) -> Any:
        """Write a rounding."""
        eqn, rounded = jaxprs.reduce_precision(self.want(v))
        self.eqns.append(eqn)
        return rounded

    def read(self, region: Region, atom: Any) -> Any:
        """The atom that stands for one of the jaxpr's own, read in the region that it comes from."""
        name = atom if isinstance(atom, jaxprs.Literal) else region.names[atom]
        return self.want(name) if isinstance(name, int) else name

    def op(self, op: Op, apart: bool) -> None:
        """Write one op."""
        region = self.graph.regions[op.region]
        invars = [self.read(region, atom) for atom in op.payload.invars]
        outvars = [jaxprs.fresh(atom.aval) for atom in op.payload.outvars]
        eqn = jaxprs.rebound(op.payload, invars, outvars)
        self.eqns.append(jaxprs.called(eqn) if apart else eqn)
        for v, var in zip(op.outputs, outvars, strict=True):
            self.define(v, var)

    def loop(self, step: Enter) -> None:
        """Write one equation of a loop."""
        eqn, results, _ = self.entered(step)
        self.eqns.append(eqn)
        self.finish(step, results)

    def entered(
        self, step: Enter, starts: Sequence[int] | None = None, made: Sequence[int] = ()
    ) -> tuple[Any, list[Any], list[int]]:
        """One equation of a loop, its results, carried values first, and the stacks that it takes slices of.

        With `starts` it carries these values alone, since the others do not change. They begin as new variables, as do
        the stacks that are `made` in each segment. The body is written first: it tells what the equation reads.
        """
        graph, eqn, body = self.graph, self.graph.ops[step.op].payload, self.graph.bodies[step.op]
        assert body.inside is not None, "equations are written of a graph that was read from equations"
        carried = body.carried_in if starts is None else starts
        carries = dict(zip(body.carried_in, body.inside.carries, strict=True))
        region, home = graph.regions[body.region], graph.regions[graph.ops[step.op].region]
        unchanged = frozenset(body.carried_in).difference(carried)
        inner = _Writer(graph, region, self, unchanged=unchanged, packings=self.packings)
        carry = [inner.define(v, inner.fresh(v, body.loop)) for v in carried]
        inner.run(step.steps)
        results = [inner.read(region, carries[v].following) for v in carried] + [inner.leaving(v) for v in step.stacks]
        results += [inner.read(region, v) for v in body.repeated] if starts is None else []
        closed = jaxprs.build([*inner.consts.values(), *carry, *flat(inner.xs.values())], flat(results), inner.eqns)
        self.stack(step.stacks, inner)
        outvars = [jaxprs.fresh(v.aval) for v in carry] + [self.fresh(v, self.region.loop) for v in step.stacks]
        outvars += [self.fresh(v, self.region.loop) for v in body.own] if starts is None else []
        first = [self.read(home, carries[v].start) if starts is None else inner.fresh(v, body.loop) for v in carried]
        whole = [self.read(home, carries[v].start) if v in inner.unchanged else self.want(v) for v in inner.consts]
        sliced = [self.fresh(v, self.region.loop) if v in made else self.want(v) for v in inner.xs]
        operands = whole, first, flat(sliced)
        return KINDS[body.kind].equation(eqn, closed, operands, flat(outvars)), outvars, list(inner.xs)

    def finish(self, step: Enter, results: Iterable[Any]) -> None:
        """Let the results of a loop stand for its values."""
        body = self.graph.bodies[step.op]
        for v, var in zip([*body.carried_out, *step.stacks, *body.own], results, strict=False):
            self.define(v, var)

    def keep(self, step: Keep) -> None:
        """Write a loop that keeps where its segments start."""
        eqn, made, _ = self.entered(step.loop)
        body, apart = self.graph.bodies[step.loop.op], None
        if step.whole is not None:
            both = [*step.whole.stacks, *body.own]
            same = tuple(map(both.index, (*step.loop.stacks, *body.own)))
            apart = Apart(step.last, self.entered(step.whole)[0], same)
        kept = [body.carried_in.index(v) for v in step.starts]
        results = self.splice(*_dividing(body).sweep(eqn, kept, step.length, apart))
        self.finish(step.loop, results)
        starts = results[len(made) : len(results) - len(step.tails)]
        self.kept.update(((v, False), starts[i :: len(kept)]) for i, v in enumerate(step.starts))
        tails = results[len(results) - len(step.tails) :]
        self.kept.update(((v, True), [tail]) for v, tail in zip(step.tails, tails, strict=True))

    def segments(self, step: Segments) -> None:
        """Write a loop's backward in segments."""
        lengths, reruns, starts, last = [step.length], [], step.starts, step.last
        while isinstance(step.rerun, Keep) and isinstance(step.then, Segments):
            reruns.append(self.entered(step.rerun.loop, starts)[0])
            step = step.then
            lengths.append(step.length)
        assert isinstance(step.rerun, Enter) and isinstance(step.then, Enter)
        made = step.rerun.stacks
        reruns.append(self.entered(step.rerun, starts)[0])
        back, _, sliced = self.entered(step.then, made=made)
        fed = [made.index(v) if v in made else None for v in sliced]
        rows = [self.kept[v, False] for v in starts]
        program, operands = _dividing(self.graph.bodies[step.then.op]).unwind(reruns, back, fed, lengths, last)
        operands += [v for kind in zip(*rows, strict=True) for v in kind]
        operands += [self.kept[v, True][0] for v in made] if last else []
        self.finish(step.then, self.splice(program, operands))

    def parts(self, step: Parts) -> None:
        """Write a loop in two parts; the forward makes the stacks of the values, the backward reads them."""
        values, body = step.values, self.graph.bodies[step.first.op]
        first, made, early = self.entered(step.first, made=values)
        with self.on_device(values):
            rest, _, late = self.entered(step.rest, made=values)
        owned = (
            {v: flat([self.env[v]]) for v in early if v in values},
            {v: self.kept[v, True] for v in late if v in values},
        )
        given = [
            [v in own for v in row for _ in flat([self.want(v)])] for row, own in zip((early, late), owned, strict=True)
        ]
        rows = dict(zip((*step.first.stacks, *body.own), made[len(body.carried_in) :], strict=True))
        apart = [v in values for v, atom in rows.items() for _ in flat([atom])]
        held = (self.graph.ops[i] for i, other in self.graph.bodies.items() if other.loop == body.loop)
        ahead = next(op.payload for op in held if op.origin is Side.FORWARD)
        program, operands = _dividing(body).parts(ahead, (first, rest), given, apart, step.last)
        operands += [atom for own in owned for atoms in own.values() for atom in atoms]
        results = iter(self.splice(program, operands))
        self.env.update((v, next(results)) for v in body.carried_out)
        for v in sorted(rows, key=values.__contains__):
            self.define(v, _alike(rows[v], results))
        self.kept.update(((v, True), flat([_alike(rows[v], results)])) for v in rows if v in values)

    def splice(self, program: Any, operands: Sequence[Any]) -> list[Any]:
        """Write a whole program; returns its results."""
        inner, _ = jaxprs.opened(program)
        eqns, results = renamed(inner, dict(zip(inner.invars, operands, strict=True)))
        self.eqns += eqns
        return results


def _alike(atom: Any, results: Iterator[Any]) -> Any:
    """The next results, as many as an atom has."""
    return tuple(next(results) for _ in atom) if isinstance(atom, tuple) else next(results)


def _dividing(body: Body) -> DividingKind:
    kind = KINDS[body.kind]
    assert isinstance(kind, DividingKind), f"a {body.kind} cannot run in segments"
    return kind
