"""Add gradients to references that the user holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jointcut.partition.errors import CallError, message

_CALLER = "accumulate_into"


def fitting_refs(places: Any, refs: Any, paths: Sequence[str], leaves: Sequence[Any]) -> dict[int, Any]:
    """The reference of each leaf that is differentiated, by the place of the leaf.

    `places` is the tree of the gradients with a place for each, `paths` and `leaves` are in the order of the places.
    Raises `CallError` if trees or types differ, or a reference is given twice.
    """
    numbers: list[int]
    numbers, tree = jax.tree.flatten(places)
    given, other = jax.tree.flatten(refs)
    if other != tree:
        what = f"was given references in the structure {other}, the gradients are {tree}."
        raise CallError(message(_CALLER, what, "Give jax.tree.map(jax.new_ref, zeros) of what grad returns."))
    held = dict[int, str]()
    for place, ref in zip(numbers, given, strict=True):
        path = paths[place]
        fitting_ref(ref, path, leaves[place], _CALLER)
        if (before := held.setdefault(id(ref), path)) != path:
            what = f"was given one jax.Ref for {before} and for {path}."
            raise CallError(message(_CALLER, what, "Make one for each, with jax.new_ref(jnp.zeros_like(array))."))
    return dict(zip(numbers, given, strict=True))


def fitting_ref(ref: Any, path: str, leaf: Any, caller: str) -> Any:
    """A reference for a leaf; raises `CallError` if it is none, or of another type."""
    kind = jax.typeof(leaf)
    if isinstance(ref, jax.Ref) and (ref.shape, ref.dtype) == (kind.shape, kind.dtype):
        return ref
    given = f"{ref.dtype}{list(ref.shape)}" if isinstance(ref, jax.Ref) else f"a {type(ref).__name__}"
    what = f"needs a jax.Ref of {kind.str_short()} for {path}, but was given {given}."
    raise CallError(message(caller, what, "Make it with jax.new_ref(jnp.zeros_like(array))."))


def add(refs: Mapping[int, Any], gradients: Sequence[Any]) -> None:
    """Add gradients, in the order of the references, to these."""
    _add(list(refs.values()), list(gradients))


@jax.jit
def _add(refs: Sequence[Any], gradients: Sequence[Any]) -> None:
    for ref, gradient in zip(refs, gradients, strict=True):
        ref[...] += gradient
