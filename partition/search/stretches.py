"""Divide the forward into stretches at narrow places, and say in which stretch each value is made and read.

A *place* is an op of the forward that runs once, at the top of the program or in the program of a `jax.shard_map`
there; a loop is one place, with all of its body. A value passes from one place to the next if a later place reads it:
itself, in the body of its loop, or in its backward. A value that is cheaply made from fewer bytes does not pass. Its
sources pass instead, and it is computed again on the other side. A place is narrow if few bytes pass it. A *stretch*
holds the places from one narrow place to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.runs import needed
from jointcut.partition.prices.rules import light
from jointcut.partition.program.graph import LITERAL, OPEN, SHARDS, STEP, TOP, Graph
from jointcut.partition.program.primitives import DEAR, UPDATING

_NOWHERE = -1


@dataclass(frozen=True)
class Places:
    """The places where each value of the forward is made and last read, and where each op runs, as numbers.

    Attributes, by value:
        made: the place that makes it; -1 for inputs, for values of the backward alone, and for those it does not need.
        last: the place of its last read; at least `made`.
        roots: the values that must be at hand where it is read: itself, or the values that it is cheaply made from.
        must_save: the values that must be saved if the backward needs them.

    Attributes, by op:
        runs_at: its own place; for an op of the backward the place that is undone when it runs.

    Attributes, by place:
        width: the bytes that pass to the next place.
        computed: the bytes among these that the backward reads only to compute other values.
        load: the bytes that the place makes with more than one instruction for each element.
    """

    made: tuple[int, ...]
    last: tuple[int, ...]
    roots: tuple[frozenset[int], ...]
    runs_at: tuple[int, ...]
    must_save: frozenset[int]
    width: np.ndarray
    computed: np.ndarray
    load: np.ndarray


def top_ops(graph: Graph) -> tuple[int, ...]:
    """For each op the op that runs once: itself, or the loop in whose body it stands."""
    tops: list[int] = []
    for op in graph.ops:
        while graph.loop_of(op) not in graph.once:
            op = graph.holder_of(op.region)
        tops.append(op.id)
    return tuple(tops)


def in_a_row(graph: Graph, region: int = TOP) -> Iterator[int]:
    """The ops that run once, in order; an op whose program runs once comes after the ops of its program."""
    for i in graph.regions[region].ops:
        if i in graph.bodies and graph.bodies[i].loop in graph.once:
            yield from in_a_row(graph, graph.bodies[i].region)
        yield i


def places(problem: Problem) -> Places:
    """Walk over the program and note where its values live."""
    return _Walk(problem).places()


class _Walk:
    def __init__(self, problem: Problem) -> None:
        self.graph, self.sides = problem.graph, problem.sides
        self.prices, self.verdicts = problem.prices, problem.verdicts
        self.tops = top_ops(self.graph)
        self.useful = needed(problem, frozenset()).values
        self.must, self.never = self.rules()
        self.made = [_NOWHERE] * len(self.graph.values)
        self.runs_at = [_NOWHERE] * len(self.graph.ops)
        self.roots: list[frozenset[int]] = [frozenset()] * len(self.graph.values)

    def places(self) -> Places:
        """Take all steps of the walk, in order."""
        count = self.place_forward()
        self.place_others()
        self.find_roots()
        self.place_backward()
        last = list(self.made)
        for i, v in self.reads():
            for r in self.roots[v]:
                last[r] = max(last[r], self.runs_at[i])
        width, computed, load = np.zeros((3, count + 1), np.int64)
        for v, (start, stop) in enumerate(zip(self.made, last, strict=True)):
            if start == _NOWHERE:
                continue
            if v in self.roots[v] or self.is_barred(v):
                load[start] += self.prices[v] * self.is_work(v)
            if v in self.roots[v]:
                for total in (width, computed)[: 1 + (v not in self.sides.wanted)]:
                    total[start] += self.prices[v]
                    total[stop] -= self.prices[v]
        return Places(
            made=tuple(self.made),
            last=tuple(last),
            roots=tuple(self.roots),
            runs_at=tuple(self.runs_at),
            must_save=frozenset(self.must),
            width=np.cumsum(width)[:-1],
            computed=np.cumsum(computed)[:-1],
            load=load[:-1],
        )

    def is_barred(self, v: int) -> bool:
        """Whether somebody asked that a value not be saved."""
        op = self.graph.maker_of(v)
        return bool(self.verdicts[v].not_saved) and op is not None and op.name not in (STEP, LITERAL)

    def is_work(self, v: int) -> bool:
        """Whether computing a value, or fetching it, takes more than one instruction for each element."""
        op = self.graph.maker_of(v)
        return op is not None and (op.name in DEAR or not light(self.graph, op))

    def rules(self) -> tuple[set[int], set[int]]:
        """The values that must be saved where needed, and the values that can be neither saved nor computed again."""
        hard = [bool(verdict.not_recomputed) and not verdict.is_costly for verdict in self.verdicts]
        must = {v for v, is_hard in enumerate(hard) if is_hard and self.graph.values[v].maker is not None}
        never: set[int] = set()
        work = [v for v in must if self.verdicts[v].not_saved]
        while work:
            v = work.pop()
            if v in never:
                continue
            never.add(v)
            for i in self.graph.consumers[v]:
                for out in self.graph.ops[i].outputs:
                    if not self.sides.is_late(out):
                        must.add(out)
                        work += [out] * bool(self.verdicts[out].not_saved)
        return must - never, never

    def place_forward(self) -> int:
        """Number the ops of the forward that run once; return how many there are."""
        mine = [op for op in self.graph.ops if op.id in self.sides.forward and op.name not in (STEP, LITERAL)]
        tops = {self.tops[op.id] for op in mine}
        order = {i: place for place, i in enumerate(i for i in in_a_row(self.graph) if i in tops)}
        for op in mine:
            self.runs_at[op.id] = order[self.tops[op.id]]
            self.note(op.outputs, self.runs_at[op.id])
        return len(order)

    def note(self, values: Sequence[int], place: int) -> None:
        """Note the place where values are made, if the backward needs them."""
        for v in values:
            if v in self.useful:
                self.made[v] = place

    def place_others(self) -> None:
        """Put each op that either side may run at the last place that makes one of its operands."""
        placed = self.sides.forward | self.sides.backward
        others = [
            op for op in self.graph.ops if op.id not in placed or (op.name == STEP and op.id in self.sides.forward)
        ]
        moved = True
        while moved:  # another round is needed only where an op of a loop comes before the maker of its operand
            moved = False
            for op in others:
                place = max((self.made[v] for v in op.inputs), default=_NOWHERE)
                if place > self.runs_at[op.id]:
                    self.runs_at[op.id], moved = place, True
                    self.note(op.outputs, place)
        for op in others:
            if op.name not in (STEP, LITERAL) and self.runs_at[op.id] == _NOWHERE:
                self.runs_at[op.id] = 0
                self.note(op.outputs, 0)

    def find_roots(self) -> None:
        """Find the roots of each value: the values that pass in its place."""
        for value in sorted(self.graph.values, key=lambda v: _NOWHERE if v.maker is None else v.maker):
            if value.maker is None or value.id not in self.useful:
                continue
            op = self.graph.ops[value.maker]
            below = frozenset[int]().union(*(self.roots[v] for v in op.inputs))
            cheap = light(self.graph, op) or op.id not in self.sides.forward
            is_less = sum(self.prices[v] for v in below) < self.prices[value.id]
            free = cheap and is_less and value.id not in self.must and op.name not in OPEN
            passes_on = free or self.verdicts[value.id].not_saved
            self.roots[value.id] = below if passes_on else frozenset([value.id])

    def place_backward(self) -> None:
        """Put each op of the backward at the last place whose values it, or a later op, reads directly."""
        graph, sides = self.graph, self.sides
        latest = dict.fromkeys((i for i in in_a_row(graph) if i in sides.backward), _NOWHERE)
        for op in graph.ops:
            if (top := self.tops[op.id]) in latest:
                latest[top] = max([latest[top], *(self.made[v] for v in op.inputs if not sides.is_late(v))])
        place = 0
        for i in reversed(latest):
            place = latest[i] = max(place, latest[i])
        for op in graph.ops:
            self.runs_at[op.id] = latest.get(self.tops[op.id], self.runs_at[op.id])

    def reads(self) -> Iterator[tuple[int, int]]:
        """Pairs of an op and a value of the forward that it needs."""
        for op in self.graph.ops:
            if self.runs_at[op.id] == _NOWHERE:
                continue
            if op.id in self.sides.backward or not self.useful.isdisjoint(op.outputs):
                for v in op.inputs:
                    if not self.sides.is_late(v):
                        yield op.id, v


# ------------------------------------------------------------------------------------------------- the stretches


@dataclass(frozen=True)
class Stretch:
    """One stretch of the forward, and the part of the backward that undoes it.

    Attributes:
        values: the values that it makes.
        exports: the values that pass its end, each with the last stretch that reads it.
        needs: the values that its own backward reads, or that other stretches rebuild from cheaper sources.
        backward: the ops that run once and undo it.
        reads: the values that each of these ops reads, in its loop or out of it.
        late: values of the backward that are alive before the stretch is undone.
        passing: values of the backward that are alive after it.
    """

    number: int
    values: list[int] = field(default_factory=list)
    exports: dict[int, int] = field(default_factory=dict)
    needs: set[int] = field(default_factory=set)
    backward: list[int] = field(default_factory=list)
    reads: dict[int, dict[int, None]] = field(default_factory=dict)
    late: dict[int, None] = field(default_factory=dict)
    passing: dict[int, None] = field(default_factory=dict)


class Stretches:
    """The stretches of a program in a row, divided at `narrow_places`.

    The ops of the `problem` have prices in seconds. `made_in` is the stretch of each value, `undone_in` the stretch of
    each op; -1 for none. `ends` are the values in buffers of the caller: results, and operands that these are written
    into.
    """

    def __init__(self, problem: Problem, most: int, worth: float) -> None:
        """Divide the forward, and give each stretch its values and ops."""
        self.problem, self.graph, self.sides = problem, problem.graph, problem.sides
        self.places = places(problem)
        self.cuts = narrow_places(self.places, most, worth)
        self.made_in, self.undone_in = (self._stretches_of(at) for at in (self.places.made, self.places.runs_at))
        self.ends = _ends(self.graph)
        self.stretches = tuple(Stretch(number) for number in range(len(self.cuts) + 1))
        self._share_values()
        self._share_ops()

    def _stretches_of(self, numbers: Sequence[int]) -> list[int]:
        return np.where(np.array(numbers) < 0, _NOWHERE, np.searchsorted(self.cuts, numbers)).tolist()

    def _share_values(self) -> None:
        last_in = self._stretches_of(self.places.last)
        for v, number in enumerate(self.made_in):
            if number != _NOWHERE:
                stretch = self.stretches[number]
                stretch.values.append(v)
                if v in self.places.roots[v] and last_in[v] > number:
                    stretch.exports[v] = last_in[v]
                if v in self.sides.wanted:
                    stretch.needs.add(v)

    def _share_ops(self) -> None:
        graph, tops = self.graph, top_ops(self.graph)
        for i in in_a_row(graph):
            if i in self.sides.backward:
                self.stretches[self.undone_in[i]].backward.append(i)
        for op in graph.ops:
            number, top = self.undone_in[op.id], tops[op.id]
            for v in op.inputs:
                if self.sides.is_late(v):
                    self._share_late(v, top, number)
                elif op.id in self.sides.backward:
                    self.stretches[number].reads.setdefault(top, {})[v] = None
                elif self.made_in[v] not in (_NOWHERE, number) and v not in self.places.roots[v]:
                    self.stretches[self.made_in[v]].needs.add(v)

    def _share_late(self, v: int, top: int, number: int) -> None:
        """Note a read of a value of the backward: it is alive from its maker's stretch down to its last reader's."""
        if self.graph.values[v].loop not in self.graph.once:
            return
        self.stretches[number].reads.setdefault(top, {})[v] = None
        maker = self.graph.values[v].maker
        if maker is not None:
            for stretch in self.stretches[number : self.undone_in[maker]]:
                stretch.late[v] = None
            for stretch in self.stretches[number + 1 : self.undone_in[maker] + 1]:
                stretch.passing[v] = None


def _ends(graph: Graph) -> frozenset[int]:
    ends = {v for v, _ in graph.outputs if v is not None}
    for op in graph.ops:
        if op.name == SHARDS and not ends.isdisjoint(op.outputs):
            pairs = zip(op.outputs, graph.bodies[op.id].ends[0], strict=True)
            ends.update(end for v, end in pairs if v in ends and end is not None)
    for op in reversed(graph.ops):
        if op.name in UPDATING and op.outputs[0] in ends:
            into = op.operands[0]
            ends.update([into] if into is not None and graph.consumers[into] == (op.id,) else [])
    return frozenset(ends)


def narrow_places(walked: Places, most: int, worth: float) -> tuple[int, ...]:
    """The places after which to divide the forward into at most `most` stretches; the narrowest are chosen first.

    Each stretch makes at least 1/`most` of the bytes that the forward makes, and at least `worth` times the bytes that
    pass its wider end.
    """
    load = np.cumsum(walked.load)
    chosen: list[int] = []
    for p in np.lexsort((np.arange(len(walked.width)), walked.computed, walked.width)).tolist():
        least = max(load[-1] / most, worth * walked.width[p], 1)
        if all(abs(load[p] - edge) >= least for edge in (0, load[-1], *load[chosen])):
            chosen.append(p)
    return tuple(sorted(chosen))
