"""Add gradients to references.

A pullback takes a tree of entries, one for each array that has a gradient: a reference, to which the gradient is added,
or a mark that says whether it is returned. The marks are JAX's, in `jax.ad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax

from jointcut.partition.errors import CallError, message
from jointcut.partition.program.jax import side_effects
from jointcut.wrappers.arguments.tree import is_array_like
from jointcut.wrappers.metadata.convention import slot

#: The marks for a gradient that is returned, and for one that is not wanted.
MARKS = side_effects.marks.GradValue, side_effects.marks.DontWant


def exact(caller: str, given: Any, tree: Any) -> list[Any]:
    """Return the entries, flat; raises `CallError` if they are not in the structure of the arguments."""
    entries, other = jax.tree.flatten(given)
    if other != tree:
        what = f"was given entries in the structure {other}, the arguments are {tree}."
        cure = "Give a jax.Ref, jax.ad.GradValue() or jax.ad.DontWant() for each array."
        raise CallError(message(caller, what, cure))
    return entries


def spread(caller: str, given: Any, tree: Any) -> list[Any]:
    """Return the references, flat, with `DontWant` for each array below a None.

    Raises `CallError` if they are in another structure. One reference does not stand for several arrays.
    """
    ends, prefix = jax.tree.flatten(given, is_leaf=lambda x: x is None)
    single = jax.tree.structure(0)
    try:
        parts = list(map(jax.tree.flatten, prefix.flatten_up_to(jax.tree.unflatten(tree, range(tree.num_leaves)))))
        fits = all(x is None or part == single for x, (_, part) in zip(ends, parts, strict=True))
    except ValueError:
        parts, fits = [], False
    if not fits:
        what = f"was given references in the structure {jax.tree.structure(given)}, the gradients are {tree}."
        cure = "Give a jax.Ref for each array, or None where no gradient is wanted."
        raise CallError(message(caller, what, cure))
    unwanted = side_effects.marks.DontWant()
    return [unwanted if x is None else x for x, (leaves, _) in zip(ends, parts, strict=True) for _ in leaves]


def fitting(caller: str, path: str, aval: Any, entry: Any) -> Any:
    """Return the entry for an argument's gradient; raises `CallError` if it is no reference, or of another type."""
    if isinstance(entry, jax.Ref) and (entry.shape, entry.dtype) == (aval.shape, aval.dtype):
        return entry
    what = f"needs a jax.Ref of {_kind(aval)} for {path}, but was given {_kind(entry)}."
    raise CallError(message(caller, what, "Make it with jax.new_ref(jnp.zeros_like(array))."))


def refuse_without(caller: str, path: str, leaf: Any) -> NoReturn:
    """Raise `CallError` for an argument that has no gradient."""
    kind = _kind(slot(path, leaf) if is_array_like(leaf) else leaf)
    what = f"was given a reference for {path}, which is {kind} and has no gradient."
    raise CallError(message(caller, what, "Give None for it, or jax.ad.DontWant() to with_refs."))


def _kind(x: Any) -> str:
    """Return `float32[3,4]`, or the kind of an object that is no reference or type."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.Ref):
        return "an array"
    if not hasattr(x, "dtype"):
        return f"a {type(x).__name__}"
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def result(entry: Any, gradient: Any) -> Any:
    """Return a pullback's result for an entry."""
    if isinstance(entry, side_effects.marks.GradValue):
        return gradient
    return (
        side_effects.marks.DidntWant()
        if isinstance(entry, side_effects.marks.DontWant)
        else side_effects.marks.GradRef()
    )


def added(entries: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Add each gradient to its reference, and return a pullback's results for the entries.

    A gradient that is a sparse array is added as a dense one.
    """
    for entry, gradient in zip(entries, gradients, strict=True):
        if not isinstance(entry, MARKS):
            entry[...] += gradient.todense() if hasattr(gradient, "todense") else gradient
    return [result(entry, gradient) for entry, gradient in zip(entries, gradients, strict=True)]
