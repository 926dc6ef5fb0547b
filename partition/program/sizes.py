"""Put numbers in the place of symbolic sizes.

JAX can trace a program for symbolic sizes (`jax.export.symbolic_shape`). Such a program says `float32[b,128]`, where
the batch `b` is known only when the program runs. Its values have no number of bytes. So the plan is made for the same
program with numbers in the place of names. Both programs have the same equations in the same order, so the plan holds
for both. A size is read from its text, which `jax.export` itself writes and parses, so its value is an exact integer.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from jointcut.partition.errors import GraphError, message
from jointcut.partition.program.jax import abstract, jaxprs, user_source
from jointcut.partition.program.jax.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, Var

AS_VALUE = "dim_as_value"  # JAX's equation that makes an integer array of a symbolic size

_CALLED = {"floordiv": operator.floordiv, "mod": operator.mod, "max": max, "min": min}
_OF_ARRAYS = {"floordiv": jnp.floor_divide, "mod": jnp.mod, "max": jnp.maximum, "min": jnp.minimum}
_WRITTEN = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow}
_NAME = re.compile(r"[^\W\d]\w*")


def names(size: Any) -> frozenset[str]:
    """The names in a size or a shape, or in its text: `b` and `t` in `2*b + floordiv(t, 8)`."""
    return frozenset(_NAME.findall(str(size))) - _CALLED.keys()


def number(size: Any, sizes: Mapping[str, int]) -> int:
    """Evaluate a size, or its text, with these values for its names; raise `KeyError` for any other name.

    >>> number("2*b^2 - mod(t, 8)", {"b": 3, "t": 10})
    16
    """
    text = str(size).strip()
    return _number(text, tuple((name, sizes[name]) for name in sorted(names(text))))


@functools.lru_cache(maxsize=4096)
def _number(text: str, sizes: tuple[tuple[str, int], ...]) -> int:
    return _computed(_parsed(text), dict(sizes), _CALLED)


def _parsed(size: Any) -> ast.expr:
    return ast.parse(str(size).replace("^", "**"), mode="eval").body


def _computed(node: ast.expr, known: Mapping[str, Any], called: Mapping[str, Callable[[Any, Any], Any]]) -> Any:
    """Compute a size from values for its names, which may be numbers or arrays, by functions for these."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return known[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand, known, called)
        case ast.BinOp(left=left, op=op, right=right):
            return _WRITTEN[type(op)](_computed(left, known, called), _computed(right, known, called))
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            return called[name](_computed(left, known, called), _computed(right, known, called))
        case _:
            raise AssertionError(f"JAX writes no size as {ast.unparse(node)}")


def numbers(shape: Any, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with numbers in the place of symbolic sizes."""
    return tuple(number(n, sizes) if export.is_symbolic_dim(n) else n for n in shape)


def is_symbolic(shape: Any) -> bool:
    """Whether a shape has a symbolic size."""
    return any(map(export.is_symbolic_dim, shape))


def holds_sizes(held: Any) -> bool:
    """Whether a parameter of an equation, or a jaxpr, holds a symbolic size."""
    return next(_sizes(held), None) is not None


def array_of(size: Any, known: Mapping[str, Any]) -> Any:
    """Compute a size from integer arrays for its names."""
    return _computed(_parsed(size), known, _OF_ARRAYS)


@functools.lru_cache(maxsize=4096)
def grows(size: Any) -> bool:
    """Whether a size never becomes smaller where its names become larger, as `2*b + 1` does, and `c - b` does not."""
    return _direction(_parsed(size)) in (0, 1)


def _direction(node: ast.expr) -> int | None:
    """Return 1 if a size grows with its names, -1 if it falls, 0 if it is a number, and None if that is unknown."""
    match node:
        case ast.Constant():
            return 0
        case ast.Name():
            return 1
        case ast.UnaryOp(operand=operand):
            way = _direction(operand)
            return None if way is None else -way
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _together(_direction(left), _direction(right))
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            way = _direction(right)
            return _together(_direction(left), None if way is None else -way)
        case ast.BinOp(left=left, op=ast.Mult(), right=right) if _is_negative(left) or _is_negative(right):
            way = _direction(right if _is_negative(left) else left)
            return None if way is None else -way
        case ast.BinOp(left=left, right=right):
            return _together(_direction(left), _direction(right))
        case ast.Call(func=ast.Name(id="floordiv"), args=[left, ast.Constant()]):
            return _direction(left)
        case ast.Call(func=ast.Name(id="max" | "min"), args=[left, right]):
            return _together(_direction(left), _direction(right))
        case _:
            return None


def _is_negative(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)


def _together(left: int | None, right: int | None) -> int | None:
    ways = {left, right} - {0}
    return (ways.pop() if ways else 0) if len(ways) < 2 else None


# ------------------------------------------------------------------------------------------------- whole programs


def names_in(closed: ClosedJaxpr) -> frozenset[str]:
    """The names of symbolic sizes in a jaxpr, in its types or in parameters of its equations, however deep."""
    return frozenset(name for size in _sizes(closed) for name in names(size))


def _sizes(held: Any) -> Iterator[Any]:
    """The symbolic sizes in a parameter of an equation, or in a jaxpr."""
    if export.is_symbolic_dim(held):
        yield held
    elif isinstance(held, tuple | list):
        for item in held:
            yield from _sizes(item)
    elif isinstance(held, Jaxpr | ClosedJaxpr):
        jaxpr, _ = jaxprs.opened(held)
        for atom in (*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)):
            yield from filter(export.is_symbolic_dim, getattr(atom.aval, "shape", ()))
        for eqn in jaxpr.eqns:
            for param in eqn.params.values():
                yield from _sizes(param)


def with_numbers(closed: ClosedJaxpr, sizes: Mapping[str, int]) -> ClosedJaxpr:
    """A jaxpr with numbers in the place of its symbolic sizes: the same equations in the same order.

    Functions among the parameters (the derivatives that `jax.custom_jvp` keeps) do not change. Raises `GraphError` for
    a `jax.Ref` of symbolic size.
    """
    return _Numbered(sizes).held(closed)


@dataclass
class _Numbered:
    """A copy of a program with numbers; `vars` maps variables of symbolic size to variables of the copy."""

    sizes: Mapping[str, int]
    vars: dict[Var, Var] = field(default_factory=dict)

    def held(self, held: Any) -> Any:
        if export.is_symbolic_dim(held):
            return number(held, self.sizes)
        if isinstance(held, Jaxpr):
            return self.jaxpr(held)
        if isinstance(held, ClosedJaxpr):
            jaxpr, consts = jaxprs.opened(held)
            return ClosedJaxpr(self.jaxpr(jaxpr), consts)
        if isinstance(held, list):
            return list(map(self.held, held))
        if isinstance(held, tuple):
            items = map(self.held, held)
            return type(held)(*items) if hasattr(held, "_fields") else tuple(items)
        return held

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        outer = [[self.atom(v) for v in ends] for ends in (jaxpr.constvars, jaxpr.invars)]
        eqns = list(map(self.equation, jaxpr.eqns))
        ends = list(map(self.atom, jaxpr.outvars))
        return jaxpr.replace(constvars=outer[0], invars=outer[1], outvars=ends, eqns=eqns)

    def equation(self, eqn: Equation) -> Equation:
        avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        if any(abstract.is_reference(aval) and is_symbolic(aval.shape) for aval in avals):
            where = user_source.source_of(eqn) or f"A {eqn.primitive.name}"
            what = "uses a jax.Ref of symbolic size, for which no plan is made."
            raise GraphError(message(where, what, "Give its sizes as numbers, or return what it holds instead."))
        outvars = list(map(self.atom, eqn.outvars))
        if eqn.primitive.name == AS_VALUE:
            return _known(eqn, self.held(eqn.params["dim"]), outvars)
        params = {key: self.held(param) for key, param in eqn.params.items()}
        return eqn.replace(invars=list(map(self.atom, eqn.invars)), outvars=outvars, params=params)

    def atom(self, atom: Atom) -> Atom:
        shape = getattr(atom.aval, "shape", ())
        if isinstance(atom, Literal) or not is_symbolic(shape):
            return atom
        if atom not in self.vars:
            self.vars[atom] = jaxprs.fresh(atom.aval.update(shape=numbers(shape, self.sizes)))
        return self.vars[atom]


def _known(eqn: Equation, value: int, outvars: list[Var]) -> Equation:
    """An equation that makes an integer array from a number, to replace `dim_as_value`, which makes it from a size."""
    aval: Any = outvars[0].aval
    like = _absolute(abstract.struct(aval))
    literal = Literal(np.array(value).astype(aval.dtype), aval)
    return like.replace(invars=[literal], outvars=outvars, source_info=eqn.source_info, ctx=eqn.ctx)


@functools.lru_cache(maxsize=16)
def _absolute(struct: Any) -> Equation:
    """An equation that does not change a size."""
    return jaxprs.opened(jax.make_jaxpr(lax.abs)(struct))[0].eqns[0]
