"""Run a call by programs that another process compiled.

An entry of the cache holds executables of flat arrays and how they are called. Everything else, the caller's trees
above all, comes from the function itself, which is at hand. Executables are pickled by JAX: an entry is made of bytes
only where the store's own key says that this user wrote them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.experimental import serialize_executable

from jointcut.aot.flat import FlatCall, FlatPullback
from jointcut.wrappers import alias
from jointcut.wrappers.metadata import TensorAlias
from jointcut.wrappers.tree import Bound

_HEAD = struct.Struct("<Q")


@dataclass(frozen=True)
class Entry:
    """What is kept of one signature: executables, and how they are called.

    Attributes:
        consts: for each constant that the programs take first its place among those of the function's own trace; None
            where only the differentiated program knows them, which is the key then.
        handed_back: outputs that stay out of the programs, as position, source and alias.
        residuals: kind and index of each residual.
        is_train, sparse: whether there is a backward, and which gradients are rows, as in `Joint`.
        arity: how many arrays each program takes and gives.
        programs: the executables, as JAX pickles them; none until the entry is `holding` them.
    """

    consts: tuple[int, ...] | None
    handed_back: tuple[tuple[int, str, int], ...]
    residuals: tuple[tuple[str, int], ...]
    is_train: bool
    sparse: tuple[int, ...]
    arity: tuple[tuple[int, int], ...] = ()
    programs: tuple[bytes, ...] = ()

    def holding(self, programs: Sequence[jax.stages.Compiled]) -> Entry:
        """The entry with executables of flat arrays; raises what JAX raises where it cannot serialise them."""
        arity = tuple((program.in_tree.num_leaves, program.out_tree.num_leaves) for program in programs)
        pickled = tuple(serialize_executable.serialize(program)[0] for program in programs)
        return replace(self, arity=arity, programs=pickled)

    def to_bytes(self) -> bytes:
        """The entry as a header in JSON, with its length before it, and the executables."""
        head = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "programs"}
        text = json.dumps(head | {"bytes": list(map(len, self.programs))}).encode()
        return b"".join([_HEAD.pack(len(text)), text, *self.programs])

    @classmethod
    def from_bytes(cls, data: bytes) -> Entry:
        """What `to_bytes` wrote."""
        (length,) = _HEAD.unpack_from(data)
        at = _HEAD.size + length
        head = json.loads(data[_HEAD.size : at])
        programs = []
        for size in head.pop("bytes"):
            programs.append(data[at : at + size])
            at += size
        return cls(**{name: _tuples(value) for name, value in head.items()}, programs=tuple(programs))

    def loaded(self) -> tuple[Callable[..., list[Any]], ...]:
        """The executables on this machine's device; raises what JAX raises where it cannot."""
        return tuple(map(_loaded, self.programs, self.arity))


def _tuples(found: Any) -> Any:
    return tuple(map(_tuples, found)) if isinstance(found, list) else found


def _loaded(data: bytes, arity: tuple[int, int]) -> Any:
    taken, given = (tuple(range(n)) for n in arity)
    in_tree, out_tree = jax.tree.structure((taken, {})), jax.tree.structure(list(given))
    return serialize_executable.deserialize_and_load(data, in_tree, out_tree)


@dataclass(frozen=True)
class StoredCall:
    """One signature, ready to run: its trees, its constants, and its programs."""

    call: FlatCall
    consts: tuple[Any, ...]
    entry: Entry
    programs: tuple[Callable[..., list[Any]], ...]

    def result(self, bound: Bound) -> Any:
        """The function's result."""
        flat = self._flat(bound)
        main, aux = self.call.results(self._restored(self.programs[0](*flat), flat), bound)
        return (main, aux) if self.call.options.has_aux else main

    def value_and_grad(self, bound: Bound) -> Any:
        """As `jax.value_and_grad` of the function."""
        flat = self._flat(bound)
        results = self._restored(self.programs[0](*flat), flat)
        count = len(self.call.derivative.results.avals)
        return self.call.value_and_gradients(results[:count], results[count:], bound)

    def vjp(self, bound: Bound) -> Any:
        """As `jax.vjp` of the function."""
        flat = self._flat(bound.copied())
        results = self._restored(self.programs[0](*flat), flat)
        count = len(self.call.derivative.results.avals)
        where = {"input": flat, "output": results[:count], "saved": results[count:]}
        residuals = [where[kind][index] for kind, index in self.entry.residuals]
        pullback = FlatPullback(self._backward, residuals, self.call, bound, range(len(bound.spans)))
        main, aux = self.call.results(results[:count], bound)
        return (main, pullback, aux) if self.call.options.has_aux else (main, pullback)

    def _backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        return self.programs[1](*residuals, *cotangents)

    def _flat(self, bound: Bound) -> list[Any]:
        return [*self.consts, *bound.unique]

    def _restored(self, results: Sequence[Any], flat: Sequence[Any]) -> list[Any]:
        """The results, with the caller's own arrays where outputs are inputs."""
        leaves = flat[len(self.consts) :]
        found = {i: TensorAlias(source, at) for i, source, at in self.entry.handed_back}
        whole = alias.inserted(results, found, [leaves[p] for p in self.call.bound.places])
        return list(map(alias.as_array, whole))
