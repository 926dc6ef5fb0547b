"""Count the rows of one region while a schedule is followed: the buffers that each step makes and reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from jointcut.partition.lower.follow import Followed, in_forms, lengths_between, segments_of, steps_of
from jointcut.partition.lower.memory import STAYS, Barrier, Level, Row, Stack
from jointcut.partition.lower.steps import Enter, Keep, Parts, Segments
from jointcut.partition.nesting.stacks import is_held
from jointcut.partition.program.graph import TOP, Op, Region
from jointcut.partition.program.primitives import BARRIER, REGION, RENAMING, UPDATING


@dataclass
class Counter(Followed[int | None]):
    """The rows of one region while they are counted; atoms are buffers, None for literals.

    `starts` are, for a carried value of a loop in segments, the stack of what the loop carries where segments start.
    `tails` are, for a value that is stacked in the last steps alone or apart, that stack. If `names_barriers`, a
    barrier makes new names for the buffers that it reads, as `xla` needs it. Unless it `moves_inside`, a value goes
    into host memory, or is read there, without a copy of its own: as a result of one program and an argument of
    another.
    """

    level: Level = field(default_factory=Level)
    bodies: Mapping[int, Level] = field(kw_only=True)
    starts: dict[int, int] = field(default_factory=dict)
    tails: dict[int, int] = field(default_factory=dict)
    names_barriers: bool = False
    moves_inside: bool = True

    def copied(self) -> Counter:
        """The same rows of the top of the program, to be continued."""
        kept: dict[str, Any] = {"starts": dict(self.starts), "tails": dict(self.tails)}
        kept |= {"copies": dict(self.copies), "on_host": set(self.on_host), "away": set(self.away)}
        kept |= {"forms": dict(self.forms), "left": dict(self.left)}
        return replace(self, env=dict(self.env), written=set(), level=self.level.copied(), **kept)

    def given(self, v: int) -> int:
        """A buffer of somebody else for a value."""
        return self.level.given(self.graph.values[v].bytes, self.graph.values[v])

    def buffer(self, v: int, lengths: Sequence[int] = ()) -> int:
        """A buffer for a value, or for a stack of it."""
        value = in_forms(self.graph.values[v], self.forms.get(v, ()))
        held = Stack(value, tuple(lengths)) if lengths else value
        return self.level.buffer(value.bytes * math.prod(lengths), held)

    def fresh(self, v: int, loop: int) -> int:
        """A buffer around the level."""
        number = self.buffer(v, lengths_between(self.graph, v, loop))
        self.level.free.add(number)
        if loop == self.region.loop and v not in self.unchanged:
            self.level.sliced.add(number)
        return number

    def literal(self, payload: Any) -> None:
        """No buffer: a literal stands in the program."""

    def barrier(self, atoms: Sequence[int | None]) -> list[int | None]:
        """The same buffers, which are in memory now."""
        level, raw = self.level, tuple(b for b in atoms if b is not None)
        if not self.names_barriers:
            level.written.update(raw)
            return list(atoms)
        level.written.update(self.raw(b) for b in raw)
        made = {b: level.buffer(level.sizes[b], level.types[b]) for b in dict.fromkeys(raw)}
        level.same.update((new, self.raw(b)) for b, new in made.items())
        level.barriers.append(Barrier(len(level.rows), tuple(made), tuple(made.values())))
        return [None if b is None else made[b] for b in atoms]

    def raw(self, b: int) -> int:
        """The buffer that an atom names."""
        return self.level.same.get(b, b)

    def rounded(self, v: int) -> int:
        """A buffer of the same size."""
        maker = self.graph.maker_of(v)
        assert maker is not None, "an input is not rounded"
        made = self.buffer(v)
        self.row([self.want(v)], [made], None, maker, 1, "reduce_precision")
        return made

    def after(self, atom: int | None, cotangent: int) -> int | None:
        """The same buffer, which is in memory now."""
        return self.barrier([atom, self.want(cotangent)])[0]

    def packed(self, v: int, form: str) -> int:
        """A buffer of the size that the value has in the form."""
        return self.converted(v, self.leaving(v), (*self.left.get(v, ()), form))

    def unpacked(self, v: int, atom: int | None) -> int:
        """A buffer of the size that the value has without its last form."""
        return self.converted(v, atom, self.forms[v][:-1])

    def converted(self, v: int, atom: int | None, forms: Sequence[str]) -> int:
        """Count a conversion of a value to other forms."""
        maker, lengths = self.graph.maker_of(v), lengths_between(self.graph, v, self.region.loop)
        value = in_forms(self.graph.values[v], forms)
        made = self.level.buffer(value.bytes * math.prod(lengths), Stack(value, tuple(lengths)) if lengths else value)
        self.row([atom], [made], None, maker, 1, "convert_element_type")
        return made

    def copied_out(self, v: int) -> int | None:
        """A buffer in host memory; the value's own where nothing is copied."""
        atom = self.leaving(v)
        if atom is None or not self.moves_inside:
            self.hosted([] if atom is None else [self.raw(atom)])
            return atom
        return self.moved(v, atom, "offload")

    def copied_in(self, v: int, atom: int | None) -> int | None:
        """A buffer of the device; that in host memory where nothing is copied."""
        return self.moved(v, atom, "fetch") if self.moves_inside else atom

    def moved(self, v: int, atom: int | None, name: str) -> int:
        """Count a copy from one memory to the other."""
        maker = self.graph.maker_of(v)
        assert maker is not None, "an input of the program is not saved"
        made = self.buffer(v, lengths_between(self.graph, v, self.region.loop))
        self.hosted([made] if name == "offload" else [])
        self.row([atom], [made], None, maker, 1, name)
        return made

    def hosted(self, buffers: Iterable[int]) -> None:
        """Note buffers in host memory."""
        self.level.host.update(buffers)

    def row(
        self,
        reads: Iterable[int | None],
        makes: Iterable[int],
        inside: Level | None,
        source: Op | None,
        trips: int,
        name: str,
        carries: Iterable[tuple[int, int | None]] = (),
    ) -> None:
        """Add a row."""
        reads = tuple(reads)
        distinct = tuple(dict.fromkeys(self.raw(b) for b in reads if b is not None))
        row = Row(name, distinct, tuple(makes), None, inside, source, trips, reads, tuple(carries))
        self.level.rows.append(row)

    def op(self, op: Op, apart: bool) -> None:
        """Count one op; another name for a buffer takes no row."""
        if op.name in RENAMING:
            self.rename(op)
            return
        env, level, values, name = self.env, self.level, self.graph.values, op.name
        operands = op.operands if self.names_barriers else op.inputs
        atoms = [None if v is None else env[v] if v in env else self.want(v) for v in operands]
        if name == REGION and self.names_barriers and op.region == TOP and is_held(op.payload):
            atoms = self.barrier(atoms)
        reads = [b for b in atoms if b is not None]
        into = self.want(op.operands[0]) if name in UPDATING and op.operands[0] is not None else None
        if same := level.same:
            reads = [same.get(b, b) for b in reads]
            into = None if into is None else same.get(into, into)
        sizes, types, first = level.sizes, level.types, len(level.sizes)
        for v in op.outputs:
            env[v] = len(sizes)
            value = values[v]
            sizes.append(value.bytes)
            types.append(value)
        makes = (first,) if len(sizes) == first + 1 else tuple(range(first, len(sizes)))
        distinct = tuple(reads if len(reads) < 2 else dict.fromkeys(reads))
        level.rows.append(Row(name, distinct, makes, into, self.bodies.get(op.id), op, 1, tuple(atoms)))

    def rename(self, op: Op) -> None:
        """Let results stand for the buffers of operands, each by its place; those of literals have buffers."""
        operands = [None if v is None else self.want(v) for v in op.operands]
        if op.name == BARRIER:
            operands = self.barrier(operands)
        made = []
        for v, same in zip_longest(op.outputs, operands[: len(op.outputs)]):
            if same is None:
                made.append(self.buffer(v))
            self.define(v, made[-1] if same is None else same)
        if made:
            self.row([], made, None, op, 1, op.name)

    # ----------------------------------------------------------------------------------------------------- loops

    def loop(self, step: Enter) -> None:
        """Count a loop."""
        inner = self.body(step)
        self.enter(step, self.reads(step, inner), inner.level, steps_of(self.graph, step))

    def body(self, step: Enter, starts: Sequence[int] | None = None) -> Counter:
        """The rows of a loop's body, one step of it; with `starts` it carries these values alone."""
        graph, body = self.graph, self.graph.bodies[step.op]
        carried = body.carried_in if starts is None else starts
        unchanged = frozenset(body.carried_in).difference(carried)
        inner = self.another(graph.regions[body.region], self, unchanged)
        given = {v: inner.given(v) for v in carried}
        inner.env.update(given)
        inner.run(step.steps)
        ends = dict(zip(body.carried_in, body.carried, strict=True))
        following = {v: end for v, end in ends.items() if end is not None}
        inner.level.handed += [(b, inner.want(following[v]) if v in following else None) for v, b in given.items()]
        kept = [inner.want(end) for v in carried if (end := ends[v]) is not None]
        inner.level.carried.update(inner.raw(b) for b in kept if b is not None)
        inner.level.stacks.update(inner.raw(b) for b in map(inner.leaving, step.stacks) if b is not None)
        self.stack(step.stacks, inner)
        return inner

    def reads(self, step: Enter, inner: Counter, made: Sequence[int] = ()) -> list[int | None]:
        """The buffers that a loop reads: where its carries start, and what its body takes from around."""
        return [*self.first(step, inner), *self.taken(step, inner, made)]

    def first(self, step: Enter, inner: Counter) -> list[int | None]:
        """The buffers where a loop's carries start."""
        body = self.graph.bodies[step.op]
        pairs = zip(body.carried_in, body.starts, strict=True)
        return [self.want(start) for v, start in pairs if start is not None and v not in inner.unchanged]

    def taken(self, step: Enter, inner: Counter, made: Sequence[int] = ()) -> list[int | None]:
        """The buffers that a loop's body takes from around, but for the stacks that are `made` in each segment."""
        body = self.graph.bodies[step.op]
        starts = dict(zip(body.carried_in, body.starts, strict=True))
        whole = [starts[v] if v in inner.unchanged else v for v in inner.consts]
        stacks = [v for v in inner.xs if v not in made]
        return [self.want(v) for v in (*whole, *stacks) if v is not None]

    def enter(
        self, step: Enter, reads: Iterable[int | None], inside: Level, trips: int, others: Iterable[int] = ()
    ) -> None:
        """Add the row of a loop, and let its results stand for its values; `others` are further results."""
        graph, body = self.graph, self.graph.bodies[step.op]
        carried = [self.buffer(v) for v in body.carried_out]
        self.env.update(zip(body.carried_out, carried, strict=True))
        stacks = [
            self.define(v, self.buffer(v, lengths_between(graph, v, self.region.loop)))
            for v in (*step.stacks, *body.own)
        ]
        self.hosted(b for v in step.stacks if v in self.on_host and (b := self.env[v]) is not None)
        makes = [b for b in (*carried, *stacks, *others) if b is not None]
        carries = zip(carried, self.begins(step), strict=True)
        self.row(reads, makes, inside, graph.ops[step.op], trips, body.kind, carries)

    def begins(self, step: Enter) -> list[int | None]:
        """The buffer where each carried value of a loop starts; None for a literal."""
        return [None if v is None else self.want(v) for v in self.graph.bodies[step.op].starts]

    def keep(self, step: Keep) -> None:
        """Count a loop that keeps where its segments start, and the stacks of the steps that are in none."""
        graph, count = self.graph, segments_of(self.graph, step)
        inner = self.body(step.loop)
        starts = [self.buffer(v, [count]) for v in step.starts]
        self.starts.update(zip(step.starts, starts, strict=True))
        segment, carried = self.segment(), graph.bodies[step.loop.op].carried_in
        segment.part(step.loop, carried, [], inner.level, step.length)
        reads = self.reads(step.loop, inner)
        if step.whole is None:
            self.enter(step.loop, reads, segment.level, count, starts)
            self.join(step.loop, step.length)
            return
        steps = steps_of(graph, step.loop) - step.last
        ends, early = self.stretch(step.loop, reads, segment.level, steps, self.begins(step.loop), count, starts)
        whole = self.body(step.whole)
        ends, late = self.stretch(step.whole, [*ends, *self.taken(step.whole, whole)], whole.level, step.last, ends)
        self.tails.update((v, late[v]) for v in step.tails)
        self.finish(step.loop, ends, early, late)

    def segments(self, step: Segments) -> None:
        """Count a loop's backward in segments, and before them that of the steps that are in none."""
        segment, reads, last = self.divided(step)
        back, steps = self.body(last), steps_of(self.graph, last) - step.last
        first, count = self.first(last, back), -(-steps // step.length)
        starts = [self.starts[v] for v in step.starts]
        if not step.last:
            self.enter(last, [*starts, *first, *reads], segment.level, count)
            self.join(last, step.length)
            return
        made = step.made
        tails = [*(self.tails[v] for v in made), *self.taken(last, back, made)]
        ends, late = self.stretch(last, [*first, *tails], back.level, step.last, self.begins(last))
        ends, early = self.stretch(last, [*starts, *ends, *reads], segment.level, steps, ends, count)
        self.finish(last, ends, early, late)

    def parts(self, step: Parts) -> None:
        """Count a loop in two parts; the forward makes the stacks of the values, the backward reads them."""
        first, rest, values = step.first, step.rest, step.values
        length, last = steps_of(self.graph, first) - step.last, step.last
        early = self.body(first)
        with self.on_device(values):
            late = self.body(rest)
        if not set(values).issubset(first.stacks):
            tails = [self.tails[v] for v in values if v in late.xs]
            reads = [*self.first(rest, late), *tails, *self.taken(rest, late, values)]
            ends, ys = self.stretch(rest, reads, late.level, last, self.begins(rest))
            ends, xs = self.stretch(first, [*ends, *self.taken(first, early)], early.level, length, ends)
            self.finish(first, ends, xs, ys)
            return
        ends, xs = self.stretch(first, self.reads(first, early), early.level, length, self.begins(first))
        ends, ys = self.stretch(rest, [*ends, *self.taken(rest, late)], late.level, last, ends)
        self.hosted(xs[v] for v in values if v in self.on_host)
        self.tails.update((v, ys.pop(v)) for v in values)
        self.env.update((v, xs.pop(v)) for v in values)
        self.finish(first, ends, xs, ys)

    def stretch(
        self,
        step: Enter,
        reads: Iterable[int | None],
        inside: Level,
        length: int,
        begins: Iterable[int | None],
        trips: int | None = None,
        others: Iterable[int] = (),
    ) -> tuple[list[int], dict[int, int]]:
        """Add the row of `length` steps of a loop; returns the buffers of its carries and, by value, of its stacks.

        `begins` are where its carries start.
        """
        graph, body = self.graph, self.graph.bodies[step.op]
        ends = [self.buffer(v) for v in body.carried_out]
        shapes = ((v, lengths_between(graph, v, TOP)[1:]) for v in (*step.stacks, *body.own))
        stacks = {v: self.buffer(v, [length, *inner]) for v, inner in shapes}
        makes, carries = [*ends, *stacks.values(), *others], zip(ends, begins, strict=True)
        self.row(reads, makes, inside, graph.ops[step.op], trips or length, body.kind, carries)
        return ends, stacks

    def finish(self, step: Enter, ends: Iterable[int], early: Mapping[int, int], late: Mapping[int, int]) -> None:
        """Let the results of two stretches stand for a loop's values; their stacks are joined."""
        for v, end in zip(self.graph.bodies[step.op].carried_out, ends, strict=True):
            self.define(v, end)
        for v, stack in early.items():
            joined = self.buffer(v, lengths_between(self.graph, v, TOP))
            self.define(v, joined)
            self.row([stack, late[v]], [joined], None, self.graph.ops[step.op], 1, "concatenate")

    def segment(self) -> Counter:
        """The rows of one segment."""
        return self.another(self.region, None)

    def another(self, region: Region, parent: Counter | None, unchanged: frozenset[int] = frozenset()) -> Counter:
        """The rows of another region, none so far."""
        kept = {"bodies": self.bodies, "names_barriers": self.names_barriers, "moves_inside": self.moves_inside}
        return Counter(self.graph, region, parent, unchanged=unchanged, **kept)

    def divided(self, step: Segments) -> tuple[Counter, list[int | None], Enter]:
        """One segment of a loop's backward, what it reads from around beside carries, and the backward's own loop."""
        segment, graph = self.segment(), self.graph
        if isinstance(step.rerun, Keep) and isinstance(step.then, Segments):
            again = self.body(step.rerun.loop, step.starts)
            below, reads, last = self.divided(step.then)
            count = -(-step.length // step.then.length)
            starts = [segment.buffer(v, [count]) for v in step.starts]
            rerun = step.rerun.loop.op
            segment.row([], starts, again.level, graph.ops[rerun], step.length, graph.bodies[rerun].kind)
            segment.part(last, graph.bodies[last.op].carried_in, starts, below.level, step.length, count)
            return segment, [*self.taken(step.rerun.loop, again), *reads], last
        assert isinstance(step.rerun, Enter) and isinstance(step.then, Enter)
        again, made = self.body(step.rerun, step.starts), step.rerun.stacks
        back, carried = self.body(step.then), graph.bodies[step.then.op].carried_in
        stacks = segment.part(step.rerun, step.starts, [], again.level, step.length, keeps=False)
        segment.part(step.then, carried, stacks, back.level, step.length)
        return segment, [*self.taken(step.rerun, again), *self.taken(step.then, back, made)], step.then

    def part(
        self,
        step: Enter,
        carried: Sequence[int],
        reads: Iterable[int],
        inside: Level,
        length: int,
        trips: int | None = None,
        keeps: bool = True,
    ) -> list[int]:
        """Add the part of a loop that runs in this segment, `length` steps of it; returns its stacks.

        What it `keeps` is handed to the next segment, or goes into the stacks of the whole loop.
        """
        graph = self.graph
        ends = [self.buffer(v) for v in carried]
        shapes = [lengths_between(graph, v, TOP)[1:] for v in step.stacks]
        stacks = [self.buffer(v, [length, *inner]) for v, inner in zip(step.stacks, shapes, strict=True)]
        carries = [(end, STAYS if keeps else None) for end in ends]
        trips = trips or length
        self.row(reads, [*ends, *stacks], inside, graph.ops[step.op], trips, graph.bodies[step.op].kind, carries)
        if keeps:
            self.level.carried.update(ends)
            self.level.stacks.update(stacks)
        return stacks

    def join(self, step: Enter, length: int) -> None:
        """Copy the stacks of a loop whose last segment is shorter: it runs by itself, and they are joined."""
        if steps_of(self.graph, step) % length:
            for v in step.stacks:
                joined = self.buffer(v, lengths_between(self.graph, v, TOP))
                self.row([self.want(v)], [joined], None, self.graph.ops[step.op], 1, "concatenate")
                self.define(v, joined)
