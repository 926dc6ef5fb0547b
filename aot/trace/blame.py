"""Add the user's function, its arguments and a cure to JAX's errors.

JAX names the function it traces, which is one of ours around the user's, and numbers its arrays. Here the message gets
the user's names, and a note with the cure.
"""

from __future__ import annotations

import functools
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jointcut.aot.hooks.hook import OF_TRACES
from jointcut.partition.errors import BudgetError, DerivativeError, JointcutError, TraceError, message
from jointcut.partition.program.places import our_folders
from jointcut.wrappers.arguments.tree import Bound

_JAX_ON_WRITES = "differentiated value on a non-differentiated array reference"
_JAX_ON_RULES = (
    r"(Differentiation|Transpose|Linearization|JVP|Partial eval).* not implemented|\w+ callbacks do not support JVP"
)
_JAX_ON_FUNCTION = r"the function \S+ at (\S+):\d+ for"
_JAX_ON_ARGUMENTS = r"(?<=of the argument).*?(?=\.\n|\.$)"

#: The cure, by JAX's error.
_CURES: dict[type[BaseException], str] = {
    jax.errors.TracerBoolConversionError: "Choose between values with jnp.where, between branches with jax.lax.cond.",
    jax.errors.TracerArrayConversionError: "Compute with jax.numpy in the place of numpy.",
    jax.errors.TracerIntegerConversionError: "Take a part of a changing place with jax.lax.dynamic_slice or jnp.take.",
}
_UNRULED = "Give it a derivative with jax.custom_vjp, or keep it out of the path by lax.stop_gradient."
_CURE = "Do not convert it to a Python number, nor keep it outside the function."


@contextmanager
def explained(
    name: str,
    function: Callable[..., Any] | None = None,
    paths: Sequence[str] = (),
    bound: Bound | None = None,
) -> Iterator[None]:
    """Explain the errors that JAX raises while the user's function `name` is traced.

    `paths` are the user's names of the traced arrays, which replace JAX's numbers (`args[3]`). `bound` is the call.
    Raises `DerivativeError` for an op without a derivative, and `TraceError` for a derivative that would be lost.
    """
    try:
        yield
    except jax.errors.JAXTypeError as error:
        _put_names(error, name, function, paths, bound)
        note(error, name)
        raise
    except AssertionError as error:
        if not error.args and _asserted_by_jax(error) and not _is_noted(error):
            error.add_note(
                f"This happened while jointcut traced {name}{line_of_error(error)}. JAX stopped at an assertion of its "
                "own, as it does for a collective over an axis that is not on the mesh. Look at the axis names there."
            )
        raise
    except (TypeError, AttributeError) as error:
        if bound is not None and bound.has_fixed:
            _note_fixed(error, name, bound)
        raise
    except (NotImplementedError, ValueError) as error:
        if isinstance(error, JointcutError) or not re.match(_JAX_ON_RULES, str(error)):
            raise
        what = f"cannot be differentiated{'' if function is None else line_of_error(error)}: {error}"
        raise DerivativeError(message(name, what, _UNRULED)) from error
    except Exception as error:
        if type(error).__name__ == OF_TRACES and not _is_noted(error):
            what = f"This happened while jointcut traced {name}, which writes to an object from outside."
            error.add_note(f"{what} Pass the object as an argument: what is written to it is then kept.")
        if type(error) is not Exception or _JAX_ON_WRITES not in str(error):  # JAX raises a bare Exception for this
            raise
        what = "writes a value that is differentiated into a jax.Ref that is not."
        cure = "Write jax.lax.stop_gradient(value): statistics and counters need no derivative."
        raise TraceError(message(name, what, cure)) from error


@contextmanager
def for_one_example(leaves: Sequence[Any]) -> Iterator[None]:
    """Add a note to a `BudgetError` under `jax.vmap`: the budget is for one example."""
    try:
        yield
    except BudgetError as error:
        if any(type(x).__name__ == "BatchTracer" for leaf in leaves for x in (leaf, getattr(leaf, "primal", None))):
            error.add_note(
                "In jax.vmap of jax.grad a budget is for one example, in jax.grad of jax.vmap for the batch."
            )
        raise


def note(error: BaseException, name: str) -> None:
    """Add a note to an error of JAX, once: which function was traced, and the cure."""
    if _is_noted(error):
        return
    cure = next((cure for kind, cure in _CURES.items() if isinstance(error, kind)), _CURE)
    error.add_note(
        f"This happened while jointcut traced {name}. A traced value has a shape and a dtype but no number yet. {cure} "
        "What decides and is a Python value can be passed as such: static_argnums."
    )


def _put_names(
    error: BaseException, name: str, function: Callable[..., Any] | None, paths: Sequence[str], bound: Bound | None
) -> None:
    """Put the user's function and the paths of its arguments into JAX's message."""
    if _is_noted(error):
        return
    known = {"args": paths, **dict.fromkeys(("kept", "given_up"), [] if bound is None else unique_paths(bound))}

    def path(match: re.Match[str]) -> str:
        names = known[match[1]]
        return names[int(match[2])] if int(match[2]) < len(names) else match[0]

    def arguments(match: re.Match[str]) -> str:
        return re.sub(r"\b(args|kept|given_up)\[(\d+)\]", path, match[0])

    def whole(match: re.Match[str]) -> str:
        return f"the function {name}{_place(function)} for" if match[1].startswith(our_folders()) else match[0]

    text = re.sub(_JAX_ON_ARGUMENTS, arguments, str(error), flags=re.DOTALL)
    error.args = (re.sub(_JAX_ON_FUNCTION, whole, text), *error.args[1:])


def unique_paths(bound: Bound) -> list[str]:
    """Return the user's paths of each distinct array of a call: `args[0] (the same array as args[2])`."""
    paths: dict[int, list[str]] = {}
    for place, path in zip(bound.places, bound.paths(), strict=True):
        paths.setdefault(place, []).append(path)
    alike = (f" (the same array as {' and '.join(others)})" if others else "" for _, *others in paths.values())
    return [first + rest for (first, *_), rest in zip(paths.values(), alike, strict=True)]


def _place(function: Any) -> str:
    """Return the place of a function's definition, as ` at model.py:12`; empty if unknown."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"


def line_of_error(error: BaseException) -> str:
    """Return the user's line that led to an error, ` at file:line (function)`; empty if it is one of ours.

    JAX hands on the calls that made an equation as the cause of an error in its derivative.
    """
    root = Path(jax.__file__).parent
    for raised in (error.__cause__, error):
        frames = traceback.extract_tb(None if raised is None else raised.__traceback__)
        theirs = [f for f in frames if not Path(f.filename).is_relative_to(root)]
        if theirs and not theirs[-1].filename.startswith(our_folders()):
            return f" at {theirs[-1].filename}:{theirs[-1].lineno} ({theirs[-1].name})"
    return ""


def _asserted_by_jax(error: BaseException) -> bool:
    """Whether an assertion failed in JAX's own code, whose frames JAX may have taken out of the traceback."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return (
        bool(last)
        and bool(last[0].line)
        and ("assert" not in last[0].line or Path(last[0].filename).is_relative_to(Path(jax.__file__).parent))
    )


def _note_fixed(error: BaseException, name: str, bound: Bound) -> None:
    """Add a note that names leaves which are not arrays, except functions and numbers, which are rarely the mistake."""
    strange = [(path, leaf.value) for path, leaf in bound.fixed_leaves]
    strange = [(path, x) for path, x in strange if not callable(x) and not isinstance(x, int | float | complex)]
    if strange and not isinstance(error, JointcutError) and not _is_noted(error):
        shown = ", ".join(f"{path} is a {type(x).__name__}" for path, x in strange[:3])
        error.add_note(f"This happened while jointcut traced {name}. It passes on what is no array as it is: {shown}.")


def _is_noted(error: BaseException) -> bool:
    return any("jointcut traced" in text for text in getattr(error, "__notes__", ()))
