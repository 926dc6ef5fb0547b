"""Read the variables that a hook's function reads, so that equal hooks share a program.

They are the variables around it, the globals that it names, those of the functions of its file that it calls, and the
attributes of the object that it is, or that it is a method of. Arrays among its own variables are inputs of the
program. So are Python floats, such as a threshold that changes from step to step, unless the function needs one as a
number: `numbers` says which.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jointcut.partition.program.jax import abstract

_ABSENT = inspect.Parameter.empty

#: What is compared by identity in `Still`: it cannot change, or is a part of the user's code.
_STILL = bool | int | float | str | None | types.ModuleType | types.FunctionType | type

_FEW = 64  # items of a list or dict that are compared one by one


def identity(function: Callable[..., Any], numbers: bool = False) -> Any:
    """Return a key, equal for functions with the same code that read equal values, and arrays of equal types.

    With `numbers`, floats in the variables around the function count as arrays, also below.
    """
    if isinstance(function, functools.partial):
        return identity(function.func), tuple(map(_known, function.args)), _items(function.keywords)
    if not isinstance(function, types.FunctionType):
        return _object(function)
    read = tuple(
        (name, jax.typeof(x) if _is_input(x, numbers) else _known(x)) for name, x in _variables(function).items()
    )
    defaults = _known(function.__defaults__), _items(function.__kwdefaults__ or {})
    return function.__code__, read, id(function.__globals__), defaults, *map(_values, _called(function))


def values_now(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return a key of a function and all that it reads at the moment, arrays by identity, while that is held."""
    if isinstance(function, functools.partial):
        return values_now(function.func), _known(function.args), _items(function.keywords)
    if not isinstance(function, types.FunctionType):
        return _object(function)
    return tuple(map(_values, (function, *_called(function))))


class Still:
    """A quick test that `values_now` of a function is what it was.

    There is none for a function that reads arrays, lists or objects, nor for an object with attributes: only what
    cannot change, or lives as long as the function, is held here and compared by identity.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        """Note what the function, and those of its file that it calls, read at the moment; of None nothing is known."""
        parts = [function, *_called(function)] if isinstance(function, types.FunctionType) else []
        self._object = None if parts else function
        self._parts = [(f, f.__code__, f.__defaults__) for f in parts]
        names = {(id(f.__globals__), name): f.__globals__ for f in parts for name in globals_named(f.__code__)}
        self._globals = [(scope, name, scope.get(name, _ABSENT)) for (_, name), scope in names.items()]
        cells = [cell for f in parts for cell in f.__closure__ or ()]
        self._cells = [(cell, cell.cell_contents) for cell in cells if _is_full(cell)]
        values = [x for _, _, x in self._globals] + [x for _, x in self._cells]
        values += [x for f in parts for x in f.__defaults__ or ()]
        is_bound = function is None or isinstance(function, types.MethodType | functools.partial)
        is_simple = len(self._cells) == len(cells) and not any(f.__kwdefaults__ for f in parts)
        self._is_known = is_simple and not is_bound and all(isinstance(x, _STILL) for x in values)
        if not self._is_known:  # keep no array alive
            self._object, self._parts, self._globals, self._cells = None, [], [], []

    def holds(self) -> bool:
        """Whether it is certain that nothing has changed."""
        return (
            self._is_known
            and not _attributes(self._object)
            and all(scope.get(name, _ABSENT) is x for scope, name, x in self._globals)
            and all(_is_full(cell) and cell.cell_contents is x for cell, x in self._cells)
            and all(f.__code__ is code and f.__defaults__ is x and not f.__kwdefaults__ for f, code, x in self._parts)
        )


def arrays_read(function: Callable[..., Any], numbers: bool = False) -> tuple[Any, ...]:
    """Return the arrays in variables that a function reads: inputs of a program that contains it."""
    return tuple(x for x in _variables(function).values() if _is_input(x, numbers))


def reading(function: Callable[..., Any], arrays: Sequence[Any], numbers: bool = False) -> Callable[..., Any]:
    """Return the same function with other arrays in the variables that it reads."""
    if not arrays or not isinstance(function, types.FunctionType):
        return function
    inputs = [(name, x) for name, x in _variables(function).items() if _is_input(x, numbers)]
    values = {name: _as(x, given) for (name, x), given in zip(inputs, arrays, strict=True)}
    around = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    cells = tuple(types.CellType(values[name]) if name in values else cell for name, cell in around)
    scope = function.__globals__
    if values.keys() - set(function.__code__.co_freevars):
        scope = {**scope, **values}
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
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
    """Yield the arrays that a function reads, each by its variable and its path in that: `model['mean']`."""
    if isinstance(function, functools.partial):
        yield from values_read(function.func)
        held = {f"argument {i}": x for i, x in enumerate(function.args)} | function.keywords
    else:
        held = _variables(function)
    for name, value in held.items():
        leaves, _ = jax.tree_util.tree_flatten_with_path(value)
        yield from ((f"{name}{jax.tree_util.keystr(path)}", x) for path, x in leaves if isinstance(x, jax.Array))


def constants_read(function: Callable[..., Any]) -> dict[str, str]:
    """Return what a function reads by name and is no array: variables, attributes, defaults and given arguments."""
    if isinstance(function, functools.partial):
        given = {f"argument {i}": x for i, x in enumerate(function.args)} | function.keywords
        return constants_read(function.func) | {name: repr(x) for name, x in given.items()}
    if not isinstance(function, types.FunctionType):
        attributes = _attributes(_holder(function)).items()
        return {name: repr(x) for name, x in attributes if not isinstance(_known(x), _Itself)}
    read = {name: x for each in (*_called(function), function) for name, x in _variables(each).items()}
    held = {name: x for name, x in read.items() if not isinstance(x, jax.Array | types.ModuleType)}
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


def _variables(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables that a function reads, by name: those around it, and globals."""
    if not isinstance(function, types.FunctionType):
        return {}
    around = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    full = {name: cell.cell_contents for name, cell in around if _is_full(cell)}
    scope = function.__globals__
    return {name: scope[name] for name in globals_named(function.__code__) if name in scope} | full


def _values(function: types.FunctionType) -> tuple[Any, ...]:
    return function.__code__, _items(_variables(function)), _known((function.__defaults__, function.__kwdefaults__))


def _called(function: types.FunctionType) -> list[types.FunctionType]:
    """Return the functions of the same file that a function names, and those that these name, each once."""
    found = [function]
    for each in found:
        named = (x for x in _variables(each).values() if isinstance(x, types.FunctionType))
        found += dict.fromkeys(x for x in named if x.__globals__ is function.__globals__ and x not in found)
    return found[1:]


@functools.lru_cache(1024)
def globals_named(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of the globals that a function reads, and functions that it defines."""
    own = [step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = (name for const in code.co_consts if isinstance(const, types.CodeType) for name in globals_named(const))
    return tuple(sorted({*own, *inner}))


def _object(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return a key of a method, or of another callable object, with its attributes."""
    holder = _holder(function)
    return _Itself(holder), _known(getattr(function, "__func__", None)), _known(_attributes(holder))


def _holder(function: Callable[..., Any]) -> Any:
    """Return the object that a method belongs to, or the callable object itself."""
    return function.__self__ if isinstance(function, types.MethodType) else function


def _attributes(holder: Any) -> dict[str, Any]:
    return getattr(holder, "__dict__", {})


def _is_input(x: Any, numbers: bool) -> bool:
    return isinstance(x, jax.Array) or (numbers and type(x) is float)


def _as(x: Any, given: Any) -> Any:
    """Return the value of a variable for a trace: that of a float has its weak type."""
    return given if isinstance(x, jax.Array) else abstract.typed(given, jax.typeof(x))


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False


def _items(keywords: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((name, _known(value)) for name, value in sorted(keywords.items()))


def _known(value: Any) -> Any:
    """Return a key: that of a number, a text, or a small list or dict of them is equal for equal ones.

    The key of any other value is its identity.
    """
    if isinstance(value, bool | int | float | str | np.generic | None):
        return type(value), repr(value)
    if isinstance(value, list | tuple | dict) and len(value) <= _FEW:
        items = value.items() if isinstance(value, dict) else value
        return type(value), tuple(map(_known, items))
    return _Itself(value)


class _Itself:
    """An object, equal to itself alone; where it is gone, another at its address is not taken for it."""

    __slots__ = ("address", "held")

    def __init__(self, value: Any) -> None:
        self.address = id(value)
        try:
            self.held: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # a list, or a large tuple
            self.held = lambda: value

    def __hash__(self) -> int:
        return self.address

    def __eq__(self, other: object) -> bool:
        mine = self.held()
        return isinstance(other, _Itself) and mine is not None and mine is other.held()
