"""Cut the branches of conditionals inside a joint program.

To the graph a `lax.cond` or `lax.switch` is one closed op, and JAX's derivative hands over what it linearised: all
residuals of all branches, those of one type in common. Here each branch is joined with its branch of the backward and
cut like a program of its own. Only one branch runs, so what the branches keep shares its space. Arrays of equally many
elements share a *slot*; where that would take more than the largest branch needs, all arrays of a dtype lie one after
another in one slot. In the bodies of a forward loop and its backward loop conditionals are cut in the same way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.partition.errors import PlanError
from jointcut.partition.plans.backend import PORTABLE
from jointcut.partition.program import jaxprs
from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.jaxprs import Atom, Equation, Literal, Var
from jointcut.partition.program.roles import Role, Roles
from jointcut.partition.rewrite.simplify import holds, live, merged, renamed
from jointcut.partition.split import Split, split

COND = "cond"

#: Slots by number of elements may take so many times the bytes of the largest branch.
_MOST_PADDING = 1.05


def cut_branches(closed: Any, forward_ops: int) -> Any:
    """The same joint program with its conditionals cut; `forward_ops` equations of the forward stay the first ones.

    A conditional stays as it is if it has effects, if several equations of the backward read its residuals, or if a
    branch cannot be cut.
    """
    if not holds(closed, COND):
        return closed
    jaxpr, _ = jaxprs.opened(closed)
    pair = _Pair(list(jaxpr.eqns[:forward_ops]), list(jaxpr.eqns[forward_ops:]))
    if not pair.rewrite(jaxpr.outvars):
        return closed
    return jaxprs.build(jaxpr.invars, jaxpr.outvars, [*pair.front, *pair.back])


@dataclass
class _Pair:
    """The equations of a forward and of its backward, which reads variables of the forward."""

    front: list[Equation]
    back: list[Equation]

    def rewrite(self, ends: Iterable[Atom]) -> bool:
        """Cut all conditionals, also those in loops; `ends` are read from outside. Returns whether there was one."""
        changed = False
        for i, j in self._pairs(COND, ends):
            cut = _cut(self.front[i], self.back[j], self._read_elsewhere(i, j, ends))
            if cut is not None:
                self.front[i], self.back[j] = cut
                changed = True
        for i, j in self._pairs(SCAN, ends):
            cut = _cut_in_loop(self.front[i], self.back[j], self._read_elsewhere(i, j, ends))
            if cut is not None:
                self.front[i], self.back[j] = cut
                changed = True
        return changed

    def _pairs(self, name: str, ends: Iterable[Atom]) -> list[tuple[int, int]]:
        """Places of equations of a primitive: one of the forward, and the only one of the backward that reads it."""
        makers = {v: i for i, eqn in enumerate(self.front) if eqn.primitive.name == name for v in eqn.outvars}
        readers: dict[int, set[int]] = {}
        for j, eqn in enumerate(self.back):
            for i in {makers[v] for v in eqn.invars if not isinstance(v, Literal) and v in makers}:
                readers.setdefault(i, set()).add(j)
        alone = ((i, [j for j in js if self.back[j].primitive.name == name]) for i, js in readers.items())
        return [(i, js[0]) for i, js in alone if len(js) == 1]

    def _read_elsewhere(self, i: int, j: int, ends: Iterable[Atom]) -> set[Var]:
        """The results of equation `i` of the forward that something else than equation `j` of the backward reads."""
        others = (eqn for eqn in (*self.front, *self.back) if eqn is not self.back[j])
        read = {v for eqn in others for v in eqn.invars if not isinstance(v, Literal)}
        return {v for v in self.front[i].outvars if v in read or v in set(_variables(ends))}


def _variables(atoms: Iterable[Atom]) -> Iterable[Var]:
    return (v for v in atoms if not isinstance(v, Literal))


# ------------------------------------------------------------------------------------------------ one conditional


def _cut(forward: Equation, backward: Equation, public: set[Var]) -> tuple[Equation, Equation] | None:
    """Both conditionals cut; `public` are the results that others read. None where that cannot be done."""
    ahead, behind = forward.params["branches"], backward.params["branches"]
    same = forward.invars[0] is backward.invars[0] and len(ahead) == len(behind)
    if not same or forward.effects or backward.effects or any(jaxprs.opened(b)[1] for b in (*ahead, *behind)):
        return None
    if not all(map(_is_usual, (*forward.outvars, *backward.invars))):
        return None
    meeting = _Meeting.of(forward, backward, public)
    try:
        cuts = [meeting.cut(*pair) for pair in zip(ahead, behind, strict=True)]
    except PlanError:  # a branch has no plan under the rules
        return None
    kept = [_kept(cut, len(meeting.outputs)) for cut in cuts]
    if not all(jaxprs.is_plain(aval) for branch in kept for aval in branch):
        return None
    return meeting.written(cuts, Space.of(kept))


def _is_usual(atom: Atom) -> bool:
    """Whether an atom has a known size, and its type names no mesh, so that it may share space with others."""
    aval = atom.aval
    is_placed = jaxprs.is_explicit(getattr(aval, "sharding", None)) or bool(jaxprs.varying(aval))
    return not is_placed and all(isinstance(size, int) for size in aval.shape)


def _kept(cut: Split, outputs: int) -> list[Any]:
    return [v.aval for v in jaxprs.opened(cut.forward)[0].outvars[outputs:]]


@dataclass(frozen=True)
class _Meeting:
    """Two conditionals that belong together: what each operand and result of them is.

    Attributes:
        forward, backward: their equations.
        outputs: places of the results of the forward that are not residuals.
        others: operands of the backward that are neither operands nor results of the forward, each once.
    """

    forward: Equation
    backward: Equation
    outputs: tuple[int, ...]
    others: tuple[Atom, ...]

    @classmethod
    def of(cls, forward: Equation, backward: Equation, public: set[Var]) -> _Meeting:
        """Compare the operands and results of both."""
        known = {*_variables(forward.invars), *forward.outvars}
        others = dict.fromkeys(v for v in _variables(backward.invars[1:]) if v not in known)
        outputs = tuple(i for i, v in enumerate(forward.outvars) if v in public)
        return cls(forward, backward, outputs, tuple(others))

    def cut(self, ahead: Any, behind: Any) -> Split:
        """Join a branch with its branch of the backward, and cut them. Raises `PlanError`."""
        first, second = (jaxprs.opened(branch)[0] for branch in (ahead, behind))
        others = [jaxprs.fresh(v.aval) for v in self.others]
        at_hand: dict[Any, Atom] = dict(zip(self.others, others, strict=True))
        at_hand.update(zip(self.forward.outvars, first.outvars, strict=True))
        pairs = zip(self.forward.invars[1:], first.invars, strict=True)
        at_hand.update((v, inner) for v, inner in pairs if not isinstance(v, Literal))
        given = [v if isinstance(v, Literal) else at_hand[v] for v in self.backward.invars[1:]]
        late, gradients = renamed(second, dict(zip(second.invars, given, strict=True)))
        outvars = [*(first.outvars[i] for i in self.outputs), *gradients]
        eqns, outvars, boundary = merged([*first.eqns, *late], outvars, len(first.eqns))
        needed = sorted(live(eqns, outvars).places)
        boundary = sum(i < boundary for i in needed)
        joint = jaxprs.build([*first.invars, *others], outvars, [eqns[i] for i in needed])
        roles = Roles(
            (Role.PRIMAL,) * len(first.invars) + (Role.COTANGENT,) * len(others),
            (Role.OUTPUT,) * len(self.outputs) + (Role.GRADIENT,) * len(gradients),
            boundary,
        )
        return split(cut_branches(joint, boundary), roles, "min_cut", backend=PORTABLE)

    def written(self, cuts: Sequence[Split], space: Space) -> tuple[Equation, Equation]:
        """Both conditionals with the halves of their branches, whose residuals lie in the slots of a space."""
        forward, backward, count = self.forward, self.backward, len(self.outputs)
        slots = [jaxprs.fresh(aval) for aval in space.avals]
        read = sorted({r.index for cut in cuts for r in cut.halves.residuals if r.kind == "input"})
        results = [forward.outvars[i] for i in self.outputs]
        atoms = [*(forward.invars[1 + i] for i in read), *results, *slots, *self.others]

        def ahead(cut: Split, branch: int, *operands: Any) -> list[Any]:
            made = jaxprs.evaluate(cut.forward, *operands)
            return [*made[:count], *space.pack(branch, made[count:])]

        def behind(cut: Split, branch: int, *given: Any) -> list[Any]:
            end = len(read) + count
            places = {
                "input": dict(zip(read, given, strict=False)),
                "output": given[len(read) : end],
                "saved": space.unpack(branch, given[end : end + len(slots)]),
            }
            residuals = [places[r.kind][r.index] for r in cut.halves.residuals]
            return jaxprs.evaluate(cut.backward, *residuals, *given[end + len(slots) :])

        ours = _branches(ahead, cuts, forward.invars[1:])
        theirs = _branches(behind, cuts, atoms)
        return (
            _conditional(forward, forward.invars, [*results, *slots], ours),
            _conditional(backward, [backward.invars[0], *atoms], backward.outvars, theirs),
        )


def _branches(function: Any, cuts: Sequence[Split], atoms: Sequence[Atom]) -> tuple[Any, ...]:
    """The programs of a function of each cut and its number, on inputs of the types of some atoms."""
    structs = [jaxprs.struct(v.aval) for v in atoms]
    branches = tuple(jax.make_jaxpr(partial(function, cut, k))(*structs) for k, cut in enumerate(cuts))
    assert not any(jaxprs.opened(branch)[1] for branch in branches), "halves have no constants of their own"
    return branches


def _conditional(like: Equation, invars: Sequence[Atom], outvars: Sequence[Var], branches: tuple[Any, ...]) -> Equation:
    return like.replace(invars=list(invars), outvars=list(outvars), params=dict(like.params, branches=branches))


# ------------------------------------------------------------------------------------------------ shared space


@dataclass(frozen=True)
class Space:
    """Slots that the arrays of several branches share, of which one runs.

    Attributes:
        avals: the types of the slots.
        places: for each branch and each of its arrays the slot, and the first element in it.
        kept: the types of these arrays.
    """

    avals: tuple[Any, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]
    kept: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, kept: Sequence[Sequence[Any]]) -> Space:
        """The slots for the arrays of each branch, given by their types."""
        avals: list[Any] = []
        places: list[dict[int, tuple[int, int]]] = [{} for _ in kept]
        for dtype, like in {aval.dtype: aval for branch in kept for aval in branch}.items():
            arrays = [[i for i, aval in enumerate(branch) if aval.dtype == dtype] for branch in kept]
            sizes = [[math.prod(branch[i].shape) for i in mine] for branch, mine in zip(kept, arrays, strict=True)]
            slots, shared = _shared(sizes)
            for branch, mine, there in zip(places, arrays, shared, strict=True):
                branch.update((i, (len(avals) + slot, start)) for i, (slot, start) in zip(mine, there, strict=True))
            avals += [like.update(shape=(size,), weak_type=False) for size in slots]
        ordered = tuple(tuple(branch[i] for i in range(len(branch))) for branch in places)
        return cls(tuple(avals), ordered, tuple(map(tuple, kept)))

    def pack(self, branch: int, arrays: Sequence[Any]) -> list[Any]:
        """The slots with the arrays of one branch in them, and zeros where it has none."""
        parts: list[list[Any]] = [[] for _ in self.avals]
        for (slot, _), array in zip(self.places[branch], arrays, strict=True):
            parts[slot].append(jnp.ravel(array))
        return [_filled(mine, aval) for mine, aval in zip(parts, self.avals, strict=True)]

    def unpack(self, branch: int, slots: Sequence[Any]) -> list[Any]:
        """The arrays of one branch, from the slots."""
        places, kept = self.places[branch], self.kept[branch]
        sizes = (math.prod(aval.shape) for aval in kept)
        ranges = (slots[slot][start : start + size] for (slot, start), size in zip(places, sizes, strict=True))
        return [jnp.reshape(part, aval.shape) for part, aval in zip(ranges, kept, strict=True)]


def _shared(sizes: Sequence[Sequence[int]]) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Slots for arrays of these numbers of elements in each branch: their sizes, and the place of each array."""
    most = Counter[int]()
    for mine in sizes:
        most |= Counter(mine)
    slots, largest = sorted(most.elements()), max(map(sum, sizes))
    if sum(slots) > _MOST_PADDING * largest:
        return [largest], [[(0, sum(mine[:n])) for n in range(len(mine))] for mine in sizes]
    return slots, [[(slots.index(size) + mine[:n].count(size), 0) for n, size in enumerate(mine)] for mine in sizes]


def _filled(parts: Sequence[Any], aval: Any) -> Any:
    """Arrays one after another, then zeros up to the size of a slot."""
    rest = aval.shape[0] - sum(part.shape[0] for part in parts)
    parts = [*parts, *([jnp.zeros(rest, aval.dtype)] if rest or not parts else [])]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


# ------------------------------------------------------------------------------------------------ in loops


def _cut_in_loop(forward: Equation, backward: Equation, public: set[Var]) -> tuple[Equation, Equation] | None:
    """Both scans with the conditionals in them cut; `public` are the forward's results that others read."""
    ours, theirs = jaxprs.scan_layout(forward), jaxprs.scan_layout(backward)
    in_loops = holds(forward.params["jaxpr"], COND) and holds(backward.params["jaxpr"], COND)
    if not in_loops or ours.body_consts or theirs.body_consts or forward.effects or backward.effects:
        return None
    loop = _Loop(forward, backward, ours, theirs)
    late, gradients = loop.joined()
    public_stacks = [end for end, v in loop.stacks() if v in public]
    pair = _Pair(list(ours.body.eqns), late)
    ends = [*ours.body.outvars[: ours.num_carry], *public_stacks, *gradients]
    return loop.written(pair, gradients, public) if pair.rewrite(ends) else None


@dataclass(frozen=True)
class _Loop:
    """A forward scan, and the scan of the backward that reads its stacks."""

    forward: Equation
    backward: Equation
    ours: Any
    theirs: Any

    def stacks(self) -> list[tuple[Atom, Var]]:
        """What each step of the forward stacks, with the stack."""
        n = self.ours.num_carry
        return list(zip(self.ours.body.outvars[n:], self.forward.outvars[n:], strict=True))

    def shared(self) -> dict[Var, Atom]:
        """The variables of the backward's body that stand for one of the forward's body, with that one."""
        mine, a, b = self.ours, self.ours.num_consts, self.ours.num_consts + self.ours.num_carry
        operands = list(zip(self.forward.invars, mine.body.invars, strict=True))
        whole = {v: inner for v, inner in operands[:a] if not isinstance(v, Literal)}
        steps: dict[Any, Atom] = {v: inner for v, inner in operands[b:] if not isinstance(v, Literal)}
        steps.update((v, end) for end, v in self.stacks())
        theirs = list(zip(self.backward.invars, self.theirs.body.invars, strict=True))
        c, d = self.theirs.num_consts, self.theirs.num_consts + self.theirs.num_carry
        known = [(inner, whole.get(v)) for v, inner in theirs[:c] if not isinstance(v, Literal)]
        known += [(inner, steps.get(v)) for v, inner in theirs[d:] if not isinstance(v, Literal)]
        return {inner: atom for inner, atom in known if atom is not None}

    def joined(self) -> tuple[list[Equation], list[Atom]]:
        """The equations and results of the backward's body, in the variables of the forward's."""
        return renamed(self.theirs.body, self.shared())

    def written(self, pair: _Pair, gradients: Sequence[Atom], public: set[Var]) -> tuple[Equation, Equation]:
        """Both scans with other bodies, the backward's still in the variables of the forward's."""
        mine, n = self.ours, self.ours.num_carry
        a, b = mine.num_consts, mine.num_consts + n
        kept = {end: v for end, v in self.stacks() if v in public}
        read = dict.fromkeys([*(v for eqn in pair.back for v in _variables(eqn.invars)), *_variables(gradients)])
        whole = dict(zip(mine.body.invars[:a], self.forward.invars[:a], strict=True))
        steps: dict[Any, Atom] = dict(zip(mine.body.invars[b:], self.forward.invars[b:], strict=True))
        made = {*mine.body.invars[a:b], *(v for eqn in pair.front for v in eqn.outvars)}
        length = mine.length
        stacks = {v: kept.get(v) or jaxprs.fresh(jaxprs.stacked(v.aval, [length])) for v in read if v in made}
        steps.update(stacks)
        ends = list(stacks)
        results = [*self.forward.outvars[:n], *stacks.values()]
        for end, v in self.stacks():
            if v in public and v not in results:
                ends.append(end)
                results.append(v)
        body = jaxprs.build(mine.body.invars, [*mine.body.outvars[:n], *ends], pair.front)
        operands = self.forward.invars
        first = jaxprs.scan(self.forward, body, operands[:a], operands[a:b], operands[b:], results)
        consts = [(v, whole[v]) for v in read if v in whole]
        slices = [(v, steps[v]) for v in read if v in steps]
        return first, self._backward(pair.back, gradients, consts, slices)

    def _backward(
        self,
        eqns: Sequence[Equation],
        gradients: Sequence[Atom],
        consts: Sequence[tuple[Var, Atom]],
        slices: Sequence[tuple[Var, Atom]],
    ) -> Equation:
        """The backward's scan, which reads `consts` and `slices` of the forward's variables, each with its operand."""
        shared, theirs = self.shared(), self.theirs
        c, d = theirs.num_consts, theirs.num_consts + theirs.num_carry
        own = [(inner, v) for inner, v in zip(theirs.body.invars, self.backward.invars, strict=True)]
        whole = [(inner, v) for inner, v in own[:c] if inner not in shared]
        sliced = [(inner, v) for inner, v in own[d:] if inner not in shared]
        names: dict[Var, Atom] = {v: jaxprs.fresh(v.aval) for v, _ in (*consts, *slices)}
        inputs = [
            *(inner for inner, _ in whole),
            *(names[v] for v, _ in consts),
            *(inner for inner, _ in own[c:d]),
            *(inner for inner, _ in sliced),
            *(names[v] for v, _ in slices),
        ]
        body, results = renamed(jaxprs.opened(jaxprs.build([], gradients, eqns))[0], names)
        return jaxprs.scan(
            self.backward,
            jaxprs.build(inputs, results, body),
            [v for _, v in (*whole, *consts)],
            [v for _, v in own[c:d]],
            [v for _, v in (*sliced, *slices)],
            self.backward.outvars,
        )
