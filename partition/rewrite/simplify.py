"""Open calls, and merge equations that compute the same.

A joint program passes through these two rewrites before it is read as a graph. This file also has other functions on
lists of equations. All keep every equation's name stack, source line and context.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import jax
import numpy as np

from jointcut.partition.program.jax.abstract import struct
from jointcut.partition.program.jax.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    build,
    fresh,
    inner_jaxprs,
    inner_primitives,
    is_dropped,
    opened,
    reading,
    rebound,
    variables,
    written,
)
from jointcut.partition.program.jax.meshes import inside, where_they_vary
from jointcut.partition.program.jax.side_effects import has_effects
from jointcut.partition.program.jax.user_source import scope_of
from jointcut.partition.program.places import user_line
from jointcut.partition.program.primitives import COND, OPENED, SCAN

#: Ops in whose bodies calls are opened.
_OPENED_INSIDE = (SCAN, COND, "shard_map")


def named(names: Mapping[Var, Atom], atom: Atom) -> Atom:
    """The atom that replaces an atom under some names; the atom itself where it has no replacement."""
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def with_bodies(eqn: Equation, change: Callable[[Jaxpr], Jaxpr]) -> Equation:
    """Change every jaxpr that an equation holds, in the order of its parameters; `change` runs inside the equation."""
    with inside(eqn):
        return eqn.replace(params={key: _in_bodies(value, change) for key, value in eqn.params.items()})


def _in_bodies(value: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    if isinstance(value, tuple):
        changed = (_in_bodies(v, change) for v in value)
        return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)
    if isinstance(value, Jaxpr):
        return change(value)
    if isinstance(value, ClosedJaxpr):
        inner, consts = opened(value)
        return ClosedJaxpr(change(inner), consts)
    return value


def holds(closed: ClosedJaxpr, name: str) -> bool:
    """Whether a primitive occurs in a jaxpr, however deep."""
    return any(name == eqn.primitive.name or name in inner_primitives(eqn) for eqn in opened(closed)[0].eqns)


def replaced(closed: ClosedJaxpr, name: str, change: Callable[[Equation, str], Equation]) -> ClosedJaxpr:
    """Change every equation of a primitive, however deep, the innermost first; equations in derivative rules stay.

    `change` is also given the names on the name stacks around the equation.
    """
    jaxpr, consts = opened(closed)
    return ClosedJaxpr(_replaced(jaxpr, name, change, ""), consts) if holds(closed, name) else closed


def _replaced(jaxpr: Jaxpr, name: str, change: Callable[[Equation, str], Equation], around: str) -> Jaxpr:
    eqns = []
    for eqn in jaxpr.eqns:
        scope = f"{around}/{scope_of(eqn)}"
        if name in inner_primitives(eqn):
            eqn = with_bodies(eqn, partial(_replaced, name=name, change=change, around=scope))
        eqns.append(change(eqn, scope) if eqn.primitive.name == name else eqn)
    return jaxpr.replace(eqns=eqns)


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Open every `jit` and `closed_call`, also in the bodies of `_OPENED_INSIDE`, and lift constants to leading inputs.

    The names of opened functions stay in the name stack. If a function's own equations lead to no line of the user's,
    they get the line of the call. A `jit` that asks for shardings, layouts or compiler options of its own stays closed.
    Returns a jaxpr whose constants are still its `consts`.
    """
    jaxpr, consts = opened(closed)
    lifted: list[tuple[Var, Any]] = list(zip(jaxpr.constvars, consts, strict=True))
    eqns, outvars = _flattened(jaxpr, lifted)
    out = written([v for v, _ in lifted], jaxpr.invars, outvars, eqns, jaxpr.effects, jaxpr.debug_info)
    return ClosedJaxpr(out, [c for _, c in lifted])


def _flattened(jaxpr: Jaxpr, lifted: list[tuple[Var, Any]] | None) -> tuple[list[Equation], list[Atom]]:
    """The equations and outputs of a jaxpr with calls opened; without `lifted`, calls with constants stay closed."""
    rename: dict[Var, Atom] = {}
    out: list[Equation] = []

    def visit(body: Jaxpr, names: dict[Var, Atom], stack: Any, caller: Any) -> list[Atom]:
        for eqn in body.eqns:
            invars = [named(names, v) for v in eqn.invars]
            info = eqn.source_info if caller is None else eqn.source_info.replace(traceback=caller)
            if stack is not None:
                info = info.replace(name_stack=stack + info.name_stack)
            call = _callee(eqn, lifted)
            if call is None:
                outvars = [v if stack is None or is_dropped(v) else fresh(v.aval) for v in eqn.outvars]
                names.update(zip(eqn.outvars, outvars, strict=True))
                out.append(rebound(_opened_inside(eqn), invars, outvars).replace(source_info=info))
                continue
            inner, inner_consts = call
            local: dict[Var, Atom] = dict(zip(inner.invars, invars, strict=True))
            for var, const in zip(inner.constvars, inner_consts, strict=True):
                assert lifted is not None
                local[var] = fresh(var.aval)
                lifted.append((local[var], const))
            name = eqn.params.get("name")
            deeper = info.name_stack.extend(name) if name else info.name_stack
            nowhere = bool(inner.eqns) and not user_line(inner.eqns[0])
            names.update(
                zip(eqn.outvars, visit(inner, local, deeper, info.traceback if nowhere else None), strict=True)
            )
        return [named(names, v) for v in body.outvars]

    return out, visit(jaxpr, rename, None, None)


def callee(eqn: Equation) -> Jaxpr | None:
    """The jaxpr, without constants, of a call that may be opened in place, or None."""
    found = _callee(eqn, None)
    return None if found is None else found[0]


def _callee(eqn: Equation, lifted: list[tuple[Var, Any]] | None) -> tuple[Jaxpr, list[Any]] | None:
    if eqn.primitive.name not in OPENED:
        return None
    params = eqn.params
    closed = params.get("jaxpr", params.get("call_jaxpr"))
    for key in ("in_shardings", "out_shardings"):
        if any(type(s).__name__ != "UnspecifiedValue" for s in params.get(key, ())):
            return None
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    if any(x is not None for x in layouts) or params.get("compiler_options_kvs"):
        return None
    inner, consts = opened(closed)
    return None if consts and lifted is None else (inner, consts)


def _opened_inside(eqn: Equation) -> Equation:
    """An equation with the calls in its bodies opened, if it is one of `_OPENED_INSIDE`."""
    if eqn.primitive.name not in _OPENED_INSIDE:
        return eqn

    def flattened(body: Jaxpr) -> Jaxpr:
        eqns, outvars = _flattened(body, None)
        if len(eqns) == len(body.eqns):
            return body
        return written(body.constvars, body.invars, outvars, eqns, body.effects, body.debug_info)

    return with_bodies(eqn, flattened)


def called(function: Callable[..., Any], types: Sequence[Any]) -> Equation:
    """The equation of a call to a function with operands of these types."""
    return opened(jax.make_jaxpr(jax.jit(function))(*types))[0].eqns[0]


@lru_cache(maxsize=4096)
def call_of(function: Callable[..., Any], types: tuple[Any, ...]) -> Equation:
    """The equation of a call to a function with operands of these types, where these vary; doubles stay doubles."""
    with_doubles = any(x.dtype in ("float64", "int64", "uint64", "complex128") for x in types)
    doubles = jax.enable_x64(with_doubles or jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
    with doubles, where_they_vary(*types):
        return called(function, types)


def instead(eqn: Equation, function: Callable[..., Any], operands: Sequence[Atom] | None = None) -> Equation:
    """A call of a function in the place of an equation, at its line, with its operands where no others are given."""
    operands = eqn.invars if operands is None else operands
    call = with_bodies(
        called(function, [struct(v.aval) for v in operands]), partial(_at_line, traceback=eqn.source_info.traceback)
    )
    return rebound(call, operands, eqn.outvars).replace(source_info=eqn.source_info, ctx=eqn.ctx)


def in_place(eqn: Equation, function: Callable[..., Any]) -> list[Equation]:
    """The equations of a function of one result in the place of an equation, at its line; all calls are open."""
    call = instead(eqn, function)
    inner, _ = opened(build([*dict.fromkeys(variables(call.invars))], call.outvars, [call]))
    eqns, outvars = _flattened(inner, None)
    assert outvars == list(eqns[-1].outvars), "the last equation makes the result"
    return [*eqns[:-1], rebound(eqns[-1], eqns[-1].invars, eqn.outvars)]


def _at_line(jaxpr: Jaxpr, traceback: Any) -> Jaxpr:
    deeper = partial(_at_line, traceback=traceback)
    eqns = (eqn.replace(source_info=eqn.source_info.replace(traceback=traceback)) for eqn in jaxpr.eqns)
    return jaxpr.replace(eqns=[with_bodies(eqn, deeper) if any(inner_jaxprs(eqn)) else eqn for eqn in eqns])


def renamed(jaxpr: Jaxpr, rename: dict[Var, Atom]) -> tuple[list[Equation], list[Atom]]:
    """The equations and outputs of a jaxpr in which other atoms replace some of its inputs."""
    eqns = [reading(eqn, [named(rename, v) for v in eqn.invars]) for eqn in jaxpr.eqns]
    return eqns, [named(rename, v) for v in jaxpr.outvars]


def equations_of(function: Callable[..., Any], atoms: Sequence[Atom]) -> tuple[list[Equation], list[Atom]]:
    """The equations of a function of atoms, all calls open, with its results."""
    inner, consts = opened(inlined(jax.make_jaxpr(function)(*(struct(v.aval) for v in atoms))))
    assert not consts, "the function closes over no array"
    return renamed(inner, dict(zip(inner.invars, atoms, strict=True)))


def merged(
    eqns: Sequence[Equation], outvars: Sequence[Atom], boundary: int, among: Collection[str] | None = None
) -> tuple[list[Equation], list[Atom], int]:
    """Merge equations that compute the same from the same variables; an equation with effects is never merged.

    `boundary` counts the leading equations of the forward. Only the primitives `among` are merged, if it is given.
    Returns the new equations, outputs and boundary.
    """
    rename: dict[Var, Atom] = {}
    seen: dict[Any, Sequence[Var]] = {}
    kept: list[Equation] = []
    leading = 0
    for place, eqn in enumerate(eqns):
        invars = [named(rename, v) for v in eqn.invars]
        stays = eqn.effects or (among is not None and eqn.primitive.name not in among)
        key = None if stays else fingerprint(eqn, invars)
        twin = seen.get(key) if key is not None else None
        if twin is not None:
            rename.update(zip(eqn.outvars, twin, strict=True))
            continue
        kept.append(reading(eqn, invars))
        leading += place < boundary
        if key is not None and not any(map(is_dropped, eqn.outvars)):
            seen[key] = eqn.outvars
    return kept, [named(rename, v) for v in outvars], leading


def merged_among(jaxpr: Jaxpr, names: Collection[str]) -> Jaxpr:
    """Merge equal equations of some primitives, also in the bodies of scans."""
    eqns, outvars, _ = merged(jaxpr.eqns, jaxpr.outvars, 0, names)
    deeper = partial(merged_among, names=names)
    eqns = [with_bodies(eqn, deeper) if eqn.primitive.name == SCAN else eqn for eqn in eqns]
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def fingerprint(eqn: Equation, invars: Sequence[Atom]) -> Any:
    """A key that is equal only for equations that compute the same; None where no such key can be made."""
    operands = tuple(_literal_key(v) if isinstance(v, Literal) else v for v in invars)
    key = (eqn.primitive, operands, tuple(sorted(eqn.params.items(), key=lambda kv: kv[0])), eqn.ctx)
    try:
        hash(key)
    except TypeError:  # a parameter without a hash, an array for instance
        return None
    return key


def _literal_key(literal: Literal) -> Any:
    array = np.asarray(literal.val)
    return (str(literal.aval), array.tobytes()) if array.size <= 16 else id(literal)


@dataclass(frozen=True)
class Live:
    """The part of a list of equations that something needs: their `places`, and the variables that are `read`."""

    places: frozenset[int]
    read: frozenset[Var]


def parted(jaxpr: Jaxpr, num_late: int) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Divide a program into the part that needs none of its last `num_late` inputs, and the rest.

    The first part takes the program's constants and other inputs, and returns the values that the rest reads. The rest
    takes these values and the late inputs, and makes the program's outputs.
    """
    late = jaxpr.invars[len(jaxpr.invars) - num_late :]
    needs, first, rest = set(late), list[Equation](), list[Equation]()
    for eqn in jaxpr.eqns:
        is_late = not needs.isdisjoint(variables(eqn.invars))
        needs.update(eqn.outvars if is_late else ())
        (rest if is_late else first).append(eqn)
    read = variables(chain(*(eqn.invars for eqn in rest), jaxpr.outvars))
    kept = list(dict.fromkeys(v for v in read if v not in needs))
    given = [*jaxpr.constvars, *jaxpr.invars[: len(jaxpr.invars) - num_late]]
    return build(given, kept, first), build([*kept, *late], jaxpr.outvars, rest)


def live(eqns: Sequence[Equation], ends: Iterable[Atom]) -> Live:
    """The equations that the atoms `ends` need, those with effects, and all that these need; `ends` count as read."""
    read, places = set(variables(ends)), set[int]()
    for i in range(len(eqns) - 1, -1, -1):
        if has_effects(eqns[i]) or not read.isdisjoint(eqns[i].outvars):
            places.add(i)
            read.update(variables(eqns[i].invars))
    return Live(frozenset(places), frozenset(read))
