"""Speak in flat arrays to the compiler, in trees to the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jointcut.wrappers.arguments import objects
from jointcut.wrappers.arguments.copies import Copies
from jointcut.wrappers.arguments.paths import Paths
from jointcut.wrappers.arguments.tree import Bound, Statics, bind
from jointcut.wrappers.metadata.convention import Convention, slots
from jointcut.wrappers.stack import applied
from jointcut.wrappers.wrapper import CompilerWrapper, Target, flat_form_of


@dataclass(frozen=True)
class Outcome:
    """The result of a function that was given objects, and what it wrote to them.

    `states` are the new arrays by flat positions of the call, `paths` how the user reaches these.
    """

    result: Any
    states: Mapping[int, Any]
    paths: tuple[str, ...]


@dataclass
class TreeWrapper:
    """Speak in flat lists of arrays to the compiler, in trees to the caller.

    `around` are the user's own wrappers, which stand inside of the trees.
    """

    bound: Bound
    around: tuple[CompilerWrapper, ...] = ()

    def pre_compile(self, target: Target) -> Target:
        """A function of flat leaves; its convention's `out_tree` is known once it has been traced."""
        inputs = slots(self.bound.paths(), self.bound.leaves)
        return Target(self.flat(target.function), Convention(inputs, (), self.bound.tree))

    def flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The user's function over flat leaves; an `Outcome` where it was given objects that it can write."""
        if not self.around:
            return self._flat(function)
        inner = self._flat(function)

        @flat_form_of(function)
        def call(*leaves: Any) -> Any:
            outcomes: list[Outcome] = []

            @flat_form_of(function)
            def result(*given: Any) -> Any:
                made = inner(*given)
                outcomes[:] = [made] if isinstance(made, Outcome) else []
                return made.result if isinstance(made, Outcome) else made

            convention = Convention(slots(self.bound.paths(), leaves), (), self.bound.tree)
            made = applied(self.around, Target(result, convention))(*leaves)
            return replace(outcomes[0], result=made) if outcomes else made

        return call

    def _flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        bound = self.bound

        @flat_form_of(function)
        def call(*leaves: Any) -> Any:
            (args, kwargs), live = bound.rebuilt(leaves)
            copies = Copies.of(args, kwargs)
            result = function(*args, **kwargs)
            copies.refuse_written()
            if not live:
                return result
            paths = Paths(bound.dynamic)
            states = objects.states(leaves, jax.tree.unflatten(bound.tree, leaves), live, paths)
            names = bound.paths() if states else ()
            return Outcome(result, states, tuple(names[i] for i in states))

        return call

    def post_compile(self, call: Callable[..., Any], target: Target) -> Callable[..., Any]:
        """A call in trees over one in flat leaves, for arguments with the structure that was traced."""
        del target
        statics = Statics(
            frozenset(i for i, _ in self.bound.static_args), frozenset(k for k, _ in self.bound.static_kwargs)
        )

        def in_trees(*args: Any, **kwargs: Any) -> Any:
            return call(bind(args, kwargs, statics))

        return in_trees
