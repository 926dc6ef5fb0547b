"""Find the cheapest cut at every price of a second.

Saving costs bytes, recomputing costs seconds. The minimum cuts at all prices of a second (see `peel`) are the lower
convex hull of (bytes, seconds) over all cuts. This is the linear relaxation of "fewest seconds within a budget of
bytes", so it bounds every cut from below. Between two neighbours on the hull lie cuts that are cheapest at no price.
Two kinds of them are tried: some change over from one neighbour to the other somewhere in the program, others take
steps of the hull out of their turn. The same cuts are tried whatever the budget, so that a larger budget never chooses
more seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from jointcut.partition.search.network import INFINITE, SINK, Network
from jointcut.partition.search.peel import peel

#: The seconds of a network sum to fewer ticks than 2 to this power.
_TICK_BITS = 60

#: How many infinite arcs in a row are followed to find the last use of a node.
_LONGEST_TIE = 64

#: A step of the hull is large if it saves more than this share of the bytes that all steps save. A large step is tried
#: in its turn, and these numbers of steps earlier (later, where negative).
_LARGE = 1 / 16
_MOVES = (0, 1, -1, 2, -2, 3, -3, 4, -4, 6, -6, 8, -8)

#: How many cuts with two early steps are tried, and how many steps early they may be.
_MOST_PAIRS = 300_000
_MOST_AHEAD = 32


@dataclass(frozen=True)
class Choice:
    """One cut: its capacity in bytes, exact, and the seconds that it makes the backward compute again.

    Each op's seconds are rounded down to `Front.tick_seconds`. A node lies on the sink's side if its rank is above
    `step` and not among `ahead`.
    """

    bytes: int
    seconds: float
    ranks: np.ndarray = field(compare=False, repr=False)
    step: int = field(default=0, compare=False, repr=False)
    ahead: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @property
    def sink_side(self) -> np.ndarray:
        """Which nodes lie on the sink's side (bool): the values that the backward has at hand or computes."""
        return (self.ranks > self.step) & ~np.isin(self.ranks, self.ahead)


@dataclass(frozen=True)
class _Chain:
    """Nested cuts: in cut k the nodes of a rank above k are on the sink's side. The other arrays are indexed by k."""

    ranks: np.ndarray
    bytes: np.ndarray
    ticks: np.ndarray
    is_finite: np.ndarray


@dataclass(frozen=True)
class _Table:
    """Cuts by rising bytes and falling ticks: each is a `step` of a `chain`, with up to two steps `ahead` (0: none)."""

    bytes: np.ndarray
    ticks: np.ndarray
    chain: np.ndarray
    step: np.ndarray
    ahead: np.ndarray


@dataclass(frozen=True)
class Front:
    """The lower convex hull of (bytes, seconds) over all cuts of a network, from fewest bytes to fewest seconds.

    The first `ranks[node]` cuts of the hull have a node on the sink's side. `ticks` are the seconds of each arc in
    units of `tick_seconds`, rounded down. Cuts after number `last` cost more bytes for a second than was asked for:
    they are no choices, but the bound uses them.
    """

    net: Network
    ticks: np.ndarray
    tick_seconds: float
    ranks: np.ndarray
    last: int

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """The cuts of the hull: its corners, and points on its edges."""
        hull = self._hull
        return tuple(self._choice(self.ranks, hull.bytes[k], hull.ticks[k], k) for k in range(self.last + 1))

    def bound_seconds(self, budget_bytes: int) -> float:
        """A lower bound on the seconds of any cut of at most `budget_bytes`; infinite where there is no such cut."""
        hull = self._hull
        k = _affordable(hull.bytes, budget_bytes)
        if k < 0:
            return math.inf
        ticks = int(hull.ticks[k])
        if k + 1 < len(hull.bytes):
            rise, fall = int(hull.bytes[k + 1] - hull.bytes[k]), ticks - int(hull.ticks[k + 1])
            ticks += (int(hull.bytes[k]) - int(budget_bytes)) * fall // rise
        return ticks * self.tick_seconds

    def best(self, budget_bytes: int) -> Choice | None:
        """The cut of fewest seconds found among cuts of at most `budget_bytes`; None where there is none.

        A larger budget never gives more seconds.
        """
        table = self._table
        k = _affordable(table.bytes, budget_bytes)
        if k < 0:
            return None
        ahead = tuple(int(step) for step in table.ahead[:, k] if step)
        ranks = self._ranks_of(int(table.chain[k]))
        return self._choice(ranks, table.bytes[k], table.ticks[k], int(table.step[k]), ahead)

    def _choice(
        self, ranks: np.ndarray, bytes_cut: int, ticks: int, step: int = 0, ahead: tuple[int, ...] = ()
    ) -> Choice:
        return Choice(int(bytes_cut), int(ticks) * self.tick_seconds, ranks, step, ahead)

    @cached_property
    def _hull(self) -> _Chain:
        return _measured(self.net, self.ticks, self.ranks)

    @cached_property
    def _keys(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys that order the nodes of a step, to save the end of the program first, or its beginning."""
        return -self.net.places, _last_uses(self.net, self.ranks)

    @cached_property
    def _large(self) -> np.ndarray:
        """Which steps of the hull are large (bool), by rank."""
        bytes_cut = self._hull.bytes[: self.last + 1]
        rises = np.diff(bytes_cut, prepend=bytes_cut[0], append=bytes_cut[-1])
        return rises > _LARGE * (bytes_cut[-1] - bytes_cut[0])

    def _ranks_of(self, number: int) -> np.ndarray:
        """The ranks of a chain by its number: 0 is the hull as far as `last`, others take its steps node by node.

        They are not kept, since there are many, each as long as the network.
        """
        ranks = np.minimum(self.ranks, self.last + 1)
        if not number:
            return ranks
        move, key = divmod(number - 1, len(self._keys))
        return _refined(_moved(ranks, self._large, _MOVES[move]), self._keys[key])

    @cached_property
    def _table(self) -> _Table:
        """The cuts to choose from, without any cut that another one equals or betters in both bytes and ticks."""
        rows = [*_fills(self.net, _measured(self.net, self.ticks, self._ranks_of(0)))]
        for number in range(1 + len(self._keys) * (len(_MOVES) if self._large.any() else 1)):
            chain = _measured(self.net, self.ticks, self._ranks_of(number))
            (k,) = np.nonzero(chain.is_finite)
            none = np.zeros_like(k)
            rows.append(np.stack([chain.bytes[k], chain.ticks[k], none + number, k, none, none]))
        table = np.concatenate(rows, axis=1)
        table = table[:, np.lexsort(table[::-1])]
        fewest = np.minimum.accumulate(table[1])
        table = table[:, np.append(True, table[1, 1:] < fewest[:-1])]
        return _Table(table[0], table[1], table[2], table[3], table[4:])


def front(net: Network, max_price: float | None = None) -> Front:
    """Return the hull of a network, from fewest bytes up to `max_price` bytes for a second, or to fewest seconds.

    Raises `PlanError` where every cut is infinite.
    """
    tick_seconds = math.ldexp(1.0, math.frexp(math.fsum(net.seconds))[1] - _TICK_BITS)
    ticks = np.floor(net.seconds / tick_seconds).astype(np.int64)
    ranks = peel(net, ticks)
    whole = Front(net, ticks, tick_seconds, ranks, int(ranks[SINK]) - 1)
    if max_price is None:
        return whole
    rises = np.diff([choice.bytes for choice in whole.choices])
    falls = -np.diff([choice.seconds for choice in whole.choices])
    return replace(whole, last=int(np.logical_and.accumulate(rises <= max_price * falls).sum()))


def _affordable(bytes_cut: np.ndarray, budget_bytes: int) -> int:
    """The place of the last cut within a budget, in a row by rising bytes; -1 where there is none."""
    return int(np.searchsorted(bytes_cut, min(budget_bytes, INFINITE), "right")) - 1


def _measured(net: Network, ticks: np.ndarray, ranks: np.ndarray) -> _Chain:
    """All cuts of a chain in one pass: an arc is severed from the rank of its tail on, up to the rank of its head."""
    tails, heads, top = ranks[net.tails], ranks[net.heads], int(ranks[SINK])
    severed = tails < heads
    tied = severed & (net.capacities >= INFINITE)
    bytes_cut, ties_cut, ticks_cut = np.zeros((3, top + 1), np.int64)
    for total, arcs, weights in ((bytes_cut, severed & ~tied, net.capacities), (ties_cut, tied, np.ones_like(tails))):
        np.add.at(total, tails[arcs], weights[arcs])
        np.add.at(total, heads[arcs], -weights[arcs])
    np.add.at(ticks_cut, heads, ticks)
    return _Chain(ranks, bytes_cut.cumsum()[:top], ticks_cut[:0:-1].cumsum()[::-1], ties_cut.cumsum()[:top] == 0)


def _moved(ranks: np.ndarray, large: np.ndarray, steps: int) -> np.ndarray:
    """Ranks of a chain in which large steps come `steps` steps earlier."""
    moved = 2 * ranks
    moved[large[ranks]] -= 2 * steps + np.sign(steps)  # an odd number, between two even ones
    return np.where(large[ranks], np.clip(moved, 1, 2 * ranks[SINK] - 1), moved)


def _refined(ranks: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ranks of a chain in which the nodes of each step leave the sink's side by rising key."""
    (inside,) = np.nonzero((ranks > 0) & (ranks < ranks[SINK]))
    inside = inside[np.lexsort((key[inside], ranks[inside]))]
    is_new = np.ones(len(inside), bool)
    is_new[1:] = (np.diff(ranks[inside]) != 0) | (np.diff(key[inside]) != 0)
    refined = np.zeros_like(ranks)
    refined[inside] = np.cumsum(is_new)
    refined[ranks == ranks[SINK]] = np.count_nonzero(is_new) + 1
    return refined


def _last_uses(net: Network, ranks: np.ndarray) -> np.ndarray:
    """For each node, the last place in the program that infinite arcs lead to from it, within its step of the hull."""
    tied = (net.capacities >= INFINITE) & (ranks[net.tails] == ranks[net.heads])
    tails, heads = net.tails[tied], net.heads[tied]
    last = net.places
    for _ in range(_LONGEST_TIE):
        later = last.copy()
        np.maximum.at(later, tails, last[heads])
        if (later == last).all():
            break
        last = later
    return last


def _fills(net: Network, hull: _Chain) -> Iterator[np.ndarray]:
    """Rows of the table: cuts of the hull with one or two steps taken early, if better than the hull's own cuts.

    A step may be taken before others if no arc joins it to them; it then costs the same as in its turn.
    """
    tails, heads, cuts = hull.ranks[net.tails], hull.ranks[net.heads], len(hull.bytes)
    low, high = np.minimum(tails, heads), np.maximum(tails, heads)
    joined = (low > 0) & (high < cuts) & (low < high)
    needs = np.zeros(cuts, np.int64)  # for each step, the last earlier step that an arc joins it to
    np.maximum.at(needs, high[joined], low[joined])
    rises, falls = np.diff(hull.bytes, prepend=hull.bytes[0]), -np.diff(hull.ticks, prepend=hull.ticks[0])
    most_ahead = min(_MOST_AHEAD, math.isqrt(2 * _MOST_PAIRS // cuts))
    for one in range(2, most_ahead + 1):
        for two in (0, *range(one + 1, most_ahead + 1)):
            step = np.arange(cuts - max(one, two))
            first, second = step + one, step + two if two else np.zeros_like(step)  # there is no step 0
            is_free = (needs[first] <= step) & (needs[second] <= step)
            step, first, second = step[is_free], first[is_free], second[is_free]
            bytes_cut = hull.bytes[step] + rises[first] + rises[second]
            ticks = hull.ticks[step] - falls[first] - falls[second]
            gains = ticks < hull.ticks[np.searchsorted(hull.bytes, bytes_cut, "right") - 1]
            yield np.stack([bytes_cut, ticks, np.zeros_like(step), step, first, second])[:, gains]


def spread(choices: Sequence[Choice], count: int) -> list[Choice]:
    """At most `count` of the choices, the ends among them, evenly spread in the logarithm of their bytes."""
    if len(choices) <= count:
        return list(choices)
    sizes = np.log2([c.bytes + 4096 for c in choices])
    wanted = np.linspace(sizes[0], sizes[-1], count)
    places = sorted({int(np.argmin(abs(sizes - w))) for w in wanted} | {0, len(choices) - 1})
    return [choices[i] for i in places]


def sampled(whole: Front, count: int) -> list[Choice]:
    """At most `count` cuts of the hull, and the best known cuts for as many budgets between its ends."""
    corners = spread(whole.choices, count)
    budgets = np.linspace(corners[0].bytes, corners[-1].bytes, count, dtype=np.int64).tolist()
    between = [choice for b in budgets if (choice := whole.best(b)) is not None]
    return sorted({(c.bytes, c.seconds): c for c in (*between, *corners)}.values(), key=lambda c: c.bytes)
