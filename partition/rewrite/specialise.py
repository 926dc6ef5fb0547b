"""Leave out of a backward the equations that zero cotangents make needless.

A backward is made for all outputs. Often a caller differentiates only some of them; the others have zero cotangents.
Zeros are followed through the equations as `jax.vjp` would have followed them. Products with a zero and sums of zeros
are not computed. Where a zero meets an equation without a rule, an array of zeros is made. So zero times infinity is
zero here, as it is for JAX's own symbolic zeros. Equations that nothing reads any more are dropped, also inside loops,
branches and calls; equations with effects stay. Kept equations keep their name stack and source line.

Some zeros are arrays in the program: a loop that sums cotangents starts from an array full of zeros. If only zeros are
added to it, it is left out as well. So a value has one of three states, not two.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import jax
import numpy as np
from jax import lax

from jointcut.partition.program import primitives
from jointcut.partition.program.jax.abstract import is_plain, struct
from jointcut.partition.program.jax.jaxprs import (
    Atom,
    Equation,
    Jaxpr,
    Literal,
    Var,
    are_same,
    build,
    check,
    fresh,
    inner_jaxprs,
    opened,
    rebound,
    scan,
    scan_layout,
    touches_references,
    variables,
)
from jointcut.partition.program.jax.meshes import is_explicit, on_all_devices, varied, varying
from jointcut.partition.program.jax.runtime import paused_collection
from jointcut.partition.program.jax.side_effects import has_effects
from jointcut.partition.program.primitives import BARRIER, COND, OPENED, REGION, SCAN
from jointcut.partition.rewrite.simplify import named


@dataclass(frozen=True)
class Specialised:
    """A program for the case that some of its inputs are zero.

    `closed` takes the inputs of the original program at the positions `used`. It returns the outputs of the original
    program, except outputs that `zero_outputs` marks.
    """

    closed: Any
    used: tuple[int, ...]
    zero_outputs: tuple[bool, ...]


class _State(Enum):
    """The state of a value: it is zero and left out, it is an array of zeros, or nothing is known of it."""

    ABSENT = "absent"
    BLANK = "blank"
    GIVEN = "given"


_ABSENT, _BLANK, _GIVEN = _State.ABSENT, _State.BLANK, _State.GIVEN

# The operands that must all be zero for the results to be zero. The others (indices, predicates) may be anything.
_ALL, _FIRST = slice(None), slice(1)
_TERMS: dict[str, slice] = {
    **dict.fromkeys(primitives.ZERO_OF_ZEROS, _ALL),
    **dict.fromkeys(primitives.LINEAR_FIRST & primitives.PICKING, _FIRST),
    "scatter": slice(0, 3, 2),
    "scatter-add": slice(0, 3, 2),
    "scatter-sub": slice(0, 3, 2),
    "dynamic_update_slice": slice(2),
    "select_n": slice(1, None),
}
# The operands of which a single zero makes the results zero.
_FACTORS: dict[str, slice] = {
    **dict.fromkeys(primitives.BILINEAR, slice(2)),
    **dict.fromkeys(primitives.LINEAR_FIRST - primitives.PICKING, _FIRST),
    "rem": _FIRST,
    "triangular_solve": slice(1, 2),
    "tridiagonal_solve": slice(3, 4),
}
_CALLS = OPENED | {"eval_jaxpr", REGION}
# Zeros are followed into their bodies, which are not rewritten.
_WHOLE = (primitives.CALLS & primitives.WITH_BODIES) - OPENED | {"shard_map"}


def without(closed: Any, zeros: Collection[int]) -> Specialised:
    """Specialise a jaxpr without constants to zeros in place of its inputs at the positions `zeros`.

    References and random keys are never left out. Every output that is then zero is marked, whatever makes it zero. If
    no input is left out, no output is marked, and the program only loses its dead code.
    """
    jaxpr, consts = opened(closed)
    assert not consts and not jaxpr.constvars, "constants are inputs by now"
    assert all(0 <= i < len(jaxpr.invars) for i in zeros), f"{sorted(zeros)} of {len(jaxpr.invars)} inputs"
    gone = {i for i in zeros if is_plain(jaxpr.invars[i].aval) or _is_float0(jaxpr.invars[i].aval)}
    with paused_collection():
        scope = _walked(jaxpr, [_ABSENT if i in gone else _GIVEN for i in range(len(jaxpr.invars))])
        zero = tuple(bool(gone) and scope.state(v) is not _GIVEN for v in jaxpr.outvars)
        ends = [named(scope.atoms, v) for v, is_zero in zip(jaxpr.outvars, zero, strict=True) if not is_zero]
        part = _pruned(scope.eqns, ends)
        used = tuple(i for i, v in enumerate(jaxpr.invars) if v in part.read)
        out = build([jaxpr.invars[i] for i in used], ends, part.eqns)
    check(out)
    return Specialised(out, used, zero)


# ------------------------------------------------------------------------------------------------ following zeros


def _walked(jaxpr: Jaxpr, known: Sequence[_State]) -> _Scope:
    """Rewrite the equations of a jaxpr whose inputs are in these states."""
    scope = _Scope(dict(zip(jaxpr.invars, known, strict=True)))
    for eqn in jaxpr.eqns:
        scope.equation(eqn)
    return scope


@dataclass
class _Scope:
    """A list of equations while it is rewritten: the states of its variables, and atoms that replace some of them."""

    states: dict[Var, _State]
    atoms: dict[Var, Atom] = field(default_factory=dict)
    eqns: list[Equation] = field(default_factory=list)
    zeros: dict[Any, Var] = field(default_factory=dict)

    def state(self, atom: Atom) -> _State:
        if isinstance(atom, Literal):
            return _BLANK if _holds_zero(atom) else _GIVEN
        return self.states.get(atom, _GIVEN)

    def read(self, atom: Atom, reader: Equation) -> Atom:
        """The atom to read in place of `atom`: a new array of zeros if `atom` is left out."""
        if self.state(atom) is not _ABSENT:
            return named(self.atoms, atom)
        aval = atom.aval
        if not aval.shape and not varying(aval):
            return Literal(np.zeros(aval.shape, aval.dtype), aval)
        if aval not in self.zeros:
            made = _zero(aval)
            self.eqns.extend(eqn.replace(source_info=reader.source_info, ctx=reader.ctx) for eqn in made)
            self.zeros[aval] = made[-1].outvars[0]
        return self.zeros[aval]

    def equation(self, eqn: Equation) -> None:
        known = [self.state(v) for v in eqn.invars]
        nest = _nest(eqn) if _ABSENT in known else None
        if nest is not None:
            self.nested(nest, known)
            return
        outcomes = _outcomes(eqn, known)
        self.states.update(zip(eqn.outvars, outcomes, strict=True))
        if all(s is _ABSENT for s in outcomes) and not has_effects(eqn):
            return
        if eqn.primitive.name == BARRIER:
            kept = [s is not _ABSENT for s in known]
            self.keep(eqn, _chosen(eqn.invars, kept), _chosen(eqn.outvars, kept))
        elif not (_ABSENT in known and eqn.primitive.name in primitives.SUMS and self.summed(eqn, known)):
            self.keep(eqn, eqn.invars, eqn.outvars)

    def keep(self, eqn: Equation, invars: Sequence[Atom], outvars: Sequence[Var]) -> None:
        operands = [self.read(v, eqn) for v in invars]
        self.eqns.append(eqn if are_same(operands, eqn.invars) else rebound(eqn, operands, outvars))

    def summed(self, eqn: Equation, known: Sequence[_State]) -> bool:
        """Replace a sum that has one term left by that term, if their types agree; return whether it was replaced."""
        places = range(len(known))[_TERMS[eqn.primitive.name]]
        (left, *more), out = [i for i in places if known[i] is not _ABSENT], eqn.outvars[0]
        if more or struct(eqn.invars[left].aval) != struct(out.aval):
            return False
        term = self.read(eqn.invars[left], eqn)
        if left == 0 or eqn.primitive.name in primitives.ADDING:
            self.atoms[out] = term
        elif eqn.primitive.name == "sub":
            negated = _template(lax.neg, np.float32(0))
            self.eqns.append(negated.replace(invars=[term], outvars=[out], source_info=eqn.source_info, ctx=eqn.ctx))
        else:
            return False
        return True

    def nested(self, nest: _Nest, outer: Sequence[_State]) -> None:
        """Rewrite the bodies of an equation; a carry is zero if it starts as zero and every step leaves it so."""
        eqn, known = nest.eqn, list(outer[nest.first :])
        for operand, _ in nest.carried:  # JAX starts a carry with an array of zeros where it knew of a zero
            known[operand] = _GIVEN if known[operand] is _GIVEN else _ABSENT
        while True:
            scopes = [_walked(body, known) for body in nest.bodies]
            columns = zip(*(map(s.state, b.outvars) for s, b in zip(scopes, nest.bodies, strict=True)), strict=True)
            outcomes = [_joined(column) for column in columns]
            before = list(known)
            for operand, result in nest.carried:
                known[operand] = outcomes[result] = _joined((known[operand], outcomes[result]))
            if known == before:
                break
        kept = [True] * nest.first + [s is not _ABSENT for s in known]
        shown = [s is not _ABSENT for s in outcomes]
        bodies = []
        for body, scope in zip(nest.bodies, scopes, strict=True):
            ends = [scope.read(v, eqn) for v in _chosen(body.outvars, shown)]
            bodies.append(build(_chosen(body.invars, kept[nest.first :]), ends, scope.eqns))
        self.states.update(zip(eqn.outvars, outcomes, strict=True))
        operands = [self.read(v, eqn) for v in _chosen(eqn.invars, kept)]
        self.eqns.append(nest.rebuilt(bodies, operands, kept, shown))


def _holds_zero(literal: Literal) -> bool:
    return _is_float0(literal.aval) or (is_plain(literal.aval) and not np.any(np.asarray(literal.val)))


def _is_float0(aval: Any) -> bool:
    return getattr(aval, "dtype", None) == jax.dtypes.float0


def _joined(states: Iterable[_State]) -> _State:
    """The state of a sum: zero if every term is zero, and then left out if some term is left out."""
    distinct = set(states)
    if _GIVEN in distinct or not distinct:
        return _GIVEN
    return _ABSENT if _ABSENT in distinct else _BLANK


def _outcomes(eqn: Equation, known: list[_State]) -> list[_State]:
    """The states of the results of an equation, by its rule."""
    name = eqn.primitive.name
    if name == BARRIER:
        return known
    if name in _WHOLE | _CALLS and _ABSENT in known:
        body = next(inner_jaxprs(eqn))
        return [s if s is _ABSENT else _GIVEN for s in map(_walked(body, known).state, body.outvars)]
    if name in _FACTORS:
        state = _ABSENT if _ABSENT in known[_FACTORS[name]] else _GIVEN
    else:
        terms = _terms(eqn)
        state = _GIVEN if terms is None else _joined(known[terms])
    return [state] * len(eqn.outvars)


def _terms(eqn: Equation) -> slice | None:
    """The operands that must all be zero for an equation's results to be zero; None where there is no rule."""
    if eqn.primitive.name == "custom_linear_solve":
        return slice(-len(eqn.outvars), None)
    if "num_residuals" in eqn.params:  # a primitive of `jaxprs.linear_primitive`
        return slice(eqn.params["num_residuals"], None)
    return _TERMS.get(eqn.primitive.name)


def _zero(aval: Any) -> list[Equation]:
    """Equations that make an array of zeros. Nothing is traced in its own dtype, which may need 64 bits enabled."""
    sharding = getattr(aval, "sharding", None)
    eqn = _template(_broadcast, np.float32(0), shape=aval.shape, sharding=sharding if is_explicit(sharding) else None)
    scalar = eqn.invars[0].aval.update(dtype=aval.dtype, weak_type=aval.weak_type)
    same = fresh(on_all_devices(aval))
    eqn = eqn.replace(invars=[Literal(np.zeros((), aval.dtype), scalar)], outvars=[same])
    return [eqn, varied(same, aval)] if varying(aval) else [eqn]


def _broadcast(x: Any, shape: tuple[int, ...], sharding: Any) -> Any:
    return lax.broadcast_in_dim(x, shape, (), out_sharding=sharding)


@functools.lru_cache(maxsize=1024)
def _template(function: Any, operand: Any, **fixed: Any) -> Equation:
    return opened(jax.make_jaxpr(functools.partial(function, **fixed))(operand))[0].eqns[0]


# ------------------------------------------------------------------------------------- equations that hold jaxprs


@dataclass(frozen=True)
class _Nest:
    """An equation with bodies. Its operands from `first` on are the operands of each body, and so are its results.

    `carried` pairs an operand of the bodies with the result that takes its place at the next step of a loop.
    """

    eqn: Equation
    bodies: tuple[Jaxpr, ...]
    first: int = 0
    carried: tuple[tuple[int, int], ...] = ()

    def rebuilt(
        self, bodies: Sequence[Any], operands: Sequence[Atom], kept: Sequence[bool], shown: Sequence[bool]
    ) -> Equation:
        """The same equation over smaller bodies, with the operands that are `kept` and the results that are `shown`."""
        eqn, name = self.eqn, self.eqn.primitive.name
        outvars = _chosen(eqn.outvars, shown)
        if name == SCAN:
            layout = scan_layout(eqn)
            a, b = layout.num_consts, layout.num_consts + layout.num_carry
            consts, carry = sum(kept[:a]), sum(kept[:b])
            return scan(eqn, bodies[0], operands[:consts], operands[consts:carry], operands[carry:], outvars)
        params = dict(eqn.params)
        if name == COND:
            params["branches"] = tuple(bodies)
        else:
            key = "jaxpr" if "jaxpr" in params else "call_jaxpr"
            params[key] = opened(bodies[0])[0] if isinstance(params[key], Jaxpr) else bodies[0]
        for keys, flags in (("in_shardings in_layouts donated_invars", kept), ("out_shardings out_layouts", shown)):
            params |= {k: tuple(_chosen(params[k], flags)) for k in keys.split() if k in params}
        effects = frozenset().union(*(opened(body)[0].effects for body in bodies))
        return eqn.replace(invars=list(operands), outvars=outvars, params=params, effects=effects)


def _nest(eqn: Equation) -> _Nest | None:
    """The bodies of an equation to rewrite; None if it stays whole: it has references, or constants in a body."""
    name = eqn.primitive.name
    if name not in _CALLS | {SCAN, COND} or touches_references(eqn):
        return None
    params = eqn.params
    held = params["branches"] if name == COND else [params["jaxpr" if "jaxpr" in params else "call_jaxpr"]]
    bodies = tuple(opened(closed)[0] for closed in held)
    if any(body.constvars for body in bodies):
        return None
    if name != SCAN:
        return _Nest(eqn, bodies, len(eqn.invars) - len(bodies[0].invars))
    layout = scan_layout(eqn)
    return _Nest(eqn, bodies, 0, tuple((layout.num_consts + i, i) for i in range(layout.num_carry)))


def _chosen(things: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [thing for thing, flag in zip(things, flags, strict=True) if flag]


# ------------------------------------------------------------------------------------------------------ dead code


@dataclass(frozen=True)
class _Part:
    """The equations that some results need, and all variables that they or the results read."""

    eqns: list[Equation]
    read: set[Var]


def _pruned(eqns: Sequence[Equation], ends: Iterable[Atom]) -> _Part:
    read = set(variables(ends))
    kept: list[Equation] = []
    for eqn in reversed(eqns):
        if has_effects(eqn) or any(v in read for v in eqn.outvars):
            kept.append(_shrunk(eqn, read))
            read.update(variables(kept[-1].invars))
    return _Part(kept[::-1], read)


def _shrunk(eqn: Equation, read: Collection[Var]) -> Equation:
    """An equation without the results that nothing reads, and without the equations inside that only they need."""
    nest = _nest(eqn)
    if nest is None:
        return eqn
    shown = [v in read for v in eqn.outvars]
    while True:
        parts = [_pruned(body.eqns, _chosen(body.outvars, shown)) for body in nest.bodies]
        inputs = [
            any(body.invars[i] in part.read for body, part in zip(nest.bodies, parts, strict=True))
            for i in range(len(nest.bodies[0].invars))
        ]
        before = list(shown)
        for operand, result in nest.carried:
            inputs[operand] = shown[result] = shown[result] or inputs[operand]
        if shown == before:
            break
    pairs = list(zip(nest.bodies, parts, strict=True))
    if all(shown) and all(inputs) and all(are_same(body.eqns, part.eqns) for body, part in pairs):
        return eqn
    bodies = [build(_chosen(b.invars, inputs), _chosen(b.outvars, shown), part.eqns) for b, part in pairs]
    kept = [True] * nest.first + inputs
    return nest.rebuilt(bodies, _chosen(eqn.invars, kept), kept, shown)
