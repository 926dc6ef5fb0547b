"""Keep leaves that are not arrays out of programs: functions, strings, flags, numbers of Equinox modules.

Such a leaf is *fixed*: a program is made for its value, as for a static argument. In the flattened call it is a
`Fixed`, a node without leaves, so that all leaves are arrays. Two calls share a program if their fixed leaves are
equal. A leaf without a hash is equal to itself alone; this is logged once for each class.

JAX's transformations keep a Python number; only `jax.jit` makes it an array. Likewise, a flag is always fixed, and an
integer is fixed inside a transformation. In an Equinox module every Python number is fixed, as in Equinox's own
`filter_jit` and `filter_grad`.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jointcut.partition.errors import CallError, TraceError, message
from jointcut.partition.program.jax.abstract import is_reference
from jointcut.partition.program.jax.runtime import is_tracer
from jointcut.wrappers.arguments.paths import Paths
from jointcut.wrappers.record import Record

_LOG = logging.getLogger("jointcut")
_NUMBERS = (bool, int, float, complex)
_told: set[type] = set()


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Fixed(Record):
    """A leaf whose value a program is made for.

    Attributes:
        value: the leaf.
        has_zero: whether its gradient is a `float0` zero, as for a flag or an integer; otherwise it is None.
    """

    value: Any
    has_zero: bool = False
    _key: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Compute the key by which leaves are compared."""
        object.__setattr__(self, "_key", (type(self.value), _key(self.value)))

    def __eq__(self, other: object) -> bool:
        """Whether a program for one leaf fits the other; `1`, `1.0` and `True` differ."""
        return isinstance(other, Fixed) and bool(self._key == other._key) and self.has_zero == other.has_zero

    def __hash__(self) -> int:
        """Hash type and value."""
        return hash(self._key)

    @property
    def gradient(self) -> Any:
        """The gradient for this leaf."""
        return np.zeros((), jax.dtypes.float0) if self.has_zero else None


@dataclass(frozen=True)
class _Same:
    """An object without a hash, equal to itself alone; kept alive, so that its address is not used again."""

    of: Any = field(compare=False, hash=False)
    address: int

    @classmethod
    def to(cls, value: Any) -> _Same:
        return cls(value, id(value))


def _key(value: Any) -> Any:
    if isinstance(value, float | complex):
        return repr(value)  # -0.0 and 0.0 differ, and a NaN is equal to itself
    try:
        hash(value)
    except TypeError:
        if type(value) not in _told:
            _told.add(type(value))
            _LOG.info("a %s has no hash: calls share a program only where they pass the same one", type(value).__name__)
        return _Same.to(value)
    return value


def fixed(tree: Any, integers: bool, paths: Paths) -> tuple[Any, bool]:
    """Return a call with each leaf that is not an array as a `Fixed` node, and whether there is any such leaf.

    With `integers`, integers are fixed too. Raises `CallError` for a leaf whose `==` does not return a bool, since
    calls could not be compared.
    """

    def kept(leaf: Any) -> Fixed | None:
        if isinstance(leaf, bool) or (integers and type(leaf) is int):
            return Fixed(leaf, has_zero=True)
        return _unless_array(leaf)

    tree, changed = _marked(tree, kept)
    if changed:
        _refuse_incomparable(tree, paths)
    return tree, changed


def fixed_results(tree: Any) -> Any:
    """Return a result with each leaf that is not an array as a `Fixed` node; Python numbers only in Equinox modules.

    Raises `TraceError` for a leaf that holds a traced value, as a closure may.
    """
    tree, changed = _marked(tree, _unless_array)
    if changed:
        for keys, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_fixed)[0]:
            if is_fixed(node) and _holds_traced(node.value):
                what = (
                    f"is a {type(node.value).__name__} that holds a traced value, which has no number after the trace."
                )
                cure = "Return that value itself, and make the object of it outside of the function."
                raise TraceError(message("result" + jax.tree_util.keystr(keys), what, cure))
    return tree


def _marked(tree: Any, kept: Callable[[Any], Fixed | None]) -> tuple[Any, bool]:
    """Replace leaves by the nodes that `kept` returns; modules have their own rule.

    Return the tree, and whether any leaf was replaced.
    """
    module = _module_class()

    def in_module(x: Any) -> bool:
        return module is not None and isinstance(x, module)

    leaves, structure = jax.tree.flatten(tree, is_leaf=in_module if module else None)
    changed = False
    for i, leaf in enumerate(leaves):
        if in_module(leaf):
            leaves[i], touched = _each(leaf)
            changed |= touched
        elif (node := kept(leaf)) is not None:
            leaves[i], changed = node, True
    return (jax.tree.unflatten(structure, leaves), True) if changed else (tree, False)


def _each(module: Any) -> tuple[Any, bool]:
    """Return a module with numbers and leaves that are not arrays as `Fixed` nodes, and whether there are any."""
    leaves, structure = jax.tree.flatten(module)
    flags = [isinstance(x, _NUMBERS) or not _is_array_like(x) for x in leaves]
    if not any(flags):
        return module, False
    pairs = zip(leaves, flags, strict=True)
    return jax.tree.unflatten(structure, [Fixed(x) if on else x for x, on in pairs]), True


def _unless_array(leaf: Any) -> Fixed | None:
    return None if _is_array_like(leaf) else Fixed(leaf)


def _holds_traced(value: Any) -> bool:
    """Whether a function closes over a traced value, or an object has one among its attributes."""
    cells = getattr(value, "__closure__", None) or ()
    attributes = [getattr(value, name, None) for name in ("__dict__", "args", "keywords")]
    filled = [cell.cell_contents for cell in cells if cell != types.CellType()]  # an empty cell equals `CellType()`
    return any(map(is_tracer, jax.tree.leaves([filled, attributes])))


def _is_array_like(leaf: Any) -> bool:
    """Whether a leaf is passed to JAX, which may still refuse it."""
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
    """Return the leaves in Equinox modules of a tree."""
    module = _module_class()
    if module is None:
        return []
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, module))
    return [leaf for node in nodes if isinstance(node, module) for leaf in jax.tree.leaves(node)]


def is_fixed(x: Any) -> bool:
    """Whether a node is a fixed leaf."""
    return isinstance(x, Fixed)


def stand_in(tree: Any) -> bool:
    """Whether a tree holds fixed leaves."""
    return any(map(is_fixed, jax.tree.leaves(tree, is_leaf=is_fixed)))


def released(tree: Any) -> Any:
    """Return the tree with each fixed leaf replaced by its value."""
    return jax.tree.map(lambda x: x.value if is_fixed(x) else x, tree, is_leaf=is_fixed)


def gradients(tree: Any) -> Any:
    """Return a tree of gradients, with each fixed leaf replaced by its gradient."""
    return jax.tree.map(lambda x: x.gradient if is_fixed(x) else x, tree, is_leaf=is_fixed)


def _module_class() -> type | None:
    """Return Equinox's `Module`, or None if Equinox is not imported."""
    return getattr(sys.modules.get("equinox"), "Module", None)
