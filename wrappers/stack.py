"""Apply every wrapper in order before, and in reverse after.

The stack is a tuple of wrappers, outermost first. Before compiling, each simplifies the target that the one before
left; after compiling, each puts back what it took away, innermost first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jointcut.wrappers.wrapper import CompilerWrapper, Target


@dataclass(frozen=True)
class Wrapped:
    """A target after the `pre_compile` of a whole stack, and what each wrapper was given."""

    target: Target
    trail: tuple[tuple[CompilerWrapper, Target], ...]

    def post_compile(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call that the user sees, made of one that speaks the simplest convention."""
        for wrapper, given in reversed(self.trail):
            call = wrapper.post_compile(call, given)
        return call


def pre_compile(wrappers: Sequence[CompilerWrapper], target: Target) -> Wrapped:
    """Run every wrapper's `pre_compile`, outermost first."""
    trail = []
    for wrapper in wrappers:
        simpler = wrapper.pre_compile(target)
        # A wrapper that changes nothing before compiling still acts after: it is given the simpler convention.
        trail.append((wrapper, simpler))
        target = simpler
    return Wrapped(target, tuple(trail))
