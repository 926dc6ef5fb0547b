"""Decide which objects every process knows by name.

The name of an object of JAX, NumPy or jointcut determines its behaviour, given their versions (see
`environment.environment`). The name of a user's object does not, since the name stays when the code changes.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable
from typing import Any

from jointcut.partition.program.jax import user_source

_VERSIONED = ("jax", "jaxlib", "numpy", "ml_dtypes", "builtins", "collections")
_OURS = ("jointcut.partition", "jointcut.wrappers", "jointcut.aot")
_MEMORY = (("_memoize.<locals>.memoized", "cells"),)  # by function and variable
_FOR_MESSAGES = (("_flatten_bwd", "primal_fun"),)  # by transformation and argument
_PRIMITIVES: dict[int, Any] = {}  # by id; holding a primitive keeps its id from being reused


def is_versioned(module: Any) -> bool:
    """Whether the names in a module determine behaviour; `module` is its name."""
    name = str(module)
    return name.partition(".")[0] in _VERSIONED or ".".join(name.split(".")[:2]) in _OURS


def is_own(kind: type) -> bool:
    """Whether the name of a class determines its behaviour; a class made in a function may close over anything."""
    return is_versioned(kind.__module__) and "<locals>" not in kind.__qualname__


def module_of(x: Any) -> str:
    """Return the module that defines a function, or the class of any other object.

    Unlike `__module__`, it is not changed by `functools.wraps`.
    """
    return x.__globals__.get("__name__", "") if isinstance(x, types.FunctionType) else type(x).__module__


def class_name(kind: type) -> bytes:
    """Return the module and name of a class."""
    return f"{kind.__module__}:{kind.__qualname__}".encode()


def title(x: Any) -> str:
    """Return the qualified name of a class or function."""
    return f"{getattr(x, '__module__', None)}.{getattr(x, '__qualname__', type(x).__qualname__)}"


def described(x: Any) -> str:
    """Describe an object for an error message: a function by its name, anything else by its class."""
    return f"the function {title(x)}" if isinstance(x, types.FunctionType) else f"a {title(type(x))}"


def is_at(x: Any, module: Any, path: Any) -> bool:
    """Whether a versioned module (see `is_versioned`) holds an object under a dotted path."""
    if not isinstance(module, str) or not isinstance(path, str) or not is_versioned(module):
        return False
    value: Any = sys.modules.get(module)
    for name in path.split("."):
        value = getattr(value, name, None)
    return value is x


def is_named(x: Any) -> bool:
    """Whether a versioned module holds an object under the object's own qualified name."""
    return is_at(x, getattr(x, "__module__", None), getattr(x, "__qualname__", None))


def is_own_primitive(x: Any) -> bool:
    """Whether a versioned module holds a primitive.

    The name is not enough: a user's primitive may have the name of a JAX primitive.
    """
    if id(x) not in _PRIMITIVES:
        modules = [module for name, module in list(sys.modules.items()) if is_versioned(name)]
        _PRIMITIVES.update((id(v), v) for m in modules for v in list(vars(m).values()) if type(v) is type(x))
    return id(x) in _PRIMITIVES


def is_primitive(kind: type) -> bool:
    """Whether a class is a class of JAX's primitives."""
    return any(c.__name__ == "Primitive" and c.__module__.startswith("jax.") for c in kind.__mro__)


def closure(x: types.FunctionType) -> dict[str, Any]:
    """Return the values that a function closes over, by name, without JAX's memory of earlier results."""
    values = {}
    for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
        if (x.__code__.co_qualname, name) in _MEMORY:
            continue
        try:
            values[name] = cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    return values


def only_for_messages(step: Any, place: int) -> bool:
    """Whether only error messages read an argument of a JAX transformation; `place` counts from the end."""
    code = getattr(step, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    return -place <= len(names) and (step.__code__.co_qualname, names[place]) in _FOR_MESSAGES


def pickled(x: Any) -> tuple[Any, ...] | None:
    """Return the parts that pickle would write for an object: constructor, arguments and state; None if it cannot."""
    try:
        reduced = x.__reduce_ex__(4)
    except TypeError:
        return None
    if isinstance(reduced, str):  # a name, which pickle would look up
        module = getattr(x, "__module__", None) or type(x).__module__
        return (module, reduced) if is_at(x, module, reduced) else None
    parts: tuple[Any, ...] = reduced
    args: Any
    make, args, state, *items = (*parts, None, None, None)[:5]
    if state is None and len(args) == 1 and args[0] is type(x):  # some of JAX's classes hide their state
        state = object.__getstate__(x)
    if isinstance(state, dict):
        state = {k: v for k, v in state.items() if not isinstance(getattr(type(x), k, None), functools.cached_property)}
    return (title(make), args, state, *(i and list(i) for i in items))


def place(path: Iterable[Any]) -> str:
    """Format the path to a value, of names and equations: `program: exp at loss.py:3 (loss): accuracy.bits`."""
    text = ""
    for step in path:
        if isinstance(step, str):
            text += f"{'' if not text else ' ' if text.endswith(':') else '.'}{step}"
        else:
            source = user_source.source_of(step)
            text += f": {step.primitive.name}{' at ' * bool(source)}{source}:"
    return text
