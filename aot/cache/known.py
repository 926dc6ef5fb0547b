"""Tell what every process knows by name.

What JAX, NumPy or jointcut define has a name that stands for its behaviour, once their versions are given
(`environment.environment` gives them). What a user wrote has not: its name stays when its text changes.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable
from typing import Any

from jointcut.partition.program import jaxprs

_VERSIONED = ("jax", "jaxlib", "numpy", "ml_dtypes", "builtins", "collections")
_OURS = ("jointcut.partition", "jointcut.wrappers", "jointcut.aot")
_MEMORY = (("_memoize.<locals>.memoized", "cells"),)  # by function and variable
_FOR_MESSAGES = (("_flatten_bwd", "primal_fun"),)  # by transformation and argument
_PRIMITIVES: dict[int, Any] = {}  # the primitives themselves, so that their ids stay their own


def is_versioned(module: Any) -> bool:
    """Whether the names in a module, given by its own, stand for behaviour."""
    name = str(module)
    return name.partition(".")[0] in _VERSIONED or ".".join(name.split(".")[:2]) in _OURS


def is_own(kind: type) -> bool:
    """Whether the name of a class stands for behaviour: one that a function makes may close over anything."""
    return is_versioned(kind.__module__) and "<locals>" not in kind.__qualname__


def module_of(x: Any) -> str:
    """The module in which a function, or the class of another object, was written.

    Unlike `__module__`, which `functools.wraps` takes over from another function.
    """
    return x.__globals__.get("__name__", "") if isinstance(x, types.FunctionType) else type(x).__module__


def class_name(kind: type) -> bytes:
    """A class by its module and name."""
    return f"{kind.__module__}:{kind.__qualname__}".encode()


def title(x: Any) -> str:
    """What a class or function calls itself."""
    return f"{getattr(x, '__module__', None)}.{getattr(x, '__qualname__', type(x).__qualname__)}"


def described(x: Any) -> str:
    """What something is, for an error message: a function by name, anything else by its class."""
    return f"the function {title(x)}" if isinstance(x, types.FunctionType) else f"a {title(type(x))}"


def is_at(x: Any, module: Any, path: Any) -> bool:
    """Whether a module whose names stand for behaviour holds an object under a dotted path."""
    if not isinstance(module, str) or not isinstance(path, str) or not is_versioned(module):
        return False
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found is x


def is_named(x: Any) -> bool:
    """Whether an object is found where it says that it stands, in such a module."""
    return is_at(x, getattr(x, "__module__", None), getattr(x, "__qualname__", None))


def is_own_primitive(x: Any) -> bool:
    """Whether a primitive stands in such a module.

    No two of those have one name, but a user's primitive may be called as one of them.
    """
    if id(x) not in _PRIMITIVES:
        modules = [module for name, module in list(sys.modules.items()) if is_versioned(name)]
        _PRIMITIVES.update((id(v), v) for m in modules for v in list(vars(m).values()) if type(v) is type(x))
    return id(x) in _PRIMITIVES


def is_primitive(kind: type) -> bool:
    """Whether a class is one of JAX's primitives."""
    return any(c.__name__ == "Primitive" and c.__module__.startswith("jax.") for c in kind.__mro__)


def closure(x: types.FunctionType) -> dict[str, Any]:
    """What a function closes over, by name; JAX's memory of results that it has computed before is no part of it."""
    found = {}
    for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
        if (x.__code__.co_qualname, name) in _MEMORY:
            continue
        try:
            found[name] = cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    return found


def only_for_messages(step: Any, place: int) -> bool:
    """Whether only error messages read an argument of one of JAX's transformations, by its place from the end."""
    code = getattr(step, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    return -place <= len(names) and (step.__code__.co_qualname, names[place]) in _FOR_MESSAGES


def pickled(x: Any) -> tuple[Any, ...] | None:
    """What pickling would write of an object: how it is made, of what, and its state; None where it cannot be."""
    try:
        reduced = x.__reduce_ex__(4)
    except TypeError:
        return None
    if isinstance(reduced, str):  # a name, which pickling would look up
        module = getattr(x, "__module__", None) or type(x).__module__
        return (module, reduced) if is_at(x, module, reduced) else None
    given: tuple[Any, ...] = reduced
    args: Any
    make, args, state, *items = (*given, None, None, None)[:5]
    if state is None and len(args) == 1 and args[0] is type(x):  # some of JAX's classes hide their state
        state = object.__getstate__(x)
    if isinstance(state, dict):
        state = {k: v for k, v in state.items() if not isinstance(getattr(type(x), k, None), functools.cached_property)}
    return (title(make), args, state, *(i and list(i) for i in items))


def place(path: Iterable[Any]) -> str:
    """Where a value stands, from names and equations: `program: exp at loss.py:3 (loss): accuracy.bits`."""
    text = ""
    for step in path:
        if isinstance(step, str):
            text += f"{'' if not text else ' ' if text.endswith(':') else '.'}{step}"
        else:
            source = jaxprs.source_of(step)
            text += f": {step.primitive.name}{' at ' * bool(source)}{source}:"
    return text
