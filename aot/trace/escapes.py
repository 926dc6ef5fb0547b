"""Find traced values that a function stored outside itself.

A traced function writes to Python objects only while it is traced, not at each call, and a stored traced value has no
number. JAX raises an error only when such a value is used later. Here it is found right after the trace, in the objects
that the call can reach: arguments that are not arrays, closed-over values, the instance, arguments of a
`functools.partial`, defaults and global names.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jointcut.partition.errors import TraceError, message
from jointcut.partition.program.jax import runtime
from jointcut.wrappers.arguments.tree import Bound

_MOST_VISITED = 1_000
_DEEPEST = 4
_WRITTEN = (list, dict, set)
_CLOSED = (types.ModuleType, jax.Array, np.ndarray, np.generic, str, bytes, int, float, complex)


@contextmanager
def refused(function: Callable[..., Any], name: str, bound: Bound) -> Iterator[None]:
    """Raise `TraceError` if a call stored traced values in objects that it can reach."""
    before = [value for _, value in _traced(function, bound)]
    yield
    for path, value in _traced(function, bound):
        if not any(value is known for known in before):
            what = f"was written while {name} was traced, and holds a traced value now, which has no number."
            cure = (
                "Return it (as aux, with has_aux=True), or print it with jax.debug.print: a compiled function runs no "
                "Python and writes to no object. A Flax NNX module is written where it is an argument."
            )
            raise TraceError(message(path, what, cure))


def _passed(bound: Bound) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call that are not arrays, which the function receives uncopied."""
    yield from ((path, value) for path, _, value in bound.statics)
    if bound.has_fixed:
        yield from ((path, leaf.value) for path, leaf in bound.fixed_leaves)


def _traced(function: Any, bound: Bound) -> list[tuple[str, Any]]:
    """Return the traced values that a call of a function can reach, each once, with its path."""
    waiting = [(path, root, 0) for path, root in (*_passed(bound), *_roots(function))]
    seen: set[int] = set()
    tracers = []
    while waiting and len(seen) < _MOST_VISITED:
        path, value, depth = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if runtime.is_tracer(value):
            tracers.append((path, value))
        elif not isinstance(value, _CLOSED) and depth < _DEEPEST:
            waiting.extend((inner, part, depth + 1) for inner, part in _parts(path, value))
    return tracers


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", part) for key, part in list(value.items()))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{path}[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, type):
        yield from ((f"{path}.{name}", part) for name, part in _of_class(value))
    elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        yield from _roots(value)
    else:
        attributes = dict(_of_class(type(value))) | getattr(value, "__dict__", {})
        yield from ((f"{path}.{name}", part) for name, part in attributes.items())


def _of_class(owner: type) -> Iterator[tuple[str, Any]]:
    """Yield attributes of a class and its bases that a function may have written: containers and traced values."""
    for base in reversed(owner.__mro__[:-1]):
        parts = ((name, part) for name, part in vars(base).items() if not name.startswith("__"))
        yield from ((name, part) for name, part in parts if isinstance(part, _WRITTEN) or runtime.is_tracer(part))


def _roots(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a function can reach, by the names it uses."""
    if isinstance(function, functools.partial):
        yield from _roots(function.func)
        yield from ((f"argument {i} of the partial", x) for i, x in enumerate(function.args))
        yield from function.keywords.items()
    elif isinstance(function, types.MethodType):
        yield "self", function.__self__
        yield from _roots(function.__func__)
    elif isinstance(function, types.FunctionType):
        yield from _closed_over(function)
        yield from _globals(function, function.__code__)
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            yield from _roots(wrapped)
    elif callable(function):
        yield type(function).__name__, function


def _closed_over(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from ((f"a default of {function.__name__}", x) for x in function.__defaults__ or ())


def _globals(function: types.FunctionType, code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function's code, and the functions inside it, read."""
    known = function.__globals__
    yield from ((name, known[name]) for name in code.co_names if name in known)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals(function, constant)
