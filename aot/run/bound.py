"""Bind calls to signatures, and find the program of an earlier call of the same signature.

The result of binding depends only on the tree of a call and the types of its leaves, unless an array is passed twice.
So a call like an earlier one is only flattened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import jax

from jointcut.partition.program.jax import runtime
from jointcut.partition.program.jax.meshes import NO_MESH, Spec, heard, is_on_mesh, sharding_given, spec_of
from jointcut.wrappers.arguments.given_up import is_given_up
from jointcut.wrappers.arguments.tree import Bound, Statics, bind, duplicates
from jointcut.wrappers.table import Table

KEPT_SIGNATURES = 256

#: A program that returns the leaves of a result, its leading arguments (constants), and the tree of the result.
Ready = tuple[Callable[..., Sequence[Any]], tuple[Any, ...], Any]

_AVAL = attrgetter("aval")
_PLACED = attrgetter("aval", "sharding")


#: Is told of an argument that lies otherwise than where its plan was made: its path, how it lies, and how it lay.
Otherwise = Callable[[str, Spec, Spec], None]


@dataclass
class Planned:
    """Whether a plan was made for a signature."""

    is_made: bool = False


class Signature:
    """One signature of a function under one configuration of JAX.

    `made` has its programs and records, by name, and `planned` tells whether they include a plan.
    """

    def __init__(self, bound: Bound) -> None:
        """Start with an empty table; `bound` is a call of the signature."""
        self.bound = bound.abstract()
        self.made: Table[Any] = Table()
        self.planned = Planned()


@dataclass(frozen=True)
class _Latest:
    """The latest call, and programs for calls with the same tree.

    Attributes:
        tree: the call's tree.
        classes: the classes of its leaves; None if all are JAX's arrays, which alone have the types in `ready`.
        context, statics: JAX's settings, and the call's static arguments.
        type_of: a function from a leaf to its type.
        ready: programs, by the types of the leaves.
    """

    tree: Any
    classes: tuple[type, ...] | None
    context: Any
    statics: Any
    type_of: Callable[[Any], Any] = field(compare=False)
    ready: dict[tuple[Any, ...], Ready] = field(compare=False)


class Binder:
    """Binds the calls of one function, and holds their signatures."""

    def __init__(self, statics: Statics, otherwise: Otherwise | None = None) -> None:
        """Start without signatures; `otherwise` is told where a plan is used for other shardings."""
        self.statics, self._otherwise = statics, otherwise
        self.signatures: Table[Signature] = Table(KEPT_SIGNATURES)
        self._plain: Table[Signature] = Table(KEPT_SIGNATURES)
        self._latest: dict[str, _Latest] = {}
        self._some_static = bool(statics.argnums or statics.argnames)

    def ready(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Ready, list[Any]] | None:
        """Return the program for a call like the latest one, and the call's leaves; None if it must be bound."""
        latest = self._latest.get(name)
        if latest is None or runtime.tracing():
            return None
        if self._some_static:
            args, kwargs, statics = self._parted(args, kwargs)
            if statics != latest.statics:
                return None
        try:
            leaves = latest.tree.flatten_up_to((args, kwargs))
            types = tuple(map(latest.type_of, leaves))
        except (ValueError, AttributeError, TypeError):  # another tree, or other leaves
            return None
        ready = latest.ready.get(types)
        if ready is None or runtime.trace_context() != latest.context:
            return None
        if latest.classes is not None and latest.classes != tuple(map(type, leaves)):
            return None
        return ready, leaves

    def ran(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """Run the program for a call like the latest one, and return its result in a tuple; None to bind it."""
        if (ready := self.ready(name, args, kwargs)) is None:
            return None
        (program, consts, tree), leaves = ready
        try:
            return (tree.unflatten(program(*consts, *leaves)),)
        except (RuntimeError, ValueError):
            if any(map(is_given_up, leaves)):
                return None  # where the call is bound it is refused
            raise

    def keep(self, name: str, bound: Bound, ready: Ready | None) -> None:
        """Use a program for the next calls like this one, until one with another tree comes."""
        if ready is None or not bound.is_plain or any(isinstance(leaf, jax.Ref) for leaf in bound.leaves):
            return  # binding must check references: one passed twice is refused
        of_jax = all(isinstance(leaf, jax.Array) for leaf in bound.leaves)
        type_of, classes = (_AVAL, None) if of_jax else (_type_of, tuple(map(type, bound.leaves)))
        if any(is_on_mesh(_type_of(leaf)) for leaf in bound.leaves):  # on automatic axes types do not tell how it lies
            type_of = _PLACED if of_jax else _placed_of
        statics = _typed((*bound.static_args, *bound.static_kwargs))
        this = _Latest(bound.tree, classes, runtime.trace_context(), statics, type_of, {})
        latest = self._latest.get(name)
        if latest is None or latest != this or len(latest.ready) >= KEPT_SIGNATURES:
            latest = self._latest[name] = this
        latest.ready[tuple(map(type_of, bound.leaves))] = ready

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Signature, Bound]:
        """The signature of a call, and the call flattened; raises as `bind` does."""
        key, leaves = None, []
        if not runtime.tracing():
            dynamic, named, statics = self._parted(args, kwargs) if self._some_static else (args, kwargs, ())
            leaves, tree = jax.tree.flatten((dynamic, named))
            try:
                types = *map(type, leaves), *map(_type_of, leaves)
                key = tree, types, runtime.trace_context(), len(args), statics
                known = self._plain.get(key)
                if known is None and (lying := _lying(leaves)):  # asked last, so that other calls are as quick as ever
                    key = key, lying
                    known = self._plain.get(key)
            except (TypeError, ValueError):  # unhashable, or not an array: `bind` raises the proper error
                key = known = None
            if known is not None and not duplicates(leaves):
                return known, _with_leaves(known.bound, leaves)
        bound = bind(args, kwargs, self.statics)
        whole = bound.signature(), runtime.trace_context(), _lying(bound.leaves)
        signature = self.signatures.of(whole, lambda: Signature(bound))
        if runtime.tracing() and self._otherwise is not None:
            bound = _heard(bound, signature.planned, self._otherwise)
        if key is not None and bound.is_plain:
            self._plain.of(key, lambda: signature)
        return signature, bound

    def _parted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return the dynamic arguments of a call, by position and by name, and the static ones."""
        nums, names = self.statics.argnums, self.statics.argnames
        dynamic = tuple(a for i, a in enumerate(args) if i not in nums)
        statics = [(i, a) for i, a in enumerate(args) if i in nums]
        statics += sorted(((name, a) for name, a in kwargs.items() if name in names), key=lambda pair: pair[0])
        return dynamic, {name: a for name, a in kwargs.items() if name not in names}, _typed(statics)


def _typed(statics: Iterable[tuple[Any, Any]]) -> tuple[Any, ...]:
    """Return static arguments with their types, since `1`, `1.0` and `True` are equal."""
    return tuple((key, type(value), value) for key, value in statics)


def _type_of(leaf: Any) -> Any:
    aval = getattr(leaf, "aval", None)  # ten times faster than jax.typeof
    return jax.typeof(leaf) if aval is None else aval


def _placed_of(leaf: Any) -> Any:
    return _type_of(leaf), getattr(leaf, "sharding", None)


def _lying(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """How arrays lie on meshes; empty where none does. Traced ones lie as the arguments of the user's `jax.jit`."""
    if runtime.tracing():
        return tuple(map(sharding_given, leaves))
    found = list[tuple[int, Any]]()
    for i, leaf in enumerate(leaves):
        placed = getattr(getattr(leaf, "aval", leaf), "sharding", None)
        if placed is not None and getattr(placed, "mesh", NO_MESH) is not NO_MESH and (at := spec_of(leaf)) is not None:
            found.append((i, at[1]))  # the types have the mesh
    return tuple(found)


def _heard(bound: Bound, planned: Planned, otherwise: Otherwise) -> Bound:
    """Return a call of which `otherwise` is told if JAX runs its trace for arguments that lie otherwise."""
    if not any(sharding_given(leaf) for leaf in bound.leaves):
        return bound

    def told(path: str) -> Callable[[Spec, Spec], None]:
        return lambda now, before: otherwise(path, now, before) if planned.is_made else None

    leaves = {id(leaf): heard(leaf, told(path)) for path, leaf in zip(bound.paths(), bound.leaves, strict=True)}
    return _with_leaves(bound, [leaves[id(leaf)] for leaf in bound.leaves])


def _with_leaves(bound: Bound, leaves: Sequence[Any]) -> Bound:
    """Return a copy of a call with other leaves, including all cached properties."""
    copy = object.__new__(Bound)
    copy.__dict__.update(bound.__dict__, leaves=tuple(leaves))
    return copy
