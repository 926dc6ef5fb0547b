"""Find the arguments of the `jax.jit` around a trace, to know how they lie on a mesh.

On automatic axes the type of a traced value does not tell how it lies. But JAX traces a jitted function when it is
called, or lowered, so its arguments are there: in the frames of JAX that called it. It traces once for all shardings on
one mesh, and lowers what it traced for each. `noticed` tells of that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax._src import core as _core
from jax._src import pjit as _pjit
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.interpreters import pxla as _pxla
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

#: JAX's functions that trace a jitted function for the arguments of a call, lower it for their shardings, and lower the
#: equations of a jaxpr.
_TRACES, _LOWERS, _LOWERS_EACH = "_infer_params", "lower_sharding_computation", "jaxpr_subcomp"

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
    if made is None or not _keeps_place(made.primitive):
        return None
    return next((each for each in made.in_tracers if each.aval.shape == x.aval.shape), None)


def _keeps_place(primitive: Any) -> bool:
    return primitive is _noticed_p or primitive.name in _LYING_ALIKE


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


# --------------------------------------------------------------------------------- what a program is lowered for


def noticed(x: Any, lies: Callable[[Any], None]) -> Any:
    """A traced value; `lies` is called with the sharding of the jitted function's argument that it is, or is cast from.

    It is called whenever JAX lowers the program that is traced now, or one that holds it. The value is not changed.
    """
    return _noticed_p.bind(x, lies=lies)


_noticed_p = jex.Primitive("jointcut_noticed")
_noticed_p.def_impl(lambda x, **_: x)
_noticed_p.def_abstract_eval(lambda x, **_: x)
ad.primitive_jvps[_noticed_p] = lambda xs, ts, **how: (_noticed_p.bind(*xs, **how), ts[0])
batching.primitive_batchers[_noticed_p] = lambda xs, dims, **how: (_noticed_p.bind(*xs, **how), dims[0])


def _lowered(ctx: Any, x: Any, *, lies: Callable[[Any], None]) -> list[Any]:
    del ctx
    if (sharding := _lowered_for(sys._getframe())) is not None:
        lies(sharding)
    return [x]


mlir.register_lowering(_noticed_p, _lowered, cacheable=False)


def _lowered_for(frame: FrameType | None) -> Any | None:
    """The sharding for which the first operand of the equation that is lowered in a frame is lowered."""
    place = 0
    while frame is not None:
        known, at = frame.f_locals, (frame.f_code.co_name, frame.f_globals)
        if at == (_LOWERS, _pxla.__dict__):
            return known["in_shardings"][len(known["const_args"]) + place]
        if at == (_LOWERS_EACH, _mlir.__dict__):
            found = _place(known["jaxpr"], known["eqn"], place)
            if found is None:
                return None
            place = found
        frame = frame.f_back
    return None


def _place(jaxpr: Any, eqn: Any, operand: int) -> int | None:
    """The number of the input of a jaxpr that an equation's operand is, or is cast or scaled from; None if of none."""
    made = {id(v): each for each in jaxpr.eqns for v in each.outvars}
    v = eqn.invars[operand] if operand < len(eqn.invars) else None
    while v is not None and (maker := made.get(id(v))) is not None:
        shape = v.aval.shape
        alike = (each for each in maker.invars if each.aval.shape == shape)
        v = next(alike, None) if _keeps_place(maker.primitive) else None
    return next((n for n, each in enumerate(jaxpr.invars) if each is v), None)
