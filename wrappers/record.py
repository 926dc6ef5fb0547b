"""Write records as JSON, and read them back.

A record is a frozen dataclass that compares by value. A value without a JSON form is written as an object with one key,
its tag: `{"InputAliasInfo": {...}}`, `{"dtype": "bfloat16"}`, `{"tree": ...}`. Tuples are arrays. Classes and functions
are written by name. Reading looks these names up in modules that are imported already; it imports no module, and calls
no function.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.partition.errors import RecordError, message

_KNOWN: dict[str, type] = {}
_LEAF = "*"
_WIDEST = 40  # characters of a column in a table
_E = TypeVar("_E", bound=enum.Enum)
_IMPLEMENTATIONS = {"fry": "threefry2x32", "urbg": "unsafe_rbg"}  # dtypes whose name differs from their generator


class Record:
    """A frozen dataclass with a JSON form: `Record.from_json(r.to_json()) == r`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the class by its name, which is its tag in JSON."""
        super().__init_subclass__(**kwargs)
        _KNOWN[cls.__name__] = cls

    def __str__(self) -> str:
        """Return a line for each field; long values are cut."""
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return "\n".join([type(self).__name__, *(f"  {f.name}: {_short(getattr(self, f.name))}" for f in fields)])

    def to_json(self, indent: int | None = None) -> str:
        """Return the record as a JSON text; raises `RecordError` if a field has no JSON form."""
        return json.dumps(_encoded(self, type(self).__name__), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the record that `to_json` wrote; raises `RecordError` for any other text."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise RecordError(message(cls.__name__, f"is not JSON: {error}.", _CURE)) from error
        record = _decoded(data, cls.__name__)
        if not isinstance(record, cls):
            raise RecordError(message(cls.__name__, f"was asked for, but the text holds {_shown(data)}.", _CURE))
        return record


_CURE = "Read what to_json of the same class and version wrote."


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines, with aligned columns; a cell after a very long one is not aligned."""
    columns = list(zip(*rows, strict=True))
    widths = [min(max(map(len, column)), _WIDEST) for column in columns if any(column)]
    shown = [[cell for cell, column in zip(row, columns, strict=True) if any(column)] for row in rows]
    return [("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True))).rstrip() for row in shown]


def _short(value: Any) -> str:
    """Return a value on one line of at most 100 characters; if it is cut, add the number of its entries."""
    text = repr(value)
    if len(text) <= 100:
        return text
    count = f" ({len(value)} entries)" if isinstance(value, tuple | dict) else ""
    return f"{text[: 97 - len(count)]}...{count}"


def choice(cls: type[_E]) -> type[_E]:
    """Let records hold members of an enumeration."""
    _KNOWN[cls.__name__] = cls
    return cls


# ---------------------------------------------------------------------------------------------------- writing


def _encoded(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return [_encoded(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if is_dtype(value):
        return {"dtype": "float0" if value == jax.dtypes.float0 else str(value)}
    for kind, tag, encode in _FORMS:
        if isinstance(value, kind):
            return {tag(value): encode(value, path)}
    if _is_empty_node(value):
        return {"node": _tree(jax.tree.structure(value), path)}
    if (name := _name_of(value)) is not None:
        return {"function": name}
    cure = "Give the class auxiliary data of numbers, strings, tuples and dicts, so that it can be written."
    raise RecordError(message(path, f"is a {type(value).__name__}, which has no JSON form.", cure))


def is_dtype(value: Any) -> bool:
    """Whether a value is a dtype of NumPy or of JAX, such as the dtype of random keys."""
    kind = getattr(value, "type", None)  # a property, in classes such as `nnx.Param`
    return isinstance(value, np.dtype) or (isinstance(kind, type) and issubclass(kind, jax.dtypes.extended))


def _is_empty_node(value: Any) -> bool:
    """Whether a value is a pytree node without leaves, such as the sentinel of a library."""
    kind = type(value)
    if isinstance(value, tuple) or dataclasses.is_dataclass(kind) or not jax.tree_util.default_registry.is_node(kind):
        return False
    tree = jax.tree.structure(value)
    return tree.num_nodes == 1 and tree.node_data()[1] is not value


def _name_of(value: Any) -> str | None:
    """Return `module:function` if this name finds the value; None for a lambda, a closure, or another object."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not callable(value) or module is None or name is None or _at(module, name) is not value:
        return None
    return f"{module}:{name}"


def _at(module: str, qualified: str) -> Any:
    """Return the object of this name in an imported module, or None."""
    value: Any = sys.modules.get(module)
    for part in qualified.split("."):
        value = getattr(value, part, None)
    return value


def _record(value: Any, path: str) -> dict[str, Any]:
    fields = (f.name for f in dataclasses.fields(value) if f.init)
    return {name: _encoded(getattr(value, name), f"{path}.{name}") for name in fields}


def _tree(tree: Any, path: str) -> Any:
    data = tree.node_data()
    if data is None:
        return _LEAF
    kind, aux = data
    children = [_tree(child, f"{path}[{i}]") for i, child in enumerate(tree.children())]
    return {"class": class_name(kind), "data": _encoded(aux, path), "children": children}


def class_name(kind: type) -> str:
    """Return the name of a class in JSON, `module:class`."""
    return f"{kind.__module__}:{kind.__qualname__}"


_FORMS: tuple[tuple[Any, Callable[[Any], str], Callable[[Any, str], Any]], ...] = (
    (Record, lambda v: type(v).__name__, _record),
    (enum.Enum, lambda v: type(v).__name__, lambda v, _: v.name),
    (list, lambda _: "list", lambda v, path: [_encoded(x, f"{path}[{i}]") for i, x in enumerate(v)]),
    (Mapping, lambda _: "dict", lambda v, path: [[_encoded(k, path), _encoded(v[k], f"{path}[{k!r}]")] for k in v]),
    (type, lambda _: "class", lambda v, _: class_name(v)),
    (jax.tree_util.PyTreeDef, lambda _: "tree", _tree),
)


# ---------------------------------------------------------------------------------------------------- reading


def _decoded(data: Any, path: str) -> Any:
    if isinstance(data, list):
        return tuple(_decoded(item, f"{path}[{i}]") for i, item in enumerate(data))
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise RecordError(message(path, f"is an object with {len(data)} keys, not one tagged value.", _CURE))
    ((tag, inner),) = data.items()
    if tag in _READERS:
        return _READERS[tag](inner, path)
    kind = _KNOWN.get(tag)
    if kind is None:
        raise RecordError(message(path, f"has the unknown tag {tag!r}.", _CURE))
    return _member(kind, inner, path) if issubclass(kind, enum.Enum) else _made(kind, inner, path)


def _member(kind: type[enum.Enum], name: Any, path: str) -> Any:
    if not isinstance(name, str) or name not in kind.__members__:
        raise RecordError(message(path, f"names no {kind.__name__}: {name!r}.", _CURE))
    return kind[name]


def _made(kind: type, inner: Any, path: str) -> Any:
    fields = [f for f in dataclasses.fields(kind) if f.init]
    names = set(inner) if isinstance(inner, dict) else set()
    unknown = names - {f.name for f in fields}
    # A text of an older version may lack fields, which then have defaults.
    missing = {f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING} - names
    if not isinstance(inner, dict) or unknown or missing:
        what = f"is no {kind.__name__}: missing {sorted(missing)}, unknown {sorted(unknown)}."
        raise RecordError(message(path, what, _CURE))
    return kind(**{name: _decoded(inner[name], f"{path}.{name}") for name in inner})


def _read_tree(node: Any, path: str) -> Any:
    if node == _LEAF:
        return jax.tree.structure(0)
    if not isinstance(node, dict) or set(node) != {"class", "data", "children"}:
        raise RecordError(message(path, f"holds no tree: {_shown(node)}.", _CURE))
    kind, data = _read_class(node["class"], path), _decoded(node["data"], path)
    children = [_read_tree(child, f"{path}[{i}]") for i, child in enumerate(node["children"])]
    if kind is dict and (not isinstance(data, list) or len(set(map(repr, data))) != len(children)):
        what = f"holds a dict of {len(children)} entries whose keys are {data!r}."
        raise RecordError(message(path, what, _CURE))  # JAX accepts such a node, and crashes when it unflattens it
    try:
        return jax.tree_util.PyTreeDef.from_node_data_and_children(
            jax.tree_util.default_registry, (kind, data), children
        )
    except (ValueError, RuntimeError) as error:
        cure = f"Register {kind.__name__} as a pytree before reading."
        raise RecordError(
            message(path, f"needs the tree node {kind.__name__}, which is none: {error}.", cure)
        ) from error


def _read_class(name: Any, path: str) -> Any:
    if name == class_name(type(None)):
        return type(None)
    module, _, qualified = str(name).partition(":")
    kind = _at(module, qualified)
    if not isinstance(kind, type):
        raise RecordError(message(path, f"names the class {name}, which is not at hand.", f"Import {module} first."))
    return kind


def _read_function(name: Any, path: str) -> Any:
    module, _, qualified = str(name).partition(":")
    function = _at(module, qualified)
    if function is None or _name_of(function) != name:
        what = f"names the function {name}, which is not at hand."
        raise RecordError(message(path, what, f"Import {module} first."))
    return function


def _read_node(node: Any, path: str) -> Any:
    tree = _read_tree(node, path)
    data = tree.node_data()
    if data is not None and tree.num_nodes == 1 and not dataclasses.is_dataclass(data[0]):
        try:
            return jax.tree.unflatten(tree, ())
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise RecordError(message(path, f"holds a node that cannot be made: {error}.", _CURE)) from error
    raise RecordError(message(path, f"holds no node without leaves: {_shown(node)}.", _CURE))


def read_dtype(name: Any, path: str) -> Any:
    """Return the dtype of a name, also for random keys and `float0`; raises `RecordError` for an unknown name."""
    if name == "float0":
        return jax.dtypes.float0
    try:
        if str(name).startswith("key<"):
            return jax.eval_shape(lambda: jax.random.key(0, impl=key_implementation(name))).dtype
        return jnp.dtype(name)
    except (TypeError, ValueError, KeyError) as error:
        raise RecordError(message(path, f"names the unknown dtype {name!r}.", _CURE)) from error


def key_implementation(dtype: str) -> str:
    """Return the name of a key dtype's generator, as in `jax.random.key`; an example of such a dtype is `key<fry>`."""
    short = dtype[len("key<") : -1]
    return _IMPLEMENTATIONS.get(short, short)


def _read_float(text: Any, path: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise RecordError(message(path, f"is no number: {text!r}.", _CURE))
    return float(text)


def _read_dict(pairs: Any, path: str) -> dict[Any, Any]:
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise RecordError(message(path, f"holds no pairs: {_shown(pairs)}.", _CURE))
    return {_decoded(key, path): _decoded(value, f"{path}[{key!r}]") for key, value in pairs}


def _read_list(items: Any, path: str) -> list[Any]:
    return list(_decoded(items, path))


_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "float": _read_float,
    "list": _read_list,
    "dict": _read_dict,
    "class": _read_class,
    "function": _read_function,
    "node": _read_node,
    "tree": _read_tree,
    "dtype": read_dtype,
}


def _shown(data: Any) -> str:
    text = json.dumps(data)
    return text if len(text) <= 60 else f"{text[:57]}..."
