"""Write the equations of one region while a schedule is followed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jointcut.partition.bodies.kinds import KINDS, ONCE_KINDS
from jointcut.partition.bodies.stacks import made_late
from jointcut.partition.lower.follow import Followed, flat, results_of
from jointcut.partition.lower.once_programs import Given, KeptValue, Lent
from jointcut.partition.lower.steps import Enter, Fork, Keep, Parts, Segments
from jointcut.partition.packing.packing import Packed, Packings
from jointcut.partition.program.bodies import Apart, Body, DividingKind, Kept
from jointcut.partition.program.graph import TOP, Op, Region, lengths_between
from jointcut.partition.program.jax import abstract, barriers, jaxprs, meshes
from jointcut.partition.program.roles import Side
from jointcut.partition.rewrite.simplify import named, renamed

#: A value of a divided loop, and a flag: True for its stack of the last steps, False for the starts of segments.
Key = tuple[int, bool]


@dataclass
class Writer(Followed[Any]):
    """The equations of one region while they are written; atoms are variables and literals.

    `kept` holds the values that the forward keeps for loops in segments or in two parts. For a carried value, `(v,
    False)` is a stack of its values where segments start, and the start of a shorter last segment. For a value of the
    last steps, which run apart, `(v, True)` is its stack. `shared` says how a value that a branch keeps is handed over.
    Its keys are the value and the loop around the conditional. `segmented` says how a program that runs once hands over
    what it has `kept`, by its loop.
    """

    eqns: list[Any] = field(default_factory=list)
    kept: dict[Key, list[Any]] = field(default_factory=dict)
    packings: Packings = field(default_factory=Packings)
    shared: dict[tuple[int, int], KeptValue] = field(default_factory=dict)
    segmented: dict[int, Kept] = field(default_factory=dict)

    def fresh(self, v: int, loop: int) -> Any:
        """A new variable, or several where the value is in other forms; in host memory if the value is there.

        Outside a branch, the variables of all values that the branches keep.
        """
        if (branch := self.graph.branch_of(v, loop)) is not None:
            around = self.graph.loops[branch].parent
            lengths = lengths_between(self.graph.loops, around, loop)
            return tuple(jaxprs.fresh(abstract.stacked(aval, lengths)) for aval in self.shared[v, around].kept.avals)
        lengths, forms = self.graph.lengths(v, loop), self.forms.get(v, ())
        avals = [abstract.stacked(aval, lengths) for aval in self.packings.types(self.graph.values[v].payload, forms)]
        made = tuple(jaxprs.fresh(abstract.on_host(aval) if v in self.on_host else aval) for aval in avals)
        return made if forms else made[0]

    def given(self, v: int, steps: int | None) -> Any:
        """A new variable of the top, or several, as `fresh`; for a loop in two parts, with `steps` steps only."""
        atom = self.fresh(v, TOP)
        if steps is None:
            return atom
        made = [jaxprs.fresh(abstract.stacked(abstract.unstacked(each.aval), [steps])) for each in flat([atom])]
        return tuple(made) if isinstance(atom, tuple) else made[0]

    def after(self, atom: Any, cotangent: int) -> Any:
        """Write a barrier."""
        *held, _ = self.barrier([*flat([atom]), self.want(cotangent)])
        return tuple(held) if isinstance(atom, tuple) else held[0]

    def packed(self, v: int, form: str) -> Any:
        """Pack a value: write the equations that make the arrays of its form."""
        made: list[Any] = []
        for atom, known in zip(flat([self.leaving(v)]), self.forms_at(v, form, self.left.get(v, ())), strict=True):
            made += self.called(v, known.pack, [atom])
        return tuple(made)

    def unpacked(self, v: int, atom: Any) -> Any:
        """Unpack a stored value: write the equations that make it from the arrays of its form."""
        *before, form = self.forms[v]
        atoms, made = list(atom), list[Any]()
        for known in self.forms_at(v, form, before):
            made += self.called(v, known.unpack, [atoms.pop(0) for _ in known.types])
        return tuple(made) if before else made[0]

    def forms_at(self, v: int, form: str, before: Sequence[str]) -> list[Packed]:
        """The form of each array of a value, as it is seen here; the value is already in the forms `before`."""
        lengths, aval = self.graph.lengths(v, self.region.loop), self.graph.values[v].payload
        return self.packings.seen(form, aval, before, lengths, lambda: self.graph.where(v))

    def hook(self, v: int, aval: Any) -> Packed | None:
        """A user's functions for a value that a loop in segments keeps, if there are any."""
        return self.packings.hook(aval, lambda: self.graph.where(v))

    def hooked(self, v: int, atom: Any) -> list[Any]:
        """Pack a value kept at the start of a segment with the user's functions; without them, return the value."""
        hook = self.hook(v, atom.aval)
        return [atom] if hook is None else self.called(v, hook.pack, [atom])

    def unhooked(self, v: int, aval: Any, atoms: Sequence[Any]) -> Any:
        """Unpack a value that was `hooked`, to this type."""
        hook = self.hook(v, aval)
        return atoms[0] if hook is None else self.called(v, hook.unpack, atoms)[0]

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
        eqn, copy = barriers.moved(atom, to_host)
        self.eqns.append(eqn)
        return copy

    def literal(self, payload: Any) -> Any:
        """The literal itself."""
        return payload

    def barrier(self, atoms: Sequence[Any]) -> list[Any]:
        """Write a barrier."""
        eqns, held = barriers.barriers(atoms)
        self.eqns += eqns
        return held

    def rounded(self, v: int) -> Any:
        """Write a rounding."""
        eqn, rounded = barriers.reduce_precision(self.want(v))
        self.eqns.append(eqn)
        return rounded

    def read(self, region: Region, atom: Any) -> Any:
        """The atom that stands for one of the jaxpr's own atoms, read in the atom's region."""
        name = atom if isinstance(atom, jaxprs.Literal) else region.names[atom]
        return self.want(name) if isinstance(name, int) else name

    def op(self, op: Op, apart: bool) -> None:
        """Write one op."""
        region = self.graph.regions[op.region]
        invars = [self.read(region, atom) for atom in op.payload.invars]
        outvars = [jaxprs.fresh(atom.aval) for atom in op.payload.outvars]
        eqn = jaxprs.rebound(op.payload, invars, outvars)
        self.write_out([barriers.called(eqn) if apart else eqn], outvars, op.outputs)

    def loop(self, step: Enter) -> None:
        """Write one equation of a loop."""
        eqn, results, _ = self.entered(step)
        self.write_out([eqn], results, results_of(self.graph, step))

    def entered(
        self, step: Enter, starts: Sequence[int] | None = None, made: Sequence[int] = ()
    ) -> tuple[Any, list[Any], list[int]]:
        """One equation of a loop, its results, carried values first, and the stacks that it takes slices of.

        With `starts` only these values are carried, since the others do not change. They begin as new variables, as do
        the stacks that are `made` in each segment. The body is written first, since it decides what the equation reads.
        """
        graph, eqn, body = self.graph, self.graph.ops[step.op].payload, self.graph.bodies[step.op]
        assert body.inside is not None, "equations are written of a graph that was read from equations"
        carried = body.carried_in if starts is None else starts
        carries = dict(zip(body.carried_in, body.inside.carries, strict=True))
        region, home = graph.regions[body.region], graph.regions[graph.ops[step.op].region]
        unchanged = frozenset(body.carried_in).difference(carried)
        inner = replace(self.another(body.region, self), unchanged=unchanged)
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

    def write_out(self, eqns: Sequence[Any], results: Sequence[Any], values: Sequence[int] = ()) -> list[Any]:
        """Write equations, in which stacks may wait; return the atoms of results, the first of them for `values`."""
        if self.late is not None:
            late, left = [self.want(v) for v in self.late.values], self.late.left
            kept = [atom for v, atom in zip(values, results, strict=False) if v in left]
            eqns, names = made_late(eqns, flat(late), flat(kept))
            results = [atom if isinstance(atom, tuple) else named(names, atom) for atom in results]
        self.eqns += eqns
        self.env.update(zip(values, results, strict=False))
        return list(results)

    def fork(self, step: Fork) -> None:
        """Write an equation whose programs run at most once; its branches are written first, as bodies of loops are."""
        graph, op, body = self.graph, self.graph.ops[step.op], self.graph.bodies[step.op]
        kind, eqn, home = ONCE_KINDS[body.kind], op.payload, graph.regions[op.region]
        found = kind.once(eqn)
        assert found is not None, "equations are written of a graph that was read from equations"
        inner = [self.another(region, self) for region in body.regions]
        lent = self.lent(inner[0])
        for writer, branch in zip(inner, step.branches, strict=True):
            with meshes.inside(eqn):
                writer.run(branch.steps)
            self.stack(branch.stacks, writer)
        ends = [
            [writer.read(writer.region, program.outvars[i]) for i in body.places]
            for writer, program in zip(inner, found.programs, strict=True)
        ]
        left = [[writer.leaving(v) for v in branch.stacks] for writer, branch in zip(inner, step.branches, strict=True)]
        starts = {key: atoms for key, atoms in inner[0].kept.items() if key not in self.kept}
        rows = [left] * bool(step.stacks) + [[[*itertools.chain(*starts.values())]]] * bool(starts)
        kept = [kind.keep(eqn, [[atom.aval for atom in flat(own)] for own in row]) for row in rows]
        given, programs = Given.of(self, inner, self.shared, lent), []
        for k, writer in enumerate(inner):
            packed = [hand.pack(k, flat(row[k])) for hand, row in zip(kept, rows, strict=True)]
            eqns, results = (list(itertools.chain(*(pair[i] for pair in packed))) for i in (0, 1))
            programs.append(given.program(k, writer, [*writer.eqns, *eqns], [*ends[k], *results]))
        chosen_by = None if found.chosen_by is None else self.read(home, found.chosen_by)
        types = [*(eqn.outvars[i].aval for i in body.places), *(aval for hand in kept for aval in hand.avals)]
        views = given.views(body, found, kept)
        written = kind.equation(eqn, programs, chosen_by, given.operands, types, views)
        self.eqns.append(written)
        made = iter(written.outvars)
        self.env.update((v, next(made)) for v in op.outputs)
        if step.stacks:
            self.share(step, kept[0], left, [next(made) for _ in kept[0].avals])
        self.kept.update((key, [next(made) for _ in atoms]) for key, atoms in starts.items())
        self.segmented.update({body.loop: kept[-1]} if starts else {})

    def share(self, step: Fork, kept: Kept, left: Sequence[Sequence[Any]], slots: Sequence[Any]) -> None:
        """Let one value stand for all values that branches keep, and note where each of them lies."""
        (leader,) = step.stacks
        self.define(leader, tuple(slots))
        for branch, own in zip(step.branches, left, strict=True):
            places = itertools.accumulate((len(flat([atom])) for atom in own), initial=0)
            for v, atom, at in zip(branch.stacks, own, places, strict=False):
                self.shared[v, self.region.loop] = KeptValue(kept, leader, at, len(flat([atom])))

    def lent(self, inner: Writer) -> Lent:
        """Let a program read all that its forward has kept for loops in segments."""
        loop, values = inner.region.loop, self.graph.values
        if loop not in self.segmented or inner.region.origin is Side.FORWARD:
            return Lent()
        kept = {key: atoms for key, atoms in self.kept.items() if loop in self.graph.ancestors[values[key[0]].loop]}
        how = self.segmented[loop]
        slots = [*map(jaxprs.fresh, how.inside)]
        eqns, atoms = how.unpack(0, slots)
        inner.eqns += eqns
        rows = iter(atoms)
        inner.kept.update((key, [next(rows) for _ in own]) for key, own in kept.items())
        return Lent(slots, [*itertools.chain(*kept.values())], how.views)

    def another(self, region: int, around: Writer | None) -> Writer:
        """The equations of another region, none so far, with the same forms and shared values."""
        kept = {"packings": self.packings, "shared": self.shared, "segmented": self.segmented}
        return Writer(self.graph, self.graph.regions[region], around, **kept)

    def keep(self, step: Keep) -> None:
        """Write a loop that keeps the starts of its segments."""
        eqn, made, _ = self.entered(step.loop)
        body, apart = self.graph.bodies[step.loop.op], None
        if step.whole is not None:
            both = [*step.whole.stacks, *body.own]
            whole, _, _ = self.entered(step.whole)
            places = [v for v in both for _ in flat([self.fresh(v, self.region.loop)])]
            same = tuple(i for v in (*step.loop.stacks, *body.own) for i in _all_of(places, v))
            apart = Apart(step.last, whole, same)
        kept = [body.carried_in.index(v) for v in step.starts]
        results = self.splice(*_dividing(body).sweep(eqn, kept, step.length, apart))
        rows = iter(results)
        self.env.update(zip(results_of(self.graph, step.loop), [_alike(atom, rows) for atom in made], strict=False))
        tails = [self.fresh(v, self.region.loop) for v in step.tails]
        end = len(results) - len(flat(tails))
        starts, rest = results[len(flat(made)) : end], iter(results[end:])
        self.kept.update(((v, False), starts[i :: len(kept)]) for i, v in enumerate(step.starts))
        self.kept.update(((v, True), flat([_alike(tail, rest)])) for v, tail in zip(step.tails, tails, strict=True))

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
        places = list(itertools.chain(*([v] * len(flat([self.fresh(v, self.region.loop)])) for v in made)))
        fed = [i for v in sliced for i in (_all_of(places, v) if v in made else [None] * len(flat([self.want(v)])))]
        rows = [self.kept[v, False] for v in starts]
        program, operands = _dividing(self.graph.bodies[step.then.op]).unwind(reruns, back, fed, lengths, last)
        operands += [v for kind in zip(*rows, strict=True) for v in kind]
        operands += [atom for v in made for atom in flat(self.kept[v, True])] if last else []
        self.env.update(zip(results_of(self.graph, step.then), self.splice(program, operands), strict=False))

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

    def splice(self, program: Any, operands: Sequence[Any], values: Sequence[int] = ()) -> list[Any]:
        """Write a whole program; return its results. The first results stand for `values`."""
        inner, _ = jaxprs.opened(program)
        eqns, results = renamed(inner, dict(zip(inner.invars, operands, strict=True)))
        return self.write_out(eqns, results, values)


def _all_of(values: Sequence[int], v: int) -> list[int]:
    """All places of a value in a sequence."""
    return [i for i, other in enumerate(values) if other == v]


def _alike(atom: Any, results: Iterator[Any]) -> Any:
    """The next results, as many as an atom has variables."""
    return tuple(next(results) for _ in atom) if isinstance(atom, tuple) else next(results)


def _dividing(body: Body) -> DividingKind:
    kind = KINDS[body.kind]
    assert isinstance(kind, DividingKind), f"a {body.kind} cannot run in segments"
    return kind
