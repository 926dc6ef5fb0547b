"""Say which equations are linear in some of their operands, programs inside included."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.jax.jaxprs import Atom, Equation, Literal, Var
from jointcut.partition.program.primitives import BILINEAR, CALLS, COND, LINEAR, LINEAR_FIRST, REGION


def zeros_of(eqns: Iterable[Equation]) -> set[Var]:
    """The variables that hold zeros."""
    zeros = set[Var]()
    for eqn in eqns:
        if eqn.primitive.name in LINEAR and eqn.invars and all(holds_zeros(v, zeros) for v in eqn.invars):
            zeros.update(eqn.outvars)
    return zeros


def holds_zeros(atom: Atom, zeros: Collection[Var]) -> bool:
    """Whether an atom is a literal of zeros, or one of the variables that hold `zeros`."""
    return jaxprs.is_zero(atom) if isinstance(atom, Literal) else atom in zeros


def keeps_linear(eqn: Equation, are: Sequence[bool], nothing: Sequence[bool]) -> bool:
    """Whether the results are linear if the operands are that `are`, and others are given or `nothing`."""
    name = eqn.primitive.name
    if name in LINEAR:
        return all(one or zero for one, zero in zip(are, nothing, strict=True))
    if name in BILINEAR:
        return sum(are) == 1 and any(are[:2])
    if name in LINEAR_FIRST:
        return are[0] and not any(are[1:])
    if name == "select_n":
        return not are[0] and all(one or zero for one, zero in zip(are[1:], nothing[1:], strict=True))
    if name in ("scatter-add", "dynamic_update_slice"):
        update = 2 if name == "scatter-add" else 1
        others = [one for n, one in enumerate(are) if n not in (0, update)]
        return all(are[n] or nothing[n] for n in (0, update)) and not any(others)
    return False


def through(jaxpr: Any, are: Sequence[bool], nothing: Sequence[bool]) -> set[Var] | None:
    """The variables of a program that are linear in the inputs that `are`; other inputs are given or `nothing`.

    None where a value depends on these inputs and is not linear, or not a wide float.
    """
    linear = {v for v, one in zip(jaxpr.invars, are, strict=True) if one}
    zeros = zeros_of(jaxpr.eqns) | {v for v, zero in zip(jaxpr.invars, nothing, strict=True) if zero}
    return linear if follow(jaxpr.eqns, linear, zeros) else None


def follow(eqns: Iterable[Equation], linear: set[Var], zeros: set[Var]) -> bool:
    """Add the results of equations to the `linear` variables; returns whether all that depend on these are linear."""
    for eqn in eqns:
        are = [not isinstance(v, Literal) and v in linear for v in eqn.invars]
        if not any(are):
            continue
        nothing = [holds_zeros(v, zeros) for v in eqn.invars]
        ends = results(eqn, are, nothing)
        if ends is None or not all(is_wide(v) for v, one in zip(eqn.outvars, ends, strict=True) if one):
            return False
        linear.update(v for v, one in zip(eqn.outvars, ends, strict=True) if one)
    return True


def is_wide(v: Any) -> bool:
    """Whether a variable is a floating-point array with a wide range of exponents."""
    return jnp.issubdtype(v.aval.dtype, jnp.floating) and v.aval.dtype != jnp.float16


def results(eqn: Equation, are: Sequence[bool], nothing: Sequence[bool]) -> list[bool] | None:
    """Whether each result is linear; None where one depends on the operands that `are` and is not linear."""
    name = eqn.primitive.name
    if next(jaxprs.inner_jaxprs(eqn), None) is None or name == "scatter-add":
        return [True] * len(eqn.outvars) if keeps_linear(eqn, are, nothing) else None
    if name == SCAN:
        return _scanned(eqn, are, nothing)
    if name == COND:
        return None if are[0] else _branched(eqn, are[1:], nothing[1:])
    if name in CALLS or name == REGION:
        return _ends(eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"], are, nothing)
    return None


def _ends(program: Any, are: Sequence[bool], nothing: Sequence[bool]) -> list[bool] | None:
    jaxpr, _ = jaxprs.opened(program)
    if len(jaxpr.invars) != len(are):
        return None
    linear = through(jaxpr, are, nothing)
    return None if linear is None else [not isinstance(v, Literal) and v in linear for v in jaxpr.outvars]


def _branched(eqn: Equation, are: Sequence[bool], nothing: Sequence[bool]) -> list[bool] | None:
    """A result is linear if it is in all branches; one that holds zeros counts."""
    found = [_ends(branch, are, nothing) for branch in eqn.params["branches"]]
    if any(one is None for one in found):
        return None
    ends = [any(flags) for flags in zip(*(one for one in found if one is not None), strict=True)]
    for branch, flags in zip(eqn.params["branches"], found, strict=True):
        jaxpr, _ = jaxprs.opened(branch)
        zeros = zeros_of(jaxpr.eqns) | {v for v, zero in zip(jaxpr.invars, nothing, strict=True) if zero}
        for v, one, end in zip(jaxpr.outvars, flags or (), ends, strict=True):
            if end and not one and not holds_zeros(v, zeros):
                return None
    return ends


def _scanned(eqn: Equation, are: Sequence[bool], nothing: Sequence[bool]) -> list[bool] | None:
    """What a scan carries is linear if it begins as zeros, or linear, and a step adds what is linear."""
    layout = jaxprs.scan_layout(eqn)
    carry = slice(layout.num_consts, layout.num_consts + layout.num_carry)
    begin, given = [*are], [*nothing]
    while True:
        ends = _ends(eqn.params["jaxpr"], begin, [zero and not one for zero, one in zip(given, begin, strict=True)])
        if ends is None:
            return None
        now = [one or end for one, end in zip(begin[carry], ends[: layout.num_carry], strict=True)]
        if not all(one or zero for one, zero, new in zip(are[carry], nothing[carry], now, strict=True) if new):
            return None
        given[carry] = [False] * layout.num_carry
        if now == begin[carry]:
            return ends
        begin[carry] = now
