"""Find equations of a joint program whose rows do not meet.

Equations are found from one axis of one array, such as the largest at the peak, along its makers and readers. An
equation joins if it treats each row alone (`program/ties`) along the axes that are known by then. Values of fewer bytes
than a bound are the border: they are made whole. A sum over rows is a border, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.partition.program.axes import Joined, Place, Rows, is_sum
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.jax.jaxprs import Atom, Equation, Literal, Var
from jointcut.partition.program.jax.side_effects import has_effects
from jointcut.partition.program.primitives import UNDONE
from jointcut.partition.program.ties import ADD, Tie, ties
from jointcut.partition.tiles import inside
from jointcut.partition.tiles.blocks import is_numbered
from jointcut.partition.tiles.linearity import holds_zeros, keeps_linear, zeros_of


@dataclass(frozen=True)
class Tiling:
    """Equations of a program that treat each of some rows alone.

    Attributes:
        eqns: their places in the program.
        rows: the axis of the rows of each value that the equations read or make; `Joined` for a sum over rows.
        count: the number of rows.
        levels: the equations of each loop over blocks, in order. A loop may need results of another by way of equations
            outside; each half has loops of its own.
    """

    eqns: frozenset[int]
    rows: Rows
    count: int
    levels: tuple[frozenset[int], ...] = ()

    @property
    def needs_even(self) -> bool:
        """Whether blocks must not overlap: sums inside the programs of equations would count rows twice."""
        return any(map(_sums, (rows for several in self.rows.inside.values() for rows in several)))


def _sums(rows: Rows) -> bool:
    """Whether a program adds up rows, or one inside it does."""
    inner = (each for several in rows.inside.values() for each in several)
    return any(is_sum(p) for p in rows.places.values()) or any(map(_sums, inner))


def grown(closed: Any, boundary: int, v: Any, axis: int, least_bytes: int, fixed: Collection[int] = ()) -> Tiling:
    """Return the tiling that grows from one axis of a value, bordered by values of fewer than `least_bytes`.

    `boundary` is the number of forward equations, and `fixed` has the places of equations that stay as they are.
    """
    jaxpr, _ = jaxprs.opened(closed)
    growing = Growing.of(jaxpr, v.aval.shape[axis], least_bytes, fixed)
    growing.start(v, axis)
    return levelled(jaxpr.eqns, (range(boundary), range(boundary, len(jaxpr.eqns))), growing.tiling())


def levelled(eqns: Sequence[Equation], spans: Iterable[Iterable[int]], tiling: Tiling) -> Tiling:
    """Return a tiling in levels: equations that need its results by way of others stand in a later one.

    No level has equations of several spans.
    """
    levels: list[frozenset[int]] = []
    for span in spans:
        inside, after, groups = dict[Any, int](), dict[Any, int](), dict[int, set[int]]()
        for i in span:
            reads = reading(eqns[i])
            level = max((inside.get(v, after.get(v, -1) + 1) for v in reads), default=0)
            # a part of a sum is read where it is made
            reads_sums = [inside.get(v) == level for v in reads if is_sum(tiling.rows.places.get(v))]
            if i in tiling.eqns and all(reads_sums):
                groups.setdefault(level, set()).add(i)
                inside.update(dict.fromkeys(eqns[i].outvars, level))
            elif (last := max((inside.get(v, after.get(v, -1)) for v in reads), default=-1)) >= 0:
                after.update(dict.fromkeys(making(eqns[i]), last))
        levels += [frozenset(groups[level]) for level in sorted(groups)]
    kept = frozenset[int]().union(*levels)
    seen = {v for i in kept for v in _values(eqns[i])}
    places = {v: place for v, place in tiling.rows.places.items() if v in seen}
    return replace(tiling, eqns=kept, rows=replace(tiling.rows, places=places), levels=tuple(levels))


#: Stands for the world in the order of effects.
_WORLD = object()


def reading(eqn: Equation) -> set[Any]:
    """The variables that an equation reads. An equation with effects also reads the world."""
    return {*jaxprs.variables(eqn.invars), *[_WORLD] * bool(eqn.effects)}


def making(eqn: Equation) -> set[Any]:
    """The variables that an equation makes. An equation with effects also makes another world."""
    return {*eqn.outvars, *[_WORLD] * bool(eqn.effects)}


@dataclass
class Growing:
    """A tiling while it grows.

    Attributes:
        eqns: the equations of the program.
        count: the number of rows.
        near: for each variable, the places of the equations that make or read it.
        ends: the results of the program.
        least_bytes: values of fewer bytes are the border.
        zeros: values that are known to hold zeros.
        fixed: the places of equations that never join.
        never_border: values that are no border, however small.
        bodies: the rows in programs inside equations, by the identity of the equation.
        places: the axis of the rows of each value that has rows.
        whole: the values that an equation of the tiling reads whole.
        sums: the sums over rows.
        inside: the places of the equations of the tiling.
        number: the number of values that were queued.
    """

    eqns: Sequence[Equation]
    count: int
    near: Mapping[Var, Sequence[int]]
    ends: frozenset[Var]
    least_bytes: int
    zeros: Collection[Var]
    fixed: frozenset[int] = frozenset()
    never_border: Collection[Var] = ()
    bodies: dict[int, list[Rows]] = field(default_factory=dict)
    places: dict[Var, int] = field(default_factory=dict)
    whole: set[Var] = field(default_factory=set)
    sums: dict[Var, Joined] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)
    number: int = 0

    @classmethod
    def of(
        cls, jaxpr: Any, count: int, least_bytes: int, fixed: Collection[int] = (), never_border: Collection[Var] = ()
    ) -> Growing:
        """Begin with no equation."""
        zeros = zeros_of(jaxpr.eqns)
        near: dict[Var, list[int]] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            for v in dict.fromkeys(_values(eqn)):
                near.setdefault(v, []).append(i)
        ends = frozenset(jaxprs.variables(jaxpr.outvars))
        return cls(jaxpr.eqns, count, near, ends, least_bytes, zeros, frozenset(fixed), never_border)

    def start(self, v: Var, axis: int) -> None:
        """Add equations around a value."""
        self.places[v] = axis
        self.grow([v])

    def grow(self, known: Iterable[Var]) -> None:
        """Add equations around values, those around the largest first."""
        queue = list[tuple[int, int, Var]]()
        for v in known:
            self.put(queue, v)
        while queue:
            _, _, v = heapq.heappop(queue)
            for i in self.near.get(v, ()):
                for new in self.join(i):
                    if new in self.never_border or abstract.aval_bytes(new.aval) >= self.least_bytes:
                        self.put(queue, new)

    def put(self, queue: list[tuple[int, int, Var]], v: Var) -> None:
        """Queue a value."""
        self.number += 1
        heapq.heappush(queue, (-abstract.aval_bytes(v.aval), self.number, v))

    def close(self, order: Sequence[int]) -> bool:
        """Add equations that stand between others in an order; returns whether all could be added."""
        while between := _between(self.eqns, order, self.inside):
            for i in between:
                self.grow(self.join(i))
            if not self.inside.issuperset(between):
                return False
        return True

    def join(self, i: int) -> list[Var]:
        """Let an equation join if it may; returns the values that are known to have rows by that."""
        eqn = self.eqns[i]
        if i in self.inside or i in self.fixed or has_effects(eqn) or any(map(_is_extended, eqn.outvars)):
            return []
        if inside.holds_program(eqn):
            return self.join_with_programs(i, eqn)
        tie = next((tie for tie in _ties(eqn) if self.fits(eqn, tie)), None)
        if tie is None:
            return self.join_sum(i, eqn)
        return self.joined(i, tie.operands, [Joined(ADD, tie.starts) if p is None else p for p in tie.results])

    def joined(self, i: int, ins: Sequence[Place], outs: Sequence[Place]) -> list[Var]:
        """Note that an equation has joined, with the places of its operands and results."""
        eqn = self.eqns[i]
        self.inside.add(i)
        before = set(self.places)
        pairs = (*zip(eqn.invars, ins, strict=True), *zip(eqn.outvars, outs, strict=True))
        self.places.update((v, p) for v, p in pairs if isinstance(p, int) and not isinstance(v, Literal))
        self.whole.update(jaxprs.variables(v for v, p in zip(eqn.invars, ins, strict=True) if p is None))
        self.sums.update((v, p) for v, p in zip(eqn.outvars, outs, strict=True) if isinstance(p, Joined))
        for v in eqn.outvars:
            if v in self.sums:
                self.follow_sum(v)
        return [v for v in _values(eqn) if v in self.places and v not in before]

    def join_with_programs(self, i: int, eqn: Equation) -> list[Var]:
        """Let an equation join whose programs keep the rows apart."""
        ins, outs = ([None if p == inside.SAME else p for p in map(self.place, vs)] for vs in (eqn.invars, eqn.outvars))
        zeros = [holds_zeros(v, self.zeros) for v in eqn.invars]
        if any(isinstance(p, Joined) for p in ins):
            return []
        found = inside.through(eqn, ins, outs, zeros, self.follow)
        if found is not None and not _agree(eqn, found.ins):  # what is read twice is read in one way
            known = {id(v): p for v, p in zip(eqn.invars, found.ins, strict=True) if p is not None}
            ins = [known.get(id(v)) for v in eqn.invars]
            found = inside.through(eqn, ins, outs, zeros, self.follow)
        if found is None or not _agree(eqn, found.ins):
            return []
        ends = [inside.SAME if p is None else p for p in found.outs]
        if not all(self.is_read(v, p) for v, p in zip(eqn.invars, found.ins, strict=True)):
            return []
        if not all(self.is_made(v, p) for v, p in zip(eqn.outvars, ends, strict=True)):
            return []
        self.bodies[id(eqn)] = list(found.rows)
        return self.joined(i, found.ins, ends)

    def place(self, v: Any) -> Place:
        """The place of a variable or literal, as far as it is known."""
        return None if isinstance(v, Literal) else self.sums.get(v, self.places.get(v))

    def follow(self, program: Any, ins: Sequence[Place], outs: Sequence[Place], is_strict: bool) -> inside.Ends | None:
        """Follow rows through a program inside an equation; None where they meet."""
        jaxpr, _ = jaxprs.opened(program)
        growing = InBody.of(jaxpr, self.count, 0)
        pairs: list[tuple[Any, Place]] = [*zip((*jaxpr.invars, *jaxpr.outvars), (*ins, *outs), strict=True)]
        along = [(v, p) for v, p in pairs if isinstance(p, int)]
        if any(isinstance(v, Literal) or v.aval.shape[p : p + 1] != (self.count,) for v, p in along):
            return None
        growing.places.update(along)
        growing.sums.update((v, p) for v, p in pairs[: len(ins)] if isinstance(p, Joined))
        growing.grow([*growing.places])
        for v in [*growing.sums]:
            growing.follow_sum(v)
        for i, eqn in enumerate(growing.eqns):
            found = [] if i in growing.inside else [growing.place(v) for v in _values(eqn)]
            if any(isinstance(p, int) for p in found) or (is_strict and any(p is not None for p in found)):
                return None
            if any(p is not None for p in found):
                growing.sums.update((v, Joined(ADD)) for v in eqn.outvars)
        ends = tuple(growing.place(v) for v in jaxpr.outvars)
        return inside.Ends(tuple(growing.place(v) for v in jaxpr.invars), ends, (growing.rows(),))

    def join_sum(self, i: int, eqn: Equation) -> list[Var]:
        """Let an equation join that only shows a sum in another shape or order."""
        if len(eqn.invars) == 1 and eqn.primitive.name in UNDONE:
            (v,) = eqn.invars
            is_known = v in self.sums and self.sums[v] == Joined(ADD) and self.is_made(eqn.outvars[0], None)
            if is_known and v not in self.ends and self.readers(v) == [i]:
                return self.joined_sum(i, eqn)
        return []

    def joined_sum(self, i: int, eqn: Equation) -> list[Var]:
        """Note that an equation of sums has joined."""
        self.inside.add(i)
        self.sums.update((v, Joined(ADD)) for v in eqn.outvars)
        for v in eqn.outvars:
            self.follow_sum(v)
        return []

    def follow_sum(self, total: Var) -> None:
        """Let readers of a sum join that are done to the part of each block."""
        for i in self.readers(total):
            if i not in self.inside:
                self.join_sum(i, self.eqns[i])

    def readers(self, v: Atom) -> list[int]:
        """The places of the equations that read a value."""
        return [i for i in self.near.get(v, ()) if v in self.eqns[i].invars]

    def fits(self, eqn: Equation, tie: Tie) -> bool:
        """Whether an equation treats each row alone along the axes of a tie, and these agree with the known ones."""
        if tie.joins not in ("", ADD) or (tie.starts and isinstance(eqn.invars[0], Literal)):
            return False
        if not _agree(eqn, tie.operands):
            return False
        reads = zip(eqn.invars, tie.operands, strict=True)
        makes = zip(eqn.outvars, tie.results, strict=True)
        return all(self.is_read(v, axis) for v, axis in reads) and all(self.is_made(v, axis) for v, axis in makes)

    def is_read(self, v: Any, axis: Place) -> bool:
        """Whether a value may be read by rows along an axis, or whole."""
        if isinstance(v, Literal):
            return axis is None
        if v in self.sums:
            return axis is None and self.sums[v] == inside.SAME
        if self.places.get(v, axis) != axis:
            return False
        return axis is None or (v.aval.shape[axis] == self.count and v not in self.whole)

    def is_made(self, v: Var, place: Place) -> bool:
        """Whether a value may be made by rows along an axis, alike by every block, or else as a sum over rows."""
        if isinstance(place, int):
            return self.is_read(v, place)
        return v not in self.places and (place == inside.SAME or v not in self.whole)

    def rows(self) -> Rows:
        """The places of all rows as they are now."""
        return Rows({**self.places, **self.sums}, inside=self.bodies)

    def tiling(self) -> Tiling:
        """The tiling as it is now."""
        return Tiling(frozenset(self.inside), self.rows(), self.count)


class InBody(Growing):
    """Rows that are followed through a program inside an equation: all equations that they reach must join."""

    def fits(self, eqn: Equation, tie: Tie) -> bool:
        """As for any program, but scatters add to zeros."""
        return super().fits(eqn, tie) and not (tie.starts and eqn.invars[0] not in self.zeros)

    def join_sum(self, i: int, eqn: Equation) -> list[Var]:
        """Let an equation join that is linear in sums."""
        are = [isinstance(self.place(v), Joined) for v in eqn.invars]
        if inside.holds_program(eqn) or not any(are) or any(isinstance(self.place(v), int) for v in eqn.invars):
            return []
        nothing = [holds_zeros(v, self.zeros) for v in eqn.invars]
        if not keeps_linear(eqn, are, nothing) or any(v in self.whole or v in self.places for v in eqn.outvars):
            return []
        self.whole.update(jaxprs.variables(v for v, one in zip(eqn.invars, are, strict=True) if not one))
        return self.joined_sum(i, eqn)


def _between(eqns: Sequence[Equation], order: Sequence[int], inside: Collection[int]) -> list[int]:
    """The equations outside that read results of some, and are read by some, at once or by way of others."""
    after, made = set[int](), set[Any]()
    for i in order:
        if i in inside or reading(eqns[i]) & made:
            made |= making(eqns[i])
            after.add(i)
    wanted = set[Any]()
    between = list[int]()
    for i in reversed(order):
        if i in inside or making(eqns[i]) & wanted:
            wanted |= reading(eqns[i])
            if i in after and i not in inside:
                between.append(i)
    return between[::-1]


def _agree(eqn: Equation, places: Sequence[Place]) -> bool:
    """Whether an operand that an equation reads twice has one place."""
    pairs = {(v, p) for v, p in zip(eqn.invars, places, strict=True) if not isinstance(v, Literal)}
    return len(pairs) == len({v for v, _ in pairs})


def _values(eqn: Equation) -> list[Var]:
    """The variables that an equation reads and makes."""
    return [*jaxprs.variables(eqn.invars), *eqn.outvars]


def _is_extended(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)


def _ties(eqn: Equation) -> list[Tie]:
    """The ties of an equation; rows with numbers are counted from the first row of a block."""
    found = [*ties(eqn)]
    known, given = {tie.results[0] for tie in found}, (None,) * len(eqn.invars)
    axes = range(len(getattr(eqn.outvars[0].aval, "shape", ()))) if eqn.outvars else ()
    return [*found, *(Tie(given, (axis,)) for axis in axes if axis not in known and is_numbered(eqn, axis))]
