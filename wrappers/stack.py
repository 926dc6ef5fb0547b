"""Apply wrappers in order before compiling, and in reverse order after.

A stack is a sequence of wrappers, outermost first. Each `pre_compile` takes the target that the previous one returned.
After compiling, `post_compile` runs innermost first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jointcut.partition.errors import TraceError, message
from jointcut.partition.program.jax import jaxprs
from jointcut.wrappers.arguments import objects
from jointcut.wrappers.arguments.paths import tree_paths
from jointcut.wrappers.metadata.descriptors import Descriptors
from jointcut.wrappers.wrapper import CompilerWrapper, JointPass, Target

_CURE = "Return what the function that pre_compile was given returns for the same arrays."
_JOINT_CURE = "Return a closed jaxpr with the inputs and outputs of the joint program that it is given, in their order."


@dataclass(frozen=True)
class Wrapped:
    """The target after every `pre_compile`, and each wrapper with the target that it returned."""

    target: Target
    trail: tuple[tuple[CompilerWrapper, Target], ...]

    def post_compile(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call in the user's convention, made from a call in the simplest convention."""
        for wrapper, target in reversed(self.trail):
            call = wrapper.post_compile(call, target)
        return call


def pre_compile(wrappers: Sequence[CompilerWrapper], target: Target) -> Wrapped:
    """Run every wrapper's `pre_compile`, outermost first."""
    trail = []
    for wrapper in wrappers:
        target = wrapper.pre_compile(target)
        trail.append((wrapper, target))
    return Wrapped(target, tuple(trail))


def applied(wrappers: Sequence[CompilerWrapper], target: Target) -> Callable[..., Any]:
    """Return the function of a target inside a user's wrappers, which behaves like the function alone.

    Raises `TraceError`, now or when it is called, for a wrapper that changes the structure or types of results.
    """
    steps = []
    for wrapper in wrappers:
        seen = _Seen(target.function)
        simpler = wrapper.pre_compile(replace(target, function=seen))
        if not isinstance(simpler, Target):
            what = f"returned a {type(simpler).__name__}, not a Target."
            cure = "Return jointcut.wrappers.Target(function, convention), or the one that was given."
            raise TraceError(message(f"pre_compile of {type(wrapper).__name__}", what, cure))
        steps.append((wrapper, seen, simpler))
        target = simpler
    call = target.function
    for wrapper, seen, simpler in reversed(steps):
        call = seen.compared(wrapper, wrapper.post_compile(call, simpler))
    return call


def refuse_no_wrappers(wrappers: Sequence[Any]) -> None:
    """Raise `TraceError` if one of the user's wrappers lacks the methods of a wrapper."""
    for i, wrapper in enumerate(wrappers):
        wraps = hasattr(wrapper, "pre_compile") and hasattr(wrapper, "post_compile")
        if not wraps and not hasattr(wrapper, "before_cut") and not hasattr(wrapper, "pre_lower"):
            name = type(wrapper).__name__
            what = f"is a {name}, which has neither pre_compile and post_compile nor before_cut nor pre_lower."
            cure = "Give a jointcut.wrappers.CompilerWrapper or JointPass, or a jointcut.partition.HalfPass."
            raise TraceError(message(f"wrappers[{i}]", what, cure))
        if isinstance(wrapper, type):
            what, cure = f"is the class {wrapper.__name__}.", f"Give an object of it, {wrapper.__name__}()."
            raise TraceError(message(f"wrappers[{i}]", what, cure))


def rewritten(wrapper: JointPass, joint: Any, descriptors: Descriptors) -> Any:
    """Return the joint program as a user's wrapper rewrites it.

    Raises `TraceError` if it does not return a jaxpr with the same inputs and outputs.
    """
    where, made = f"before_cut of {type(wrapper).__name__}", wrapper.before_cut(joint, descriptors)
    if not isinstance(made, jaxprs.ClosedJaxpr | jaxprs.Jaxpr):
        raise TraceError(message(where, f"returned a {type(made).__name__}, not a jaxpr.", _JOINT_CURE))
    (given, _), (jaxpr, _) = jaxprs.opened(joint), jaxprs.opened(made)
    inputs, outputs = (*descriptors.inputs, *descriptors.tangents), (*descriptors.outputs, *descriptors.gradients)
    ends = (inputs, given.invars, jaxpr.invars), (outputs, given.outvars, jaxpr.outvars)
    if any(len(old) != len(new) for _, old, new in ends):
        (takes, gives), (took, gave) = ([len(end[i]) for end in ends] for i in (2, 1))
        what = f"returned a program of {takes} inputs and {gives} outputs, and was given one of {took} and {gave}."
        raise TraceError(message(where, what, _JOINT_CURE))
    for name, old, new in ((d.name, o, n) for end in ends for d, o, n in zip(*end, strict=True)):
        old, new = (v.aval.str_short().lstrip("~") for v in (old, new))  # a weak type is no other type
        if old != new:
            raise TraceError(message(where, f"returned a program whose {name} is {new}, not {old}.", _JOINT_CURE))
    return made


class _Seen:
    """A function that remembers the types of its results by the types of its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.results: dict[tuple[str, ...], tuple[Any, list[str]]] = {}

    def __call__(self, *arrays: Any) -> Any:
        result = self.function(*arrays)
        self.results[tuple(map(_type, arrays))] = _types(result)
        return result

    def compared(self, wrapper: CompilerWrapper, call: Any) -> Callable[..., Any]:
        """Return a wrapper's call with a check: its results must have the types of the function's results."""
        where = f"post_compile of {type(wrapper).__name__}"
        if not callable(call):
            raise TraceError(message(where, f"returned a {type(call).__name__}, not a function.", _CURE))

        def compared(*arrays: Any) -> Any:
            result = call(*arrays)
            (tree, leaves), (want_tree, want) = _types(result), self._of(arrays)
            if tree != want_tree:
                what = f"gave a result of the structure {tree}, where the function returns {want_tree}."
                raise TraceError(message(where, what, _CURE))
            for path, got, expected in zip(tree_paths("result", tree), leaves, want, strict=True):
                if got != expected:
                    what = f"gave {got} at {path}, where the function returns {expected}."
                    raise TraceError(message(where, what, _CURE))
            return result

        return compared

    def _of(self, arrays: Sequence[Any]) -> tuple[Any, list[str]]:
        """Return the types of the result for some arrays, even if the wrapper never called the function with such."""
        key = tuple(map(_type, arrays))
        if key not in self.results:
            jax.eval_shape(lambda *args: jax.tree.leaves(self(*args))[:0], *arrays)
        return self.results[key]


def _types(result: Any) -> tuple[Any, list[str]]:
    """Return the structure of a result, and the type of each leaf as text."""
    leaves, tree = jax.tree.flatten(objects.taken_apart(result)[0])
    return tree, [_type(leaf) for leaf in leaves]


def _type(leaf: Any) -> str:
    try:
        aval = jax.typeof(leaf)
    except TypeError:
        return f"a {type(leaf).__name__}"
    return aval.str_short()
