"""Define a wrapper: one step before compiling, one step after.

`pre_compile` takes a `Target` (a function and its calling convention) and returns a target with a simpler convention.
`post_compile` takes the compiled call in the simpler convention and returns a call in the original convention. Outside
of `TreeWrapper`, a call takes the caller's arguments in trees; inside, it takes one flattened call (`tree.Bound`).
Every wrapper keeps a law: if the compiled call is the function of the simpler target, the result behaves like the
original function. The names come from PyTorch's `CompilerWrapper`.

Users pass their own wrappers as `aot.function(wrappers=(...))`. Their calls take flat arrays, and both steps run while
the function is traced. By the law above, the simpler function in its wrapper behaves like the function itself, so it
can be differentiated, exported and cached like any other.

A wrapper with `before_cut` is given the joint program of forward and backward instead, and may rewrite it before the
plan is made: what it puts there is planned, weighed, cached and exported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from jointcut.wrappers.metadata.convention import Convention
from jointcut.wrappers.metadata.descriptors import Descriptors


@dataclass(frozen=True)
class Target:
    """A function to compile, and its calling convention.

    An array that the caller passes twice enters the program once, and is differentiated at each place.

    Attributes:
        function: takes and returns flat arrays.
        convention: the arrays that enter and leave the program.
        places: the position of each argument of the function in `convention.inputs`; None if the positions are equal.
        describe: returns the arrays of the user's function without these wrappers, with its metadata, for a wrapper of
            the user's. The function is traced once more for it. Inside a transformation of JAX there are no gradients:
            JAX decides later what is differentiated.
    """

    function: Callable[..., Any]
    convention: Convention
    places: tuple[int, ...] | None = None
    describe: Callable[[], Descriptors] | None = field(default=None, compare=False, repr=False)

    def entered(self, *arrays: Any) -> Any:
        """Call the function with the arrays that enter the program."""
        places = range(len(arrays)) if self.places is None else self.places
        return self.function(*(arrays[p] for p in places))


class CompilerWrapper(Protocol):
    """A step from one calling convention to a simpler one, and back."""

    def pre_compile(self, target: Target) -> Target:
        """Return a target with a simpler convention."""
        ...

    def post_compile(self, call: Callable[..., Any], target: Target) -> Callable[..., Any]:
        """Return a call in the original convention; `call` has the convention of `target`, from `pre_compile`."""
        ...


class JointPass(Protocol):
    """A rewrite of the joint program, before it is cut.

    The joint program is the jaxpr `(inputs, tangents) -> (outputs, gradients)`, without constants. A pass may replace
    ops by others, or let the backward read other values: those that the cut then keeps.
    """

    def before_cut(self, joint: Any, descriptors: Descriptors) -> Any:
        """Return a closed jaxpr with the inputs and outputs of `joint`, which `descriptors` name one by one.

        The arrays that it closes over become inputs. What needs no tangent belongs to the forward, so that the plan
        may keep it; effects stay as they are.
        """
        ...


def flat_form_of(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a function of flat arrays the name and place of another, but not its parameters.

    JAX names an argument by the signature; here the name is `args[2]`, counted in arrays.
    """

    def decorate(flat: Callable[..., Any]) -> Callable[..., Any]:
        named: Any = functools.wraps(function)(flat)
        named.__signature__ = inspect.signature(lambda *args: args)
        return named

    return decorate
