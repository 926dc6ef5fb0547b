"""List the functions of `aot.derivatives` that cure a line, and the formulas that each replaces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jointcut.aot import derivatives
from jointcut.aot.derivatives import linalg
from jointcut.aot.stages.cures.formula import Formula, Origins, Use
from jointcut.aot.trace.formulas.chosen_slopes import root_of_squares
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.jax.jaxprs import Atom, Equation, Literal
from jointcut.partition.program.primitives import JITS, SAME_NUMBERS

# ------------------------------------------------------------------------------------- functions of several equations


def _product_with(name: str, function: Callable[..., Any]) -> Callable[[Equation, Origins], Use | None]:
    """Find a product of x and a logarithm."""

    def at(eqn: Equation, makers: Origins) -> Use | None:
        if eqn.primitive.name != "mul":
            return None
        for x, y in (eqn.invars, eqn.invars[::-1]):
            made = makers.get(y, name)
            if made is not None:
                return [function], [x, made.invars[0]]
        return None

    return at


def _log_of_sum(eqn: Equation, makers: Origins) -> Use | None:
    """Find log(sum(exp(x)))."""
    total = makers.behind(eqn.invars[0], "reduce_sum") if eqn.primitive.name == "log" else None
    made = total and makers.get(total.invars[0], "exp")
    if total is None or made is None:
        return None
    return _over(derivatives.logsumexp, total.params["axes"], (False, True)), made.invars


def _over(function: Callable[..., Any], axes: Sequence[int], keeps: Sequence[bool] = ()) -> list[Callable[..., Any]]:
    over = functools.partial(function, axis=tuple(axes))
    return [functools.partial(over, keepdims=keep) for keep in keeps] or [over]


def _softmax(eqn: Equation, makers: Origins) -> Use | None:
    """Find exp(x) / sum(exp(x))."""
    if eqn.primitive.name != "div":
        return None
    upper, total = makers.get(eqn.invars[0], "exp"), makers.behind(eqn.invars[1], "reduce_sum")
    lower = total and makers.get(total.invars[0], "exp")
    if upper is None or total is None or lower is None or not _same(upper.invars[0], lower.invars[0]):
        return None
    return _over(derivatives.softmax, total.params["axes"]), upper.invars


def _log_softmax(eqn: Equation, makers: Origins) -> Use | None:
    """Find log(softmax(x)), with JAX's softmax or one written by hand."""
    made = makers.get(eqn.invars[0], "div") if eqn.primitive.name == "log" else None
    total = None if made is None or _softmax(made, makers) is None else makers.behind(made.invars[1], "reduce_sum")
    upper = None if made is None else makers.get(made.invars[0], "exp")
    return total and upper and (_over(derivatives.log_softmax, total.params["axes"]), upper.invars)


def _exp_beside_one(v: Atom, makers: Origins) -> Equation | None:
    """Find the `exp` in 1 + exp(x)."""
    made = makers.get(v, "add")
    if made is None:
        return None
    one, other = made.invars
    pairs = [x for x, y in ((one, other), (other, one)) if _number(y) == 1.0]
    return makers.get(pairs[0], "exp") if pairs else None


def _softplus(eqn: Equation, makers: Origins) -> Use | None:
    """Find log(1 + exp(x))."""
    if eqn.primitive.name not in ("log", "log1p"):
        return None
    v = eqn.invars[0]
    made = makers.get(v, "exp") if eqn.primitive.name == "log1p" else _exp_beside_one(v, makers)
    return made and ([derivatives.softplus], made.invars)


def _sigmoid(eqn: Equation, makers: Origins) -> Use | None:
    """Find 1 / (1 + exp(-x)), or exp(x) / (1 + exp(x))."""
    lower = _exp_beside_one(eqn.invars[1], makers) if eqn.primitive.name == "div" else None
    if lower is None:
        return None
    upper = makers.get(eqn.invars[0], "exp")
    if upper is not None and _same(upper.invars[0], lower.invars[0]):
        return [derivatives.sigmoid], upper.invars
    return ([lambda x: derivatives.sigmoid(-x)], lower.invars) if _number(eqn.invars[0]) == 1.0 else None


def _log_sigmoid(eqn: Equation, makers: Origins) -> Use | None:
    """Find log(sigmoid(x))."""
    if eqn.primitive.name != "log":
        return None
    made = makers.get(eqn.invars[0], "logistic")
    if made is not None:
        return [derivatives.log_sigmoid], made.invars
    by_hand = makers.get(eqn.invars[0], "div")
    use = None if by_hand is None else _sigmoid(by_hand, makers)
    if use is None:
        return None
    ((sigmoid,), operands) = use
    if sigmoid is derivatives.sigmoid:
        return [derivatives.log_sigmoid], operands
    return [lambda x: derivatives.log_sigmoid(-x)], operands


def _logaddexp(eqn: Equation, makers: Origins) -> Use | None:
    """Find log(exp(x) + exp(y))."""
    total = makers.get(eqn.invars[0], "add") if eqn.primitive.name == "log" else None
    made = [makers.get(v, "exp") for v in total.invars] if total is not None else []
    operands = [eqn.invars[0] for eqn in made if eqn is not None]
    return ([derivatives.logaddexp], operands) if len(operands) == 2 else None


def _sinc(eqn: Equation, makers: Origins) -> Use | None:
    """Find sin(x) / x."""
    upper = makers.get(eqn.invars[0], "sin") if eqn.primitive.name == "div" else None
    if upper is None or not _same(upper.invars[0], eqn.invars[1]):
        return None
    return [lambda x: derivatives.sinc(x / np.asarray(np.pi, x.dtype))], upper.invars


def _unit(eqn: Equation, makers: Origins) -> Use | None:
    """Find x / norm(x)."""
    root = makers.behind(eqn.invars[1], "sqrt") if eqn.primitive.name == "div" else None
    total = root and makers.behind(root.invars[0], "reduce_sum")
    if total is None or len(total.params["axes"]) != 1:
        return None
    made = makers.get(total.invars[0], "mul", "square", "integer_pow")
    if made is None or not all(_same(v, eqn.invars[0]) for v in made.invars) or made.params.get("y", 2) != 2:
        return None
    return [functools.partial(derivatives.normalize, axis=total.params["axes"][0])], [eqn.invars[0]]


def _is(v: Any, kind: Any) -> bool:
    """Whether a value is of this kind of numbers."""
    return bool(jnp.issubdtype(v.aval.dtype, kind))


def _same(one: Atom, other: Atom) -> bool:
    return one is other and not isinstance(one, Literal)


def _number(v: Atom) -> float | None:
    """Return the number of a literal; None if the atom is not a scalar float."""
    if not isinstance(v, Literal) or np.ndim(v.val) or not _is(v, np.floating):
        return None
    return float(v.val)


# ---------------------------------------------------------------------------------------------- functions of one


def _alone(primitive: str, function: Callable[..., Any]) -> Callable[[Equation, Origins], Use | None]:
    def at(eqn: Equation, makers: Origins) -> Use | None:
        del makers
        return ([function], eqn.invars) if eqn.primitive.name == primitive else None

    return at


def _of_size(eqn: Equation, makers: Origins) -> Use | None:
    """Find the absolute value of complex numbers."""
    is_complex = eqn.primitive.name == "abs" and _is(eqn.invars[0], np.complexfloating)
    return _alone("abs", derivatives.abs)(eqn, makers) if is_complex else None


def _power(eqn: Equation, makers: Origins) -> Use | None:
    """Find a power, with an exponent that is an array or a whole number."""
    if eqn.primitive.name == "integer_pow":
        return [functools.partial(derivatives.power, x2=eqn.params["y"])], eqn.invars
    return _alone("pow", derivatives.power)(eqn, makers)


def _root(eqn: Equation, makers: Origins) -> Use | None:
    """Find the root of a sum of squares."""
    if eqn.primitive.name != "sqrt" or not _is_of_squares(eqn.invars[0], makers):
        return None
    return [functools.partial(root_of_squares, None)], eqn.invars


def _is_of_squares(v: Atom, makers: Origins) -> bool:
    """Whether a value is a sum of squares of real numbers, or such a sum divided by a value."""
    made = makers.get(v, "mul", "square", "integer_pow", "dot_general")
    if made is not None and not _is(v, np.complexfloating):
        operands = made.invars
        return made.params.get("y", 2) == 2 and _same(operands[0], operands[-1])
    made = makers.get(v, "reduce_sum", "div", "select_n", "add", *SAME_NUMBERS)
    if made is None:
        return False
    name, operands = made.primitive.name, made.invars
    if name == "select_n":
        return any(_is_of_squares(x, makers) for x in operands[1:])
    return all(_is_of_squares(x, makers) for x in (operands if name == "add" else operands[:1]))


def _distance(eqn: Equation, makers: Origins) -> Use | None:
    """Find sqrt(max(x·x - 2 x·y + y·y, 0)), the distance of pairs of points."""
    clipped = makers.get(eqn.invars[0], "max") if eqn.primitive.name == "sqrt" else None
    if clipped is None or 0.0 not in map(_number, clipped.invars):
        return None
    squares = next(v for v in clipped.invars if _number(v) != 0.0)
    if not _holds_product(squares, makers):
        return None
    return [functools.partial(root_of_squares, None)], eqn.invars


def _holds_product(v: Atom, makers: Origins) -> bool:
    """Whether a matrix product is among the terms of a sum."""
    made = makers.get(v, "add", "sub", "mul", "neg", "dot_general", *SAME_NUMBERS)
    if made is None:
        return False
    return made.primitive.name == "dot_general" or any(_holds_product(x, makers) for x in made.invars)


def _deviation(eqn: Equation, makers: Origins) -> Use | None:
    """Find the root of a variance: a sum of squares of numbers minus their mean."""
    return _root(eqn, makers) if eqn.primitive.name == "sqrt" and _is_centred(eqn.invars[0], makers) else None


def _is_centred(v: Atom, makers: Origins) -> bool:
    """Whether a value is made of squares of numbers minus their mean."""
    made = makers.get(v, "mul", "square", "integer_pow")
    if made is not None:
        less = makers.get(made.invars[0], "sub")
        return less is not None and makers.behind(less.invars[1], "div") is not None
    made = makers.get(v, "reduce_sum", "div", "select_n", *SAME_NUMBERS)
    return made is not None and any(_is_centred(x, makers) for x in made.invars)


def _cumulative(primitive: str, function: Callable[..., Any]) -> Callable[[Equation, Origins], Use | None]:
    def at(eqn: Equation, makers: Origins) -> Use | None:
        del makers
        if eqn.primitive.name != primitive or eqn.params["reverse"]:
            return None
        return [functools.partial(function, axis=eqn.params["axis"])], eqn.invars

    return at


def _product(eqn: Equation, makers: Origins) -> Use | None:
    del makers
    return (_over(derivatives.prod, eqn.params["axes"]), eqn.invars) if eqn.primitive.name == "reduce_prod" else None


def _named(name: str, *functions: Callable[..., Any]) -> Formula:
    """Return the formula of a call with the same name, of `jax.numpy` or of `jax.numpy.linalg`."""

    def at(eqn: Equation, makers: Origins) -> Use | None:
        del makers
        return (functions, eqn.invars) if _call_name(eqn) == name else None

    arguments = ", ".join("xyz"[: 2 if name in ("hypot", "logaddexp", "logaddexp2", "xlogy", "xlog1py") else 1])
    is_matrix = getattr(linalg, name, None) is not None
    room, theirs = ("linalg.", "jnp.linalg.") if is_matrix else ("", "jnp.")
    return Formula(f"{room}{name}({arguments})", f"{theirs}{name}({arguments})", at, is_named=True)


def _call_name(eqn: Equation) -> str:
    """Return the name of the called function."""
    if eqn.primitive.name == "custom_jvp_call":
        info = jaxprs.opened(eqn.params["call_jaxpr"])[0].debug_info
        return str(info.func_name).lstrip("_")
    return str(eqn.params.get("name", "")).lstrip("_") if eqn.primitive.name in JITS else ""


#: In the order in which they are tried: formulas of more equations come first.
FORMULAS: tuple[Formula, ...] = (
    Formula("log_softmax(x)", "log(softmax(x))", _log_softmax, is_safer=True),
    Formula("log_sigmoid(x)", "log(sigmoid(x))", _log_sigmoid, is_safer=True),
    Formula("logsumexp(x)", "log(sum(exp(x)))", _log_of_sum, is_safer=True),
    Formula("softplus(x)", "log(1 + exp(x))", _softplus, is_safer=True),
    Formula("logaddexp(x, y)", "log(exp(x) + exp(y))", _logaddexp, is_safer=True),
    Formula("softmax(x)", "exp(x) / sum(exp(x))", _softmax, is_safer=True),
    Formula("sigmoid(x)", "1 / (1 + exp(-x))", _sigmoid, is_safer=True),
    Formula("xlogy(x, y)", "x * log(y)", _product_with("log", derivatives.xlogy), is_safer=True),
    Formula("xlog1py(x, y)", "x * log1p(y)", _product_with("log1p", derivatives.xlog1py), is_safer=True),
    Formula("sinc(x / pi)", "sin(x) / x", _sinc, is_safer=True),
    Formula("normalize(x)", "x / norm(x)", _unit, is_safer=True),
    _named("eigh", linalg.eigh),
    _named("svd", linalg.svd, functools.partial(linalg.svd, full_matrices=False), linalg.svdvals),
    _named("qr", linalg.qr, functools.partial(linalg.qr, mode="complete")),
    _named("slogdet", linalg.slogdet),
    _named("det", linalg.det),
    _named("pinv", linalg.pinv),
    _named("inv", linalg.inv),
    _named("cholesky", linalg.cholesky, functools.partial(linalg.cholesky, upper=True)),
    _named("hypot", derivatives.hypot),
    _named("logaddexp", derivatives.logaddexp),
    _named("logaddexp2", derivatives.logaddexp2),
    _named("sinc", derivatives.sinc),
    Formula("std(x)", "the root of a variance", _deviation),
    Formula("norm(x)", "the root of a sum of squares", _root),
    Formula("cdist(x, y)", "the root of squared distances", _distance),
    Formula("sqrt(x)", "jnp.sqrt(x)", _alone("sqrt", derivatives.sqrt)),
    Formula("rsqrt(x)", "jax.lax.rsqrt(x)", _alone("rsqrt", derivatives.rsqrt)),
    Formula("cbrt(x)", "jnp.cbrt(x)", _alone("cbrt", derivatives.cbrt)),
    Formula("power(x, y)", "x ** y", _power),
    Formula("log(x)", "jnp.log(x)", _alone("log", derivatives.log)),
    Formula("log1p(x)", "jnp.log1p(x)", _alone("log1p", derivatives.log1p)),
    Formula("divide(x, y)", "x / y", _alone("div", derivatives.divide)),
    Formula("arccos(x)", "jnp.arccos(x)", _alone("acos", derivatives.arccos)),
    Formula("arcsin(x)", "jnp.arcsin(x)", _alone("asin", derivatives.arcsin)),
    Formula("arccosh(x)", "jnp.arccosh(x)", _alone("acosh", derivatives.arccosh)),
    Formula("arctanh(x)", "jnp.arctanh(x)", _alone("atanh", derivatives.arctanh)),
    Formula("arctan2(y, x)", "jnp.arctan2(y, x)", _alone("atan2", derivatives.arctan2)),
    Formula("abs(x)", "jnp.abs(x)", _of_size),
    Formula("prod(x)", "jnp.prod(x)", _product),
    Formula("cumprod(x)", "jnp.cumprod(x)", _cumulative("cumprod", derivatives.cumprod)),
    Formula("logcumsumexp(x)", "jax.lax.cumlogsumexp(x)", _cumulative("cumlogsumexp", derivatives.logcumsumexp)),
)
