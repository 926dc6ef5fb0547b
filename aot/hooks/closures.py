"""Read the variables that a hook's function closes over, so that equal hooks share a program.

Arrays among them are inputs of the program. So are Python floats, such as a threshold that changes from step to step,
unless the function needs one as a number: `numbers` says which.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jointcut.partition.program.jax import abstract


def identity(function: Callable[..., Any], numbers: bool = False) -> Any:
    """Return a key, equal for functions with the same code that read equal values, and arrays of equal types.

    With `numbers`, floats in the variables around the function count as arrays, also below.
    """
    if isinstance(function, functools.partial):
        return identity(function.func), tuple(map(_known, function.args)), _items(function.keywords)
    if not isinstance(function, types.FunctionType):
        return id(function)
    cells = [cell for cell in function.__closure__ or () if _is_full(cell)]
    read = tuple(jax.typeof(c.cell_contents) if _is_input(c, numbers) else _known(c.cell_contents) for c in cells)
    defaults = tuple(map(_known, function.__defaults__ or ())), _items(function.__kwdefaults__ or {})
    return function.__code__, read, id(function.__globals__), defaults


def arrays_read(function: Callable[..., Any], numbers: bool = False) -> tuple[Any, ...]:
    """Return the arrays in variables around a function: inputs of a program that contains it."""
    if not isinstance(function, types.FunctionType):
        return ()
    return tuple(cell.cell_contents for cell in function.__closure__ or () if _is_input(cell, numbers))


def reading(function: Callable[..., Any], arrays: Sequence[Any], numbers: bool = False) -> Callable[..., Any]:
    """Return the same function with other arrays in the variables around it."""
    if not arrays or not isinstance(function, types.FunctionType):
        return function
    given = iter(arrays)
    cells = tuple(
        types.CellType(_as(c, next(given))) if _is_input(c, numbers) else c for c in function.__closure__ or ()
    )
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def works_on_tracers(function: Callable[..., Any], arguments: Sequence[Any]) -> bool:
    """Whether a function closes over floats, and works for arguments of some types if these floats are traced.

    It does not if Python needs one as a number, as `if limit > 0` does.
    """
    read = arrays_read(function, True)
    if not any(type(x) is float for x in read):
        return False
    try:
        jax.eval_shape(lambda read, arguments: reading(function, read, True)(*arguments), read, arguments)
    except jax.errors.JAXTypeError:
        return False
    return True


def values_read(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arrays that a function closes over, with the names of the variables that hold them."""
    if isinstance(function, functools.partial):
        yield from values_read(function.func)
        held = [*((f"argument {i}", x) for i, x in enumerate(function.args)), *function.keywords.items()]
    elif isinstance(function, types.FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        held = [(name, cell.cell_contents) for name, cell in cells if _is_full(cell)]
    else:
        held = []
    for name, value in held:
        yield from ((name, x) for x in jax.tree.leaves(value) if isinstance(x, jax.Array))


def constants_read(function: Callable[..., Any]) -> dict[str, str]:
    """Return what a function reads by name and is no array: variables around it, defaults and given arguments."""
    if isinstance(function, functools.partial):
        given = {f"argument {i}": x for i, x in enumerate(function.args)} | function.keywords
        return constants_read(function.func) | {name: repr(x) for name, x in given.items()}
    if not isinstance(function, types.FunctionType):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells if _is_full(cell) and not _holds_array(cell)}
    bound = inspect.signature(function).parameters.items()
    defaults = {name: given.default for name, given in bound if given.default is not inspect.Parameter.empty}
    return {name: repr(x) for name, x in (held | defaults).items()}


def described(function: Callable[..., Any]) -> str:
    """Return the hook as errors name it: `clip at train.py:12`."""
    inner = inspect.unwrap(function)
    inner = inner.func if isinstance(inner, functools.partial) else inner
    name = getattr(inner, "__qualname__", type(inner).__name__)
    code = getattr(inner, "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def _holds_array(cell: Any) -> bool:
    return _is_full(cell) and isinstance(cell.cell_contents, jax.Array)


def _is_input(cell: Any, numbers: bool) -> bool:
    return _holds_array(cell) or (numbers and _is_full(cell) and type(cell.cell_contents) is float)


def _as(cell: Any, given: Any) -> Any:
    """Return the value of a variable for a trace: that of a float has its weak type."""
    return given if _holds_array(cell) else abstract.typed(given, jax.typeof(cell.cell_contents))


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False


def _items(keywords: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((name, _known(value)) for name, value in sorted(keywords.items()))


def _known(value: Any) -> Any:
    """Return a key of a value: that of a number or text is equal for equal ones, any other is its identity."""
    return (type(value), repr(value)) if isinstance(value, bool | int | float | str | None) else id(value)
