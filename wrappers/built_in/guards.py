"""Refuse a call that does not fit the compiled program.

A compiled program has one signature. Before it runs, `GuardsWrapper` compares the tree, shapes, dtypes and static
values of a call with the signature. The error names the path of the first difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import keystr, tree_flatten_with_path

from jointcut.partition.errors import CallError, message
from jointcut.partition.program.jax import abstract
from jointcut.wrappers.arguments.tree import Bound, is_array_like
from jointcut.wrappers.metadata.convention import Slot, slot, slots
from jointcut.wrappers.metadata.schemas import InputAliasInfo, PlainTensorMeta, plain_meta, zero_meta
from jointcut.wrappers.wrapper import Target

_COTANGENT = "Give a cotangent with the structure, shapes and dtypes of the output (float0 or zeros for integers)."
_CURE = "Trace and compile for this signature too, or call the function itself, which does so by need."


@dataclass(frozen=True)
class GuardsWrapper:
    """Compare each call with the traced one; `inputs` are the records of its arguments."""

    traced: Bound
    inputs: Sequence[InputAliasInfo]

    def pre_compile(self, target: Target) -> Target:
        """Return the target unchanged."""
        return target

    def post_compile(self, call: Callable[..., Any], target: Target) -> Callable[..., Any]:
        """Return a call that raises `CallError` if the arguments do not fit."""
        del target
        inputs = slots([info.path for info in self.inputs], self.traced.leaves)

        def guarded(bound: Bound) -> Any:
            if bound.tree != self.traced.tree:
                raise CallError(message("The arguments", _tree_difference(self.traced, bound), _CURE))
            self.same_statics(bound)
            for want, leaf in zip(inputs, bound.leaves, strict=True):
                got = slot(want.path, leaf)
                if (got.shape, got.dtype) != (want.shape, want.dtype):
                    raise CallError(message(want.path, f"is {_type(got)}, but {_type(want)} was traced.", _CURE))
            return call(bound)

        return guarded

    def same_statics(self, bound: Bound) -> None:
        """Raise `CallError` for the first static argument that differs from the traced one."""
        old, new = _by_path(self.traced), _by_path(bound)
        for path in dict.fromkeys((*old, *new)):
            if path not in new or path not in old:
                when = "was given when traced and is not now" if path in old else "was not given when traced"
                raise CallError(message(path, f"is static and {when}.", _CURE))
            if old[path] != new[path]:
                what = f"is static and {new[path][1]!r}, but {old[path][1]!r} was traced."
                raise CallError(message(path, what, _CURE))


def fitting(tree: Any, tangents: Sequence[PlainTensorMeta], cotangent: Any) -> list[Any | None]:
    """Return the flat cotangents that a backward takes, in its order; None for one that is zero by its type.

    `tree` is that of the output, `tangents` describe the cotangent of each leaf. Raises `CallError` if the cotangent
    does not fit.
    """
    leaves, structure = tree_flatten_with_path(cotangent)
    if structure != tree:
        raise CallError(message("The cotangent", f"has the structure {structure}, the output {tree}.", _COTANGENT))
    cotangents: dict[int, Any | None] = {}
    for (path, leaf), meta in zip(leaves, tangents, strict=True):
        name, zero = f"cotangent{keystr(path)}", is_zero(leaf)
        if not zero and not is_array_like(leaf):
            raise CallError(message(name, f"is a {type(leaf).__name__}, not an array.", _COTANGENT))
        want = Slot(name, meta.shape, meta.dtype)
        got = Slot(name, leaf.shape, meta.dtype) if zero else slot(name, leaf)
        if got.shape != want.shape or (got.dtype != want.dtype and meta.unwrapped_idx is not None):
            raise CallError(message(name, f"is {_type(got)}, the output {_type(want)}.", _COTANGENT))
        if meta.unwrapped_idx is not None:
            cotangents[meta.unwrapped_idx] = None if zero else leaf
    return [cotangents[i] for i in range(len(cotangents))]


def tangent_metas(
    avals: Sequence[Any], carries: Sequence[bool], order: Sequence[int] | None = None
) -> tuple[PlainTensorMeta, ...]:
    """Return the type of each result's cotangent, with its position among those that a backward takes.

    `carries` says which results have one. A program has them in the order of its outputs: `order` gives the output of
    each result.
    """
    on = [i for i, has_one in enumerate(carries) if has_one]
    place = {i: k for k, i in enumerate(sorted(on, key=order.__getitem__) if order else on)}
    return tuple(
        plain_meta(place[i], abstract.cotangent_aval(aval)) if i in place else zero_meta(aval)
        for i, aval in enumerate(avals)
    )


def is_zero(cotangent: Any) -> bool:
    """Whether a cotangent is zero by its type: a symbolic zero, or a `float0` array."""
    return isinstance(cotangent, SymbolicZero) or getattr(cotangent, "dtype", None) == jax.dtypes.float0


def _type(of: Slot) -> str:
    return str(of).split(": ")[1]


def _by_path(bound: Bound) -> dict[str, tuple[type, Any]]:
    return {path: (kind, value) for path, kind, value in bound.statics}


def _tree_difference(traced: Bound, bound: Bound) -> str:
    """Describe the first difference between the trees of two calls."""
    old, new = traced.paths(), bound.paths()
    before, after = dict(traced.fixed_leaves), dict(bound.fixed_leaves)
    for path, leaf in after.items():
        if path in old:
            return f"have a {type(leaf.value).__name__} at {path}, where an array was traced."
        if path in before and before[path] != leaf:
            return f"have {leaf.value!r} at {path}, where {before[path].value!r} was traced."
    for path in new:
        if path not in old:
            return f"hold {path}, which was not there when traced."
    for path in old:
        if path not in new:
            return f"lack {path}, which was there when traced."
    return f"have the structure {jax.tree.structure(bound.rebuild_places())}, not the one traced."
