"""Find the values that the keys of a policy name.

A key is a text or a predicate on an op and a value that it makes. A text names one of

- the values of a `checkpoint_name`;
- the values in a scope: names that stand next to each other on the name stack, joined by `/` (`"block_0/attention"`).
  The names come from `jax.named_scope`, from functions under `jax.jit`, and from modules of Flax, Equinox and Haiku. A
  value in a loop has the scopes around the loop too;
- the values of a primitive (`"dot_general"`).

`*`, `?` and `[...]` in a text stand for characters, within one name of a scope. An array and its `checkpoint_name` are
one value with all its names, scopes and primitives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import jax

from jointcut.partition.errors import PolicyError, message, nearest
from jointcut.partition.program.graph import LITERAL, OPEN, OPEN_LOOP, STEP, Graph, Op, Value
from jointcut.partition.program.places import modules_of
from jointcut.partition.program.primitives import CHECKPOINT_SCOPE, NAME
from jointcut.partition.program.roles import Side
from jointcut.partition.program.sides import Sides, classify

Key = str | Callable[[Op, Value], Any]

_NAME, _PREDICATE, _KIND = range(3)  # how a key names a value, the most particular first


@dataclass(frozen=True)
class Array:
    """An array of the forward: the value that an op makes, and the same array under each of its names.

    `values` are ids, the value without a name first; `scope` is the path of the names on the name stack.
    """

    values: tuple[int, ...]
    names: tuple[str, ...]
    op: Op
    scope: tuple[str, ...]

    @property
    def is_forward(self) -> bool:
        """Whether it was traced with the forward; arrays traced only with the backward are not for saving."""
        return self.op.origin is Side.FORWARD


def arrays_of(graph: Graph, sides: Sides) -> Iterator[Array]:
    """The arrays of a program's forward that the user's ops make, in order, without the carries of loops."""
    paths: dict[int, tuple[str, ...]] = {}
    for op in graph.ops:
        if not _is_users(op) or (renames(op) and _is_users(graph.maker_of(op.inputs[0]))):
            continue
        for v in op.outputs:
            if not sides.is_late(v):
                yield Array(*_same(graph, v), op, (*_around(graph, op.region, paths), *modules_of(op.scope)))


def _is_users(op: Op | None) -> bool:
    return op is not None and op.name not in (STEP, LITERAL, OPEN_LOOP)


def renames(op: Op) -> bool:
    """Whether an op gives an array a name, or follows a value that a `jax.checkpoint` saves or hands on."""
    return op.name == NAME or (op.name in ("copy", "reduce_precision") and CHECKPOINT_SCOPE in op.scope)


def _around(graph: Graph, region: int, known: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
    """The scopes around a region: the scopes of the op that holds it, and the scopes around that."""
    if region not in known:
        holder = None if graph.regions[region].holder is None else graph.holder_of(region)
        known[region] = () if holder is None else (*_around(graph, holder.region, known), *modules_of(holder.scope))
    return known[region]


def _same(graph: Graph, v: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """A value and the same array under its names, and these names."""
    values, names = [v], list[str]()
    for v in values:
        maker = graph.maker_of(v)
        if maker is not None and maker.name == NAME and maker.payload is not None:
            names.append(maker.payload.params["name"])
        values += [out for i in graph.consumers[v] if renames(graph.ops[i]) for out in graph.ops[i].outputs]
    return tuple(values), tuple(names)


def how_named(key: Key, array: Array, graph: Graph) -> int | None:
    """The way in which a key names an array; None where it does not."""
    if not isinstance(key, str):
        return _PREDICATE if any(_holds(key, graph, v) for v in array.values) else None
    if any(_like(name, key) for name in array.names):
        return _NAME
    return _KIND if _like(array.op.primitive, key) or _in_scope(tuple(key.split("/")), array.scope) else None


def _holds(key: Callable[[Op, Value], Any], graph: Graph, v: int) -> bool:
    op = graph.maker_of(v)
    return op is not None and bool(key(op, graph.values[v]))


def _like(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _in_scope(parts: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Whether the parts of a key stand next to each other in a path."""
    starts = range(len(path) - len(parts) + 1)
    return any(all(map(_like, path[i : i + len(parts)], parts)) for i in starts)


def named_by(key: Key, graph: Graph) -> frozenset[int]:
    """The values of a program's forward that a key names, with the carried values of loops in a scope."""
    sides, paths = classify(graph), dict[int, tuple[str, ...]]()
    named = (array for array in arrays_of(graph, sides) if how_named(key, array, graph) is not None)
    values = {v for array in named for v in array.values}
    parts = tuple(key.split("/")) if isinstance(key, str) else ()
    for op in graph.ops if parts else ():
        path = (*_around(graph, op.region, paths), *modules_of(op.scope)) if op.name in OPEN else ()
        if _in_scope(parts, path):
            values.update(v for v in op.outputs if not sides.is_late(v))
    return frozenset(values)


def names_nothing(key: Key, arrays: Sequence[Array]) -> NoReturn:
    """Raise `PolicyError` for a key that names none of some arrays, with the names that it could use."""
    where = f"policy[{shown(key)}]"
    if not isinstance(key, str):
        known = nearest("", {array.op.name for array in arrays})
        what, cure = "holds of no value of the forward.", f"It is given each op and value. Primitives: {known}."
        raise PolicyError(message(where, what, cure))
    kinds = {
        "Names": {name for array in arrays for name in array.names},
        "Scopes": {"/".join(array.scope) for array in arrays if array.scope},
        "Primitives": {array.op.name for array in arrays},
    }
    lists = [f"{kind}: {nearest(key, known)}." for kind, known in kinds.items() if known]
    cure = f"There are, the nearest first: {' '.join(lists)}" if lists else "It computes none."
    raise PolicyError(message(where, "names no value of the forward.", cure))


def shown(key: Key) -> str:
    """A key in messages: a text in quotes, a predicate by its name."""
    return repr(key) if isinstance(key, str) else title(key)


def title(function: Any) -> str:
    """A predicate, or a policy of JAX's, in messages: its name."""
    known = (name for name, policy in vars(jax.checkpoint_policies).items() if policy is function)
    return next(known, None) or getattr(function, "__qualname__", None) or repr(function)
