"""Hold the functions that are called with cotangents, and check what they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from jointcut.aot.hooks.looks import arrays_read, can_be_traced, described, identity, reading
from jointcut.partition.errors import CallError, message
from jointcut.partition.program import jaxprs
from jointcut.wrappers.table import Table

#: The kinds of hooks, as messages name them.
KINDS = ("on_cotangent", "pre_hook", "post_hook", "post_accumulate", "unpack")

#: What was found of functions for some types, with the function, since its key is made of the ids of what it reads.
_LOOKS: Table[tuple[bool, Any]] = Table(1024)


class Hook:
    """A hook that can be removed: pass it instead of the function, and call `remove`.

    In `aot.function` it is always called back, so that `remove` has an effect on compiled programs too.

    Attributes:
        function: what is called.
        removed: whether it was removed; a removed hook is not called any more.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Make a hook of a function; raises `CallError` if it cannot be called."""
        if not callable(function):
            what = f"was given {type(function).__name__}, which cannot be called."
            raise CallError(message("aot.Hook", what, "Give a function of the cotangent."))
        self.function = function
        self.removed = False

    def __repr__(self) -> str:
        """`<aot.Hook clip at train.py:12>`."""
        return f"<aot.Hook {described(self.function)}{', removed' * self.removed}>"

    def remove(self) -> None:
        """Do not call it any more."""
        self.removed = True

    @cached_property
    def key(self) -> Any:
        """Equal for functions with the same code that read the same values, and arrays of the same types."""
        return identity(self.function)


@dataclass(frozen=True)
class Place:
    """Where a hook is called: with the values `types`, flat, in `trees`, one for each argument of the hook.

    Attributes:
        kind: one of `KINDS`.
        hook: what is called.
        types: of its flat arguments.
        trees: of its arguments.
        returns: the types of what it returns, flat.
        out_tree: the tree of what it returns.
        where: what it is set on, in words.
        outputs: the outputs of the node whose cotangents are the first arguments.
        partner: the node whose cotangents are the other arguments.
    """

    kind: str
    hook: Hook
    types: tuple[Any, ...]
    trees: tuple[Any, ...]
    returns: tuple[Any, ...]
    out_tree: Any
    where: str = field(compare=False)
    outputs: tuple[int, ...] = ()
    partner: Any = field(default=None, compare=False, repr=False)

    @property
    def named(self) -> str:
        """The hook as messages name it."""
        return described(self.hook.function)

    @cached_property
    def is_traced(self) -> bool:
        """Whether the hook is a part of the program; otherwise the program is left for it, and it is called back."""
        if len(self.types) != sum(tree.num_leaves for tree in self.trees):  # what was packed is not made of arrays
            return False
        function = self.hook.function

        def look() -> tuple[bool, Any]:
            structs = [jaxprs.struct(aval) for aval in self.types]
            read = [jaxprs.struct(jax.typeof(x)) for x in self.read]
            return can_be_traced(function, self.arguments(structs), read), function

        return _LOOKS.of((self.hook.key, self.types, self.trees), look)[0]

    @property
    def read(self) -> tuple[Any, ...]:
        """The arrays that the hook closes over."""
        return arrays_read(self.hook.function)

    @cached_property
    def key(self) -> Any:
        """What the program depends on: the function if it is traced, and the place."""
        function = self.hook.key if self.is_traced else None
        return self.kind, function, self.outputs, self.types, self.trees, self.returns

    def arguments(self, flat: Sequence[Any]) -> list[Any]:
        """The arguments of the hook, in trees."""
        arguments, start = [], 0
        for tree in self.trees:
            arguments.append(jax.tree.unflatten(tree, flat[start : start + tree.num_leaves]))
            start += tree.num_leaves
        return arguments

    def __call__(self, flat: Sequence[Any], read: Sequence[Any] = ()) -> list[Any]:
        """Call the hook, and return the values that take the place of the first ones.

        `read` are arrays to read instead of those that it closes over.

        Raises `CallError` if it returns other shapes or dtypes.
        """
        given = list(flat[: len(self.returns)])
        if self.hook.removed and self.kind != "unpack":
            return given
        result = reading(self.hook.function, read)(*self.arguments(flat))
        return given if result is None and self.kind != "unpack" else self._checked(result)

    def _checked(self, result: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(result)
        if tree != self.out_tree:
            as_given = " in the tree that it is given" * (len(self.returns) > 1)
            self._refuse(_shown(result), _types(self.returns) + as_given)
        for leaf, aval in zip(leaves, self.returns, strict=True):
            is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
            if not is_array or leaf.shape != aval.shape or leaf.dtype != aval.dtype:
                self._refuse(_shown(leaf), aval.str_short())
        return leaves

    def _refuse(self, returned: str, needed: str) -> None:
        what = f"returned {returned}, but is set ({self.kind}) on {self.where}."
        cure = f"Return {needed}{'' if self.kind == 'unpack' else ', or None'}."
        raise CallError(message(f"The hook {self.named}", what, cure))


def hook_of(function: Any) -> Hook:
    """The hook itself, or a hook of a function."""
    return function if isinstance(function, Hook) else Hook(function)


def _shown(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return jax.typeof(value).str_short()
    return f"a {type(value).__name__}"


def _types(avals: Sequence[Any]) -> str:
    return ", ".join(aval.str_short() for aval in avals)
