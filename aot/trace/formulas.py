"""Give a traced function derivatives that stay finite, by the formulas of `aot.derivatives`.

What JAX differentiates to NaN at a singular point is recognised in the function's jaxpr, however deep, and gets another
derivative; values stay the same, bit for bit:

- a root of a sum of squares or of higher powers of sizes, as in a norm, a distance or a standard deviation: 0 where the
  sum is 0, the middle of the subgradients, as in PyTorch's `linalg_vector_norm_backward` and `std_backward`;
- the angle of a point: 0 at the origin, as in PyTorch's `atan2_backward`;
- a power, and the absolute value of a complex number: those of `derivatives.power` and `derivatives.abs`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.aot.derivatives.elementwise import angles, powers
from jointcut.partition.program import jaxprs
from jointcut.partition.program.primitives import LOOPS, MOVEMENT, OPENED
from jointcut.partition.rewrite import simplify


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def root_of_squares(total: jax.Array, exponent: float | None) -> jax.Array:
    """A root of a sum of squares, the square root without an exponent below 1, whose slope is 0 where the sum is."""
    return lax.sqrt(total) if exponent is None else lax.pow(total, jnp.asarray(exponent, total.dtype))


@root_of_squares.defjvp
def _root_slope(
    exponent: float | None, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (total,), (tangent,) = primals, tangents
    root, is_zero = root_of_squares(total, exponent), total == 0
    if exponent is None:
        slope = 0.5 / jnp.where(is_zero, 1, root)
    else:
        power = jnp.asarray(exponent, total.dtype)
        slope = power * lax.pow(jnp.where(is_zero, 1, total), power - 1)
    return root, tangent * jnp.where(is_zero, 0, slope)


@jax.custom_jvp
def turned(y: jax.Array, x: jax.Array) -> jax.Array:
    """The angle of the point (x, y), whose slopes are JAX's, but 0 at the origin."""
    return lax.atan2(y, x)


@turned.defjvp
def _turned_slope(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (y, x), (dy, dx) = primals, tangents
    length = lax.square(y) + lax.square(x)
    is_zero = length == 0
    length = jnp.where(is_zero, 1, length)
    of_y, of_x = (jnp.where(is_zero, 0, part / length) for part in (x, -y))
    return turned(y, x), dy * of_y + dx * of_x


#: Primitives that get the derivative of another function.
_FORMULAS: dict[str, Callable[..., jax.Array]] = {"pow": powers.power, "atan2": turned}

#: What keeps a sum of squares one: it moves or adds elements.
_KEEPS = MOVEMENT | {
    "reduce_sum",
    "add",
    "add_any",
    "convert_element_type",
    "reduce_precision",
    "copy",
    "cumsum",
    "max",
}

#: Functions of numbers that are followed, since JAX divides a variance by such a number.
_OF_NUMBERS: dict[str, Callable[..., float]] = {
    **dict.fromkeys(("convert_element_type", "broadcast_in_dim", "reshape", "copy"), float),
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "max": max,
}

#: What holds programs that are looked into.
_LOOKED_INTO = LOOPS | OPENED | {"cond", "remat2", "checkpoint"}


class _Squares:
    """What is known of a value that is a sum of squares of real numbers, or one over something: its slope is 0 at 0."""


_SQUARES = _Squares()

#: What is known of a value: that it is a sum of squares, the one number that all its elements are, or nothing.
_Known = _Squares | float | None


def with_formulas(closed: Any) -> Any:
    """The same function, with finite derivatives where JAX's are not; rules of the user's own stay as they are."""
    jaxpr, consts = jaxprs.opened(closed)
    return jaxprs.ClosedJaxpr(_rewritten(jaxpr, [None] * len(jaxpr.invars))[0], consts)


def _rewritten(jaxpr: Any, given: Sequence[_Known]) -> tuple[Any, list[_Known]]:
    """The jaxpr with formulas, and what is known of its outputs, given that of its inputs."""
    known: dict[Any, _Known] = dict(zip(jaxpr.invars, given, strict=True))
    makers: dict[Any, Any] = {}

    def read(v: Any) -> _Known:
        if isinstance(v, jaxprs.Literal):
            number = np.asarray(v.val)
            return float(number) if number.ndim == 0 and number.dtype.kind in "iuf" else None
        return known.get(v)

    eqns = []
    for eqn in jaxpr.eqns:
        now = [read(v) for v in eqn.invars]
        if eqn.primitive.name in _LOOKED_INTO:
            eqn, ends = _nested(eqn, now)
            known.update(zip(eqn.outvars, ends, strict=True))
        else:
            known.update(dict.fromkeys(eqn.outvars, _made(eqn, now, makers)))
            makers.update(dict.fromkeys(eqn.outvars, eqn))
            eqn = _with_formula(eqn, now)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns), [read(v) for v in jaxpr.outvars]


def _nested(eqn: Any, now: Sequence[_Known]) -> tuple[Any, list[_Known]]:
    """An equation with formulas in its bodies, and what is known of its results: of those of calls, all of it."""
    is_call = eqn.primitive.name in OPENED
    ends: list[list[_Known]] = []

    def change(jaxpr: Any) -> Any:
        new, after = _rewritten(jaxpr, now if is_call else [None] * len(jaxpr.invars))
        ends.append(after)
        return new

    return simplify.with_bodies(eqn, change), ends[0] if is_call else [None] * len(eqn.outvars)


# ------------------------------------------------------------------------------------------------- sums of squares


def _made(eqn: Any, now: Sequence[_Known], makers: dict[Any, Any]) -> _Known:
    """What is known of the results of an equation."""
    name = eqn.primitive.name
    if now and all(isinstance(known, float) for known in now) and name in _OF_NUMBERS:
        return _OF_NUMBERS[name](*now)
    is_real = bool(eqn.outvars) and jnp.issubdtype(eqn.outvars[0].aval.dtype, np.floating)
    return _SQUARES if is_real and (_is_power(eqn, now, makers) or _is_sum(name, now)) else None


def _is_power(eqn: Any, now: Sequence[_Known], makers: dict[Any, Any]) -> bool:
    """Whether an equation makes squares, or higher powers of sizes."""
    name, operands = eqn.primitive.name, eqn.invars
    if name == "mul":
        return not isinstance(operands[0], jaxprs.Literal) and operands[0] is operands[1]
    if name == "integer_pow":
        exponent = eqn.params["y"]
        return exponent >= 2 and (exponent % 2 == 0 or _name_of(operands[0], makers) == "abs")
    if name == "pow":
        return _name_of(operands[0], makers) == "abs" and isinstance(now[1], float) and now[1] > 1
    return name == "square" or (name == "real" and _is_with_conjugate(operands[0], makers))


def _is_sum(name: str, now: Sequence[_Known]) -> bool:
    """Whether an equation makes sums of squares of such sums, so that it is 0 only where these are."""
    if _SQUARES not in now:
        return False
    others = [known for known in now if known is not _SQUARES]
    if name == "div":
        return now[0] is _SQUARES
    if name == "mul":
        return all(isinstance(known, float) and known != 0.0 for known in others)
    if name == "select_n":  # JAX puts NaN in the place of a variance that has no degree of freedom
        return all(isinstance(known, float) and known != 0.0 for known in others if known is not now[0])
    return name in _KEEPS and all(isinstance(known, float) and known >= 0.0 for known in others)


def _name_of(v: Any, makers: dict[Any, Any]) -> str:
    """The name of the primitive that makes a value; nothing for literals and inputs."""
    return "" if isinstance(v, jaxprs.Literal) or v not in makers else makers[v].primitive.name


def _is_with_conjugate(v: Any, makers: dict[Any, Any]) -> bool:
    """Whether a value is a complex number times its conjugate."""
    if _name_of(v, makers) != "mul":
        return False
    one, other = makers[v].invars
    pairs = ((one, other), (other, one))
    return any(_name_of(x, makers) == "conj" and makers[x].invars[0] is y for x, y in pairs)


# -------------------------------------------------------------------------------------------------------- formulas


def _with_formula(eqn: Any, now: Sequence[_Known]) -> Any:
    name, formula = eqn.primitive.name, _FORMULAS.get(eqn.primitive.name)
    operands = eqn.invars
    if name == "sqrt" and now[0] is _SQUARES:
        formula = functools.partial(root_of_squares, exponent=None)
    elif name == "pow" and now[0] is _SQUARES and isinstance(now[1], float) and 0 < now[1] < 1:
        formula, operands = functools.partial(root_of_squares, exponent=now[1]), operands[:1]
    elif name == "abs" and jnp.issubdtype(operands[0].aval.dtype, np.complexfloating):
        formula = angles.abs
    if formula is None or not all(jnp.issubdtype(v.aval.dtype, np.inexact) for v in operands):
        return eqn
    closed = jax.make_jaxpr(jax.jit(formula))(*(jaxprs.struct(v.aval) for v in operands))
    call = jaxprs.opened(closed)[0].eqns[0]
    return jaxprs.rebound(call, operands, eqn.outvars).replace(source_info=eqn.source_info, ctx=eqn.ctx)
