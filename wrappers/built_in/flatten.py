"""Turn a function of trees into a function of flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jointcut.wrappers.arguments import objects
from jointcut.wrappers.arguments.originals import GivenCopies
from jointcut.wrappers.arguments.paths import Paths
from jointcut.wrappers.arguments.tree import Bound, Statics, bind
from jointcut.wrappers.metadata.convention import Convention, slots
from jointcut.wrappers.metadata.descriptors import Descriptors
from jointcut.wrappers.stack import applied
from jointcut.wrappers.wrapper import CompilerWrapper, Target, flat_form_of


@dataclass(frozen=True)
class Outcome:
    """The result of a function that takes objects, and the arrays that it wrote to them.

    `states` maps flat positions of the call to new arrays, `paths` are the paths of these positions. If the function
    changed the structure of the objects, there are no states; `grown` is the new structure, and `parts` are all arrays.
    """

    result: Any
    states: Mapping[int, Any] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    grown: objects.Grown | None = None
    parts: Sequence[Any] = ()


@dataclass
class TreeWrapper:
    """Turn a function of trees into a function of flat arrays.

    `around` are the user's own wrappers, which take flat arrays; `describe` is as in `Target`.
    """

    bound: Bound
    around: tuple[CompilerWrapper, ...] = ()
    describe: Callable[[], Descriptors] | None = None

    def pre_compile(self, target: Target) -> Target:
        """Return a target with a function of flat leaves; its results are not known yet."""
        inputs = slots(self.bound.paths(), self.bound.leaves)
        return Target(self.flat(target.function), Convention(inputs, (), self.bound.tree))

    def flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the user's function of flat leaves; it returns an `Outcome` if the call holds writable objects."""
        if not self.around:
            return self._flat(function)
        inner = self._flat(function)

        @flat_form_of(function)
        def call(*leaves: Any) -> Any:
            outcomes: list[Outcome] = []

            @flat_form_of(function)
            def without_states(*leaves: Any) -> Any:
                outcome = inner(*leaves)
                outcomes[:] = [outcome] if isinstance(outcome, Outcome) else []
                return outcome.result if isinstance(outcome, Outcome) else outcome

            convention = Convention(slots(self.bound.paths(), leaves), (), self.bound.tree)
            result = applied(self.around, Target(without_states, convention, describe=self.describe))(*leaves)
            return replace(outcomes[0], result=result) if outcomes else result

        return call

    def _flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        bound = self.bound

        @flat_form_of(function)
        def call(*leaves: Any) -> Any:
            (args, kwargs), live = bound.rebuilt(leaves)
            copies = GivenCopies.of(args, kwargs)
            result = function(*args, **kwargs)
            copies.refuse_written()
            if not live:
                return result
            paths, tree = Paths(bound.dynamic), jax.tree.unflatten(bound.tree, leaves)
            if (found := objects.grown(tree, live, paths)) is not None:
                return Outcome(result, grown=found[0], parts=found[1])
            states = objects.states(leaves, tree, live, paths)
            names = bound.paths() if states else ()
            return Outcome(result, states, tuple(names[i] for i in states))

        return call

    def post_compile(self, call: Callable[..., Any], target: Target) -> Callable[..., Any]:
        """Return a call that takes trees, flattens them, and passes them to `call` as one `Bound`."""
        del target
        statics = Statics(
            frozenset(i for i, _ in self.bound.static_args), frozenset(k for k, _ in self.bound.static_kwargs)
        )

        def in_trees(*args: Any, **kwargs: Any) -> Any:
            return call(bind(args, kwargs, statics))

        return in_trees
