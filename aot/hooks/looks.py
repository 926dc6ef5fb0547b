"""Tell whether a hook can be traced into a program, or must be called back.

A traced function runs once, for all later calls of the program. So a hook is only traced if nothing but its result can
be seen: it reads no list, dict or object that could change, stores nothing outside of itself, and returns something.
This is found by looking at its code, before anything of it runs. A function of `jax.jit` is always traced.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jointcut.partition.program.places import our_folders

_STORES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "DELETE_ATTR")
_PURE = {abs, bool, complex, divmod, enumerate, float, int, isinstance, len, list, max, min, pow, range, round, sum}
_PURE |= {dict, map, reversed, sorted, tuple, zip, slice}
_FIXED = (types.ModuleType, type, int, float, complex, str, bytes, bool, type(None), np.dtype, np.generic, jax.Array)
_LIBRARIES = (*(str(m.__file__).rpartition("/")[0] for m in (jax, np)), *our_folders())
_UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def can_be_traced(function: Callable[..., Any], structs: Sequence[Any], read: Sequence[Any]) -> bool:
    """Whether a hook can be a part of a program for values of these types; it `read`s arrays of these."""
    if not _is_jitted(function) and not _is_pure(function, set()):
        return False
    results: list[Any] = []

    def look(read: Sequence[Any], *args: Any) -> None:
        results.append(reading(function, read)(*args))

    try:
        jax.eval_shape(look, list(read), *structs)
    except _UNTRACEABLE:
        return False
    return results[0] is not None


def identity(function: Callable[..., Any]) -> Any:
    """A key that is equal for functions with the same code that read the same values, and arrays of the same types."""
    if isinstance(function, functools.partial):
        return identity(function.func), tuple(map(id, function.args)), _items(function.keywords)
    if not isinstance(function, types.FunctionType):
        return id(function)
    cells = [cell for cell in function.__closure__ or () if _is_full(cell)]
    read = tuple(jax.typeof(c.cell_contents) if _holds_array(c) else id(c.cell_contents) for c in cells)
    defaults = tuple(map(id, function.__defaults__ or ())), _items(function.__kwdefaults__ or {})
    return function.__code__, read, id(function.__globals__), defaults


def arrays_read(function: Callable[..., Any]) -> tuple[Any, ...]:
    """The arrays in variables around a function: inputs of a program that it is a part of."""
    if not isinstance(function, types.FunctionType):
        return ()
    return tuple(cell.cell_contents for cell in function.__closure__ or () if _holds_array(cell))


def reading(function: Callable[..., Any], arrays: Sequence[Any]) -> Callable[..., Any]:
    """The same function with other arrays in the variables around it."""
    if not arrays or not isinstance(function, types.FunctionType):
        return function
    given = iter(arrays)
    cells = tuple(types.CellType(next(given)) if _holds_array(c) else c for c in function.__closure__ or ())
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _holds_array(cell: Any) -> bool:
    return _is_full(cell) and isinstance(cell.cell_contents, jax.Array)


def values_read(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The arrays that a function closes over, with the names of the variables that hold them."""
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


def described(function: Callable[..., Any]) -> str:
    """The hook as errors name it: `clip at train.py:12`."""
    inner = inspect.unwrap(function)
    inner = inner.func if isinstance(inner, functools.partial) else inner
    name = getattr(inner, "__qualname__", type(inner).__name__)
    code = getattr(inner, "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def _is_jitted(function: Any) -> bool:
    return isinstance(function, jax.stages.Wrapped)


def _is_pure(function: Any, seen: set[int]) -> bool:
    """Whether nothing but the result of a call can be seen, as far as the code shows."""
    if id(function) in seen or _is_jitted(function):
        return True
    seen.add(id(function))
    if isinstance(function, functools.partial):
        parts = (*function.args, *function.keywords.values())
        return _is_pure(function.func, seen) and all(_is_fixed(part, seen) for part in parts)
    if not isinstance(function, types.FunctionType):
        return _is_of_library(function)
    if _is_of_library(function):
        return True
    if any(_stores(code) for code in _codes(function.__code__)):
        return False
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return all(_is_fixed(value, seen) for value in (*_read(function), *defaults))


def _is_fixed(value: Any, seen: set[int]) -> bool:
    """Whether a value that a function reads cannot be changed by it."""
    if isinstance(value, _FIXED):
        return True
    if isinstance(value, tuple | frozenset):
        return all(_is_fixed(part, seen) for part in value)
    try:
        if value in _PURE:
            return True
    except (TypeError, ValueError):
        return False
    return callable(value) and _is_pure(value, seen)


def _is_of_library(function: Any) -> bool:
    """Whether a function belongs to JAX or numpy, whose functions are pure."""
    module = str(getattr(function, "__module__", ""))
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return module.split(".")[0] in ("jax", "numpy") or (code is not None and code.co_filename.startswith(_LIBRARIES))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of the functions written inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _stores(code: types.CodeType) -> bool:
    ops = dis.get_instructions(code)
    return any(op.opname in _STORES or (op.opname == "STORE_DEREF" and op.argval in code.co_freevars) for op in ops)


def _read(function: types.FunctionType) -> Iterator[Any]:
    """The values outside of it that a function reads by name."""
    for cell in function.__closure__ or ():
        if _is_full(cell):
            yield cell.cell_contents
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    for name in names:
        if name in function.__globals__:
            yield function.__globals__[name]
        elif hasattr(builtins, name):
            yield getattr(builtins, name)


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False


def _items(keywords: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((name, id(value)) for name, value in sorted(keywords.items()))
