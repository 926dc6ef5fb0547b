"""Update each parameter as soon as its gradient is complete, before the backward goes on.

A compiler may put updates off, and hold all gradients until then. So the values that later ops of the backward read
wait for each update, after which its gradient is gone. If the backward runs twice, the cotangents of the second sweep
wait for the numbers that the first one makes. Otherwise a compiler would run it once, and hold all gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from jointcut.partition.lower.follow import made_by, read_by
from jointcut.partition.lower.steps import Enter, Fork, Run, Settle, Step, Update
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.roles import Role


def updated(problem: Problem, steps: Iterable[Step]) -> tuple[Step, ...]:
    """Add the steps that updates of parameters need to a backward."""
    rows = tuple(steps)
    if not problem.graph.updates:
        return rows
    backward = _BackwardSteps.of(problem, rows)
    first, second = (backward.ends(problem, sweep) for sweep in (1, 2))
    if not second:
        return tuple(backward.swept(range(len(rows)), first))
    joins = 1 + max(first, default=-1)
    again = backward.begins(joins)
    sweeps = backward.swept(range(joins), first), backward.swept(range(again, len(rows)), second)
    return (*sweeps[0], *rows[joins:again], *backward.settled(again), *sweeps[1])


@dataclass(frozen=True)
class _BackwardSteps:
    """The steps of a backward, the arrays that each reads and makes in it, and the cotangents that it begins with."""

    steps: tuple[Step, ...]
    reads: Sequence[frozenset[int]]
    makes: Sequence[Sequence[int]]
    cotangents: Sequence[int]

    @classmethod
    def of(cls, problem: Problem, steps: tuple[Step, ...]) -> Self:
        """Look at steps."""
        graph, late = problem.graph, problem.sides.late & problem.graph.arrays
        reads = [late & read_by(graph, step) for step in steps]
        makes = [[v for v in made_by(graph, step) if v in late] for step in steps]
        return cls(steps, reads, makes, [v for v in graph.role_inputs(Role.COTANGENT) if v in late])

    def ends(self, problem: Problem, sweep: int) -> dict[int, Update]:
        """The updates of a sweep, which nothing waits for yet, by the place of the step that completes each."""
        runs = enumerate(self.steps)
        places = {s.op: i for i, s in runs if isinstance(s, Run | Enter | Fork) and not s.again}
        ends = dict[int, Update]()
        for update in problem.graph.updates:
            at = sorted(places[op] for op in update.ops if op in places)
            made = tuple(v for i in at for v in self.makes[i])
            if made and update.sweep == sweep:
                ends[at[-1]] = Update(update.parameter, made, ())
        return ends

    def swept(self, places: range, ends: Mapping[int, Update]) -> Iterator[Step]:
        """The steps of one sweep; the values that are read after an update wait for it."""
        last = {v: i for i in places for v in self.reads[i]}
        there = dict.fromkeys(self.cotangents)
        for i in places:
            yield self.steps[i]
            there.update(dict.fromkeys(self.makes[i]))
            if i in ends:
                there = {v: None for v in there if last.get(v, -1) > i}
                yield replace(ends[i], waiting=tuple(there))

    def begins(self, joins: int) -> int:
        """The place where the second sweep begins, after the one where the numbers of the first are joined."""
        later = (i for i in range(joins, len(self.steps)) if not self.reads[i].isdisjoint(self.cotangents))
        return next(later, len(self.steps))

    def settled(self, again: int) -> Iterator[Step]:
        """The steps with which the second sweep begins: its cotangents wait for the numbers of the first."""
        read = set[int]().union(*self.reads[again:])
        joined = tuple(v for made in self.makes[:again] for v in made if v in read)
        yield from (Settle(v, joined) for v in self.cotangents if v in read and joined)
