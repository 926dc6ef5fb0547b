"""Tell the effects of equations, and take them out."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import effects as _effects
from jax._src.state import discharge as _discharge

from jointcut.partition.program.jax.jaxprs import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    build,
    constants_first,
    may_hold_jaxpr,
    no_debug_info,
    opened,
)

_SAYING = ("DebugEffect", "OrderedDebugEffect", "ErrorEffect")  # of `jax.debug.print` and of `checkify.check`
_INWARD = ("NamedAxisEffect", "InternalMutableArrayEffect", "NoDCEEffect")  # effects that nobody outside can see


def has_effects(eqn: Equation) -> bool:
    """Whether running the equation twice, or not at all, could be seen from outside (named axes do not count)."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def effect_names(eqn: Equation, ordered: bool = False) -> list[str]:
    """Names of an equation's effects on the world outside, without references; with `ordered`, only ordered ones."""
    effects = [e for e in eqn.effects if not hasattr(e, "input") and type(e).__name__ not in _INWARD]
    return sorted(str(e) for e in effects if not ordered or _effects.ordered_effects.contains(e))


#: Marks in the place of a gradient among the arguments of `with_refs`: `GradRef`, `GradValue`, `DontWant`, `DidntWant`.
marks: Any = jax.ad  # pyright: ignore[reportPrivateImportUsage]


def called_back(eqn: Equation) -> Any:
    """The function that an equation of `io_callback` calls; None for any other equation."""
    if eqn.primitive.name != "io_callback":
        return None
    return getattr(eqn.params["callback"], "callback_func", None)


def discharged(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The pure form of a jaxpr: references become arrays, and their last states become trailing results.

    The jaxpr has no constants. Raises `NotImplementedError` where JAX has no rule for a primitive that touches a
    reference.
    """
    jaxpr, consts = opened(_discharge.discharge_state(closed, lower=False))
    assert not consts, "JAX's rules for references make no constants"
    return build(jaxpr.invars, jaxpr.outvars, jaxpr.eqns)


def pure(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr with values in the place of the references that it makes."""
    jaxpr, consts = opened(closed)
    if not any(type(effect).__name__ == "InternalMutableArrayEffect" for effect in jaxpr.effects):
        return closed
    inner, _ = opened(discharged(constants_first(jaxpr)))
    front, rest = inner.invars[: len(consts)], inner.invars[len(consts) :]
    info = no_debug_info(rest, inner.outvars)
    return ClosedJaxpr(Jaxpr(front, rest, inner.outvars, inner.eqns, inner.effects, info), consts)


def silenced(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr without `jax.debug.print`, `jax.debug.callback` and `checkify.check`, however deep."""
    jaxpr, consts = opened(closed)
    return ClosedJaxpr(_silenced(jaxpr), consts) if _says(jaxpr.effects) else closed


def _says(effects: Any) -> bool:
    return any(type(effect).__name__ in _SAYING for effect in effects)


def _silenced(jaxpr: Jaxpr) -> Jaxpr:
    def quiet(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(quiet, value))
        if isinstance(value, Jaxpr):  # also a closed jaxpr, where JAX merged the two classes
            return _silenced(value)
        return ClosedJaxpr(_silenced(value.jaxpr), value.consts) if isinstance(value, ClosedJaxpr) else value

    eqns = []
    for eqn in jaxpr.eqns:
        if not _says(eqn.effects):
            eqns.append(eqn)
        elif any(map(may_hold_jaxpr, eqn.params.values())):
            effects = frozenset(e for e in eqn.effects if type(e).__name__ not in _SAYING)
            eqns.append(eqn.replace(params={k: quiet(v) for k, v in eqn.params.items()}, effects=effects))
    effects = frozenset(e for e in jaxpr.effects if type(e).__name__ not in _SAYING)
    return jaxpr.replace(eqns=eqns, effects=effects)
