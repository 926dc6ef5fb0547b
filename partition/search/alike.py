"""Find stretches that are alike, so that figures are counted once for all of them.

Deep models repeat a layer. The stretches of equal layers have equal figures; only the numbers of their values differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from jointcut.partition.prices.rules import light
from jointcut.partition.search.recompute import Figures, figures
from jointcut.partition.search.stretches import Stretch, Stretches


class Alike:
    """The figures of stretches in a row, each counted for the first stretch of its kind."""

    def __init__(self, row: Stretches) -> None:
        """Find out which stretches are alike; in a program with loops each is one of a kind."""
        self.row = row
        self.described = [_Described(row, stretch) for stretch in row.stretches]
        first: dict[Any, int] = {}
        has_loops = len(row.graph.loops) > len(row.graph.once)
        kinds = (d.stretch.number if has_loops else d.kind() for d in self.described)
        self.first = [first.setdefault(kind, number) for number, kind in enumerate(kinds)]
        self.known: dict[tuple[Any, ...], Figures] = {}

    def figures(
        self, number: int, inside: frozenset[int], outer: frozenset[int], inner: frozenset[int], drops: bool
    ) -> Figures:
        """The figures of the stretch with this number, as `undo.figures` returns them."""
        first = self.first[number]
        mine, its = self.described[number].numbers, self.described[first].numbers
        back = None if number == first else dict(zip(its, mine, strict=True))
        sets = inside, outer, inner
        if back is not None:
            there = dict(zip(mine, its, strict=True))
            inside, outer, inner = sets = tuple(frozenset(map(there.__getitem__, values)) for values in sets)
        key = first, *sets, drops
        if key not in self.known:
            self.known[key] = figures(self.row, self.row.stretches[first], inside, outer, inner, drops)
        return self.known[key] if back is None else _renamed(self.known[key], back)


def _renamed(found: Figures, names: Mapping[int, int]) -> Figures:
    """The same figures with the values of another stretch."""
    parts = ("saved", "passed", "reads", "dropped")
    return replace(found, **{part: frozenset(names[v] for v in getattr(found, part)) for part in parts})


class _Described:
    """One stretch, all values that its figures depend on, in the order in which they are met, and their numbers."""

    def __init__(self, row: Stretches, stretch: Stretch) -> None:
        self.row, self.stretch = row, stretch
        graph = row.graph
        makers = {graph.values[v].maker for v in stretch.values}
        self.ops = [graph.ops[i] for i in sorted({i for i in makers if i is not None}.union(stretch.backward))]
        values = dict.fromkeys(v for op in self.ops for v in (*op.inputs, *op.outputs))
        values |= dict.fromkeys((*stretch.values, *stretch.late, *stretch.passing))
        values |= dict.fromkeys(r for v in tuple(values) for r in sorted(row.places.roots[v]))
        self.numbers = {v: k for k, v in enumerate(values)}

    def kind(self) -> tuple[Any, ...]:
        """A description that is equal for stretches that are alike."""
        row, stretch, numbers = self.row, self.stretch, self.numbers

        def at(values: Iterable[int]) -> tuple[int, ...]:
            return tuple(numbers[v] for v in values)

        weighed, graph = row.problem.weighed, row.graph
        reads = tuple((k, at(stretch.reads[op.id])) for k, op in enumerate(self.ops) if op.id in stretch.reads)
        ops = tuple((op.name, at(op.inputs), at(op.outputs), weighed[op.id], light(graph, op)) for op in self.ops)
        undoing = set(stretch.backward)
        sides = tuple((op.id in undoing, op.id in row.problem.sides.backward) for op in self.ops)
        needs = frozenset(numbers[v] for v in stretch.needs)
        ends = at(stretch.values), at(stretch.exports), needs, at(stretch.late), at(stretch.passing)
        return ops, sides, reads, ends, tuple(map(self._facts, numbers))

    def _facts(self, v: int) -> tuple[Any, ...]:
        """The properties of a value that figures depend on, and whether this stretch makes it."""
        row, problem, value = self.row, self.row.problem, self.row.graph.values[v]
        roots = tuple(sorted(self.numbers[r] for r in row.places.roots[v] if r in self.numbers))
        is_mine, is_never_saved = row.made_in[v] == self.stretch.number, bool(problem.verdicts[v].not_saved)
        must, is_end = v in row.places.must_save, v in row.ends
        return is_mine, value.bytes, problem.prices[v], is_never_saved, must, is_end, roots
