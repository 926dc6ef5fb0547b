"""Count the rows of one region while a schedule is followed: rows of ops, whole loops and branches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Self

from jointcut.partition.bodies import kinds
from jointcut.partition.lower.follow import Followed, in_forms, runs_once, steps_of
from jointcut.partition.lower.memory.levels import Level, Row, Stack
from jointcut.partition.lower.steps import Enter, Fork
from jointcut.partition.program.graph import LITERAL, STEP, Op, Region, Value, lengths_between
from jointcut.partition.program.primitives import BARRIER, RENAMING, UPDATING


@dataclass(frozen=True)
class SharedSpace:
    """The values that branches keep, as one array of bytes, and the value that stands for it.

    A value that a program keeps which runs once has a buffer of its own, `atom`.
    """

    kept: Value
    leader: int
    atom: int | None = None


@dataclass
class RegionRows(Followed[int | None]):
    """The rows of one region while they are counted; atoms are buffers, None for literals.

    Unless the region `moves_inside`, a value goes into host memory, or is read there, without a separate copy: it is
    the result of one program and an argument of another.

    `starts` maps a carried value of a loop in segments to the stack of its values where segments start. `tails` maps a
    value that is stacked only in the last steps, or apart, to that stack. A program that runs once `is_inlined`: its
    rows are counted among the rows around it.
    """

    level: Level = field(default_factory=Level)
    bodies: Mapping[int, Level] = field(kw_only=True)
    moves_inside: bool = True
    shared: dict[tuple[int, int], SharedSpace] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    tails: dict[int, int] = field(default_factory=dict)
    is_inlined: bool = False

    def given(self, v: int) -> int:
        """A buffer of somebody else for a value."""
        return self.level.given(self.graph.values[v].bytes, self.graph.values[v])

    def buffer(self, v: int, lengths: Sequence[int] = ()) -> int:
        """A buffer for a value, or for a stack of it."""
        value = in_forms(self.graph.values[v], self.forms.get(v, ()))
        held = Stack(value, tuple(lengths)) if lengths else value
        return self.level.buffer(value.bytes * math.prod(lengths), held)

    def seen(self, v: int, loop: int, steps: int | None = None) -> int:
        """A buffer for a value as it is seen from a loop: a stack of it.

        Outside a branch the buffer holds all values that the branches keep. The stack has `steps` of its outermost
        loop, by default all.
        """
        branch = self.graph.branch_of(v, loop)
        around = self.graph.values[v].loop if branch is None else self.graph.loops[branch].parent
        lengths = lengths_between(self.graph.loops, around, loop)
        lengths = lengths if steps is None else [steps, *lengths[1:]]
        if branch is None:
            return self.buffer(v, lengths)
        kept = self.shared[v, around].kept
        held = Stack(kept, tuple(lengths)) if lengths else kept
        return self.level.buffer(kept.bytes * math.prod(lengths), held)

    def fresh(self, v: int, loop: int) -> int:
        """A buffer around the level."""
        number = self.seen(v, loop)
        self.level.free.add(number)
        return number

    def literal(self, payload: Any) -> None:
        """No buffer: a literal stands in the program."""

    def barrier(self, atoms: Sequence[int | None]) -> list[int | None]:
        """The same buffers, now in memory."""
        self.level.written.update(b for b in atoms if b is not None)
        return list(atoms)

    def rounded(self, v: int) -> int:
        """A buffer of the same size."""
        maker = self.graph.maker_of(v)
        assert maker is not None, "an input is not rounded"
        made = self.buffer(v)
        self.row([self.want(v)], [made], None, maker, 1, "reduce_precision")
        return made

    def after(self, atom: int | None, cotangent: int) -> int | None:
        """The same buffer, now in memory."""
        return self.barrier([atom, self.want(cotangent)])[0]

    def packed(self, v: int, form: str) -> int:
        """A buffer of the size that the value has in the form."""
        return self.converted(v, self.leaving(v), (*self.left.get(v, ()), form))

    def unpacked(self, v: int, atom: int | None) -> int:
        """A buffer of the size that the value has without its last form."""
        return self.converted(v, atom, self.forms[v][:-1])

    def converted(self, v: int, atom: int | None, forms: Sequence[str]) -> int:
        """Count a conversion of a value to other forms."""
        maker, lengths = self.graph.maker_of(v), self.graph.lengths(v, self.region.loop)
        value = in_forms(self.graph.values[v], forms)
        made = self.level.buffer(value.bytes * math.prod(lengths), Stack(value, tuple(lengths)) if lengths else value)
        self.row([atom], [made], None, maker, 1, "convert_element_type")
        return made

    def copied_out(self, v: int) -> int | None:
        """A buffer in host memory; the value's own where nothing is copied."""
        atom = self.leaving(v)
        if atom is None or not self.moves_inside:
            self.hosted([] if atom is None else [atom])
            return atom
        return self.moved(v, atom, "offload")

    def copied_in(self, v: int, atom: int | None) -> int | None:
        """A buffer of the device; the buffer in host memory where nothing is copied."""
        return self.moved(v, atom, "fetch") if self.moves_inside else atom

    def moved(self, v: int, atom: int | None, name: str) -> int:
        """Count a copy from one memory to the other."""
        maker = self.graph.maker_of(v)
        assert maker is not None, "an input of the program is not saved"
        made = self.buffer(v, self.graph.lengths(v, self.region.loop))
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
        starts: Iterable[int | None] = (),
    ) -> None:
        """Add a row. A loop's carries start in the buffers `starts`."""
        distinct, begun = (tuple(dict.fromkeys(b for b in bs if b is not None)) for bs in (reads, starts))
        self.level.rows.append(Row(name, distinct, tuple(makes), None, inside, source, trips, begun))

    def op(self, op: Op, apart: bool) -> None:
        """Count one op; another name for a buffer takes no row."""
        if op.name in RENAMING:
            self.rename(op)
            return
        env, level, values, name = self.env, self.level, self.graph.values, op.name
        atoms = (env[v] if v in env else self.want(v) for v in op.inputs)
        reads = [b for b in atoms if b is not None]
        into = self.want(op.operands[0]) if name in UPDATING and op.operands[0] is not None else None
        sizes, types, first = level.sizes, level.types, len(level.sizes)
        for v in op.outputs:
            env[v] = len(sizes)
            value = values[v]
            sizes.append(value.bytes)
            types.append(value)
        makes = (first,) if len(sizes) == first + 1 else tuple(range(first, len(sizes)))
        distinct = tuple(reads if len(reads) < 2 else dict.fromkeys(reads))
        loop = kinds.inside(op.payload) if op.id in self.bodies else None
        if loop is None:
            level.rows.append(Row(name, distinct, makes, into, self.bodies.get(op.id), op))
            return
        begun = {id(carry.start) for carry in loop.carries}
        pairs = zip(op.payload.invars, op.operands, strict=True)
        first = (self.env[v] for atom, v in pairs if id(atom) in begun and v is not None)
        starts = tuple(b for b in first if b is not None)
        level.rows.append(Row(name, distinct, makes, into, self.bodies[op.id], op, loop.trips or 1, starts))

    def rename(self, op: Op) -> None:
        """Let results stand for the buffers of operands in the same places; results of literals get new buffers."""
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

    def fork(self, step: Fork) -> None:
        """Count an op whose regions run at most once, as the largest; a region that surely runs, step by step."""
        if runs_once(step, self.graph):
            self.inlined(step)
            return
        graph, op, body = self.graph, self.graph.ops[step.op], self.graph.bodies[step.op]
        inner = [self.another(graph.regions[r], self) for r in body.regions]
        most = Value(-1, (), "uint8", 0)
        for counter, branch, ends in zip(inner, step.branches, body.ends, strict=True):
            counter.run(branch.steps)
            self.stack(branch.stacks, counter)
            kept = [b for b in map(counter.leaving, branch.stacks) if b is not None]
            results = [counter.want(v) for v in ends if v is not None]
            counter.level.ends.update([*kept, *(b for b in results if b is not None)])
            size = sum(counter.level.sizes[b] for b in kept)
            if size > most.bytes:
                most = Value(branch.stacks[0], (size,), "uint8", size)
        loop = graph.loop_of(op)
        xs = (v for counter in inner for v in counter.xs)
        leaders = dict.fromkeys(self.shared[v, loop].leader if (v, loop) in self.shared else v for v in xs)
        given = [v for v in op.inputs if graph.values[v].loop in graph.ancestors[loop]]
        reads = [self.want(v) for v in dict.fromkeys([*given, *(v for c in inner for v in c.consts), *leaders])]
        makes = [self.define(v, self.buffer(v)) for v in op.outputs]
        for v in (v for branch in step.branches for v in branch.stacks):
            self.shared[v, loop] = SharedSpace(most, step.stacks[0])
        for v in step.stacks:
            makes.append(self.define(v, self.seen(v, loop)))
        inside = max((counter.level for counter in inner), key=lambda level: level.peak[0])
        self.row(reads, [b for b in makes if b is not None], inside, op, 1, body.kind)

    def inlined(self, step: Fork) -> None:
        """Count an op whose one region runs once, step by step: what it keeps and reads dies where it is read last."""
        body, (branch,), op = self.graph.bodies[step.op], step.branches, self.graph.ops[step.op]
        around = {"level": self.level, "starts": self.starts, "tails": self.tails}
        inner = replace(self.another(self.graph.regions[body.region], self), **around, is_inlined=True)
        inner.run(branch.steps)
        self.stack(branch.stacks, inner)
        for v in branch.stacks:
            atom = self.define(v, inner.leaving(v))
            self.shared[v, self.region.loop] = SharedSpace(self.graph.values[v], step.stacks[0], atom)
        for v, end in zip(op.outputs, body.ends[0], strict=True):
            self.define(v, self.buffer(v) if end is None else inner.want(end))

    def want(self, v: int) -> int | None:
        """The buffer of a value; a program that is counted where it runs finds the buffers around it."""
        if not self.is_inlined or v in self.env or self.parent is None:
            return super().want(v)
        maker, shared = self.graph.maker_of(v), self.shared.get((v, self.parent.region.loop))
        if maker is not None and maker.name == LITERAL:
            return super().want(v)
        if forms := self.parent.forms_of(v):
            self.forms[v] = forms
        if shared is not None:
            return self.define(v, shared.atom)
        return self.define(v, self.parent.want(maker.inputs[0] if maker is not None and maker.name == STEP else v))

    def body(self, step: Enter, starts: Sequence[int] | None = None) -> Self:
        """The rows of a loop's body, one step of it; with `starts` only these values are carried."""
        graph, body = self.graph, self.graph.bodies[step.op]
        carried = body.carried_in if starts is None else starts
        unchanged = frozenset(body.carried_in).difference(carried)
        inner = self.another(graph.regions[body.region], self, unchanged)
        inner.env.update((v, inner.given(v)) for v in carried)
        inner.level.found.update(b for v in carried if (b := inner.env[v]) is not None)
        inner.run(step.steps)
        ends = dict(zip(body.carried_in, body.carried, strict=True))
        kept = [inner.want(end) for v in carried if (end := ends[v]) is not None]
        inner.level.carried.update(b for b in kept if b is not None)
        inner.level.stacks.update(b for b in map(inner.leaving, step.stacks) if b is not None)
        self.stack(step.stacks, inner)
        return inner

    def reads(self, step: Enter, inner: RegionRows, made: Sequence[int] = ()) -> list[int | None]:
        """The buffers that a loop reads: the starts of its carries, and the buffers that its body takes from around."""
        return [*self.first(step, inner), *self.taken(step, inner, made)]

    def first(self, step: Enter, inner: RegionRows) -> list[int | None]:
        """The buffers where a loop's carries start."""
        body = self.graph.bodies[step.op]
        pairs = zip(body.carried_in, body.starts, strict=True)
        return [self.want(start) for v, start in pairs if start is not None and v not in inner.unchanged]

    def taken(self, step: Enter, inner: RegionRows, made: Sequence[int] = ()) -> list[int | None]:
        """The buffers that a loop's body takes from around, except for the stacks that are `made` in each segment."""
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
        stacks = [self.define(v, self.seen(v, self.region.loop)) for v in (*step.stacks, *body.own)]
        self.hosted(b for v in step.stacks if v in self.on_host and (b := self.env[v]) is not None)
        makes = [b for b in (*carried, *stacks, *others) if b is not None]
        starts = [self.want(start) for start in body.starts if start is not None]
        self.row(reads, makes, inside, graph.ops[step.op], trips, body.kind, starts)

    def another(self, region: Region, parent: Self | None, unchanged: frozenset[int] = frozenset()) -> Self:
        """The rows of another region, none so far."""
        kept = {"bodies": self.bodies, "moves_inside": self.moves_inside, "shared": self.shared}
        return type(self)(self.graph, region, parent, unchanged=unchanged, **kept)
