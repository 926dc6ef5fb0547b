"""Choose the leaves of a call that are differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jointcut.aot.options.options import Options
from jointcut.partition.errors import TraceError, message
from jointcut.partition.figures import counted
from jointcut.partition.program.jax import abstract
from jointcut.wrappers.arguments import containers, fixed
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.metadata.convention import is_inexact, slot

_CURE_FILTER = (
    "Give a predicate on arrays, a class that holds arrays (nnx.Param), or a tree of booleans that the argument begins "
    "with."
)


def differentiated(bound: Bound, positions: Sequence[int] | None, options: Options) -> tuple[int, ...]:
    """Return the flat positions of the leaves that are differentiated.

    `positions` are arguments whose leaves must all be floating point; None means every floating-point leaf of all
    arguments. Raises `TraceError` if `argnums` names an argument that is missing or cannot be differentiated, or if
    the filter selects nothing.
    """
    if positions is None:
        leaves = [i for span in bound.spans for i in span if _carries_derivative(bound.leaves[i])]
    else:
        leaves = _chosen(bound, places_of(bound, positions, options), options)
    if options.filter is None:
        return tuple(leaves)
    selected = _selected(bound, options)
    if leaves and not selected.intersection(leaves):
        which = "the arguments" if positions is None else f"argnums={options.argnums}"
        raise TraceError(message("filter", f"selects no array of {which}.", "Let it hold for at least one array."))
    return tuple(i for i in leaves if i in selected)


def places_of(bound: Bound, positions: Sequence[int], options: Options) -> list[int]:
    """Return the positions as non-negative numbers; raises `TraceError` if one is missing or named twice."""
    count = len(bound.spans)
    for place in positions:
        if not -count <= place < count:
            needed = counted(place + 1 if place >= 0 else -place, "positional argument")
            what = f"needs at least {needed}, but got {count}."
            cure = "Pass it by position, or change argnums." if bound.leaves else "Pass the arguments of the function."
            raise TraceError(message(f"argnums={options.argnums}", what, cure))
    places = [place % count for place in positions]
    if len(set(places)) < len(places):
        raise TraceError(message(f"argnums={options.argnums}", "names an argument twice.", "Name each once."))
    return places


def _chosen(bound: Bound, places: Sequence[int], options: Options) -> list[int]:
    """Return the differentiable leaves of some arguments.

    Raises `TraceError` for any other leaf, unless a filter is given or the leaf is in a container or Equinox module.
    """
    bound.refuse_shared(places)
    loose = bound.contained | bound.in_modules
    filtered = options.filter is not None
    chosen = []
    for i in sorted({i for place in places for i in bound.spans[place]}):
        leaf = bound.leaves[i]
        if _carries_derivative(leaf):
            chosen.append(i)
        elif isinstance(leaf, jax.Ref):
            what = "is a jax.Ref: value_and_grad differentiates arrays."
            cure = (
                f"Leave it out of argnums={options.argnums}, or pass what it holds, ref[...], and differentiate that."
            )
            raise TraceError(message(bound.paths()[i], what, cure))
        elif i not in loose and not filtered:
            what = f"is {slot('', leaf).dtype}: value_and_grad differentiates floating-point arguments."
            path = bound.paths()[i]
            leave = f"Leave it out of argnums={options.argnums}"
            if path not in (f"args[{place}]" for place in places):
                leave = "Say which arrays are differentiated, as filter=lambda x: x.dtype == jnp.float32"
            raise TraceError(message(path, what, f"{leave}, convert it, or use vjp."))
    _refuse_no_arrays(bound, places, options)
    return chosen


def _refuse_no_arrays(bound: Bound, places: Sequence[int], options: Options) -> None:
    """Raise `TraceError` for an argument that holds fixed leaves and no array."""
    for path, leaf in bound.fixed_leaves if bound.has_fixed else ():
        for place in places:
            is_inside = path == f"args[{place}]" or path.startswith((f"args[{place}].", f"args[{place}]["))
            if is_inside and not bound.spans[place]:
                raise TraceError(message(path, *_why_fixed(leaf, options)))


def _why_fixed(leaf: fixed.Fixed, options: Options) -> tuple[str, str]:
    """Return the reason why a fixed leaf cannot be differentiated, and the cure."""
    kind, leave = type(leaf.value).__name__, f"Leave it out of argnums={options.argnums}"
    if leaf.has_zero:
        return (
            f"is {kind}: value_and_grad differentiates floating-point arguments.",
            f"{leave}, convert it, or use vjp.",
        )
    if isinstance(leaf.value, int | float | complex):
        return "is a Python number in an Equinox module, which has no gradient.", f"{leave}, or make it an array."
    return f"is a {kind}: value_and_grad differentiates floating-point arguments.", f"{leave}, or pass an array."


def _selected(bound: Bound, options: Options) -> frozenset[int]:
    """Return the positions of the leaves that the options' filter selects."""
    spec = options.filter
    if isinstance(spec, type):
        return frozenset(containers.held_by(bound.tree, spec))
    if callable(spec) and jax.tree_util.treedef_is_leaf(jax.tree.structure(spec)):
        holds: list[bool] = []

        def look(*leaves: Any) -> None:
            holds.extend(bool(spec(leaf)) for leaf in leaves)

        jax.eval_shape(look, *bound.leaves)
        return frozenset(i for i, on in enumerate(holds) if on)
    trees: Any = (spec,) if isinstance(options.argnums, int) else spec
    arguments = bound.rebuild_places()[0]
    selected: list[int] = []
    try:
        for place, tree in zip(options.chosen, trees, strict=True):
            argument = arguments[bound.dynamic.index(place % len(bound.spans))]
            for on, inside in zip(jax.tree.leaves(tree), _under(tree, argument), strict=True):
                if not isinstance(on, bool):
                    raise TypeError(f"it holds a {type(on).__name__}")
                selected.extend(inside if on else ())
    except (TypeError, ValueError) as error:
        what = f"does not fit the argument: {str(error).splitlines()[0].rstrip('.')}."
        raise TraceError(message("filter", what, _CURE_FILTER)) from error
    return frozenset(selected)


def _under(prefix: Any, tree: Any) -> list[list[int]]:
    """Return the leaves of a tree below each leaf of its prefix."""
    return [jax.tree.leaves(part) for part in jax.tree.structure(prefix).flatten_up_to(fixed.released(tree))]


def _carries_derivative(leaf: Any) -> bool:
    return not abstract.is_reference(jax.typeof(leaf)) and is_inexact(slot("", leaf).dtype)
