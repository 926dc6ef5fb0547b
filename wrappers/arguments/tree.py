"""Flatten nested arguments and results, and build them again.

`bind` reads one call as a flat list of array leaves: static arguments are set apart, every leaf keeps the path by
which the user reaches it, and anything that is not an array is refused there and then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jointcut.partition.errors import CallError, TraceError, choices, message
from jointcut.partition.program.jaxprs import is_reference, is_tracer, tracing
from jointcut.wrappers.arguments import containers, fixed, objects
from jointcut.wrappers.arguments.containers import needs_opening, opened
from jointcut.wrappers.arguments.objects import Live
from jointcut.wrappers.arguments.paths import Paths
from jointcut.wrappers.metadata.schemas import InputAliasInfo


@dataclass(frozen=True)
class Statics:
    """Which arguments are Python values that a program is specialised for, by position and by keyword."""

    argnums: frozenset[int] = frozenset()
    argnames: frozenset[str] = frozenset()
    count: int | None = None  # how many positional parameters the function has, if that is known

    @classmethod
    def of(cls, function: Callable[..., Any], argnums: Any, argnames: Any, kind: str = "static") -> Statics:
        """Complete positions by names and names by positions, as `jax.jit` does, from the function's signature."""
        nums = {argnums} if isinstance(argnums, int) else set(argnums or ())
        names = {argnames} if isinstance(argnames, str) else set(argnames or ())
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return cls(frozenset(nums), frozenset(names))
        known = {p.name for p in parameters}
        if names - known and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise CallError(
                message(f"{kind}_argnames", f"holds {min(names - known)!r}.", choices(min(names - known), known))
            )
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        nums = {n + len(positional) if n < 0 else n for n in nums}
        if argnames is None:
            names |= {positional[n] for n in nums if n < len(positional)}
        if argnums is None:
            nums |= {i for i, name in enumerate(positional) if name in names}
        return cls(frozenset(nums), frozenset(names), len(positional))


@dataclass(frozen=True)
class Bound:
    """One call, flattened: leaves in order, the tree that holds them, and the static arguments."""

    leaves: tuple[Any, ...]
    tree: Any
    static_args: tuple[tuple[int, Any], ...]
    static_kwargs: tuple[tuple[str, Any], ...]
    spans: tuple[range, ...] = field(compare=False)
    duplicates: Mapping[int, int] = field(default_factory=dict)  # a leaf's position to that of the same array before it
    has_objects: bool = field(default=False, compare=False)  # whether leaves were objects that gave their arrays
    has_fixed: bool = field(default=False, compare=False)  # whether leaves that are no arrays are nodes of the tree
    has_taken: bool = field(default=False, compare=False)  # whether objects that can be written were taken apart
    live: tuple[Live, ...] = field(default=(), compare=False, repr=False)  # the caller's objects, at a call

    def rebuild(self, leaves: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The call's arguments with other leaves in place."""
        return self.rebuilt(leaves)[0]

    def rebuilt(self, leaves: Iterable[Any]) -> tuple[tuple[list[Any], dict[str, Any]], tuple[Live, ...]]:
        """The call's arguments with other leaves in place, and the new objects among them that can be written."""
        given, live = jax.tree.unflatten(self.tree, leaves), ()
        if self.has_taken:
            given, live = objects.built(given)
        args, kwargs = fixed.released(given) if self.has_fixed else given
        args = list(args)
        for i, value in self.static_args:
            args.insert(i, value)
        return (args, {**kwargs, **dict(self.static_kwargs)}), live

    @property
    def is_plain(self) -> bool:
        """Whether `jax.jit` could take the call as it is: arrays and nothing else, each once."""
        return not (self.has_objects or self.holds_more or self.duplicates)

    @property
    def holds_more(self) -> bool:
        """Whether something else than arrays stands in its trees: then they stay outside of programs."""
        return self.has_fixed or self.has_taken

    def paths(self) -> list[str]:
        """How the user reaches each leaf: `args[0]['w']`, `kwargs['mask']`."""
        return list(self._paths)

    @cached_property
    def _paths(self) -> list[str]:
        return Paths(self.dynamic).leaves(self.rebuild_places())

    def input_info(self, wanted: Collection[int] = (), donated: Collection[int] = ()) -> tuple[InputAliasInfo, ...]:
        """Return a record of each leaf, with what is known before the function is traced.

        `wanted` (differentiated) and `donated` are positions of leaves.
        """
        return tuple(
            InputAliasInfo(
                path,
                is_read=False,
                requires_grad=i in wanted,
                is_reference=is_reference(jax.typeof(leaf)),
                is_donated=i in donated,
                duplicate_of=self.duplicates.get(i),
            )
            for i, (path, leaf) in enumerate(zip(self._paths, self.leaves, strict=True))
        )

    def write(self, states: Mapping[int, Any]) -> None:
        """Write new arrays, by flat positions, to the caller's objects.

        Raises `CallError` for an object that the transformation under way must not write.
        """
        if self.live and states:
            arrays = jax.tree.unflatten(self.tree, [states.get(i, leaf) for i, leaf in enumerate(self.leaves)])
            written = jax.tree.unflatten(self.tree, [i in states for i in range(len(self.leaves))])
            objects.write(self.live, arrays, written, Paths(self.dynamic))

    @property
    def fixed_leaves(self) -> list[tuple[str, fixed.Fixed]]:
        """The leaves that are no arrays, with their paths."""
        return Paths(self.dynamic).nodes(self.rebuild_places(), fixed.is_fixed)

    @cached_property
    def in_modules(self) -> frozenset[int]:
        """Positions of the leaves that belong to Equinox modules."""
        return frozenset(fixed.inside_modules(self.rebuild_places()))

    @cached_property
    def in_objects(self) -> frozenset[int]:
        """Positions of the leaves that belong to objects which were taken apart."""
        return frozenset(objects.inside(self.rebuild_places()))

    def refuse_shared(self, positions: Collection[int]) -> None:
        """Raise `CallError` where an object of the arguments at `positions` has something in common with another."""
        nodes = objects.paths_of(self.rebuild_places(), Paths(self.dynamic)) if self.live else []
        starts = tuple(f"args[{n}]" for n in positions)
        for group in self.live:
            found = group.shared()
            if found is None or not any(nodes[k].startswith(starts) for k, _ in found):
                continue
            first, second = (nodes[k] + way for k, way in found)
            what = f"is the same as {first}, and one of them is differentiated: its gradient belongs to one argument."
            raise CallError(message(second, what, "Pass what they share once, or take it out of argnums."))

    def gradients(self, leaves: Sequence[Any]) -> list[Any]:
        """The gradients of all positional arguments in their trees, None for one that is static."""
        made = jax.tree.unflatten(self.tree, leaves)
        if self.has_taken:
            made, _ = objects.built(made)
        trees = list(fixed.gradients(made)[0] if self.has_fixed else made[0])
        for i, _ in self.static_args:
            trees.insert(i, None)
        return trees

    def rebuild_places(self) -> Any:
        """The dynamic arguments as a tree of positions."""
        return jax.tree.unflatten(self.tree, range(len(self.leaves)))

    @cached_property
    def contained(self) -> frozenset[int]:
        """Positions of the leaves that belong to a container, which stands for an array as a whole."""
        return containers.inside(self.tree)

    @cached_property
    def structure(self) -> frozenset[int]:
        """Positions of the leaves that a container's gradient has in common with it: the indices of a `BCOO`."""
        return containers.kept_structure(self.tree)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that are not static, in the caller's trees: by position, by keyword."""
        return jax.tree.unflatten(self.tree, self.leaves)

    def abstract(self) -> Bound:
        """The same call with shapes in the place of arrays, so that keeping it keeps no array alive."""
        return replace(self, leaves=tuple(map(struct, self.leaves)), live=())

    def copied(self) -> Bound:
        """The same call with numpy's arrays copied: their owner may write into his before a backward reads them.

        The copy is numpy's as well: JAX copies while the program goes on, and not at all where an array lies well.
        """
        if not any(isinstance(leaf, np.ndarray) for leaf in self.leaves):
            return self
        leaves = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in self.leaves]
        return replace(self, leaves=tuple(leaves[self.duplicates.get(i, i)] for i in range(len(leaves))))

    def signature(self) -> Any:
        """Everything about the call that could change what it traces to, as one hashable value."""
        return (self.tree, tuple(map(_key, self.leaves)), self.statics, tuple(self.duplicates.items()))

    @property
    def statics(self) -> tuple[tuple[str, type, Any], ...]:
        """Path, type and value of each static argument: `1`, `1.0` and `True` are equal but not the same."""
        named = [(f"args[{i}]", v) for i, v in self.static_args]
        named += [(f"kwargs[{k!r}]", v) for k, v in self.static_kwargs]
        return tuple((path, type(value), value) for path, value in named)

    def leaves_of(self, argnums: Sequence[int], argnames: Sequence[str]) -> frozenset[int]:
        """Positions of the leaves of some arguments."""
        found = {i for n in argnums if n < len(self.spans) for i in self.spans[n]}
        named = self.tree.children()[1]
        start = self.tree.num_leaves - named.num_leaves
        for key, child in zip(named.node_data()[1], named.children(), strict=True):
            found.update(range(start, start + child.num_leaves) if key in argnames else ())
            start += child.num_leaves
        return frozenset(found)

    @property
    def dynamic(self) -> list[int]:
        """Positions of the positional arguments that are not static."""
        static = {i for i, _ in self.static_args}
        return [i for i in range(len(self.spans)) if i not in static]

    @property
    def places(self) -> tuple[int, ...]:
        """For each leaf its position among `unique`."""
        return places(len(self.leaves), self.duplicates)

    @property
    def entering(self) -> tuple[int, ...]:
        """Positions of the leaves that enter a program: of an array that stands twice, the first."""
        return tuple(i for i in range(len(self.leaves)) if i not in self.duplicates)

    @property
    def unique(self) -> tuple[Any, ...]:
        """The leaves, each array once."""
        return tuple(self.leaves[i] for i in self.entering)


def bind(args: Sequence[Any], kwargs: dict[str, Any], statics: Statics) -> Bound:
    """Flatten a call.

    Objects that can be written are taken apart (`wrappers.objects`), leaves that are no arrays are fixed
    (`wrappers.fixed`); an integer is fixed inside somebody's transformation, where JAX would keep it as it is. Raises
    `TraceError` for a leaf that JAX cannot take, `CallError` for a call that no program can be made for.
    """
    dynamic = tuple(a for i, a in enumerate(args) if i not in statics.argnums)
    named = {k: v for k, v in kwargs.items() if k not in statics.argnames}
    paths = Paths([i for i in range(len(args)) if i not in statics.argnums])
    given, live = objects.taken_apart((dynamic, named))
    given, has_fixed = fixed.fixed(given, tracing(), paths)
    leaves, tree = jax.tree.flatten(given)
    gave = any(map(needs_opening, leaves))
    leaves = list(map(opened, leaves)) if gave else leaves
    bound = Bound(
        tuple(leaves),
        tree,
        tuple((i, a) for i, a in enumerate(args) if i in statics.argnums),
        tuple((k, v) for k, v in sorted(kwargs.items()) if k in statics.argnames),
        _spans(tree, len(args), statics),
        duplicates(leaves),
        gave,
        has_fixed,
        bool(live),
        live,
    )
    _refuse(bound)
    return bound


def _refuse(bound: Bound) -> None:
    """Raise `TraceError` or `CallError` for a call that no program can be made for."""
    for path, kind, value in bound.statics:
        if not _has_hash(value):
            cure = "Pass a tuple instead of a list, a frozen dataclass instead of a dict, or make it dynamic."
            raise CallError(message(path, f"is static but a {kind.__name__}, which has no hash.", cure))
    for i, leaf in enumerate(bound.leaves):
        if not is_array_like(leaf):
            cure = "Pass an array or a number, or name the argument in static_argnums or static_argnames."
            raise TraceError(message(bound.paths()[i], _what(leaf), cure))
    for i, j in bound.duplicates.items():
        if is_reference(jax.typeof(bound.leaves[i])):
            paths = bound.paths()
            cure = "Pass it once: a function that writes through two names could not tell which write comes last."
            raise CallError(message(paths[i], f"is the same jax.Ref as {paths[j]}.", cure))


def duplicates(leaves: Sequence[Any]) -> dict[int, int]:
    """Positions of arrays that stand at an earlier position already, each with the first one."""
    if len(set(map(id, leaves))) == len(leaves):
        return {}
    first: dict[int, int] = {}
    found = {i: first.setdefault(id(leaf), i) for i, leaf in enumerate(leaves) if _has_identity(leaf)}
    return {i: j for i, j in found.items() if i != j}


def places(count: int, duplicates: Mapping[int, int]) -> tuple[int, ...]:
    """For each of `count` leaves its position among those that are no duplicates."""
    known: dict[int, int] = {}
    return tuple(known.setdefault(duplicates.get(i, i), len(known)) for i in range(count))


def _has_identity(leaf: Any) -> bool:
    """Whether the same object twice means the same array twice: so for arrays and tracers, not for Python's numbers."""
    return isinstance(leaf, jax.Array | np.ndarray | jax.Ref) or is_tracer(leaf)


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _what(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray | np.generic):
        return f"has the numpy dtype {leaf.dtype}, which JAX does not have."
    return f"is a {type(leaf).__name__}, not an array."


def is_array_like(leaf: Any) -> bool:
    """Whether JAX can take a leaf as an array: arrays, scalars, keys, tracers, references, `ShapeDtypeStruct`."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex | jax.ShapeDtypeStruct):
        return not (isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "OSUMm")
    try:
        aval = jax.typeof(leaf)
    except TypeError:
        return False
    return is_reference(aval) or hasattr(aval, "shape")


def struct(leaf: Any) -> Any:
    """The type that a program is lowered for: shape, dtype, weak type, and where an array was put."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    aval = jax.typeof(leaf)
    if is_reference(aval):
        return leaf
    placed = not is_tracer(leaf) and isinstance(leaf, jax.Array) and leaf.committed
    weak = bool(getattr(aval, "weak_type", False))
    sharding = leaf.sharding if placed else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, sharding=sharding)


def _key(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    known = getattr(leaf, "aval", None)  # an array has its type at hand, and asking JAX takes ten times as long
    return jax.typeof(leaf) if known is None else known


def _spans(tree: Any, count: int, statics: Statics) -> tuple[range, ...]:
    """For each of `count` positional arguments the leaves that belong to it; none for a static one."""
    children = iter(tree.children()[0].children())
    spans, start = [], 0
    for i in range(count):
        size = 0 if i in statics.argnums else next(children).num_leaves
        spans.append(range(start, start + size))
        start += size
    return tuple(spans)
