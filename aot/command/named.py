"""Import what a command line names.

`module:function` is imported as Python itself would from the current folder, and so are the arguments for it. What a
user's module raises while it is imported or traced is told in one message that names the line of it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import jax

from jointcut.aot.calls.method import Method
from jointcut.aot.function import Function, function
from jointcut.aot.trace.shapes import concrete
from jointcut.partition.errors import CallError, JointcutError, choices, message
from jointcut.partition.program import sizes as symbolic

_NAMED = "Write module:name, as in train:loss."
_EXAMPLES = "Give a tuple of arguments, a dict of arguments by name, or a function without parameters that returns one."
_OTHERS = frozenset({"jax", "jaxlib", "jointcut", "numpy", "click", *sys.stdlib_module_names})


@dataclass(frozen=True)
class Named:
    """A function and arguments for it: `name` is what the command line said, `module:function`."""

    name: str
    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def named(name: str, example: str, argnums: int | Sequence[int] | None) -> Named:
    """Import a function and arguments for it; a plain function is made one of ours with `argnums`, 0 if that is None.

    An example without a module is of the function's. Raises `JointcutError` for what cannot be imported or is not of
    the kind that is asked for, and `CallError` where the arguments do not fit the function's parameters.
    """
    made = _function(name, argnums)
    example = example if ":" in example else f"{name.partition(':')[0]}:{example}"
    found = _object(example, lambda value: True)
    if not isinstance(found, tuple | dict) and callable(found):
        with users_code(example, "cannot be called without arguments"):
            found = found()
    if not isinstance(found, tuple | dict):
        raise JointcutError(message(example, f"is of type {type(found).__name__}.", _EXAMPLES))
    return Named(name, made, *_fitting(name, made, example, found))


def with_numbers(found: Named, sizes: Mapping[str, int]) -> Named:
    """The same with numbers for symbolic sizes; raises `CallError` for a size that is missing or unknown."""
    leaves, tree = jax.tree.flatten((found.args, found.kwargs))
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    known = sorted(frozenset().union(*map(symbolic.names, shapes)))
    for name in known:
        if name not in sizes:
            cure = f"Give a number for each size that is a name: --size {name}=8."
            raise CallError(message(found.name, f"is to be cut, but the size {name!r} of its example is open.", cure))
    for name in sizes:
        if name not in known:
            cure = choices(name, known) if known else "All its sizes are numbers."
            raise CallError(message("--size", f"names {name!r}, which the example does not have.", cure))
    args, kwargs = jax.tree.unflatten(tree, [concrete(leaf, sizes) for leaf in leaves])
    return replace(found, args=args, kwargs=kwargs)


def _function(name: str, argnums: int | Sequence[int] | None) -> Function:
    found = _object(name, callable)
    if isinstance(found, Method):
        cure = "Name it by its class, module:Class.method, and give the object as the first argument."
        raise JointcutError(message(name, "is bound to an object.", cure))
    if not callable(found):
        raise JointcutError(message(name, f"is of type {type(found).__name__}, not a function.", _NAMED))
    if not isinstance(found, Function):
        return function(found, argnums=0 if argnums is None else argnums)
    if argnums is not None:
        cure = "Leave --argnums out, or name the plain function."
        raise JointcutError(message(name, "is an aot.function, which has its own argnums.", cure))
    return found


def _fitting(name: str, made: Function, example: str, found: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position and by keyword; by position wherever the function allows it, since those have gradients."""
    by_name = found if isinstance(found, dict) else {}
    by_place = () if isinstance(found, dict) else tuple(found)
    try:
        signature = inspect.signature(made)
    except ValueError:  # Python knows none
        return by_place, by_name
    try:
        bound = signature.bind(*by_place, **by_name)
    except TypeError as error:
        what = f"does not fit the parameters of {name}, {signature}: {error}."
        raise CallError(message(example, what, _EXAMPLES)) from error
    return bound.args, bound.kwargs


# ---------------------------------------------------------------------------------------------------------- imports


def _object(name: str, is_wanted: Callable[[Any], bool]) -> Any:
    """What `module:name` names, in which `name` may have dots; suggests names of what is wanted."""
    module, _, path = name.partition(":")
    if module.endswith(".py") or "/" in module:
        cure = f"Name the module as an import does: {Path(module).stem}:{path or 'name'}, in the folder of the file."
        raise JointcutError(message(name, "names a file.", cure))
    if not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
        raise JointcutError(message(repr(name), "names no object of a module.", _NAMED))
    found: Any = _module(module)
    where = f"module {module}"
    for part in path.split("."):
        if not hasattr(found, part):
            known = list(_public(found, is_wanted))
            cure = choices(part, known) if known else "It has none that would serve."
            raise JointcutError(message(where, f"has no {part!r}.", cure))
        found, where = getattr(found, part), f"{where.removeprefix('module ')}.{part}"
    return found


def _module(name: str) -> ModuleType:
    if sys.path[0] != (here := str(Path.cwd())):
        sys.path.insert(0, here)
    with users_code(f"module {name}", "cannot be imported"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            near = get_close_matches(name, [path.stem for path in Path().glob("*.py")], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            what = f"is neither in {here} nor installed."
            cure = f"Run jointcut in the folder from which you would import it.{hint}"
            raise JointcutError(message(f"module {name}", what, cure)) from error


def _public(owner: Any, is_wanted: Callable[[Any], bool]) -> Iterator[str]:
    """Names that an object has of its own: neither modules, nor functions and classes of other modules."""
    home = owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", None)
    for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
        is_own = not callable(value) or getattr(value, "__module__", home) == home
        if not name.startswith("_") and not isinstance(value, ModuleType) and is_own and is_wanted(value):
            yield name


# ------------------------------------------------------------------------------------------------------ user's code


@contextmanager
def users_code(where: str, what: str) -> Iterator[None]:
    """Run a user's code: what it prints goes to standard error, and what it raises becomes one message.

    Raises `JointcutError` for anything that is none already, with the line of the user's that raised it.
    """
    with _Told(where, what), redirect_stdout(sys.stderr):
        yield


@dataclass(frozen=True)
class _Told:
    """Turn what is raised inside into a message: a user's module may raise anything, or end the process."""

    where: str
    what: str

    def __enter__(self) -> None:
        """Nothing is needed."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise the message, unless nothing was raised, or an error of jointcut's, or an interrupt."""
        if isinstance(error, Exception | SystemExit) and not isinstance(error, JointcutError):
            notes = [note for note in getattr(error, "__notes__", ()) if "jointcut" in note]  # JAX notes what it hid
            told = "\n".join([str(error), *notes]).strip()
            raised = f"{type(error).__name__}{_line(trace)}{told and ': '}{told}"
            cure = "See to it there; jointcut --traceback COMMAND shows the way to it."
            raise JointcutError(message(self.where, f"{self.what}: {raised}", cure)) from error


def _line(trace: TracebackType | None) -> str:
    """` at train.py:12`, the innermost line that is neither of Python's own modules nor of JAX's nor of ours."""
    lines = [
        f" at {frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(trace)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OTHERS
    ]
    return lines[-1] if lines else ""
