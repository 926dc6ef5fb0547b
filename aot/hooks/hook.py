"""Hold the functions that are called with cotangents, and check their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from jointcut.aot.hooks.closures import arrays_read, described, identity, reading, works_on_tracers
from jointcut.partition.errors import CallError, message
from jointcut.partition.program.jax import abstract
from jointcut.wrappers.table import Table

#: The kind of a derivative rule that is called back: its partner is the node itself.
ISLAND = "island"

#: The kinds of hooks, as messages name them.
KINDS = ("on_cotangent", "pre_hook", "post_hook", "post_accumulate", "unpack", ISLAND)


class Hook:
    """A hook that can be removed: pass it instead of the function, and call `remove`.

    In `aot.function` it is always called back, so that `remove` has an effect on compiled programs too.

    Attributes:
        function: the function that is called.
        traced: whether it is part of the program (see `aot.on_cotangent`), as a function of `jax.jit` always is.
        removed: whether it was removed; a removed hook is not called any more.
        can_be_removed: whether somebody may hold it and remove it; false for a hook made from a plain function.
    """

    def __init__(self, function: Callable[..., Any], *, traced: bool = False) -> None:
        """Make a hook of a function; raises `CallError` if it cannot be called."""
        if not callable(function):
            what = f"was given {type(function).__name__}, which cannot be called."
            raise CallError(message("aot.Hook", what, "Give a function of the cotangent."))
        self.function = function
        self.traced = traced or isinstance(function, jax.stages.Wrapped)
        self.removed = False
        self.can_be_removed = True

    def __repr__(self) -> str:
        """`<aot.Hook clip at train.py:12>`."""
        return f"<aot.Hook {described(self.function)}{', removed' * self.removed}>"

    def remove(self) -> None:
        """Call the hook no more."""
        self.removed = True


#: The name of the error of Flax for an object that is written under a transformation, and was made outside of it.
OF_TRACES = "TraceContextError"
_CURE = (
    "It is part of the compiled backward: it sees arrays that have no numbers yet, and cannot write to objects. "
    "Leave out traced=True and jax.jit, and it is called back with real arrays."
)

#: Whether hooks work with their floats traced, by code and types.
_LIFTS: Table[bool] = Table(1024)


@dataclass(frozen=True)
class Place:
    """A place where a hook is called: with the values `types`, flat, in `trees`, one for each argument of the hook.

    Attributes:
        kind: one of `KINDS`.
        hook: the hook that is called.
        types: of its flat arguments.
        trees: of its arguments.
        returns: the types of its result, flat.
        out_tree: the tree of its result.
        where: the object that it is set on, in words.
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

    @property
    def words(self) -> str:
        """The hook in a sentence: `the hook clip at train.py:12`; an island is a rule."""
        return f"the {'rule' if self.kind == ISLAND else 'hook'} {self.named}"

    @property
    def is_traced(self) -> bool:
        """Whether the hook is a part of the program; otherwise the program is left for it, and it is called back."""
        are_arrays = len(self.types) == sum(tree.num_leaves for tree in self.trees)  # packed values: not always
        return self.hook.traced and are_arrays

    @property
    def read(self) -> tuple[Any, ...]:
        """The arrays that the hook closes over, and its floats where they are inputs of the program, too."""
        return arrays_read(self.hook.function, self.lifts)

    @cached_property
    def lifts(self) -> bool:
        """Whether the floats that a traced hook closes over are inputs of the program."""
        if not self.is_traced:
            return False
        function, structs = self.hook.function, [abstract.struct(aval) for aval in self.types]
        held = tuple(map(type, arrays_read(function, True)))
        key = getattr(function, "__code__", None), self.types, self.trees, held
        return _LIFTS.of(key, lambda: works_on_tracers(function, self.arguments(structs)))

    @cached_property
    def key(self) -> Any:
        """The identity of the place for a program: it includes the function if that is traced."""
        function = identity(self.hook.function, self.lifts) if self.is_traced else None
        return self.kind, function, self.outputs, self.types, self.trees, self.returns

    def alone(self) -> Place:
        """Return the place without its partner and without the residuals of an island: structures hold it."""
        hook = Hook(self.hook.function.emptied()) if self.kind == ISLAND else self.hook  # pyright: ignore[reportFunctionMemberAccess]
        return replace(self, partner=None, hook=hook)

    def arguments(self, flat: Sequence[Any]) -> list[Any]:
        """Return the arguments of the hook, in trees."""
        arguments, start = [], 0
        for tree in self.trees:
            arguments.append(jax.tree.unflatten(tree, flat[start : start + tree.num_leaves]))
            start += tree.num_leaves
        return arguments

    def __call__(self, flat: Sequence[Any], read: Sequence[Any] = ()) -> list[Any]:
        """Call the hook, and return the values that replace the first ones.

        `read` are arrays to read instead of those that it closes over.

        Raises `CallError` if it returns other shapes or dtypes.
        """
        given = list(flat[: len(self.returns)])
        if self.hook.removed and self.kind != "unpack":
            return given
        try:
            result = reading(self.hook.function, read, self.lifts)(*self.arguments(flat))
        except Exception as error:
            if self.is_traced and (isinstance(error, jax.errors.JAXTypeError) or type(error).__name__ == OF_TRACES):
                error.add_note(f"This happened while jointcut traced {self.words}. {_CURE}")
            raise
        return given if result is None and self.kind != "unpack" else self._checked(result)

    def _checked(self, result: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(result)
        if tree != self.out_tree:
            types = ", ".join(aval.str_short() for aval in self.returns)
            as_given = " in the tree that it is given" * (len(self.returns) > 1)
            self._refuse(_shown(result), types + as_given)
        for leaf, aval in zip(leaves, self.returns, strict=True):
            is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
            if not is_array or leaf.shape != aval.shape or leaf.dtype != aval.dtype:
                self._refuse(_shown(leaf), aval.str_short())
        return leaves

    def _refuse(self, returned: str, needed: str) -> None:
        what = f"returned {returned}, but is set ({self.kind}) on {self.where}."
        cure = f"Return {needed}{'' if self.kind == 'unpack' else ', or None'}."
        raise CallError(message(f"The hook {self.named}", what, cure))


def hook_of(function: Any, *, traced: bool = False) -> Hook:
    """Return the hook itself, or a hook of a function, which nobody can remove."""
    if isinstance(function, Hook):
        return function
    made = Hook(function, traced=traced)
    made.can_be_removed = False
    return made


def _shown(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return jax.typeof(value).str_short()
    return f"a {type(value).__name__}"
