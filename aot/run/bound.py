"""Bind the calls of one function, each once, and find what was made for calls like it.

What binding finds out depends on the tree of a call and on the types of its leaves alone, unless an array stands twice.
So a call of arrays like one before is flattened, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import jax

from jointcut.partition.program import jaxprs
from jointcut.wrappers.arguments.tree import Bound, Statics, bind, duplicates
from jointcut.wrappers.table import Table

KEPT_SIGNATURES = 256

#: A program that gives the leaves of a result as they are, the arrays that come first, and the tree of the result.
Ready = tuple[Callable[..., Sequence[Any]], tuple[Any, ...], Any]

_AVAL = attrgetter("aval")


class Signature:
    """One signature of a function, in one state of JAX's configuration, and what was `made` for it, by name."""

    def __init__(self, bound: Bound) -> None:
        """Begin with nothing made for the calls of which `bound` is one."""
        self.bound = bound.abstract()
        self.made: Table[Any] = Table()


@dataclass(frozen=True)
class _Latest:
    """Calls like the latest one.

    Attributes:
        tree, classes: its tree, and the classes of its leaves.
        context, statics: JAX's settings, and its static arguments.
        type_of: tells the type of a leaf.
        ready: what runs such a call, by the types of its leaves.
    """

    tree: Any
    classes: tuple[type, ...]
    context: Any
    statics: Any
    type_of: Callable[[Any], Any] = field(compare=False)
    ready: dict[tuple[Any, ...], Ready] = field(compare=False)


class Binder:
    """The calls of one function: their signatures, and how to bind them."""

    def __init__(self, statics: Statics) -> None:
        """Begin with no signature."""
        self.statics = statics
        self.signatures: Table[Signature] = Table(KEPT_SIGNATURES)
        self._plain: Table[Signature] = Table(KEPT_SIGNATURES)
        self._latest: dict[str, _Latest] = {}
        self._some_static = bool(statics.argnums or statics.argnames)

    def ready(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Ready, list[Any]] | None:
        """What runs a call of arrays like the latest one, and its leaves; None where it has to be looked at."""
        latest = self._latest.get(name)
        if latest is None or jaxprs.tracing():
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
        if ready is None or tuple(map(type, leaves)) != latest.classes or jaxprs.trace_context() != latest.context:
            return None
        return ready, leaves

    def keep(self, name: str, bound: Bound, ready: Ready | None) -> None:
        """Run calls like this one so, as long as none of another tree comes between."""
        if ready is None or not bound.is_plain or any(isinstance(leaf, jax.Ref) for leaf in bound.leaves):
            return  # a reference that stands twice is refused
        type_of = _AVAL if all(isinstance(leaf, jax.Array) for leaf in bound.leaves) else _type_of
        statics = _told_apart((*bound.static_args, *bound.static_kwargs))
        made = _Latest(bound.tree, tuple(map(type, bound.leaves)), jaxprs.trace_context(), statics, type_of, {})
        latest = self._latest.get(name)
        if latest is None or latest != made or len(latest.ready) >= KEPT_SIGNATURES:
            latest = self._latest[name] = made
        latest.ready[tuple(map(type_of, bound.leaves))] = ready

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Signature, Bound]:
        """A call flattened, and its signature; raises as `bind` does."""
        key, leaves = None, []
        if not jaxprs.tracing():
            dynamic, named, statics = self._parted(args, kwargs) if self._some_static else (args, kwargs, ())
            leaves, tree = jax.tree.flatten((dynamic, named))
            try:
                types = *map(type, leaves), *map(_type_of, leaves)
                key = tree, types, jaxprs.trace_context(), len(args), statics
                known = self._plain.get(key)
            except (TypeError, ValueError):  # something has no hash, or is no array: binding tells what
                key = known = None
            if known is not None and not duplicates(leaves):
                return known, _holding(known.bound, leaves)
        bound = bind(args, kwargs, self.statics)
        signature = self.signatures.of((bound.signature(), jaxprs.trace_context()), lambda: Signature(bound))
        if key is not None and bound.is_plain:
            self._plain.of(key, lambda: signature)
        return signature, bound

    def _parted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The arguments of a call that are not static, by position and by name, and those that are."""
        nums, names = self.statics.argnums, self.statics.argnames
        dynamic = tuple(a for i, a in enumerate(args) if i not in nums)
        given = [(i, a) for i, a in enumerate(args) if i in nums]
        given += sorted(((name, a) for name, a in kwargs.items() if name in names), key=lambda pair: pair[0])
        return dynamic, {name: a for name, a in kwargs.items() if name not in names}, _told_apart(given)


def _told_apart(given: Iterable[tuple[Any, Any]]) -> tuple[Any, ...]:
    """Static arguments with their types: `1`, `1.0` and `True` are equal but not the same."""
    return tuple((at, type(value), value) for at, value in given)


def _type_of(leaf: Any) -> Any:
    known = getattr(leaf, "aval", None)  # an array has its type at hand, and asking JAX for it takes ten times as long
    return jax.typeof(leaf) if known is None else known


def _holding(bound: Bound, leaves: Sequence[Any]) -> Bound:
    """The same call with other arrays in place; what is known of its tree is kept."""
    made = object.__new__(Bound)
    made.__dict__.update(bound.__dict__, leaves=tuple(leaves))
    return made
