"""Count the rows of loops that run in segments or in parts, beside the rows of other steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jointcut.partition.lower.follow import segments_of, steps_of
from jointcut.partition.lower.memory.levels import Level
from jointcut.partition.lower.memory.regions import RegionRows
from jointcut.partition.lower.steps import Enter, Keep, Parts, Segments


@dataclass
class Counter(RegionRows):
    """The rows of one region while they are counted."""

    def copied(self) -> Counter:
        """Copy the rows of the top of the program, to be continued."""
        names = ("env", "starts", "tails", "copies", "on_host", "away", "forms", "left")
        return replace(self, written=set(), level=self.level.copied(), **{n: getattr(self, n).copy() for n in names})

    def keep(self, step: Keep) -> None:
        """Count a loop that keeps the starts of its segments, and the stacks of the steps outside segments."""
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
        ends, early = self.stretch(step.loop, reads, segment.level, steps, count, starts)
        whole = self.body(step.whole)
        ends, late = self.stretch(step.whole, [*ends, *self.taken(step.whole, whole)], whole.level, step.last)
        self.tails.update((v, late[v]) for v in step.tails)
        self.finish(step.loop, ends, early, late)

    def segments(self, step: Segments) -> None:
        """Count a loop's backward in segments. The steps outside segments are counted first."""
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
        ends, late = self.stretch(last, [*first, *tails], back.level, step.last)
        ends, early = self.stretch(last, [*starts, *ends, *reads], segment.level, steps, count)
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
            ends, ys = self.stretch(rest, reads, late.level, last)
            ends, xs = self.stretch(first, [*ends, *self.taken(first, early)], early.level, length)
            self.finish(first, ends, xs, ys)
            return
        ends, xs = self.stretch(first, self.reads(first, early), early.level, length)
        ends, ys = self.stretch(rest, [*ends, *self.taken(rest, late)], late.level, last)
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
        trips: int | None = None,
        others: Iterable[int] = (),
    ) -> tuple[list[int], dict[int, int]]:
        """Add the row of `length` steps of a loop; returns the buffers of its carries and, by value, of its stacks."""
        graph, body = self.graph, self.graph.bodies[step.op]
        ends = [self.buffer(v) for v in body.carried_out]
        stacks = {v: self.seen(v, self.region.loop, length) for v in (*step.stacks, *body.own)}
        makes, reads = [*ends, *stacks.values(), *others], [*reads]
        self.row(reads, makes, inside, graph.ops[step.op], trips or length, body.kind, reads)
        return ends, stacks

    def finish(self, step: Enter, ends: Iterable[int], early: Mapping[int, int], late: Mapping[int, int]) -> None:
        """Let the joined stacks of two stretches stand for a loop's values."""
        for v, end in zip(self.graph.bodies[step.op].carried_out, ends, strict=True):
            self.define(v, end)
        for v, stack in early.items():
            joined = self.seen(v, self.region.loop)
            self.define(v, joined)
            self.row([stack, late[v]], [joined], None, self.graph.ops[step.op], 1, "concatenate")

    def segment(self) -> Counter:
        """The rows of one segment."""
        return self.another(self.region, None)

    def divided(self, step: Segments) -> tuple[Counter, list[int | None], Enter]:
        """One segment of a loop's backward, the buffers that it reads beside carries, and the backward's own loop."""
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
        """Add the part of a loop that runs in this segment, `length` steps of it; return its stacks.

        With `keeps`, its carries go to the next segment and its stacks into those of the whole loop.
        """
        graph = self.graph
        ends = [self.buffer(v) for v in carried]
        stacks = [self.seen(v, self.region.loop, length) for v in step.stacks]
        kind = graph.bodies[step.op].kind
        self.row(reads, [*ends, *stacks], inside, graph.ops[step.op], trips or length, kind)
        if keeps:
            self.level.carried.update(ends)
            self.level.stacks.update(stacks)
        return stacks

    def join(self, step: Enter, length: int) -> None:
        """Join the stacks of a loop whose last segment is shorter, because that segment runs by itself."""
        if steps_of(self.graph, step) % length:
            for v in step.stacks:
                joined = self.seen(v, self.region.loop)
                self.row([self.want(v)], [joined], None, self.graph.ops[step.op], 1, "concatenate")
                self.define(v, joined)
