"""Cut the branches of conditionals inside a joint program.

To the graph a `lax.cond` or `lax.switch` is one closed op, and JAX's derivative hands over what it linearised: all
residuals of all branches, those of one type in common. Here each branch is joined with its branch of the backward and
cut like a program of its own. Only one branch runs, so what the branches keep shares its space (see `nesting/slots`).
In the bodies of a forward loop and its backward loop conditionals are cut in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jointcut.partition.errors import PlanError, PolicyError
from jointcut.partition.nesting.read import read
from jointcut.partition.nesting.slots import Space
from jointcut.partition.plans.backend import PORTABLE
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.policies import Policy, constraints_of, forms_of, refuse_musts
from jointcut.partition.prices.rules import Constraint
from jointcut.partition.program import jaxprs
from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jaxprs import Atom, Equation, Literal, Var
from jointcut.partition.program.roles import Role, Roles
from jointcut.partition.rewrite.simplify import holds, live, merged, renamed
from jointcut.partition.search.forms.choose import formed
from jointcut.partition.search.forms.exact import kept_exact
from jointcut.partition.split import Split, halved

COND = "cond"


def cut_branches(closed: Any, forward_ops: int, policy: Policy | None = None) -> Any:
    """The same joint program with its conditionals cut; `forward_ops` equations of the forward stay the first ones.

    A conditional stays as it is if it has effects, if several equations of the backward read its residuals, or if a
    branch cannot be cut. Branches are cut under a user's `policy`; `PolicyError` is raised where it contradicts itself
    or a rule, or where a MUST names a value in a conditional that stays as it is.
    """
    if not holds(closed, COND):
        return closed
    jaxpr, _ = jaxprs.opened(closed)
    pair = _Pair(list(jaxpr.eqns[:forward_ops]), list(jaxpr.eqns[forward_ops:]), policy)
    if not pair.rewrite(jaxpr.outvars):
        return closed
    return jaxprs.build(jaxpr.invars, jaxpr.outvars, [*pair.front, *pair.back])


@dataclass
class _Pair:
    """The equations of a forward and of its backward, which reads variables of the forward."""

    front: list[Equation]
    back: list[Equation]
    policy: Policy | None

    def rewrite(self, ends: Iterable[Atom]) -> bool:
        """Cut all conditionals, also those in loops; `ends` are read from outside. Returns whether there was one."""
        done = set[int]()
        for i, j in self._pairs(COND, ends):
            cut = _cut(self.front[i], self.back[j], self._read_elsewhere(i, j, ends), self.policy)
            if cut is not None:
                self.front[i], self.back[j] = cut
                done.add(i)
        for i, j in self._pairs(SCAN, ends):
            cut = _cut_in_loop(self.front[i], self.back[j], self._read_elsewhere(i, j, ends), self.policy)
            if cut is not None:
                self.front[i], self.back[j] = cut
                done.add(i)
        self._refuse_others(done)
        return bool(done)

    def _refuse_others(self, done: set[int]) -> None:
        """Raise `PolicyError` if a MUST names a value in a conditional that stays, and that has a derivative."""
        read = {v for eqn in self.back if _conditionals(eqn) for v in _variables(eqn.invars)}
        for i, eqn in enumerate(self.front):
            if i not in done and not read.isdisjoint(eqn.outvars):
                bodies = (body for cond in _conditionals(eqn) for body in jaxprs.inner_jaxprs(cond))
                refuse_musts(self.policy, bodies, "a conditional that is not cut")

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


def _conditionals(eqn: Equation) -> list[Equation]:
    """The outermost conditionals in an equation, itself among them."""
    if eqn.primitive.name == COND:
        return [eqn]
    return [cond for body in jaxprs.inner_jaxprs(eqn) for inner in body.eqns for cond in _conditionals(inner)]


# ------------------------------------------------------------------------------------------------ one conditional


def _cut(
    forward: Equation, backward: Equation, public: set[Var], policy: Policy | None
) -> tuple[Equation, Equation] | None:
    """Both conditionals cut; `public` are the results that others read. None where that cannot be done."""
    ahead, behind = forward.params["branches"], backward.params["branches"]
    same = forward.invars[0] is backward.invars[0] and len(ahead) == len(behind)
    if not same or forward.effects or backward.effects or any(jaxprs.opened(b)[1] for b in (*ahead, *behind)):
        return None
    if not all(map(_is_usual, (*forward.outvars, *backward.invars))):
        return None
    meeting = _Meeting.of(forward, backward, public)
    try:
        cuts = [meeting.cut(*pair, policy) for pair in zip(ahead, behind, strict=True)]
    except PolicyError:
        raise
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

    def cut(self, ahead: Any, behind: Any, policy: Policy | None) -> Split:
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
        return halved(_problem(read(cut_branches(joint, boundary, policy), roles), policy), "min_cut")

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


def _problem(graph: Graph, policy: Policy | None) -> Problem:
    """The planning problem of a branch under a policy, whose values may wait in smaller forms."""
    if policy is None:
        return Problem.of(graph, backend=PORTABLE)
    exact = tuple[Constraint, ...]()
    if forms_of(policy, graph, is_part=True):
        graph = formed(graph, exact_masks=True)
        exact = kept_exact(Problem.of(graph))
    left_out = {c.value for c in exact}
    forms = [(v, form) for v, form in forms_of(policy, graph, is_part=True) if v not in left_out]
    demands = (*exact, *constraints_of(policy, graph, is_part=True))
    return Problem.of(graph, constraints=demands, backend=PORTABLE, forms=forms)


def _branches(function: Any, cuts: Sequence[Split], atoms: Sequence[Atom]) -> tuple[Any, ...]:
    """The programs of a function of each cut and its number, on inputs of the types of some atoms."""
    structs = [jaxprs.struct(v.aval) for v in atoms]
    branches = tuple(jax.make_jaxpr(partial(function, cut, k))(*structs) for k, cut in enumerate(cuts))
    assert not any(jaxprs.opened(branch)[1] for branch in branches), "halves have no constants of their own"
    return branches


def _conditional(like: Equation, invars: Sequence[Atom], outvars: Sequence[Var], branches: tuple[Any, ...]) -> Equation:
    return like.replace(invars=list(invars), outvars=list(outvars), params=dict(like.params, branches=branches))


# ------------------------------------------------------------------------------------------------ in loops


def _cut_in_loop(
    forward: Equation, backward: Equation, public: set[Var], policy: Policy | None
) -> tuple[Equation, Equation] | None:
    """Both scans with the conditionals in them cut; `public` are the forward's results that others read."""
    ours, theirs = jaxprs.scan_layout(forward), jaxprs.scan_layout(backward)
    in_loops = holds(forward.params["jaxpr"], COND) and holds(backward.params["jaxpr"], COND)
    if not in_loops or ours.body_consts or theirs.body_consts or forward.effects or backward.effects:
        return None
    loop = _Loop(forward, backward, ours, theirs)
    late, gradients = loop.joined()
    public_stacks = [end for end, v in loop.stacks() if v in public]
    pair = _Pair(list(ours.body.eqns), late, policy)
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
