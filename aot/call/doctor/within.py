"""Find the jitted program that a function hands all its arrays to, as `eqx.filter_jit` and `nnx.jit` do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr

from jointcut.partition.program.jax import jitting, runtime
from jointcut.wrappers.arguments import fixed

_again: Any = jax.make_user_context()


@dataclass(frozen=True)
class Within:
    """A call of a function that is one jitted program, with something of Python around it.

    JAX sees the program alone, so a gradient, a donation and the results of an update are its own.

    Attributes:
        function: the function around the program.
        args: its arguments, with types in place of arrays.
        kwargs: its arguments by name.
        jitted: the program, a function of arrays by `jax.jit`.
        types: the types of these arrays.
        places: for each of them the position in `args` of the argument that has it, with the path in there; else None.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    jitted: Any
    types: tuple[Any, ...]
    places: tuple[tuple[int, str] | None, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Within | None:
        """Trace a function; returns None where it does more than to call one program."""
        leaves, tree = jax.tree.flatten_with_path((args, kwargs))
        places = [_place(path) for path, leaf in leaves if is_array(leaf)]
        types = [leaf for _, leaf in leaves if is_array(leaf)]

        def call(*arrays: Any) -> Any:
            given = iter(arrays)
            filled = tree.unflatten([next(given) if is_array(leaf) else leaf for _, leaf in leaves])
            results = filled[0], filled[1], function(*filled[0], **filled[1])
            return [leaf for leaf in jax.tree.leaves(results) if runtime.is_tracer(leaf)]  # also what it has written

        found = jitting.only_jit(jax.make_jaxpr(call)(*types))
        if found is None:
            return None
        jitted, inputs = found
        known = [(type_, None) if i is None else (types[i], places[i]) for i, type_ in inputs]
        return cls(function, args, kwargs, jitted, tuple(t for t, _ in known), tuple(place for _, place in known))

    def again(self) -> Any:
        """Return the program, traced anew, whatever was traced of it before."""
        with _again(object()):
            found = Within.of(self.function, self.args, self.kwargs)
        assert found is not None, "it was one program before"
        return found.jitted

    def is_of(self, library: str) -> bool:
        """Whether the function around the program is of a library."""
        return type(self.function).__module__.partition(".")[0] == library

    def flat(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Return the positions of the program's arrays that lie in the arguments at some positions."""
        return tuple(i for i, place in enumerate(self.places) if place is not None and place[0] in positions)

    def grouped(self, flat: Sequence[int]) -> tuple[int, ...]:
        """Return the positions of the arguments in which some arrays of the program lie."""
        return tuple(sorted({place[0] for i in flat if (place := self.places[i]) is not None}))

    def arguments(
        self, infos: Sequence[Any], name: Callable[[int], str]
    ) -> Iterator[tuple[int, list[tuple[str, Any, bool]]]]:
        """Yield the positions of the arguments, and of each array of them path, type and donation."""
        groups: dict[int, list[tuple[str, Any, bool]]] = {}
        for place, info in zip(self.places, infos, strict=True):
            if place is not None:
                array = f"{name(place[0])}{place[1]}", jitting.aval_of(info), info.donated
                groups.setdefault(place[0], []).append(array)
        yield from sorted(groups.items())


def is_array(leaf: Any) -> bool:
    """Whether a leaf of arguments is an array, or a type in place of one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def with_fixed(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any, Any]:
    """Return a call without what JAX cannot trace, such as a function in a model, which the function puts back."""
    marked = fixed.fixed_results((args, kwargs))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = fixed.released((args, kwargs))
        return fixed.fixed_results(function(*args, **kwargs))

    return call, *marked


def _place(path: Sequence[Any]) -> tuple[int, str] | None:
    """Return the position and inner path of a leaf of `(args, kwargs)`; None for one of `kwargs`."""
    side, *rest = path
    return (rest[0].idx, keystr(tuple(rest[1:]))) if side.idx == 0 else None
