"""Find the parameters that a scan can update slice by slice.

A scan of a backward returns stacks of gradients. Where a gradient is made of one stack, and gradient and update treat
each slice alone, the update can run in the steps of the scan, if nothing reads the old parameter later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax

from jointcut.aot.trace.analyse import depending
from jointcut.aot.update.slices import Row, Slice, is_sliceable, summed
from jointcut.aot.update.updates import Stretch
from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.jax import jaxprs, meshes, runtime
from jointcut.partition.program.primitives import ELEMENTWISE
from jointcut.partition.rewrite import simplify


class Written(NamedTuple):
    """A result of an update that a scan writes: its place, the variable of the old array, and a slice's program."""

    place: int
    old: Any
    new: Slice


@dataclass(frozen=True)
class Leaf:
    """The update of one parameter, slice by slice.

    Attributes:
        place: of the parameter.
        stack: the variable of the scan's result that its gradient is made of.
        arrays: the values of variables of the update.
        before: the equations that need no slice.
        rest: the results that need no slice, by place.
        groups: the written results, in order. A later group reads no array that an earlier group has written.
        sums: variables of sums and the like over each slice, and the program for each.
        after: the equations that join these sums.
        ends: the results of these equations, by place.
    """

    place: int
    stack: Any
    arrays: dict[Any, Any]
    before: Sequence[Any]
    rest: Mapping[int, Any]
    groups: Sequence[Sequence[Written]] = ()
    sums: Sequence[tuple[Any, Slice]] = ()
    after: Sequence[Any] = ()
    ends: Mapping[int, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, stack: Any, gradient: Any, eqns: Sequence[Any], place: int, given: _Given, is_last: bool
    ) -> Leaf | None:
        """Return the update of the parameter at a place, whose gradient some equations make of a stack.

        In the last sweep results are written slice by slice. Before it they are joined from sums over slices. Returns
        None if a slice of a result needs more than one slice of the stack.
        """
        stretch, arrays = given
        program, _ = jaxprs.opened(stretch.program)
        inputs = {i: v for v, i in zip(program.invars, stretch.given, strict=True) if i is not None}
        own, outs = simplify.renamed(program, {inputs[place]: gradient} if place in inputs else {})
        eqns = [*eqns, *own]
        late = depending(eqns, [stack])
        ends = {o: v for o, v in zip(stretch.places, outs, strict=True) if _is_in(v, late)}
        rest = {o: v for o, v in zip(stretch.places, outs, strict=True) if o not in ends}
        known = dict(zip(program.invars, stretch.values(arrays), strict=True))
        leaf = cls(place, stack, known, [eqn for eqn in eqns if late.isdisjoint(eqn.outvars)], rest)
        if not ends:
            return None
        if is_last:
            olds = {o: (inputs.get(i), arrays[i]) for o in ends for i in [stretch.olds[o]]}
            return leaf._writing(eqns, ends, olds)
        return leaf._summing(eqns, ends, late)

    def _writing(self, eqns: Sequence[Any], ends: dict[int, Any], given: dict[int, tuple[Any, Any]]) -> Leaf | None:
        """Return the update that writes results into old arrays, which are `given` with their variables if known."""
        olds = {o: v or jaxprs.fresh(jax.typeof(old)) for o, (v, old) in given.items()}
        if not all(_is_alike(olds[o].aval, v.aval) and _length(v) == _length(self.stack) for o, v in ends.items()):
            return None
        changing = {self.stack, *olds.values()}
        slices = {o: Slice.of(eqns, [v], changing) for o, v in ends.items()}
        written = [Written(o, olds[o], new) for o, new in slices.items() if new is not None]
        if len(written) < len(ends):
            return None
        arrays = self.arrays | {olds[o]: old for o, (_, old) in given.items()}
        return replace(self, arrays=arrays, groups=_ordered(written))

    def _summing(self, eqns: Sequence[Any], ends: dict[int, Any], late: set[Any]) -> Leaf | None:
        """Return the update that joins results from sums over slices."""
        joined, sums, after = set[Any](), list[tuple[Any, Slice]](), list[Any]()
        for eqn in eqns:
            moving = {v for v in eqn.invars if _is_in(v, late)}
            if not moving:
                continue
            if moving <= joined:
                after.append(eqn)
            elif moving & joined:
                return None
            elif (parts := summed(eqn)) is not None:
                made = Slice.of([*eqns, parts[0]], parts[0].outvars, {self.stack})
                if made is None:
                    return None
                sums.append((parts[0].outvars[0], made))
                after.append(parts[1])
            else:
                continue
            joined.update(eqn.outvars)
        return replace(self, sums=sums, after=after, ends=ends) if joined.issuperset(ends.values()) else None

    @property
    def slices(self) -> list[Slice]:
        """The programs for slices."""
        return [*(w.new for w in self.written), *(made for _, made in self.sums)]

    @property
    def read(self) -> list[Any]:
        """The variables that slices need, without the gradient and the written arrays."""
        changing = {self.stack, *(w.old for w in self.written)}
        return list(dict.fromkeys(v for s in self.slices for v in (*s.sliced, *s.whole) if v not in changing))

    @property
    def written(self) -> list[Written]:
        """Return all written results, in order."""
        return [w for group in self.groups for w in group]

    def values(self, env: dict[Any, Any]) -> tuple[dict[Any, Any], dict[int, Any]]:
        """Return the arrays that are read, by variable, and the results that need no slice, by place.

        `env` has the values of the backward's variables.
        """
        read = self.read
        results = evaluated(self.before, [*read, *self.rest.values()], env | self.arrays)
        known = self.arrays | dict(zip(read, results[: len(read)], strict=True))
        return known, dict(zip(self.rest, results[len(read) :], strict=True))

    def joined(self, env: dict[Any, Any]) -> dict[int, Any]:
        """Return the results that are joined, by place; `env` also has the values of the sums over slices."""
        results = evaluated([*self.before, *self.after], [*self.ends.values()], env | self.arrays)
        return dict(zip(self.ends, results, strict=True))


#: A stretch of an update, and the arrays that it reads from.
_Given = tuple[Stretch, Sequence[Any]]


def evaluated(eqns: Sequence[Any], wanted: Sequence[Any], env: Mapping[Any, Any]) -> list[Any]:
    """Evaluate equations, and return the values of the atoms `wanted`; `env` has the values of other variables."""
    live = simplify.live(eqns, wanted)
    kept = [eqn for i, eqn in enumerate(eqns) if i in live.places]
    made = {v for eqn in kept for v in eqn.outvars}
    given = [v for v in live.read if v not in made]
    return runtime.evaluate(jaxprs.build(given, wanted, kept), *(env[v] for v in given))


def _is_in(v: Any, late: set[Any]) -> bool:
    return not isinstance(v, jaxprs.Literal) and v in late


def _length(v: Any) -> int | None:
    return v.aval.shape[0] if v.aval.shape else None


def _is_alike(old: Any, new: Any) -> bool:
    """Whether slices of one array may be written into another."""
    if not (is_sliceable(old) and is_sliceable(new)):
        return False
    return (old.shape, old.dtype, meshes.varying(old)) == (new.shape, new.dtype, meshes.varying(new))


def _ordered(written: Sequence[Written]) -> list[list[Written]]:
    """Return the results in groups; no group reads an array that an earlier one has written."""
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
        leaves: the updates of each such scan, by its number.
        done: the equations that each scan runs instead of the backward, by its number.
    """

    leaves: dict[int, list[Leaf]]
    done: set[int]

    @classmethod
    def of(cls, jaxpr: Any, ends: Mapping[Any, Sequence[int]], known: Mapping[Any, Any], filling: Any) -> Scans:
        """Find them. `ends` are the places of the parameters, by gradient.

        `known` are the values of inputs, and `filling` is the sweep of the update (`step.Filling`).
        """
        scans = cls({}, set())
        for n, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive.name != SCAN or jaxprs.touches_references(eqn) or not eqn.params["length"]:
                continue
            for stack in eqn.outvars[jaxprs.scan_layout(eqn).num_carry :]:
                scans._add(n, stack, jaxpr, ends, known, filling)
        return scans

    def _add(self, n: int, stack: Any, jaxpr: Any, ends: Any, known: Any, filling: Any) -> None:
        """Add the parameter whose gradient is made of a stack of the scan `n`, if there is one."""
        eqns = jaxpr.eqns
        reached = depending(eqns[n + 1 :], [stack])
        later = {m for m in range(n + 1, len(eqns)) if not reached.isdisjoint(eqns[m].outvars)}
        found = [(v, place) for v in ends if v in reached for place in ends[v]]
        if len(found) != 1 or any(eqns[m].effects for m in later):
            return
        gradient, place = found[0]
        chosen = _needed(eqns, gradient, stack, n)
        if chosen is None:
            return
        made, given = [eqns[m] for m in chosen], filling.given(place)
        leaf = Leaf.of(stack, gradient, made, place, given, filling.is_last)
        done = self.done | later
        done |= _only_for(eqns, chosen, done, {*ends})
        olds = [] if leaf is None else [leaf.arrays[w.old] for w in leaf.written]
        variables = {v for v, x in known.items() if any(x is old for old in olds)}
        if leaf is not None and not _is_read_later(eqns, n, variables, done):
            self.leaves.setdefault(n, []).append(leaf)
            self.done = done


def _needed(eqns: Sequence[Any], gradient: Any, stack: Any, n: int) -> list[int] | None:
    """Return the equations that make a gradient of a stack, without those that may as well stay where they are.

    Before the scan `n`, the equations that do not treat each slice alone stay where they are. Returns None if another
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
        left += jaxprs.variables(eqns[m].invars)
    return sorted(chosen)


def _only_for(eqns: Sequence[Any], chosen: Sequence[int], done: set[int], ends: set[Any]) -> set[int]:
    """Return the chosen equations that nothing else needs."""
    more = set[int]()
    for m in reversed(chosen):
        rest = (eqn for k, eqn in enumerate(eqns) if k not in done and k not in more)
        read = {v for eqn in rest for v in jaxprs.variables(eqn.invars)}
        if read.isdisjoint(eqns[m].outvars) and ends.isdisjoint(eqns[m].outvars):
            more.add(m)
    return more


def _is_read_later(eqns: Sequence[Any], n: int, variables: set[Any], done: set[int]) -> bool:
    """Whether an equation behind the scan `n`, or the scan as a whole, reads one of some variables."""
    layout = jaxprs.scan_layout(eqns[n])
    atoms = list(eqns[n].invars[: layout.num_consts + layout.num_carry])
    atoms += [v for m in range(n + 1, len(eqns)) if m not in done for v in eqns[m].invars]
    return not variables.isdisjoint(jaxprs.variables(atoms))
