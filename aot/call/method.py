"""Bind a function or tape to an instance."""

from __future__ import annotations

import functools
import gc
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jointcut.aot.call.flow import Differentiability
from jointcut.aot.report.report import Report
from jointcut.aot.stages.cut import Lowered
from jointcut.aot.stages.traced import Traced
from jointcut.partition.errors import CallError, TraceError, message
from jointcut.wrappers.boundary import bounded_class

_KINDS = (classmethod, staticmethod)


def unwrapped(given: Any) -> tuple[Any, Any]:
    """Return a function, and `classmethod` or `staticmethod` if it was given as one of these, else None.

    Raises `TraceError` for an async function or a generator.
    """
    function, kind = (given.__func__, type(given)) if isinstance(given, _KINDS) else (given, None)
    refuse_unfinished(function)
    return function, kind


def refuse_unfinished(function: Any) -> None:
    """Raise `TraceError` for a function whose call does not run it: an async function or a generator."""
    if inspect.isgeneratorfunction(function):
        what, cure = "is a generator, whose call runs nothing.", "Return the values: in a list, or by jax.lax.scan."
    elif inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        what, cure = "is async, so that its call runs nothing.", "Take `async` away, and await around the call."
    else:
        return
    raise TraceError(message(place_of_code(function), what, cure))


def place_of_code(function: Any) -> str:
    """Return a function with code in errors: `loss at train.py:12`, as Python tells the file."""
    while isinstance(function, functools.partial):
        function = function.func
    return f"{function.__qualname__} at {function.__code__.co_filename}:{function.__code__.co_firstlineno}"


def bound_to(function: Any, kind: Any, instance: Any, owner: type | None) -> Any:
    """Return a `Function` or `Taped` as an attribute of an instance, or of its class; `kind` is as in `unwrapped`."""
    if kind is classmethod:
        return Method(function, type(instance) if owner is None else owner)
    return function if kind is staticmethod or instance is None else Method(function, instance)


def refusing_unbound(owner: Any, function: Callable[..., Any]) -> Callable[[Sequence[Any]], None] | None:
    """Return a check of the arguments of a method whose first is called `cls`; None for any other function.

    Since Python 3.13 a `classmethod` around an object passes on its calls without the class.
    """
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return None
    around = getattr(function, "__qualname__", "").rpartition(".")[0]
    if first != "cls" or not around or around.endswith("<locals>"):
        return None

    def refuse(args: Sequence[Any]) -> None:
        is_given = bool(args) and isinstance(args[0], type)
        if not is_given and any(isinstance(holder, classmethod) for holder in gc.get_referrers(owner)):
            decorator = repr(owner)[1:].partition(" ")[0]
            what = f"is a classmethod around {decorator}, which Python hands on without the class."
            raise CallError(message(function.__qualname__, what, f"Write @{decorator} above @classmethod."))

    return refuse


@bounded_class()
class Method:
    """A `Function` or `Taped` bound to an instance, such as `obj.loss`: the instance (a pytree) is argument 0."""

    def __init__(self, function: Any, instance: Any) -> None:
        """Bind a function; attribute access calls this."""
        self._bound = function, instance
        functools.update_wrapper(self, function, updated=())

    def __repr__(self) -> str:
        """`<aot.function Model.loss: best, bound to a Model>`."""
        function, instance = self._bound
        return f"{repr(function)[:-1]}, bound to a {type(instance).__name__}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the instance as first argument."""
        return self._bound[0](self._bound[1], *args, **kwargs)

    def value_and_grad(self, *args: Any, **kwargs: Any) -> Any:
        """As `Function.value_and_grad`; the instance is argument 0."""
        return self._noted(self._bound[0].value_and_grad, self._bound[1], *args, **kwargs)

    def grad(self, *args: Any, **kwargs: Any) -> Any:
        """As `Function.grad`; the instance is argument 0."""
        return self._noted(self._bound[0].grad, self._bound[1], *args, **kwargs)

    def vjp(self, *args: Any, **kwargs: Any) -> Any:
        """As `Function.vjp`; the instance is argument 0."""
        return self._bound[0].vjp(self._bound[1], *args, **kwargs)

    def value_and_update(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """As `value_and_update` of the function; the instance holds the parameters, and is given up with the state.

        Returns `value, instance, state`.
        """
        return self._noted(self._bound[0].value_and_update, self._bound[1], state, *args, **kwargs)

    def trace_update(self, state: Any, *args: Any, **kwargs: Any) -> Traced:
        """As `Function.trace_update`; the instance holds the parameters."""
        return self._noted(self._bound[0].trace_update, self._bound[1], state, *args, **kwargs)

    def accumulate_into(self, refs: Any) -> Callable[..., Any]:
        """As `accumulate_into` of the function; the instance is argument 0."""
        return functools.partial(self._bound[0].accumulate_into(refs), self._bound[1])

    @property
    def captures(self) -> Any:
        """The captures of the tape, which all instances share."""
        return self._bound[0].captures

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """As `Function.explain`; the instance is argument 0."""
        return self._noted(self._bound[0].explain, self._bound[1], *args, **kwargs)

    def is_differentiable(self, *args: Any, **kwargs: Any) -> Differentiability:
        """As `Function.is_differentiable`; the instance is argument 0."""
        return self._bound[0].is_differentiable(self._bound[1], *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """As `Function.trace`; the instance is argument 0."""
        return self._noted(self._bound[0].trace, self._bound[1], *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """As `Function.lower`; the instance is argument 0."""
        return self._noted(self._bound[0].lower, self._bound[1], *args, **kwargs)

    def clear_cache(self) -> None:
        """As `Function.clear_cache`: the programs of all instances are forgotten."""
        self._bound[0].clear_cache()

    def export(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Path:
        """As `Function.export`; the instance is argument 0."""
        return self._noted(self._bound[0].export, path, self._bound[1], *args, **kwargs)

    def _noted(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call; an error about argument 0 gets a note that it is the instance."""
        try:
            return call(*args, **kwargs)
        except TraceError as error:
            if str(error).startswith("args[0] is a"):
                what = f"args[0] is the instance, self, of the method {self._bound[0].__name__}"
                decorator = repr(self._bound[0])[1:].partition(" ")[0]
                error.add_note(f"{what}; {decorator}(argnums=1) differentiates the argument that comes after it.")
            raise
