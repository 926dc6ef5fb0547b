"""Find the parameters that a scan can update slice by slice.

A scan of a backward returns stacks of gradients. Where a gradient is made of one stack, and gradient and update treat
each slice alone, the update can run in the steps of the scan, if nothing reads the old parameter later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jointcut.aot.trace.analyse import depending
from jointcut.aot.update.slices import Row, Slice, is_sliceable
from jointcut.aot.update.updates import Stretch
from jointcut.partition.program import jaxprs
from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.primitives import ELEMENTWISE
from jointcut.partition.rewrite import simplify


class Written(NamedTuple):
    """A result of an update that a scan writes: its place, the variable of the old array, and how a slice is made."""

    place: int
    old: Any
    new: Slice


@dataclass(frozen=True)
class Leaf:
    """The update of one parameter, slice by slice.

    Attributes:
        place: of the parameter.
        stack: the variable of the scan's result that its gradient is made of.
        groups: what is written, in order. What is written in one group is not read in a later one.
        arrays: the values of variables of the update.
        before: the equations that need no slice.
        read: what slices need of them, and of the backward.
        rest: the results that need no slice, by place.
    """

    place: int
    stack: Any
    groups: Sequence[Sequence[Written]]
    arrays: dict[Any, Any]
    before: Sequence[Any]
    read: Sequence[Any]
    rest: Mapping[int, Any]

    @classmethod
    def of(cls, stack: Any, gradient: Any, eqns: Sequence[Any], place: int, given: _Given) -> Leaf | None:
        """The update of the parameter at a place, whose gradient some equations make of a stack.

        Returns None if a slice of a result needs more than one of the stack.
        """
        stretch, arrays = given
        program, _ = jaxprs.opened(stretch.program)
        inputs = {i: v for v, i in zip(program.invars, stretch.given, strict=True) if i is not None}
        own, outs = simplify.renamed(program, {inputs[place]: gradient} if place in inputs else {})
        eqns = [*eqns, *own]
        late = depending(eqns, [stack])
        moving = {o: v for o, v in zip(stretch.places, outs, strict=True) if _is_in(v, late)}
        known = dict(zip(program.invars, stretch.values(arrays), strict=True))
        olds = {o: inputs.get(i, jaxprs.fresh(jax.typeof(arrays[i]))) for o, i in _pairs(stretch, moving)}
        known.update((olds[o], arrays[i]) for o, i in _pairs(stretch, moving))
        if not all(_is_alike(olds[o].aval, v.aval) and _length(v) == _length(stack) for o, v in moving.items()):
            return None
        changing = {stack, *olds.values()}
        made = {o: Slice.of(eqns, [v], changing) for o, v in moving.items()}
        written = [Written(o, olds[o], new) for o, new in made.items() if new is not None]
        if not made or len(written) < len(made):
            return None
        read = dict.fromkeys(v for w in written for v in (*w.new.sliced, *w.new.whole) if v not in changing)
        rest = {o: v for o, v in zip(stretch.places, outs, strict=True) if o not in moving}
        before = [eqn for eqn in eqns if late.isdisjoint(eqn.outvars)]
        return cls(place, stack, _ordered(written), known, before, tuple(read), rest)

    @property
    def written(self) -> list[Written]:
        """All that is written, in order."""
        return [w for group in self.groups for w in group]

    @property
    def outside(self) -> list[Any]:
        """The variables of the backward that it reads."""
        live = simplify.live(self.before, [*self.read, *self.rest.values()])
        made = {v for i in live.places for v in self.before[i].outvars}
        return [v for v in live.read if v not in made and v not in self.arrays]

    def values(self, env: dict[Any, Any]) -> tuple[dict[Any, Any], dict[int, Any]]:
        """The arrays that are read, by variable, and the results that need no slice, by place.

        `env` has the values of what is read `outside`.
        """
        env, wanted = env | self.arrays, [*self.read, *self.rest.values()]
        live = simplify.live(self.before, wanted)
        kept = [eqn for i, eqn in enumerate(self.before) if i in live.places]
        made = {v for eqn in kept for v in eqn.outvars}
        given = [v for v in live.read if v not in made]
        results = jaxprs.evaluate(jaxprs.build(given, wanted, kept), *(env[v] for v in given))
        count = len(self.read)
        read = self.arrays | dict(zip(self.read, results[:count], strict=True))
        return read, dict(zip(self.rest, results[count:], strict=True))


#: A stretch of an update, and the arrays that it reads from.
_Given = tuple[Stretch, Sequence[Any]]


def _pairs(stretch: Stretch, places: Collection[int]) -> Iterator[tuple[int, int]]:
    """Places of results with those, among the inputs of the update, of what they replace."""
    return ((o, stretch.olds[o]) for o in places)


def _is_in(v: Any, late: set[Any]) -> bool:
    return not isinstance(v, jaxprs.Literal) and v in late


def _length(v: Any) -> int | None:
    return v.aval.shape[0] if v.aval.shape else None


def _is_alike(old: Any, new: Any) -> bool:
    """Whether slices of one array may be written into another."""
    if not (is_sliceable(old) and is_sliceable(new)):
        return False
    return (old.shape, old.dtype, jaxprs.varying(old)) == (new.shape, new.dtype, jaxprs.varying(new))


def _ordered(written: Sequence[Written]) -> list[list[Written]]:
    """Groups in which nothing reads what an earlier one has written."""
    left, groups = list(written), list[list[Written]]()
    while left:
        free = (w for w in left if not any(w.old in other.new.sliced for other in left if other is not w))
        first = next(free, None)
        groups.append(list(left) if first is None else [first])
        left = [] if first is None else [w for w in left if w is not first]
    return groups


# ------------------------------------------------------------------------------------------------- in a backward


@dataclass
class Scans:
    """The parameters that scans of a backward update.

    Attributes:
        leaves: for the number of each such scan, what it updates.
        done: the equations that it runs instead, by number.
    """

    leaves: dict[int, list[Leaf]]
    done: set[int]

    @classmethod
    def of(cls, jaxpr: Any, ends: Mapping[Any, Sequence[int]], known: Mapping[Any, Any], given: Any) -> Scans:
        """Find them. `ends` are for gradients the places of their parameters.

        `known` are the values of inputs, and `given(place)` is the update of a parameter with the arrays that it reads.
        """
        scans = cls({}, set())
        for n, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive.name != SCAN or jaxprs.touches_references(eqn) or not eqn.params["length"]:
                continue
            for stack in eqn.outvars[jaxprs.scan_layout(eqn).num_carry :]:
                scans._add(n, stack, jaxpr, ends, known, given)
        return scans

    def _add(self, n: int, stack: Any, jaxpr: Any, ends: Any, known: Any, given: Any) -> None:
        """Add the parameter whose gradient is made of a stack of the scan `n`, if there is one."""
        eqns = jaxpr.eqns
        reached = depending(eqns[n + 1 :], [stack])
        later = {m for m in range(n + 1, len(eqns)) if not reached.isdisjoint(eqns[m].outvars)}
        found = [(v, place) for v in ends if v in reached for place in ends[v]]
        if len(found) != 1 or any(eqns[m].effects for m in later):
            return
        gradient, place = found[0]
        chosen = _needed(eqns, gradient, stack, n)
        leaf = None if chosen is None else Leaf.of(stack, gradient, [eqns[m] for m in chosen], place, given(place))
        if chosen is None or leaf is None:
            return
        done = self.done | later
        done |= _only_for(eqns, chosen, done, {*ends})
        olds = [leaf.arrays[w.old] for w in leaf.written]
        variables = {v for v, x in known.items() if any(x is old for old in olds)}
        if not _is_read_later(eqns, n, variables, done):
            self.leaves.setdefault(n, []).append(leaf)
            self.done = done


def _needed(eqns: Sequence[Any], gradient: Any, stack: Any, n: int) -> list[int] | None:
    """The equations that make a gradient of a stack, without those that are as well left where they are.

    Of the equations before the scan `n` these are all that do not treat each slice alone. Returns None if another
    result of the scan is needed, or another equation behind it that takes long.
    """
    makers = {v: m for m, eqn in enumerate(eqns) for v in eqn.outvars}
    chosen, left = set[int](), [gradient]
    while left:
        v = left.pop()
        m = None if v is stack else makers.get(v)
        if m is None or m in chosen or (m < n and Row.of(eqns[m]) is None):
            continue
        if m == n or not (eqns[m].primitive.name in ELEMENTWISE or Row.of(eqns[m])):
            return None
        chosen.add(m)
        left += [u for u in eqns[m].invars if not isinstance(u, jaxprs.Literal)]
    return sorted(chosen)


def _only_for(eqns: Sequence[Any], chosen: Sequence[int], done: set[int], ends: set[Any]) -> set[int]:
    """Those of the chosen equations that nothing else needs."""
    more = set[int]()
    for m in reversed(chosen):
        rest = (eqn for k, eqn in enumerate(eqns) if k not in done and k not in more)
        read = {v for eqn in rest for v in eqn.invars if not isinstance(v, jaxprs.Literal)}
        if read.isdisjoint(eqns[m].outvars) and ends.isdisjoint(eqns[m].outvars):
            more.add(m)
    return more


def _is_read_later(eqns: Sequence[Any], n: int, variables: set[Any], done: set[int]) -> bool:
    """Whether an equation behind the scan `n`, or the scan as a whole, reads one of some variables."""
    layout = jaxprs.scan_layout(eqns[n])
    atoms = list(eqns[n].invars[: layout.num_consts + layout.num_carry])
    atoms += [v for m in range(n + 1, len(eqns)) if m not in done for v in eqns[m].invars]
    return any(not isinstance(v, jaxprs.Literal) and v in variables for v in atoms)
