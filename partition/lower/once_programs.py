"""Write the programs of an equation that runs each at most once, with their inputs and kept values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from jointcut.partition.lower.follow import Followed, flat
from jointcut.partition.program.bodies import Body, Kept, Once, Views
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.rewrite.simplify import renamed


@dataclass(frozen=True)
class KeptValue:
    """A value that a branch keeps, as it is handed over.

    Attributes:
        kept: how the branches keep their values, all together.
        leader: the value that stands for them all.
        start, count: the place and number of the value's arrays in its branch.
    """

    kept: Kept
    leader: int
    start: int
    count: int


@dataclass(frozen=True)
class Lent:
    """The values kept for loops in segments that a program reads: variables inside it, operands, and their views."""

    invars: Sequence[Any] = ()
    operands: Sequence[Any] = ()
    views: Sequence[Any] = ()


@dataclass(frozen=True)
class Given:
    """Everything that the programs of one equation read from around.

    Attributes:
        consts: the atoms around of values that they read whole.
        parts: the atoms around of values of which they may see parts.
        read: the values that branches of the forward keep.
        wholes: the atoms around of these, by the value that stands for them.
        lent: the values kept for loops in segments.
    """

    consts: Mapping[int, Any]
    parts: Mapping[int, Any]
    read: Mapping[int, KeptValue]
    wholes: Mapping[int, Sequence[Any]]
    lent: Lent

    @classmethod
    def of(
        cls, around: Followed[Any], inner: Sequence[Followed[Any]], shared: Mapping[Any, KeptValue], lent: Lent
    ) -> Self:
        """Collect it from the levels of the programs, once these have been followed."""
        consts = {v: around.want(v) for level in inner for v in level.consts}
        xs, loop = dict.fromkeys(v for level in inner for v in level.xs), around.region.loop
        parts = {v: around.want(v) for v in xs if (v, loop) not in shared}
        read = {v: shared[v, loop] for v in xs if v not in parts}
        wholes = {one.leader: flat([around.want(one.leader)]) for one in read.values()}
        return cls(consts, parts, read, wholes, lent)

    @property
    def operands(self) -> list[Any]:
        """The atoms around, in the order of a program's inputs."""
        wholes = itertools.chain(*self.wholes.values())
        return [*self.consts.values(), *self.parts.values(), *wholes, *self.lent.operands]

    def program(self, k: int, level: Followed[Any], eqns: Sequence[Any], results: Sequence[Any]) -> Any:
        """Program `k` of the equation, which first unpacks the values that its forward has kept."""
        invars = [level.consts[v] if v in level.consts else jaxprs.fresh(x.aval) for v, x in self.consts.items()]
        slots = {one.leader: [*map(jaxprs.fresh, one.kept.inside)] for one in self.read.values()}
        first, names, unpacked = list[Any](), dict[Any, Any](), dict[int, list[Any]]()
        for v, one in self.read.items():
            if v not in level.xs:
                continue
            if one.leader not in unpacked:
                more, unpacked[one.leader] = one.kept.unpack(k, slots[one.leader])
                first += more
            names.update(zip(flat([level.xs[v]]), unpacked[one.leader][one.start : one.start + one.count], strict=True))
        inside = jaxprs.build([*names], results, eqns)
        more, ends = renamed(jaxprs.opened(inside)[0], names)
        parts = [level.xs[v] for v in self.parts]
        invars += [*parts, *itertools.chain(*slots.values()), *self.lent.invars]
        return jaxprs.build(invars, ends, [*first, *more])

    def views(self, body: Body, found: Once, kept: Iterable[Kept]) -> Views:
        """The parts of the operands and results that the programs see."""
        handed = {one.leader: one.kept.views for one in self.read.values()}
        results = [found.views[1][i] for i in body.places] if found.views[1] else []
        return (
            [*(body.views[v] for v in self.parts), *itertools.chain(*handed.values()), *self.lent.views],
            [*results, *itertools.chain(*(hand.views for hand in kept))],
        )
