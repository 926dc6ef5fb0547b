"""Divide a chain of layers: choose the values to save in each, and the layers to run again together.

The backward undoes the stretches of the forward (`stretches`) from the last to the first. A *piece* is a row of
neighbouring stretches. The values that pass its end are saved. Of the values inside it, a piece saves either none or
those that some cut of the front saves. The others are computed again when the backward comes to the piece (`undo`).
While a piece is undone, the values saved by earlier pieces are alive too. So later pieces should be shorter, and much
of the last one can be saved without raising the peak.

The cheapest division for a peak is found by dynamic programming from the first stretch on, as by Rotor (Herrmann,
Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains"), with several options for a piece as in Rockmate
(Zhao et al. 2023). There a stretch may run many times; here it runs three times at most. A piece may drop all values
that its stretches compute for later ones, except the values that pass between them, and compute them once more. Bytes
are not rounded to slots: the programme follows undominated pairs of bytes and cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jointcut.partition.figures import counted
from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.runs import needed
from jointcut.partition.search.alike import Alike
from jointcut.partition.search.front import Front
from jointcut.partition.search.recompute import Figures
from jointcut.partition.search.stretches import Stretches

#: The most stretches into which the forward is divided, and the factors: a stretch makes at least this many times the
#: bytes that pass its ends. The forward is divided twice. The larger factor makes it worthwhile to save the passing
#: bytes, the smaller one gives smaller stretches.
_MOST_STRETCHES = 72
_WORTHS = (2.0, 0.5)

#: The most ops of a program that is divided by both factors; a larger one is divided only by the first, which is
#: quicker.
_MOST_OPS = 5_000

#: How many cuts are tried for a piece of one stretch, and for pieces of several; fewer for large programs.
_MOST_OPTIONS = 8
_MOST_LEVELS, _LARGE_LEVELS = 5, 3

#: Slopes of the hull that differ by less count as equal: stretches that are alike leave the cut one by one.
_SAME = 1 + 1e-6

#: How many pairs of bytes and cost are followed from each stretch on, and for how many peaks in all.
_MOST_LABELS = 300
_PEAKS = 24

_UNLIMITED = np.iinfo(np.int64).max // 2
_NOTHING = -1

_PASSES = "a piece that runs again begins with it"
_DEAR = "at this peak its bytes cost less than computing it again"


@dataclass(frozen=True)
class Piece:
    """Stretches from `start` up to `stop` that are undone together, with the figures of each.

    At most `first_bytes` are alive while the first stretch is undone, and `later_bytes` while the others are. Bytes
    saved by earlier stretches are not counted. `reads` are the values of earlier stretches that the piece computes
    from, `passed` the part of them that the stretches after the first need.
    """

    start: int
    stop: int
    parts: tuple[Figures, ...] = field(repr=False)
    bytes_saved: int
    seconds: float
    first_bytes: int
    later_bytes: int = 0
    reads: frozenset[int] = field(default=frozenset(), repr=False)
    passed: frozenset[int] = field(default=frozenset(), repr=False)

    @property
    def working_bytes(self) -> int:
        """The most bytes alive while the piece is undone, beyond the values saved by earlier stretches."""
        return max(self.first_bytes, self.later_bytes)


@dataclass(frozen=True)
class Division:
    """A way to divide the chain: its saved values with reasons, its peak in bytes, and its seconds by `undo`.

    In `stretches_kept` stretches more values are saved than pass to the next piece; plan files call them stages.
    Values that are `dropped` are computed again for a later stretch, and once more for their own.
    """

    pieces: tuple[Piece, ...]
    reasons: Mapping[int, str]
    stretches_kept: int
    dropped: tuple[int, ...] = ()

    @property
    def saved(self) -> tuple[int, ...]:
        """Ids of the values to save."""
        return tuple(sorted(self.reasons))

    @property
    def bytes_saved(self) -> int:
        """Bytes alive between the halves."""
        return sum(piece.bytes_saved for piece in self.pieces)

    @property
    def seconds(self) -> float:
        """The seconds of the ops that run again."""
        return sum(piece.seconds for piece in self.pieces)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return peak_bytes(self.pieces)

    def __str__(self) -> str:
        """`division into 7 pieces`, or `division into 7 pieces, 3 stages kept`."""
        kept = f", {counted(self.stretches_kept, 'stage')} kept" if self.stretches_kept else ""
        dropped = f", {counted(len(self.dropped), 'value')} dropped" if self.dropped else ""
        return f"division into {counted(len(self.pieces), 'piece')}{kept}{dropped}"


def peak_bytes(pieces: Iterable[Piece]) -> int:
    """The most bytes alive at once while the pieces of a chain are undone."""
    saved = peak = 0
    for piece in pieces:
        peak = max(peak, saved + piece.working_bytes)
        saved += piece.bytes_saved
    return peak


# ------------------------------------------------------------------------------------------------- the programme


@dataclass(frozen=True)
class _Labels:
    """Divisions up to a stretch, by rising bytes and falling cost: each as its last piece and the label before it."""

    bytes: np.ndarray
    cost: np.ndarray
    piece: np.ndarray
    before: np.ndarray


class Programme:
    """A search among the divisions of a chain into known pieces: `ending[t]` are the pieces that stop at stretch t.

    The cost of a division is its seconds, plus `byte_seconds` for each byte that it saves. At most `most_labels` pairs
    of bytes and cost are followed from each stretch on.
    """

    def __init__(
        self, ending: Sequence[Sequence[Piece]], byte_seconds: float = 0.0, most_labels: int = _MOST_LABELS
    ) -> None:
        self.ending, self.byte_seconds, self.most_labels = ending, byte_seconds, most_labels
        self.start = [np.array([p.start for p in pieces], np.int64) for pieces in ending]
        self.bytes = [np.array([p.bytes_saved for p in pieces], np.int64) for pieces in ending]
        self.working = [np.array([p.working_bytes for p in pieces], np.int64) for pieces in ending]
        self.cost = [np.array([self.costs([p]) for p in pieces]) for pieces in ending]

    def costs(self, pieces: Iterable[Piece]) -> float:
        """The cost of some pieces, in seconds."""
        return sum(p.seconds + self.byte_seconds * p.bytes_saved for p in pieces)

    def fastest(self, most_bytes: int) -> tuple[Piece, ...] | None:
        """The division of least cost whose peak is at most `most_bytes`, None where there is none.

        It is optimal unless pairs of bytes and cost had to be dropped.
        """
        return self._solved(most_bytes)

    def smallest(self) -> tuple[Piece, ...]:
        """The division of the least peak."""
        pieces = self._solved(None)
        assert pieces is not None
        return pieces

    def _solved(self, most_bytes: int | None) -> tuple[Piece, ...] | None:
        nothing = np.zeros(1, np.int64)
        labels = [_Labels(nothing, np.zeros(1), nothing, nothing)]
        for stop in range(1, len(self.ending)):
            labels.append(self._extended(labels, stop, most_bytes))
        at, k = len(labels) - 1, len(labels[-1].bytes) - 1
        if k < 0:
            return None
        path: list[Piece] = []
        while at:
            path.append(self.ending[at][labels[at].piece[k]])
            k, at = int(labels[at].before[k]), path[-1].start
        return tuple(reversed(path))

    def _extended(self, labels: Sequence[_Labels], stop: int, most_bytes: int | None) -> _Labels:
        """The labels of a stretch: each piece that stops there after each label that it may follow."""
        start, working = self.start[stop], self.working[stop]
        counts = np.zeros_like(start)
        first = np.cumsum([0, *(len(before.bytes) for before in labels)])
        for at, before in enumerate(labels):
            mine = start == at
            room = np.inf if most_bytes is None else most_bytes - working[mine]
            counts[mine] = np.searchsorted(before.bytes, room, "right")
        piece = np.repeat(np.arange(len(start)), counts)
        before = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = first[start][piece] + before
        known, paid = (np.concatenate([getattr(b, name) for b in labels])[at] for name in ("bytes", "cost"))
        if most_bytes is None:
            cost = np.maximum(paid, known + working[piece])
        else:
            cost = paid + self.cost[stop][piece]
        return self._undominated(known + self.bytes[stop][piece], cost, piece, before)

    def _undominated(self, saved: np.ndarray, cost: np.ndarray, piece: np.ndarray, before: np.ndarray) -> _Labels:
        order = np.argsort(saved, kind="stable")
        least = np.minimum.accumulate(cost[order])
        falls = np.append(True, least[1:] < least[:-1]) if len(order) else np.zeros(0, bool)
        order = order[falls]
        last = np.append(saved[order][1:] > saved[order][:-1], True)[: len(order)]
        order = order[last]
        if len(order) > self.most_labels:
            ends = saved[order[[0, -1]]]
            grid = np.linspace(ends[0], ends[1], self.most_labels)
            order = order[np.unique(np.searchsorted(saved[order], grid, "right") - 1)]
        return _Labels(saved[order], cost[order], piece[order], before[order])


# ------------------------------------------------------------------------------------------------- the chain


class Chain:
    """The stretches of a forward, and the pieces that the cuts of a front can form from them."""

    def __init__(self, row: Stretches, front: Front) -> None:
        """Take a row of stretches; the front must be of the same program under the same rules."""
        self.row, self.front = row, front
        self.cuttable = [[v for v in stretch.values if front.net.value_in[v] >= 0] for stretch in row.stretches]
        nodes = [front.net.value_in[values] for values in self.cuttable]
        # A cut of the front saves a value if it lies between these two ranks.
        self.ranks = [(front.ranks[n].tolist(), front.ranks[n + 1].tolist()) for n in nodes]
        self.counted, self.known = Alike(row), dict[tuple[Any, ...], Figures]()
        self.passing: dict[tuple[int, int], frozenset[int]] = {}  # the exports that are read from `stop` on

    @cached_property
    def ending(self) -> tuple[tuple[Piece, ...], ...]:
        """All pieces worth trying, by the stretch at which they stop."""
        ending: list[tuple[Piece, ...]] = [()]
        for stop in range(1, len(self.row.stretches) + 1):
            rows = [self.alike(level, stop) for level in self.levels]
            rows.append(self.alike(_NOTHING, stop, drops=True))
            pieces = [p for same in zip(*rows, strict=True) for p in best(same)]
            pieces += best(self.longer(stop - 1, inside, None, stop) for inside in self.options(stop - 1))
            ending.append(tuple(pieces))
        return tuple(ending)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """The cuts of the front that are tried for a piece of several stretches, and -1 for saving nothing.

        They are corners of the hull, where stretches that are alike are cut alike.
        """
        sizes, times = (np.array([getattr(c, name) for c in self.front.choices]) for name in ("bytes", "seconds"))
        rises, falls = np.diff(sizes), -np.diff(times)
        corners = 1 + np.flatnonzero(rises[1:] * falls[:-1] > rises[:-1] * falls[1:] * _SAME)
        steps = np.unique(np.array([0, *corners.tolist(), len(sizes) - 1]))
        most = _MOST_LEVELS if len(self.row.graph.ops) <= _MOST_OPS else _LARGE_LEVELS
        if len(steps) > most:
            sizes = np.log2(sizes[steps] + 4096)
            wanted = np.linspace(sizes[0], sizes[-1], most)
            steps = np.unique(steps[abs(sizes[:, None] - wanted).argmin(0)])
        return _NOTHING, *steps.tolist()

    def alike(self, level: int, stop: int, drops: bool = False) -> list[Piece]:
        """The pieces that end at `stop` and save the values of one cut of the front, the longest first.

        A piece that drops values computes them once more for each stretch; see `undo`.
        """
        pieces: list[Piece] = []
        for number in range(stop - 1, -1, -1):
            rest = pieces[-1] if pieces else None
            pieces.append(self.longer(number, self.at(number, level), rest, stop, drops))
        return pieces[::-1]

    def longer(self, number: int, inside: frozenset[int], rest: Piece | None, stop: int, drops: bool = False) -> Piece:
        """A piece with one more stretch in front, whose values `inside` are saved too."""
        if rest is None:
            part = self.figures(number, inside, stop, frozenset())
            return Piece(number, stop, (part,), part.bytes_saved, part.seconds, part.peak_bytes, 0, part.reads)
        part = self.figures(number, inside, stop, rest.reads, drops)
        ahead = self.figures(number, inside, stop, rest.passed, drops)  # while stretches after the next one are undone
        later = max(part.held_bytes + rest.first_bytes, ahead.held_bytes + rest.later_bytes)
        return Piece(
            number,
            stop,
            (part, *rest.parts),
            part.bytes_saved + rest.bytes_saved,
            part.seconds + rest.seconds,
            part.peak_bytes,
            part.bytes_saved + later,
            part.reads | rest.reads,
            part.passed | rest.passed,
        )

    def figures(
        self, number: int, inside: frozenset[int], stop: int, asked: frozenset[int], drops: bool = False
    ) -> Figures:
        """The figures of a stretch in a piece up to `stop`.

        Its values `inside` are saved too. Later stretches of the piece compute from its values in `asked`.
        """
        exports = self.row.stretches[number].exports
        if (number, stop) not in self.passing:
            self.passing[number, stop] = frozenset(v for v, last in exports.items() if last >= stop)
        outer = self.passing[number, stop]
        inner = asked.intersection(exports) - outer if asked else asked
        key = number, inside, outer, inner, drops and bool(inner)  # nothing is dropped where nothing is handed on
        if key not in self.known:
            self.known[key] = self.counted.figures(*key)
        return self.known[key]

    def at(self, number: int, level: int) -> frozenset[int]:
        """The values of a stretch that a cut of the front saves."""
        pairs = zip(self.cuttable[number], *self.ranks[number], strict=True)
        return frozenset(v for v, begin, end in pairs if begin <= level < end)

    def options(self, number: int) -> list[frozenset[int]]:
        """The sets of values of a stretch that cuts of the front save, by rising bytes."""
        pairs = zip(*self.ranks[number], strict=True)
        steps = {k for begin, end in pairs for k in (begin, end) if begin < end and k <= self.front.last}
        sizes = {(inside := self.at(number, k)): sum(self.row.problem.prices[v] for v in inside) for k in sorted(steps)}
        sets = sorted(sizes, key=lambda inside: (sizes[inside], sorted(inside)))
        chosen = np.linspace(0, len(sets) - 1, min(len(sets), _MOST_OPTIONS)).round().astype(int)
        return [sets[i] for i in chosen]

    def division(self, pieces: Sequence[Piece]) -> Division:
        """The division into some pieces: the values that they save, without needless ones, and why."""
        reasons: dict[int, str] = {}
        for piece in pieces:
            for part, stretch in zip(piece.parts, self.row.stretches[piece.start : piece.stop], strict=True):
                for v in part.saved:
                    verdict = self.row.problem.verdicts[v]
                    if verdict.not_recomputed and not verdict.is_costly:
                        reasons[v] = f"not recomputed: {verdict.not_recomputed}"
                    else:
                        reasons[v] = _PASSES if stretch.exports.get(v, 0) >= piece.stop else _DEAR
        reached = needed(self.row.problem, frozenset(reasons))
        read = {v for i in reached.ops for v in self.row.graph.ops[i].inputs} | self.row.sides.wanted
        used = {v: why for v, why in sorted(reasons.items()) if v in read}
        dropped = sorted({v for piece in pieces for part in piece.parts for v in part.dropped}.difference(used))
        kept = len({self.row.made_in[v] for v, why in used.items() if why == _DEAR})
        return Division(tuple(pieces), used, kept, tuple(dropped))


def best(pieces: Iterable[Piece]) -> list[Piece]:
    """The undominated pieces: no other piece of the same stretches is better in all figures."""
    kept: list[Piece] = []
    for p in sorted(pieces, key=lambda p: (p.bytes_saved, p.seconds, p.working_bytes)):
        if all(q.seconds > p.seconds or q.working_bytes > p.working_bytes for q in kept):
            kept.append(p)
    return kept


def divisions(problem: Problem, front: Front, byte_seconds: float, peaks: int = _PEAKS) -> list[Division]:
    """Divisions of least cost for several peaks, the fastest first.

    The ops of the problem have prices in seconds, `front` is the problem's own, and `byte_seconds` is the time to write
    and read a byte. Returns an empty list where the forward has no narrow place.
    """
    worths = _WORTHS if len(problem.graph.ops) <= _MOST_OPS else _WORTHS[:1]
    rows = [Stretches(problem, _MOST_STRETCHES, worth) for worth in worths]
    rows = list({row.cuts: row for row in rows if row.cuts}.values())
    by_values: dict[Any, Division] = {}
    for row in rows:
        chain = Chain(row, front)
        divided = spread(Programme(chain.ending, byte_seconds), peaks // len(rows))
        by_values.update(((d.saved, d.dropped), d) for d in map(chain.division, divided))
    return sorted(by_values.values(), key=lambda d: (d.seconds + byte_seconds * d.bytes_saved, d.peak_bytes, d.saved))


def spread(programme: Programme, peaks: int) -> list[tuple[Piece, ...]]:
    """Divisions of least cost for at most `peaks` peaks; each costs less than the one before.

    The peaks lie between the least possible peak and the peak of the fastest division, evenly spread in their
    logarithm.
    """
    least = peak_bytes(programme.smallest())
    most = peak_bytes(programme.fastest(_UNLIMITED) or ())
    chosen: list[tuple[Piece, ...]] = []
    for peak in np.geomspace(max(least, 1), max(most, 1), peaks):
        faster = programme.fastest(max(int(peak), least)) or ()
        if not chosen or programme.costs(faster) < programme.costs(chosen[-1]):
            chosen.append(faster)
    return chosen
