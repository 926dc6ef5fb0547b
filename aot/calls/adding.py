"""Run a step, and add its gradients to references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jointcut.aot.choices.options import Options
from jointcut.aot.run.references import add, fitting_refs
from jointcut.aot.trace.wanted import differentiated, places_of
from jointcut.partition.errors import CallError, message
from jointcut.wrappers.arguments.tree import Bound, Statics, bind


def accumulated(
    value_and_grad: Callable[..., Any], options: Options, statics: Statics, refs: Any, *args: Any, **kwargs: Any
) -> Any:
    """The value of a call, whose gradients are added to references; raises as `refs_of`, before anything runs."""
    held = refs_of(bind(args, kwargs, statics), options, refs)
    value, gradients = value_and_grad(*args, **kwargs)
    add(held, jax.tree.leaves(gradients))
    return value


def refs_of(bound: Bound, options: Options, refs: Any) -> dict[int, Any]:
    """The reference of each leaf of the arguments in `argnums` that is differentiated.

    Raises `CallError` if trees or types differ, or where a gradient is no single dense array, and `TraceError` for an
    argument that cannot be differentiated.
    """
    wanted, paths = differentiated(bound, options.chosen, options), bound.paths()
    places = places_of(bound, options.chosen, options)
    rows = [i for i in wanted if paths[i] in options.sparse_gradients]
    if sparse := sorted(bound.structure.intersection(i for place in places for i in bound.spans[place]).union(rows)):
        what = f"adds to dense arrays, and the gradient of {paths[sparse[0]]} is sparse."
        raise CallError(message("accumulate_into", what, "Take the gradients with value_and_grad, and add them."))
    trees = bound.gradients([i if i in wanted else None for i in range(len(bound.leaves))])
    chosen = tuple(trees[place] for place in places)
    return fitting_refs(chosen[0] if isinstance(options.argnums, int) else chosen, refs, paths, bound.leaves)
