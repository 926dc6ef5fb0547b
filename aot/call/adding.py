"""Run a step, and add its gradients to references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jointcut.aot.options.options import Options
from jointcut.aot.run.references import MARKS, added, fitting, spread
from jointcut.aot.trace.differentiated import differentiated, places_of
from jointcut.wrappers.arguments.tree import Bound, Statics, bind
from jointcut.wrappers.metadata.convention import slot

_CALLER = "accumulate_into"


def accumulated(
    value_and_grad: Callable[..., Any], options: Options, statics: Statics, refs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return the value of a call, whose gradients are added to references.

    Raises `CallError` before anything runs if trees or types differ, and `TraceError` for an argument that cannot be
    differentiated.
    """
    bound = bind(args, kwargs, statics)
    places, tree = jax.tree.flatten(_places(bound, options))
    entries, paths = spread(_CALLER, refs, tree), bound.paths()
    for i, entry in zip(places, entries, strict=True):
        if not isinstance(entry, MARKS):
            fitting(_CALLER, paths[i], slot(paths[i], bound.leaves[i]), entry)
    value, gradients = value_and_grad(*args, **kwargs)
    added(entries, tree.flatten_up_to(gradients))
    return value


def _places(bound: Bound, options: Options) -> Any:
    """Return the tree of the gradients, with the place of each leaf."""
    wanted = {*differentiated(bound, options.chosen, options)}
    trees = bound.gradients([i if i in wanted else None for i in range(len(bound.leaves))])
    chosen = tuple(trees[place] for place in places_of(bound, options.chosen, options))
    return chosen[0] if isinstance(options.argnums, int) else chosen
