"""Define a wrapper: one half before compiling, one half after.

`pre_compile` takes a `Target` (a function and the convention it speaks) and returns a simpler one; `post_compile`
takes the compiled call that speaks the simpler convention and returns a call that speaks the original one. Calls take
the caller's arguments in trees outside `TreeWrapper`, and one flattened call (`tree.Bound`) inside it. The law of every
wrapper: if the compiled call is the simpler target's own function, the result behaves as the original.
The names are those of PyTorch's `CompilerWrapper`.

A user gives wrappers of his own as `aot.function(wrappers=(...))`. Their calls take flat arrays, as their function
does, and both halves run while the function is traced: by the law above, the simpler function with the wrapper around
it *is* the function, so that it can be differentiated, exported and kept in the cache as any other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from jointcut.wrappers.metadata.convention import Convention


@dataclass(frozen=True)
class Target:
    """A function on its way to the compiler, and the convention that it speaks.

    An array that the caller passes twice enters the program once, but is differentiated at each place.

    Attributes:
        function: takes and returns flat arrays.
        convention: the arrays that enter and leave the program.
        places: for each argument of the function, which of `convention.inputs` it is. None: each its own.
    """

    function: Callable[..., Any]
    convention: Convention
    places: tuple[int, ...] | None = None

    def entered(self, *arrays: Any) -> Any:
        """The function on what enters the program."""
        places = range(len(arrays)) if self.places is None else self.places
        return self.function(*(arrays[p] for p in places))


class CompilerWrapper(Protocol):
    """A step from one calling convention to a simpler one, and back."""

    def pre_compile(self, target: Target) -> Target:
        """Return a target with a simpler convention."""
        ...

    def post_compile(self, call: Callable[..., Any], target: Target) -> Callable[..., Any]:
        """Return a call in the convention that `pre_compile` was given, by one in that of `target`, its result."""
        ...


def flat_form_of(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for a function of flat arrays that stands for another: its name and place, but not its parameters.

    JAX names the argument of a traced value by the signature: here `args[2]`, counted in arrays.
    """

    def decorate(flat: Callable[..., Any]) -> Callable[..., Any]:
        named: Any = functools.wraps(function)(flat)
        named.__signature__ = inspect.signature(lambda *args: args)
        return named

    return decorate
