"""Run a step, and add its gradients to references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.aot.hooks.hook import Place
from jointcut.aot.hooks.in_programs import applied, called_later
from jointcut.aot.options.options import Options, name_of
from jointcut.aot.run.bound import Binder
from jointcut.aot.run.references import MARKS, added, fitting, spread
from jointcut.aot.trace.blame import explained
from jointcut.aot.trace.differentiated import differentiated, places_of
from jointcut.partition.program.jax import runtime
from jointcut.wrappers.arguments.tree import Bound, Statics, bind
from jointcut.wrappers.built_in.flatten import TreeWrapper
from jointcut.wrappers.metadata.convention import slot

_CALLER = "accumulate_into"


@dataclass(frozen=True)
class Stepping:
    """The steps whose gradients are added.

    Attributes:
        function, options, statics: the user's function, its options, and which of its arguments are static.
        with_hooks: the step `value_and_grad` of the function.
        without_hooks: makes the same step without the `post_accumulate` hooks of arguments, which are called later.
    """

    function: Callable[..., Any]
    options: Options
    statics: Statics
    with_hooks: Callable[..., Any]
    without_hooks: Callable[[], Callable[..., Any]]

    def accumulated(self, binder: Binder, refs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the value of a call, whose gradients are added to references.

        Raises `CallError` before anything runs if trees or types differ, and `TraceError` for an argument that cannot
        be differentiated.
        """
        bound = bind(args, kwargs, self.statics)
        places, tree = jax.tree.flatten(_places(bound, self.options))
        entries, paths = spread(_CALLER, refs, tree), bound.paths()
        for i, entry in zip(places, entries, strict=True):
            if not isinstance(entry, MARKS):
                fitting(_CALLER, paths[i], slot(paths[i], bound.leaves[i]), entry)
        signature, _ = binder(args, kwargs)
        later = signature.made.of("post_accumulate", lambda: self._later(bound))
        step = self.without_hooks() if later else self.with_hooks
        value, gradients = step(*args, **kwargs)
        flat = tree.flatten_up_to(gradients)
        added(entries, flat)
        at = dict(zip(places, zip(entries, flat, strict=True), strict=True))
        for i, place in later:
            if i in at:
                _hooked(place, *at[i])
        return value

    def _later(self, bound: Bound) -> list[tuple[int, Place]]:
        """Return the `post_accumulate` hooks of a call's arguments, with the positions of these; trace for it.

        Return none if one is not on an argument itself, such as behind a user's wrapper.
        """
        taken: list[tuple[Any, Place]] = []
        found: list[tuple[int, Place]] = []
        flat = TreeWrapper(bound, self.options.around).flat(called_later(self.function, taken))

        def noting(*leaves: Any) -> None:
            flat(*leaves)
            at = {id(x): i for i, x in enumerate(leaves)}
            found[:] = [(at.get(id(x), -1), place) for x, place in taken]

        with explained(name_of(self.function), self.function, bound.paths(), bound):
            jax.make_jaxpr(noting)(*bound.leaves)
        return [] if any(i < 0 for i, _ in found) else found


def _hooked(place: Place, entry: Any, gradient: Any) -> None:
    """Call a hook with the sum in a reference, and write what it returns; without a reference it sees the gradient."""
    call = (lambda x: applied(place, [x])) if runtime.tracing() else (lambda x: place([x]))
    if isinstance(entry, MARKS):
        call(gradient)
    else:
        (entry[...],) = call(entry[...])


def _places(bound: Bound, options: Options) -> Any:
    """Return the tree of the gradients, with the place of each leaf."""
    wanted = {*differentiated(bound, options.chosen, options)}
    trees = bound.gradients([i if i in wanted else None for i in range(len(bound.leaves))])
    chosen = tuple(trees[place] for place in places_of(bound, options.chosen, options))
    return chosen[0] if isinstance(options.argnums, int) else chosen
