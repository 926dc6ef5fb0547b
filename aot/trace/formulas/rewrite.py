"""Put formulas into a traced function, by the conventions.

Rules of the user's own stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jointcut.aot.choices.conventions import Conventions
from jointcut.aot.derivatives.elementwise import angles, powers
from jointcut.aot.trace.formulas import slopes
from jointcut.aot.trace.formulas.changes import ruled
from jointcut.aot.trace.formulas.known import Kind, Known, made, number_of
from jointcut.aot.trace.formulas.spectra import with_equal_values
from jointcut.partition.program import jaxprs
from jointcut.partition.program.primitives import LOOPS, OPENED
from jointcut.partition.rewrite import simplify

Formula = Callable[..., Any]

#: Functions whose derivative alone is another, by primitive or by the name of JAX's function: the rule, and a formula.
_ALWAYS: Mapping[str, tuple[str, Formula]] = {
    "pow": ("power_at_zero", powers.power),
    "igamma": ("power_at_zero", slopes.igamma),
    "igammac": ("power_at_zero", slopes.igammac),
    "atan2": ("angle_at_origin", slopes.turned),
    "xlogy": ("xlogy_at_zero", slopes.xlogy),
    "xlog1py": ("xlogy_at_zero", slopes.xlog1py),
    "logaddexp": ("empty_logsumexp", slopes.logaddexp),
    "logaddexp2": ("empty_logsumexp", slopes.logaddexp2),
}

#: What holds programs that are looked into.
_LOOKED_INTO = LOOPS | OPENED | {"cond", "remat2", "checkpoint"}


def with_formulas(closed: Any, conventions: Conventions) -> Any:
    """The same function, with the derivatives that the conventions choose."""
    if not conventions.chosen:
        return closed
    jaxpr, consts = jaxprs.opened(closed)
    return jaxprs.ClosedJaxpr(_rewritten(jaxpr, [None] * len(jaxpr.invars), conventions.chosen)[0], consts)


def _rewritten(jaxpr: Any, given: Sequence[Known], chosen: Mapping[str, str]) -> tuple[Any, list[Known]]:
    """The jaxpr with formulas, and what is known of its outputs, given that of its inputs."""
    known: dict[Any, Known] = dict(zip(jaxpr.invars, given, strict=True))
    makers: dict[Any, Any] = {}

    def read(v: Any) -> Known:
        return number_of(v) if isinstance(v, jaxprs.Literal) else known.get(v)

    eqns = []
    for eqn in jaxpr.eqns:
        now = [read(v) for v in eqn.invars]
        if eqn.primitive.name in _LOOKED_INTO:
            eqn, ends = _nested(eqn, now, chosen)
            known.update(zip(eqn.outvars, ends, strict=True))
        else:
            known.update(dict.fromkeys(eqn.outvars, made(eqn, now, makers)))
            makers.update(dict.fromkeys(eqn.outvars, eqn))
            eqn = _with_formula(eqn, now, chosen)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns), [read(v) for v in jaxpr.outvars]


def _nested(eqn: Any, now: Sequence[Known], chosen: Mapping[str, str]) -> tuple[Any, list[Known]]:
    """An equation with formulas in its bodies, and what is known of its results: of those of calls, all of it."""
    is_call = eqn.primitive.name in OPENED
    ends: list[list[Known]] = []

    def change(jaxpr: Any) -> Any:
        new, after = _rewritten(jaxpr, now if is_call else [None] * len(jaxpr.invars), chosen)
        ends.append(after)
        return new

    return simplify.with_bodies(eqn, change), ends[0] if is_call else [None] * len(eqn.outvars)


def _with_formula(eqn: Any, now: Sequence[Known], chosen: Mapping[str, str]) -> Any:
    if not eqn.invars or not all(jnp.issubdtype(v.aval.dtype, np.inexact) for v in eqn.invars):
        return eqn
    name = jaxprs.rule_of_jax(eqn) or eqn.primitive.name
    found = _root(name, now) or _singular(eqn, name) or _ALWAYS.get(name)
    if found is not None and found[0] in chosen:
        rule, formula = found
        return simplify.instead(eqn, ruled(formula, rule))
    return _corner(eqn, name, now, chosen)


def _root(name: str, now: Sequence[Known]) -> tuple[str, Formula] | None:
    """The root of a sum of squares, or the logarithm of a sum of exponentials."""
    if name == "sqrt" and now[0] is Kind.SQUARES:
        return "norm_at_zero", functools.partial(slopes.root_of_squares, None)
    if name == "pow" and now[0] is Kind.SQUARES and isinstance(now[1], float) and 0 < now[1] < 1:
        return "norm_at_zero", lambda total, _: slopes.root_of_squares(now[1], total)
    return ("empty_logsumexp", slopes.log_of_exponentials) if name == "log" and now[0] is Kind.EXPONENTIALS else None


def _singular(eqn: Any, name: str) -> tuple[str, Formula] | None:
    """An absolute value, or a decomposition with values that may be equal."""
    if name == "abs":
        is_complex = jnp.issubdtype(eqn.invars[0].aval.dtype, np.complexfloating)
        return ("norm_at_zero", angles.abs) if is_complex else ("abs_at_zero", slopes.flat_abs)
    if name in ("eigh", "svd") and eqn.params["subset_by_index"] is None:
        return "equal_eigenvalues", with_equal_values(eqn)
    return None


def _corner(eqn: Any, name: str, now: Sequence[Known], chosen: Mapping[str, str]) -> Any:
    """A bound or a maximum, with the slope that is chosen for it."""
    at_bound, ties = chosen.get("clamp_at_bound", "jax"), chosen.get("max_ties", "jax")
    operands, formula, rule = eqn.invars, None, "clamp_at_bound"
    if name in ("max", "min"):
        numbers = [isinstance(known, float) for known in now]
        if sum(numbers) == 1 and at_bound != "jax":
            formula, operands = slopes.bounded(name, at_bound), operands[:: -1 if numbers[0] else 1]
        elif not any(numbers) and ties == "first":
            formula, rule = slopes.bounded(name, "one"), "max_ties"
    elif name == "clamp" and at_bound == "one":
        formula = slopes.clamped
    elif name in ("reduce_max", "reduce_min") and ties == "first":
        formula, rule = functools.partial(slopes.first_along, name, tuple(eqn.params["axes"])), "max_ties"
    return eqn if formula is None else simplify.instead(eqn, ruled(formula, rule), operands)
