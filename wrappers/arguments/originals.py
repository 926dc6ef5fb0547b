"""Refuse a function that writes to a copy of an object, or write its changes back.

A traced function gets new objects, built from the arrays of the caller's objects. Writes to objects that
`arguments.objects` knows are repeated on the caller's objects. Writes to any other registered pytree class would be
lost. (Dicts and lists are exempt: a function that calls `batch.pop("labels")` works on its own copy under `jax.jit` as
well.)

On a tape, too, a function runs on copies, which hold tracers. `Originals` writes the values of the tracers back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.partition.errors import CallError, TraceError, message
from jointcut.partition.program.jax.jaxprs import are_same
from jointcut.wrappers.arguments import objects
from jointcut.wrappers.arguments.adapters import Adapter, adapters
from jointcut.wrappers.arguments.paths import Paths


@dataclass(frozen=True)
class GivenCopies:
    """The copies that a function gets: the path, object, leaves and structure of each, before the function runs."""

    copies: tuple[tuple[str, Any, list[Any], Any], ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GivenCopies:
        """Return the copies among these arguments."""
        nodes = Paths(range(len(args))).nodes((tuple(args), dict(kwargs)), _is_copy)
        copies = [(path, node, *jax.tree.flatten(node)) for path, node in nodes]
        return cls(tuple(copy for copy in copies if are_same(copy[2], jax.tree.leaves(copy[1]))))

    def refuse_written(self) -> None:
        """Raise `TraceError` for the first copy that has changed."""
        for path, node, leaves, structure in self.copies:
            now, tree = jax.tree.flatten(node)
            if tree != structure or not are_same(leaves, now):
                what = f"is a {type(node).__name__}, which the function writes: that would be lost after the call."
                cure = "Return the new object, as aux with has_aux=True, and put it in the place of the old one."
                raise TraceError(message(path, what, cure))


@dataclass(frozen=True)
class _CopiedObjects:
    """The objects of one adapter, and their copies, with the form, arrays and tree of the copies at the start."""

    adapter: Adapter
    paths: tuple[str, ...]
    originals: tuple[Any, ...]
    copies: tuple[Any, ...]
    form: Any
    arrays: list[Any]
    tree: Any

    def written(self) -> tuple[Any, list[Any], Any] | None:
        """Return form, arrays and tree of the copies if the function wrote to them, else None."""
        form, parts = self.adapter.split(self.copies)
        arrays, tree = jax.tree.flatten(parts)
        is_same = form == self.form and tree == self.tree and are_same(arrays, self.arrays)
        return None if is_same else (form, arrays, tree)

    def write(self, value_of: Callable[[Any], Any]) -> None:
        """Write the changes of the copies to the objects."""
        if (written := self.written()) is None:
            return
        form, arrays, tree = written
        if form != self.form or tree != self.tree:
            what = "gets or loses parts in the function, and a tape writes back arrays alone."
            raise CallError(message(self._place(), what, "Use aot.function, or make the parts before the call."))
        if self.adapter.split(self.originals)[0] != form:
            what = "is written by the function, and holds a variable twice: on a tape these are two."
            raise CallError(message(self._place(), what, "Use aot.function, which takes them for one."))
        is_new = [new is not old for new, old in zip(arrays, self.arrays, strict=True)]
        values = [value_of(array) for array in arrays]
        self.adapter.update(self.originals, jax.tree.unflatten(tree, values), jax.tree.unflatten(tree, is_new))

    def _place(self) -> str:
        return " or ".join(self.paths)


@dataclass(frozen=True)
class Originals:
    """The writable objects of a call whose function runs on copies of them."""

    groups: tuple[_CopiedObjects, ...]

    @classmethod
    def of(cls, call: tuple[Any, Any], copied: tuple[Any, Any]) -> Originals:
        """Return the objects in a call `(args, kwargs)`, with the objects in its copy."""
        groups = []
        for adapter in adapters():
            named, copies = (Paths(range(len(c[0]))).nodes(c, adapter.owns) for c in (call, copied))
            if named:
                held = tuple(copy for _, copy in copies)
                paths, originals = zip(*named, strict=True)
                form, parts = adapter.split(held)
                groups.append(_CopiedObjects(adapter, paths, originals, held, form, *jax.tree.flatten(parts)))
        return cls(tuple(groups))

    @property
    def written(self) -> tuple[str, ...]:
        """The paths of the objects of each adapter whose copies the function wrote to."""
        return tuple(path for group in self.groups if group.written() for path in group.paths)

    def write(self, value_of: Callable[[Any], Any]) -> None:
        """Write the changes of the copies to the objects, each array through `value_of`.

        Raises `CallError`, and writes nothing, if the objects cannot take the changes.
        """
        for group in self.groups:
            group.write(value_of)


def _is_copy(x: Any) -> bool:
    """Whether JAX rebuilds an object that could be written, and that `objects` does not know."""
    if x is None or isinstance(x, Mapping | list | tuple) or objects.is_known(x):
        return False
    return not hasattr(x, "dtype") and jax.tree_util.default_registry.is_node(type(x))
