"""Make arguments with symbolic sizes.

`shapes("b, 128", jnp.float32)` describes an array of any batch size `b`. A name is the same size in all arguments of an
export. JAX requires that sizes used together come from one `jax.export.SymbolicScope`. Sizes made here share one scope
per process; each export moves them into a new scope with its own constraints.
"""

from __future__ import annotations

import re
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
from jax import export

from jointcut.partition.errors import CallError, choices, message
from jointcut.partition.program import sizes as symbolic
from jointcut.wrappers.arguments.paths import Paths
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.metadata.convention import Slot

_SCOPE = export.SymbolicScope()

_COMPARED = {">=": int.__ge__, "<=": int.__le__, "==": int.__eq__}
_SPEC = "Write sizes as jax.export.symbolic_shape reads them: 'b, 128', '2*b, ...', 'floordiv(t, 8), _'."
_CONSTRAINT = "Write them as jax.export does: 'b >= 2', 't <= 4*b', 'mod(t, 8) == 0'."


def shapes(spec: Any, dtype: Any = None, *, like: Any = None) -> Any:
    """Return arguments with symbolic sizes: `jax.ShapeDtypeStruct`, as from `jax.export.symbolic_args_specs`.

    With `dtype`, the result is one array with the sizes in the text `spec`. With `like`, an array or a tree of arrays
    or types, the result is a tree of types with the sizes in `spec`. There `_` keeps the size of `like`, and `...` all
    sizes that follow. `spec` is a text for all arrays, or a tree of texts that is a prefix of `like`, where None keeps
    the shapes. A size is a name, a number, or an expression of these with `+ - * ^ floordiv mod max min`; a name is at
    least 1.

    Raises `CallError` if neither or both of `dtype` and `like` are given, or if `spec` cannot be read.

    >>> shapes("b, 128", "float32")
    ShapeDtypeStruct(shape=(b, 128), dtype=float32)
    """
    if (dtype is None) == (like is None):
        arguments = "neither dtype nor like" if dtype is None else "both dtype and like"
        cure = "Give the dtype of one array, or the arrays that it is like."
        raise CallError(message(f"shapes({spec!r})", f"is given {arguments}.", cure))
    try:
        if like is not None:
            return export.symbolic_args_specs(like, spec, scope=_SCOPE)
        return jax.ShapeDtypeStruct(export.symbolic_shape(spec, scope=_SCOPE), dtype)
    except (ValueError, tokenize.TokenError) as error:
        raise CallError(message(f"shapes({spec!r})", f"cannot be read: {_first_line(error)}", _SPEC)) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].strip()


def concrete(leaf: Any, sizes: Mapping[str, int]) -> Any:
    """Return a leaf with numbers for its symbolic sizes; any other leaf is returned unchanged.

    >>> concrete(shapes("2*b, 128", "float32"), {"b": 8})
    ShapeDtypeStruct(shape=(16, 128), dtype=float32)
    """
    if not _is_symbolic(leaf):
        return leaf
    return leaf.update(shape=symbolic.numbers(leaf.shape, sizes))


def _is_symbolic(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and symbolic.is_symbolic(leaf.shape)


def checked_sizes(bound: Bound, sizes: Mapping[str, int], constraints: Sequence[str] = ()) -> dict[str, int]:
    """Return the sizes for which a plan is made: one for each name in the arguments' shapes.

    The constraints have been checked by `in_one_scope`. Raises `CallError` if a size is missing, unknown or not a
    positive integer, if a constraint does not hold, or if an argument would have a negative size.
    """
    return sizes_for(_symbolic_leaves(bound), sizes, constraints)


def sizes_for(leaves: Mapping[str, Any], sizes: Mapping[str, int], constraints: Sequence[str] = ()) -> dict[str, int]:
    """Return the sizes as `checked_sizes` does, for the leaves with symbolic sizes by path; raises as it does."""
    first: dict[str, str] = {}
    for path, leaf in leaves.items():
        for name in symbolic.names(leaf.shape):
            first.setdefault(name, path)
    for name, path in sorted(first.items()):
        if name not in sizes:
            cure = "Give a number for each name: the plan is made for these, the programs run with any."
            raise CallError(message("sizes", f"lacks {name!r}, which {_shown(path, leaves[path])} has.", cure))
    for name in sizes:
        if name not in first:
            cure = (
                choices(name, first) if first else "Give arguments sizes that are names: aot.shapes('b, 128', dtype)."
            )
            raise CallError(message("sizes", f"names {name!r}, which stands in no argument's shape.", cure))
    known = {name: _size(name, sizes[name]) for name in sorted(first)}
    shown = ", ".join(f"{name}={value}" for name, value in known.items())
    for constraint in constraints:
        if not _holds(constraint, known):
            cure = "Give others, or leave the constraint out."
            raise CallError(message(f"sizes {shown}", f"break the constraint {constraint!r}.", cure))
    for path, leaf in leaves.items():
        if min(concrete(leaf, known).shape) < 0:
            raise CallError(message(_shown(path, leaf), f"has a size below zero where {shown}.", "Give larger sizes."))
    return known


def _symbolic_leaves(bound: Bound) -> dict[str, Any]:
    """Return the leaves with symbolic sizes, by path."""
    return {path: leaf for path, leaf in zip(bound.paths(), bound.leaves, strict=True) if _is_symbolic(leaf)}


def symbolic_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves with symbolic sizes of a call that is not bound, by path."""
    return dict(Paths(range(len(args))).nodes((args, kwargs), _is_symbolic))


def _shown(path: str, leaf: Any) -> str:
    """`args[1]: float32[b,128]`."""
    return str(Slot(path, leaf.shape, leaf.dtype))


def _size(name: str, size: Any) -> int:
    if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
        cure = "JAX takes a symbolic size to be at least 1."
        raise CallError(message(f"sizes[{name!r}]", f"is {size!r}, not a whole number from 1 up.", cure))
    return int(size)


def _holds(constraint: str, sizes: Mapping[str, int]) -> bool:
    """Whether a constraint holds; raises `CallError` if it names an unknown size."""
    if unknown := sorted(symbolic.names(constraint) - sizes.keys()):
        what = f"hold {constraint!r}, but {unknown[0]!r} stands in no argument's shape."
        raise CallError(message("constraints", what, choices(unknown[0], sizes)))
    left, sign, right = re.split("(>=|<=|==)", constraint)
    return _COMPARED[sign](symbolic.number(left, sizes), symbolic.number(right, sizes))


def in_one_scope(bound: Bound, constraints: Sequence[str] = ()) -> Bound:
    """Move all symbolic sizes of a call into a new scope, in which the constraints hold.

    Sizes of the user's own `jax.export.SymbolicScope` stay there. Raises `CallError` if sizes come from several scopes,
    if constraints are given for a scope of the user's, or if JAX does not accept a constraint.
    """
    first: dict[int, str] = {}  # by id of a scope: the first argument in it
    for path, leaf in _symbolic_leaves(bound).items():
        for n in filter(export.is_symbolic_dim, leaf.shape):
            first.setdefault(id(n.scope), _shown(path, leaf))
    if len(first) > 1:
        what = "have sizes of different scopes, in which one name may be two sizes."
        cure = "Make all with aot.shapes, or all in one jax.export.SymbolicScope."
        raise CallError(message(" and ".join(list(first.values())[:2]), what, cure))
    if first and id(_SCOPE) not in first:
        if constraints:
            cure = "Give them to that scope: jax.export.SymbolicScope(constraints)."
            raise CallError(message("constraints", "are given for sizes of a scope of your own.", cure))
        return bound
    with _accepted():
        scope = export.SymbolicScope(constraints)
        moved = [_moved(leaf, scope) if _is_symbolic(leaf) else leaf for leaf in bound.leaves]
    return replace(bound, leaves=tuple(moved))


def allowing(leaves: Mapping[str, Any], constraints: Sequence[str]) -> Callable[[Mapping[str, int]], bool]:
    """Return a function that says whether sizes are allowed: constraints hold, and each argument can have them.

    An argument has no negative size, and its sharding divides its shape.

    Raises `CallError` if JAX does not accept a constraint.
    """
    with _accepted():
        export.SymbolicScope(constraints)

    def allowed(sizes: Mapping[str, int]) -> bool:
        holds = all(_holds(constraint, sizes) for constraint in constraints)
        return holds and all(_can_be(leaf, symbolic.numbers(leaf.shape, sizes)) for leaf in leaves.values())

    return allowed


def _can_be(leaf: Any, shape: tuple[int, ...]) -> bool:
    if min(shape) < 0 or leaf.sharding is None:
        return min(shape) >= 0
    try:
        leaf.sharding.shard_shape(shape)
    except ValueError:  # JAX tells in no other way that a sharding does not divide a shape
        return False
    return True


@contextmanager
def _accepted() -> Iterator[None]:
    """Turn JAX's errors about constraints into a `CallError`."""
    try:
        yield
    except (ValueError, NotImplementedError, tokenize.TokenError) as error:
        raise CallError(message("constraints", f"cannot be taken: {_first_line(error)}", _CONSTRAINT)) from error


def _moved(leaf: Any, scope: export.SymbolicScope) -> Any:
    """Return the same type in another scope, by way of the text of its sizes."""
    return leaf.update(shape=export.symbolic_shape(", ".join(map(str, leaf.shape)), scope=scope))
