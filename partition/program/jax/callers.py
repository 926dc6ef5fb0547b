"""Find the arguments of the `jax.jit` around a trace, to know how they lie on a mesh.

On automatic axes the type of a traced value does not tell how it lies. But JAX traces a jitted function when it is
called, or lowered, so its arguments are there: in the frames of JAX that called it.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import jax
from jax._src import core as _core
from jax._src import pjit as _pjit
from jax._src.interpreters import partial_eval as _pe

_TRACES = "_infer_params"  # JAX's function that traces a jitted function for the arguments of a call

#: Ops of a jitted function whose result lies as an operand of its shape does.
_LYING_ALIKE = frozenset({"add", "convert_element_type", "copy", "div", "mul", "neg", "sub"})


def argument(x: Any) -> Any | None:
    """Return the array, or its type, that the caller passed for a traced value, or for what it is cast or scaled from.

    None for a value that is computed otherwise, or that a loop, `jax.vmap` or `in_shardings` has changed.
    """
    x, frame = _primal(x), sys._getframe()
    while isinstance(x, _pe.DynamicJaxprTracer):
        inside = x._trace.frame
        place = next((n for n, v in enumerate(inside.invars) if v is x.val), None)
        if place is None:
            x = _primal(_alike(x))
            continue
        if getattr(inside.debug_info, "traced_for", "") != "jit":
            return None
        given, frame = _arguments_of(len(inside.invars), frame)
        if given is None or jax.typeof(given[place]).shape != x.shape:
            return None
        x = _primal(given[place])
    return None if isinstance(x, _core.Tracer) else x


def _alike(x: Any) -> Any | None:
    """Return an operand that lies as a computed value does; None if there is none."""
    made = getattr(x, "parent", None)
    if made is None or made.primitive.name not in _LYING_ALIKE:
        return None
    return next((each for each in made.in_tracers if each.aval.shape == x.aval.shape), None)


def _primal(x: Any) -> Any:
    """Return the value behind a value that is differentiated."""
    while isinstance(x, _core.Tracer):
        if isinstance(x, _pe.JaxprTracer) and x.is_known():
            x = x.pval.get_known()
        elif (behind := getattr(x, "primal", None)) is not None:
            x = behind
        else:
            break
    return x


def _arguments_of(count: int, frame: FrameType | None) -> tuple[list[Any] | None, FrameType | None]:
    """Return the `count` arguments for which a jitted function is traced, and the frame that called it.

    None for the arguments if none are found from `frame` on outwards.
    """
    while frame is not None:
        known = frame.f_locals if frame.f_code.co_name == _TRACES and frame.f_globals is _pjit.__dict__ else {}
        given, info, frame = known.get("dynargs"), known.get("ji"), frame.f_back
        if given is not None and len(given) == count:
            return None if getattr(info, "user_specified_in_shardings", True) else given, frame
    return None, None
