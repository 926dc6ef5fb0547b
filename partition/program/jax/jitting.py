"""Find the jitted function that runs, and jit another function as it is jitted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
from jax._src import api as _api
from jax._src import pjit as _pjit

from jointcut.partition.program.jax import jaxprs, runtime

_FIRST_CALL = "cache_miss"  # JAX's function that runs where a jitted function is first called with some types
_GRADIENT = "value_and_grad_f"  # JAX's function that takes a gradient, also for `jax.grad`


def called(frame: FrameType) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Return the jitted function and its arguments, if a frame is of its first call; else None."""
    if frame.f_code.co_name != _FIRST_CALL or frame.f_globals is not _pjit.__dict__:
        return None
    known = frame.f_locals
    return _pjit._cpp_pjit(known["fun"], known["jit_info"]), known["args"], known["kwargs"]


def is_jitted(function: Any) -> bool:
    """Whether a function is made by `jax.jit`; one around such a function, by `functools.wraps`, is not."""
    return hasattr(function, "_jit_info") and hasattr(function, "trace")


def only_jit(closed: jaxprs.ClosedJaxpr) -> tuple[Any, list[tuple[int | None, Any]]] | None:
    """Return the jitted function that a program calls, if it does nothing else, and what it is called with.

    That is for each array the position of the program's input, or None for a constant, and its type. What is donated
    there is donated still.
    """
    jaxpr = jaxprs.opened(closed)[0]
    if len(jaxpr.eqns) != 1 or jaxpr.eqns[0].primitive is not _pjit.jit_p:
        return None
    (eqn,) = jaxpr.eqns

    params = eqn.params

    def program(*arrays: Any) -> Any:
        return tuple(runtime.evaluate(params["jaxpr"], *arrays))

    program.__name__ = params["name"]
    donated = [i for i, is_donated in enumerate(params["donated_invars"]) if is_donated]
    sides = "in_shardings", "out_shardings"
    lying: Any = {side: tuple(None if _is_open(each) else each for each in params[side]) for side in sides}
    places = {id(v): i for i, v in enumerate(jaxpr.invars)}
    inputs = [
        (places.get(id(v)), jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type))
        for v in eqn.invars
    ]
    return jax.jit(program, donate_argnums=donated, **lying), inputs


def _is_open(sharding: Any) -> bool:
    return type(sharding).__name__ == "UnspecifiedValue"


def rejitted(jitted: Any, function: Callable[..., Any], donated: Sequence[int] | None = None) -> Any:
    """Jit a function with the options of another, and with other donated arguments where some are given.

    It is traced anew, whatever was traced of the same function before.
    """
    info = jitted._jit_info
    if donated is not None:
        info = info._replace(donate_argnums=tuple(donated))
    return _pjit._cpp_pjit(lambda *args, **kwargs: function(*args, **kwargs), info)


def static_positions(jitted: Any) -> tuple[int, ...]:
    """The positions of a jitted function's arguments that are Python values."""
    return tuple(jitted._jit_info.static_argnums)


def donated_positions(jitted: Any) -> tuple[int, ...]:
    """The positions of a jitted function's arguments whose memory its results may take."""
    return tuple(jitted._jit_info.donate_argnums)


@contextmanager
def losses_replaced(other: Callable[[Callable[..., Any], Any], Callable[..., Any]]) -> Iterator[None]:
    """While this lasts, `jax.grad` and `jax.value_and_grad` differentiate `other(function, arguments)` instead.

    That holds for each gradient that is called meanwhile, wherever it was made.
    """
    api: Any = _api
    before = api.argnums_partial2

    def chosen(function: Any, argnums: Any, args: Any, kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_name == _GRADIENT:
            function = other(function, (args, kwargs))
        return before(function, argnums, args, kwargs)

    with replaced(api, "argnums_partial2", chosen):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While this lasts, a class or module has another value under a name."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def aval_of(info: Any) -> Any:
    """The abstract value of an argument, of which `args_info` of a traced call tells."""
    return info._aval
