"""Import the function and arguments that a command line names.

Like Python itself, it imports `module:function` and the arguments from the current folder. An error of a user's module
while it is imported or traced becomes one message that names the line.
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

from jointcut.aot.call.decorator import function
from jointcut.aot.call.function import Function
from jointcut.aot.call.method import Method
from jointcut.aot.trace.shapes import concrete
from jointcut.partition.errors import CallError, JointcutError, choices, message
from jointcut.partition.program import sizes as symbolic
from jointcut.wrappers.boundary import NOTE

_NAMED = "Write module:name, as in train:loss."
_EXAMPLES = "Give a tuple of arguments, a dict of arguments by name, or a function without parameters that returns one."
_OTHERS = frozenset({"jax", "jaxlib", "jointcut", "numpy", "click", *sys.stdlib_module_names})


@dataclass(frozen=True)
class Named:
    """A function and its arguments; `name` is the text of the command line, `module:function`."""

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def named(name: str, example: str, argnums: int | Sequence[int] | None, spill: Path | None = None) -> Named:
    """Import a function and its arguments.

    A plain function becomes an `aot.function` with `argnums` (None means 0), which spills to the folder `spill`, if
    given.

    An example without a module is in the function's module. Raises `JointcutError` if an object cannot be imported or
    has the wrong type, and `CallError` if the arguments do not fit the function's parameters.
    """
    return _of_example(name, _function(name, argnums, spill), example)


def as_it_is(name: str, example: str) -> Named:
    """Import a function and its arguments; the function is not changed."""
    return _of_example(name, _callable(name), example)


def with_numbers(call: Named, sizes: Mapping[str, int]) -> Named:
    """Replace symbolic sizes by numbers; raises `CallError` for a size that is missing or unknown."""
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    known = sorted(frozenset().union(*map(symbolic.names, shapes)))
    for name in known:
        if name not in sizes:
            cure = f"Give a number for each size that is a name: --size {name}=8."
            raise CallError(message(call.name, f"is to be cut, but the size {name!r} of its example is open.", cure))
    for name in sizes:
        if name not in known:
            cure = choices(name, known) if known else "All its sizes are numbers."
            raise CallError(message("--size", f"names {name!r}, which the example does not have.", cure))
    args, kwargs = jax.tree.unflatten(tree, [concrete(leaf, sizes) for leaf in leaves])
    return replace(call, args=args, kwargs=kwargs)


def _function(name: str, argnums: int | Sequence[int] | None, spill: Path | None) -> Function:
    called = _callable(name)
    if isinstance(called, Method):
        cure = "Name it by its class, module:Class.method, and give the object as the first argument."
        raise JointcutError(message(name, "is bound to an object.", cure))
    if not isinstance(called, Function):
        return function(called, argnums=0 if argnums is None else argnums, spill=spill)
    for option, given in (("argnums", argnums), ("spill", spill)):
        if given is not None:
            cure = f"Leave --{option} out, or name the plain function."
            raise JointcutError(message(name, f"is an aot.function, which has its own {option}.", cure))
    return called


def _callable(name: str) -> Any:
    called = _object(name, callable)
    if not callable(called):
        raise JointcutError(message(name, f"is of type {type(called).__name__}, not a function.", _NAMED))
    return called


def _of_example(name: str, called: Callable[..., Any], example: str) -> Named:
    """Return the call of a function with the arguments that `example` names."""
    example = example if ":" in example else f"{name.partition(':')[0]}:{example}"
    arguments = _object(example, lambda value: True)
    if not isinstance(arguments, tuple | dict) and callable(arguments):
        with users_code(example, "cannot be called without arguments"):
            arguments = arguments()
    if not isinstance(arguments, tuple | dict):
        raise JointcutError(message(example, f"is of type {type(arguments).__name__}.", _EXAMPLES))
    return Named(name, called, *_fitting(name, called, example, arguments))


def _fitting(
    name: str, called: Callable[..., Any], example: str, arguments: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments by position where possible, since these have gradients, and the rest by keyword."""
    args, kwargs = ((), arguments) if isinstance(arguments, dict) else (tuple(arguments), {})
    try:
        signature = inspect.signature(called)
    except ValueError:  # a builtin without a signature
        return args, kwargs
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        what = f"does not fit the parameters of {name}, {signature}: {error}."
        raise CallError(message(example, what, _EXAMPLES)) from error
    return bound.args, bound.kwargs


# ---------------------------------------------------------------------------------------------------------- imports


def _object(name: str, is_wanted: Callable[[Any], bool]) -> Any:
    """Return the object that `module:name` names; `name` may have dots. Errors suggest names of wanted objects."""
    module, _, path = name.partition(":")
    if module.endswith(".py") or "/" in module:
        cure = f"Name the module as an import does: {Path(module).stem}:{path or 'name'}, in the folder of the file."
        raise JointcutError(message(name, "names a file.", cure))
    if not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
        raise JointcutError(message(repr(name), "names no object of a module.", _NAMED))
    value: Any = _module(module)
    where = f"module {module}"
    for part in path.split("."):
        if not hasattr(value, part):
            known = list(_public(value, is_wanted))
            cure = choices(part, known) if known else "It has none that would serve."
            raise JointcutError(message(where, f"has no {part!r}.", cure))
        value, where = getattr(value, part), f"{where.removeprefix('module ')}.{part}"
    return value


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
    """Yield the public names of an object, except modules, and functions and classes of other modules."""
    home = owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", None)
    for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
        is_own = not callable(value) or getattr(value, "__module__", home) == home
        if not name.startswith("_") and not isinstance(value, ModuleType) and is_own and is_wanted(value):
            yield name


# ------------------------------------------------------------------------------------------------------ user's code


@contextmanager
def users_code(where: str, what: str) -> Iterator[None]:
    """Run a user's code: its output goes to standard error, and its errors become one message.

    Raises `JointcutError` for any other error, with the user's line that raised it.
    """
    with _OneMessage(where, what), redirect_stdout(sys.stderr):
        yield


@dataclass(frozen=True)
class _OneMessage:
    """Turn errors inside into a message; a user's module may raise any error, or exit."""

    where: str
    what: str

    def __enter__(self) -> None:
        """Nothing is needed."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise the message, unless there was no error, an error of jointcut, or an interrupt."""
        if isinstance(error, Exception | SystemExit) and not isinstance(error, JointcutError):
            told = getattr(error, "__notes__", ())
            notes = [note for note in told if "jointcut" in note and note != NOTE]  # without JAX's notes
            text = "\n".join([str(error), *notes]).strip()
            raised = f"{type(error).__name__}{_line(trace)}{text and ': '}{text}"
            cure = "See to it there; jointcut --traceback COMMAND shows the way to it."
            raise JointcutError(message(self.where, f"{self.what}: {raised}", cure)) from error


def _line(trace: TracebackType | None) -> str:
    """` at train.py:12`, the innermost line outside of Python's own modules, JAX and jointcut."""
    lines = [
        f" at {frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(trace)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OTHERS
    ]
    return lines[-1] if lines else ""
