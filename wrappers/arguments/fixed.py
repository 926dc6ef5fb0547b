"""Keep leaves that are no arrays out of programs: functions, strings, flags, the numbers of an Equinox module.

Such a leaf is *fixed*: a program is made for its value, as for a static argument. In the flattened call it is a node
without leaves, `Fixed`, so that everything that counts leaves counts arrays only. Two calls share a program where their
fixed leaves are equal; a leaf without a hash is the same only where it is the same object, which the log says once.

JAX's own transformations keep a Python number as it is, and only `jax.jit` makes an array of it. So do we: a flag is
always fixed, an integer where a transformation is under way. In an Equinox module every Python number is fixed, as it
is for Equinox's own `filter_jit` and `filter_grad`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jointcut.partition.errors import CallError, message
from jointcut.partition.program.jaxprs import is_reference, is_tracer
from jointcut.wrappers.arguments.paths import Paths
from jointcut.wrappers.record import Record

_LOG = logging.getLogger("jointcut")
_NUMBERS = (bool, int, float, complex)
_told: set[type] = set()


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Fixed(Record):
    """A leaf that a program is made for.

    Attributes:
        value: the leaf.
        has_zero: whether its gradient is a `float0` zero, as JAX gives for a flag or an integer; else it is None.
    """

    value: Any
    has_zero: bool = False
    _key: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Find what two equal leaves have in common."""
        object.__setattr__(self, "_key", (type(self.value), _key(self.value)))

    def __eq__(self, other: object) -> bool:
        """Whether a program for one can be used for the other: `1`, `1.0` and `True` are not the same."""
        return isinstance(other, Fixed) and bool(self._key == other._key) and self.has_zero == other.has_zero

    def __hash__(self) -> int:
        """By type and value."""
        return hash(self._key)

    @property
    def gradient(self) -> Any:
        """The gradient with respect to it."""
        return np.zeros((), jax.dtypes.float0) if self.has_zero else None


@dataclass(frozen=True)
class _Same:
    """An object without a hash, which is equal to itself alone; it is kept alive, so that its place stays its own."""

    of: Any = field(compare=False, hash=False)
    address: int

    @classmethod
    def to(cls, value: Any) -> _Same:
        return cls(value, id(value))


def _key(value: Any) -> Any:
    if isinstance(value, float | complex):
        return repr(value)  # tells -0.0 from 0.0, and a NaN is equal to itself
    try:
        hash(value)
    except TypeError:
        if type(value) not in _told:
            _told.add(type(value))
            _LOG.info("a %s has no hash: calls share a program only where they pass the same one", type(value).__name__)
        return _Same.to(value)
    return value


def fixed(tree: Any, integers: bool, paths: Paths) -> tuple[Any, bool]:
    """A call with each leaf that is no array as a `Fixed` node, and whether there is one; `integers` fixes those too.

    Raises `CallError` for one whose `==` gives no truth value, so that two calls could not be compared.
    """
    module = _module_class()

    def in_module(x: Any) -> bool:
        return module is not None and isinstance(x, module)

    leaves, structure = jax.tree.flatten(tree, is_leaf=in_module if module else None)
    changed = False
    for i, leaf in enumerate(leaves):
        if in_module(leaf):
            leaves[i], touched = _each(leaf, lambda x: isinstance(x, _NUMBERS) or not _is_array_like(x), False)
            changed |= touched
        elif isinstance(leaf, bool) or (integers and type(leaf) is int):
            leaves[i], changed = Fixed(leaf, has_zero=True), True
        elif not _is_array_like(leaf):
            leaves[i], changed = Fixed(leaf), True
    if not changed:
        return tree, False
    made = jax.tree.unflatten(structure, leaves)
    _refuse_incomparable(made, paths)
    return made, True


def _each(tree: Any, wanted: Callable[[Any], bool], has_zero: bool) -> tuple[Any, bool]:
    leaves, structure = jax.tree.flatten(tree)
    found = [wanted(leaf) for leaf in leaves]
    if not any(found):
        return tree, False
    pairs = zip(leaves, found, strict=True)
    return jax.tree.unflatten(structure, [Fixed(x, has_zero) if on else x for x, on in pairs]), True


def _is_array_like(leaf: Any) -> bool:
    """Whether a leaf is for JAX to take or to refuse."""
    kinds = jax.Array | np.ndarray | np.generic | int | float | complex | jax.ShapeDtypeStruct
    if isinstance(leaf, kinds) or is_tracer(leaf) or hasattr(leaf, "__jax_array__"):
        return True
    try:
        aval = jax.typeof(leaf)
    except TypeError:
        return False
    return is_reference(aval) or hasattr(aval, "shape")


def _refuse_incomparable(tree: Any, paths: Paths) -> None:
    for path, node in paths.nodes(tree, is_fixed):
        same = node.value == node.value
        if not isinstance(same, bool | np.bool_):
            kind, answer = type(node.value).__name__, type(same).__name__
            what = f"is a {kind}, no array of JAX's, and comparing two of them gives a {answer}, not True or False."
            raise CallError(message(path, what, "Pass it as an array, or wrap it in an object with an == of its own."))


def inside_modules(tree: Any) -> list[Any]:
    """The leaves of a tree that belong to Equinox modules."""
    module = _module_class()
    if module is None:
        return []
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, module))
    return [leaf for node in nodes if isinstance(node, module) for leaf in jax.tree.leaves(node)]


def is_fixed(x: Any) -> bool:
    """Whether a node of a tree stands for a fixed leaf."""
    return isinstance(x, Fixed)


def released(tree: Any) -> Any:
    """The tree with each fixed leaf as it was."""
    return jax.tree.map(lambda x: x.value if is_fixed(x) else x, tree, is_leaf=is_fixed)


def gradients(tree: Any) -> Any:
    """A tree of gradients, with that of each fixed leaf in its place."""
    return jax.tree.map(lambda x: x.gradient if is_fixed(x) else x, tree, is_leaf=is_fixed)


def _module_class() -> type | None:
    """Equinox's `Module`, where somebody has imported it."""
    return getattr(sys.modules.get("equinox"), "Module", None)
