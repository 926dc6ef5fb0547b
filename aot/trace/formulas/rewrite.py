"""Put formulas into a traced function, by the conventions.

Rules of the user's own are not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jointcut.aot.derivatives.elementwise import angles, bounds, powers
from jointcut.aot.loops.rules import Loop
from jointcut.aot.options.conventions import Conventions
from jointcut.aot.trace.formulas import chosen_slopes, spectra, uses
from jointcut.aot.trace.formulas.changes import ruled
from jointcut.aot.trace.formulas.squares import Makers
from jointcut.aot.trace.formulas.touches import NOTHING, SIZES, Facts, Property, either, made, number_of, through
from jointcut.partition.program.jax import jaxprs, user_source
from jointcut.partition.program.primitives import COND, DECOMPOSING, ENCLOSING, LOOPS, OPENED, SCAN
from jointcut.partition.rewrite import simplify

Formula = Callable[..., Any]

#: Functions that only need another derivative, by primitive or by the name of JAX's function: the rule, and a formula.
_ALWAYS: Mapping[str, tuple[str, Formula]] = {
    "pow": ("power_at_zero", powers.power),
    "igamma": ("power_at_zero", chosen_slopes.igamma),
    "igammac": ("power_at_zero", chosen_slopes.igammac),
    "regularized_incomplete_beta": ("power_at_zero", chosen_slopes.betainc),
    "atan2": ("angle_at_origin", chosen_slopes.turned),
    "xlogy": ("xlogy_at_zero", chosen_slopes.xlogy),
    "xlog1py": ("xlogy_at_zero", chosen_slopes.xlog1py),
    "logaddexp": ("empty_logsumexp", chosen_slopes.logaddexp),
    "logaddexp2": ("empty_logsumexp", chosen_slopes.logaddexp2),
}

#: Jitted functions of JAX's that are replaced as a whole, and the rules.
_CALLS = {
    "fmax": "fmax_ties",
    "fmin": "fmax_ties",
    "hypot": "norm_at_zero",
}

_MEDIANS = ("median", "nanmedian")

#: Functions of JAX's whose bounds stay: for the place of the middle, and two whose slopes add up to that of `celu`.
_BOUNDS_STAY = (*_MEDIANS, "celu")

#: Functions of JAX's whose calls are not opened, since a rule asks for their names.
_STAY = frozenset({*_CALLS, *_BOUNDS_STAY, "clip"})

#: Primitives whose bodies are rewritten.
_LOOKED_INTO = LOOPS | OPENED | ENCLOSING | {COND, "custom_linear_solve"}

#: Primitives whose bodies do not take the operands as inputs.
_OTHERWISE = LOOPS | {"custom_linear_solve"}


def with_formulas(closed: Any, conventions: Conventions) -> Any:
    """Return the same function, with the derivatives that the conventions choose."""
    if not conventions.chosen:
        return closed
    jaxpr, consts = jaxprs.opened(closed)
    new, _ = _rewritten(jaxpr, {}, Makers(), conventions.chosen)
    return jaxprs.ClosedJaxpr(new, consts)


def _rewritten(
    jaxpr: Any, given: Mapping[Any, Facts], makers: Makers, chosen: Mapping[str, str], inside: str = ""
) -> tuple[Any, list[Facts]]:
    """Return the jaxpr with formulas, and the facts of its outputs, given the facts of some inputs.

    `inside` is the name of JAX's function whose body the jaxpr is.
    """
    jaxpr, turned = uses.with_turns(jaxpr, chosen, _stays)
    known = dict(given)

    def read(v: Any) -> Facts:
        return number_of(v) if isinstance(v, jaxprs.Literal) else known.get(v, NOTHING)

    eqns = []
    for eqn in jaxpr.eqns:
        now = [read(v) for v in eqn.invars]
        whole = turned.get(id(eqn)) or _call(eqn, chosen)
        if whole is None and isinstance(eqn.params.get("rules"), Loop):
            whole, ends = _loop(eqn, chosen, inside), [NOTHING] * len(eqn.outvars)
        elif whole is None and eqn.primitive.name in _LOOKED_INTO:
            whole, ends = _nested(eqn, now, makers, chosen, inside or user_source.call_of_jax(eqn))
        elif whole is None and user_source.rule_of_jax(eqn):
            ends = through(jaxprs.opened(eqn.params["call_jaxpr"])[0], now)
            whole = _with_formula(eqn, now, chosen, makers, inside)
        else:
            ends = [made(eqn, now, makers, read)] * len(eqn.outvars)
            whole = whole or _with_formula(eqn, now, chosen, makers, inside)
        known.update(zip(eqn.outvars, ends, strict=True))
        makers.add(eqn)
        eqns.append(whole)
    return jaxpr.replace(eqns=eqns), [read(v) for v in jaxpr.outvars]


def _nested(
    eqn: Any, now: Sequence[Facts], makers: Makers, chosen: Mapping[str, str], inside: str
) -> tuple[Any, list[Facts]]:
    """Return an equation with formulas in its bodies, and the facts of its results."""
    outer, given, carried = _entering(eqn, now)
    ends: list[list[Facts]] = []

    def change(jaxpr: Any) -> Any:
        fits = len(jaxpr.invars) == len(given)
        inner = makers.inner(zip(outer, jaxpr.invars, strict=True)) if fits else Makers()
        start = list(given) if fits else [NOTHING] * len(jaxpr.invars)
        while True:
            known = dict(zip(jaxpr.invars, start, strict=True))
            new, after = _rewritten(jaxpr, known, inner.copy(), chosen, inside)
            wrong = [i for i, end in zip(carried, after, strict=False) if start[i] is SIZES and end.low < 0.0]
            if not wrong or not fits:
                more = {i: either((start[i], end)) for i, end in zip(carried, after, strict=False)}
                ends.append([*more.values(), *after[len(more) :]])
                return new
            start = [NOTHING if i in wrong else one for i, one in enumerate(start)]

    whole = simplify.with_bodies(eqn, change)
    fits = given and all(len(after) == len(eqn.outvars) for after in ends)
    return whole, [either(each) for each in zip(*ends, strict=True)] if fits else [NOTHING] * len(eqn.outvars)


def _entering(eqn: Any, now: Sequence[Facts]) -> tuple[list[Any], list[Facts], range]:
    """Return the values that enter an equation's bodies, their facts, and the positions of a loop's carry.

    A carry of a scan that starts at zero is taken to stay zero or larger; the step then has to confirm it. A carry is
    another value in each step, and stands as None. Nothing is known of values that enter another loop, or a solution.
    """
    name, outer, given = eqn.primitive.name, list(eqn.invars), list(now)
    if name == COND:
        return outer[1:], given[1:], range(0)
    if name != SCAN:
        return ([], [], range(0)) if name in _OTHERWISE else (outer, given, range(0))
    layout = jaxprs.scan_layout(eqn)
    carried = range(layout.num_consts, layout.num_consts + layout.num_carry)
    for i in carried:
        outer[i], given[i] = None, SIZES if given[i].low == 0.0 else NOTHING
    return outer, given, carried


def _loop(eqn: Any, chosen: Mapping[str, str], inside: str) -> Any:
    """Return a loop of ours, such as `aot.while_loop`, with formulas in its body, under the conventions."""

    def change(body: Any) -> Any:
        jaxpr, consts = jaxprs.opened(body)
        known = dict.fromkeys(jaxpr.invars, NOTHING)
        return jaxprs.ClosedJaxpr(_rewritten(jaxpr, known, Makers(), chosen, inside)[0], consts)

    loop = eqn.params["rules"].under(chosen.get("zero_cotangent", "jax"), change)
    return eqn.replace(params={"jaxpr": loop.closed, "rules": loop})


def _call(eqn: Any, chosen: Mapping[str, str]) -> Any:
    """Return a call of another function that replaces one of JAX's; None where that one stays."""
    name = user_source.call_of_jax(eqn)
    if name and "equal_eigenvalues" in chosen and spectra.is_least_squares(eqn):
        return simplify.instead(eqn, ruled(spectra.least_squares(eqn), "equal_eigenvalues"))
    if _CALLS.get(name) not in chosen or not _are_inexact(eqn):
        return None
    formula = chosen_slopes.hypot if name == "hypot" else getattr(bounds, name)
    return simplify.instead(eqn, ruled(formula, _CALLS[name]))


def _stays(eqn: Any) -> bool:
    """Whether a call of a function of JAX's is not opened."""
    name = user_source.call_of_jax(eqn)
    return name in _STAY or bool(name and spectra.is_least_squares(eqn))


def _are_inexact(eqn: Any) -> bool:
    return bool(eqn.invars) and all(jnp.issubdtype(v.aval.dtype, np.inexact) for v in eqn.invars)


def _with_formula(eqn: Any, now: Sequence[Facts], chosen: Mapping[str, str], makers: Makers, inside: str) -> Any:
    if not _are_inexact(eqn):
        return eqn
    name = user_source.rule_of_jax(eqn) or eqn.primitive.name
    found = _root(eqn, name, now, makers) or _singular(eqn, name) or _in_order(eqn, name, inside) or _always(name, now)
    if found is not None and chosen.get(found[0]) not in (None, "known"):
        rule, formula = found
        return simplify.instead(eqn, ruled(formula, rule))
    return _of_power(eqn, name, chosen, makers) or _corner(eqn, name, now, chosen, inside)


def _root(eqn: Any, name: str, now: Sequence[Facts], makers: Makers) -> tuple[str, Formula] | None:
    """Return a root, a logarithm or an arc of a number on a bound where it does not move."""
    x, dtype = now[0], eqn.outvars[0].aval.dtype
    if not jnp.issubdtype(dtype, np.floating):
        return None
    power = now[1].number if name == "pow" else None
    if name in ("sqrt", "cbrt") or (power is not None and 0.0 < power < 1.0):
        if not x.is_zero_at_least(dtype) and not (x.low < 0.0 and makers.is_sum_of_squares(eqn.invars[0])):
            return None
        if name == "cbrt":
            return "norm_at_zero", chosen_slopes.cube_root_of_squares
        return "norm_at_zero", lambda total, *_: chosen_slopes.root_of_squares(power, total)
    if name in chosen_slopes.ARCS:
        ends = tuple(end for end, known in ((1.0, x.high), (-1.0, x.low), (1.0, x.low)) if known == end)
        return ("arc_at_one", chosen_slopes.arc(name, ends)) if ends else None
    is_empty = name == "log" and x.kind is Property.EXPONENTIALS and x.is_zero_at_least(dtype)
    return ("empty_logsumexp", chosen_slopes.log_of_exponentials) if is_empty else None


def _always(name: str, now: Sequence[Facts]) -> tuple[str, Formula] | None:
    """Return a formula for all operands, but none for a sum of exponentials with a number in it: that is not empty."""
    if name in ("logaddexp", "logaddexp2") and any(known.number is not None for known in now):
        return None
    return _ALWAYS.get(name)


def _singular(eqn: Any, name: str) -> tuple[str, Formula] | None:
    """Return an absolute value, or a decomposition with values that may be equal."""
    if name == "abs":
        is_complex = jnp.issubdtype(eqn.invars[0].aval.dtype, np.complexfloating)
        return ("norm_at_zero", angles.abs) if is_complex else ("abs_at_zero", chosen_slopes.flat_abs)
    if name in DECOMPOSING and eqn.params["subset_by_index"] is None:
        return "equal_eigenvalues", spectra.with_equal_values(eqn)
    return None


def _in_order(eqn: Any, name: str, inside: str) -> tuple[str, Formula] | None:
    """Return a formula for the largest element so far, or for sorted elements, whose middle is a median."""
    if name in ("cummax", "cummin"):
        return "cumulative_ties", chosen_slopes.last_so_far(name, eqn.params["axis"], eqn.params["reverse"])
    if name == "sort" and len(eqn.invars) == 1 and inside in _MEDIANS:
        return "median_ties", functools.partial(chosen_slopes.shared_in_order, eqn.params["dimension"])
    return None


def _of_power(eqn: Any, name: str, chosen: Mapping[str, str], makers: Makers) -> Any:
    """The cube root of a whole power; None where it is none, or stays."""
    maker = makers.of(eqn.invars[0], "integer_pow") if name == "cbrt" else None
    if maker is None or maker.params["y"] < 3 or "power_at_zero" not in chosen:
        return None
    formula = ruled(chosen_slopes.cube_root(maker.params["y"]), "power_at_zero")
    return simplify.instead(eqn, formula, [eqn.invars[0], maker.invars[0]])


def _corner(eqn: Any, name: str, now: Sequence[Facts], chosen: Mapping[str, str], inside: str) -> Any:
    """Return a bound or a maximum, with its chosen slope."""
    at_bound, ties = chosen.get("clamp_at_bound", "jax"), chosen.get("max_ties", "jax")
    operands, formula, rule = eqn.invars, None, "clamp_at_bound"
    if inside in _BOUNDS_STAY:
        return eqn
    if name in ("max", "min"):
        numbers = [known.number is not None for known in now]
        if sum(numbers) == 1 and at_bound != "jax":
            formula, operands = chosen_slopes.bounded(name, at_bound), operands[:: -1 if numbers[0] else 1]
        elif inside == "clip" and not any(numbers) and at_bound != "jax":  # the bound stands first
            formula, operands = chosen_slopes.bounded(name, at_bound), operands[::-1]
        elif not any(numbers) and ties == "first":
            formula, rule = chosen_slopes.bounded(name, "one"), "max_ties"
    elif name == "clamp" and at_bound == "one":
        formula = chosen_slopes.clamped
    elif name in ("reduce_max", "reduce_min") and ties == "first":
        formula, rule = functools.partial(chosen_slopes.first_along, name, tuple(eqn.params["axes"])), "max_ties"
    return eqn if formula is None else simplify.instead(eqn, ruled(formula, rule), operands)
