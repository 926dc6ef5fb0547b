"""Flatten one call, and build it again.

`bind` turns the arguments of a call into a flat list of arrays, a `Bound`. Static arguments are kept separately. An
argument that no program can take is refused with its path.
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
from jointcut.partition.program.jax.abstract import is_reference
from jointcut.partition.program.jax.meshes import sharding_given
from jointcut.partition.program.jax.runtime import is_tracer, tracing
from jointcut.wrappers.arguments import containers, fixed, objects
from jointcut.wrappers.arguments.containers import needs_opening, opened
from jointcut.wrappers.arguments.objects import LiveObjects
from jointcut.wrappers.arguments.paths import Paths
from jointcut.wrappers.metadata.schemas import InputAliasInfo, plain_meta


@dataclass(frozen=True)
class Statics:
    """The arguments that a program is specialised for, by position and by keyword."""

    argnums: frozenset[int] = frozenset()
    argnames: frozenset[str] = frozenset()
    count: int | None = None  # number of positional parameters, if known
    refuse: Callable[[Sequence[Any]], None] | None = field(
        default=None, compare=False, repr=False
    )  # raises `CallError`

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
    duplicates: Mapping[int, int] = field(default_factory=dict)  # maps a leaf to the first leaf of the same array
    has_objects: bool = field(default=False, compare=False)  # whether leaves were objects with `__jax_array__`
    has_fixed: bool = field(default=False, compare=False)  # whether the tree holds leaves that are not arrays
    has_taken: bool = field(default=False, compare=False)  # whether the tree holds objects that were taken apart
    live: tuple[LiveObjects, ...] = field(default=(), compare=False, repr=False)  # the caller's objects, taken apart

    def rebuilt(self, leaves: Iterable[Any]) -> tuple[tuple[list[Any], dict[str, Any]], tuple[LiveObjects, ...]]:
        """Return the arguments of the call, with other leaves, and the new writable objects among them."""
        call, live = self.described.built(list(leaves)), ()
        if self.has_taken:
            call, live = objects.built(call)
        args, kwargs = fixed.released(call) if self.has_fixed else call
        args = list(args)
        for i, value in self.static_args:
            args.insert(i, value)
        return (args, {**kwargs, **dict(self.static_kwargs)}), live

    @property
    def is_plain(self) -> bool:
        """Whether `jax.jit` could take the call unchanged: it has only arrays, each once."""
        return not (self.has_objects or self.holds_more or self.duplicates)

    @property
    def holds_more(self) -> bool:
        """Whether its trees hold anything but arrays."""
        return self.has_fixed or self.has_taken

    def paths(self) -> list[str]:
        """Return the path of each leaf: `args[0]['w']`, `kwargs['mask']`."""
        return list(self._paths)

    @cached_property
    def _paths(self) -> list[str]:
        return Paths(self.dynamic).leaves(self.rebuild_places())

    def input_info(self, wanted: Collection[int] = (), donated: Collection[int] = ()) -> tuple[InputAliasInfo, ...]:
        """Return a record of each leaf, with the facts known before the function is traced.

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
        """Write new arrays to the caller's objects; `states` maps flat positions to arrays.

        Raises `CallError` for an object that must not be written inside the current transformation.
        """
        if self.live and states:
            arrays = jax.tree.unflatten(self.tree, [states.get(i, leaf) for i, leaf in enumerate(self.leaves)])
            written = jax.tree.unflatten(self.tree, [i in states for i in range(len(self.leaves))])
            objects.write(self.live, arrays, written, Paths(self.dynamic))

    def refill(self, form: objects.Grown, arrays: Sequence[Any]) -> None:
        """Fill the caller's objects with their new structure and arrays; raises like `write`."""
        objects.refill(self.live, self.rebuild_places(), form, arrays, Paths(self.dynamic))

    @property
    def fixed_leaves(self) -> list[tuple[str, fixed.Fixed]]:
        """The leaves that are not arrays, with their paths."""
        return Paths(self.dynamic).nodes(self.rebuild_places(), fixed.is_fixed)

    @cached_property
    def in_modules(self) -> frozenset[int]:
        """Positions of the leaves in Equinox modules."""
        return frozenset(fixed.inside_modules(self.rebuild_places()))

    @cached_property
    def in_objects(self) -> frozenset[int]:
        """Positions of the leaves in objects that were taken apart."""
        return frozenset(objects.inside(self.rebuild_places()))

    def refuse_shared(self, positions: Collection[int]) -> None:
        """Raise `CallError` if an object of the arguments at `positions` shares a variable with another."""
        nodes = objects.paths_of(self.rebuild_places(), Paths(self.dynamic)) if self.live else []
        starts = tuple(f"args[{n}]" for n in positions)
        for group in self.live:
            shared = group.shared()
            if shared is None or not any(nodes[k].startswith(starts) for k, _ in shared):
                continue
            first, second = (nodes[k] + way for k, way in shared)
            what = f"is the same as {first}, and one of them is differentiated: its gradient belongs to one argument."
            raise CallError(message(second, what, "Pass what they share once, or take it out of argnums."))

    def gradients(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the gradients of all positional arguments in their trees; None for a static argument."""
        call = jax.tree.unflatten(self.tree, leaves)
        if self.has_taken:
            call, _ = objects.built(call)
        trees = list(fixed.gradients(call)[0] if self.has_fixed else call[0])
        for i, _ in self.static_args:
            trees.insert(i, None)
        return trees

    def rebuild_places(self) -> Any:
        """Return the arguments that are not static, with each leaf replaced by its position."""
        return jax.tree.unflatten(self.tree, range(len(self.leaves)))

    @cached_property
    def described(self) -> containers.Described:
        """The tree with a record of each plain array and container."""
        leaves = [plain_meta(i, jax.typeof(leaf)) for i, leaf in enumerate(self.leaves)]
        return containers.Described.of(self.tree, leaves)

    @property
    def contained(self) -> frozenset[int]:
        """Positions of the leaves in containers, which act as arrays."""
        return self.described.inside

    @property
    def structure(self) -> frozenset[int]:
        """Positions of the leaves that are the same in a container and its gradient, as the indices of a `BCOO`."""
        return self.described.kept

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that are not static, in the caller's trees: positional, then keyword."""
        return jax.tree.unflatten(self.tree, self.leaves)

    def abstract(self) -> Bound:
        """Return the same call with shapes instead of arrays, so that it keeps no array alive."""
        return replace(self, leaves=tuple(map(struct, self.leaves)), live=())

    def copied(self) -> Bound:
        """Return the same call with copies of NumPy arrays, since their owner may write them before the backward.

        The copies are NumPy arrays as well: JAX copies asynchronously, and does not copy an aligned array at all.
        """
        if not any(isinstance(leaf, np.ndarray) for leaf in self.leaves):
            return self
        leaves = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in self.leaves]
        return replace(self, leaves=tuple(leaves[self.duplicates.get(i, i)] for i in range(len(leaves))))

    def signature(self) -> Any:
        """Everything about the call that affects its trace, as one hashable value."""
        return (self.tree, tuple(map(_key, self.leaves)), self.statics, tuple(self.duplicates.items()))

    @property
    def statics(self) -> tuple[tuple[str, type, Any], ...]:
        """Path, type and value of each static argument; the type counts, since `1`, `1.0` and `True` are equal."""
        named = [(f"args[{i}]", v) for i, v in self.static_args]
        named += [(f"kwargs[{k!r}]", v) for k, v in self.static_kwargs]
        return tuple((path, type(value), value) for path, value in named)

    def leaves_of(self, argnums: Sequence[int], argnames: Sequence[str]) -> frozenset[int]:
        """Return the positions of the leaves of these arguments."""
        positions = {i for n in argnums if n < len(self.spans) for i in self.spans[n]}
        named = self.tree.children()[1]
        start = self.tree.num_leaves - named.num_leaves
        for key, child in zip(named.node_data()[1], named.children(), strict=True):
            positions.update(range(start, start + child.num_leaves) if key in argnames else ())
            start += child.num_leaves
        return frozenset(positions)

    @property
    def dynamic(self) -> list[int]:
        """Positions of the positional arguments that are not static."""
        static = {i for i, _ in self.static_args}
        return [i for i in range(len(self.spans)) if i not in static]

    @property
    def places(self) -> tuple[int, ...]:
        """The position of each leaf among `unique`."""
        return places(len(self.leaves), self.duplicates)

    @property
    def entering(self) -> tuple[int, ...]:
        """Positions of the leaves that enter a program: the first of each array."""
        return tuple(i for i in range(len(self.leaves)) if i not in self.duplicates)

    @property
    def unique(self) -> tuple[Any, ...]:
        """The leaves, each array once."""
        return tuple(self.leaves[i] for i in self.entering)


def bind(args: Sequence[Any], kwargs: dict[str, Any], statics: Statics) -> Bound:
    """Flatten a call.

    Objects that can be written are taken apart (`arguments.objects`), and leaves that are not arrays are fixed
    (`arguments.fixed`). An integer is fixed inside a transformation, where JAX would not make it an array. Raises
    `TraceError` for a leaf that JAX cannot take, and `CallError` for a call that no program can be made for.
    """
    if statics.refuse is not None:
        statics.refuse(args)
    dynamic = tuple(a for i, a in enumerate(args) if i not in statics.argnums)
    named = {k: v for k, v in kwargs.items() if k not in statics.argnames}
    paths = Paths([i for i in range(len(args)) if i not in statics.argnums])
    call, live = objects.taken_apart((dynamic, named))
    call, has_fixed = fixed.fixed(call, tracing(), paths)
    leaves, tree = jax.tree.flatten(call)
    has_objects = any(map(needs_opening, leaves))
    leaves = list(map(opened, leaves)) if has_objects else leaves
    bound = Bound(
        tuple(leaves),
        tree,
        tuple((i, a) for i, a in enumerate(args) if i in statics.argnums),
        tuple((k, v) for k, v in sorted(kwargs.items()) if k in statics.argnames),
        _spans(tree, len(args), statics),
        duplicates(leaves),
        has_objects,
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
    """Map the positions of repeated arrays to the position of the first occurrence."""
    if len(set(map(id, leaves))) == len(leaves):
        return {}
    first: dict[int, int] = {}
    firsts = {i: first.setdefault(id(leaf), i) for i, leaf in enumerate(leaves) if _has_identity(leaf)}
    return {i: j for i, j in firsts.items() if i != j}


def places(count: int, duplicates: Mapping[int, int]) -> tuple[int, ...]:
    """Return, for each of `count` leaves, its position among the distinct leaves."""
    known: dict[int, int] = {}
    return tuple(known.setdefault(duplicates.get(i, i), len(known)) for i in range(count))


def _has_identity(leaf: Any) -> bool:
    """Whether a leaf is an array with an identity; false for Python numbers."""
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
    """Return the type that a program is lowered for: shape, dtype, weak type, and the sharding of a placed array.

    A traced value lies as the argument of the user's `jax.jit` that it is.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    aval = jax.typeof(leaf)
    if is_reference(aval):
        return leaf
    placed = not is_tracer(leaf) and isinstance(leaf, jax.Array) and leaf.committed
    weak = bool(getattr(aval, "weak_type", False))
    sharding = leaf.sharding if placed else sharding_given(leaf) if is_tracer(leaf) else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, sharding=sharding)


def _key(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    known = getattr(leaf, "aval", None)  # asking JAX takes ten times as long
    return jax.typeof(leaf) if known is None else known


def _spans(tree: Any, count: int, statics: Statics) -> tuple[range, ...]:
    """Return the positions of the leaves of each of `count` positional arguments; a static argument has none."""
    children = iter(tree.children()[0].children())
    spans, start = [], 0
    for i in range(count):
        size = 0 if i in statics.argnums else next(children).num_leaves
        spans.append(range(start, start + size))
        start += size
    return tuple(spans)
