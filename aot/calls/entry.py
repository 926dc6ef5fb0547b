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

from jointcut.aot.run.runner import Programs, Runner
from jointcut.aot.trace.trees import Call
from jointcut.partition.lower.emit import Residual
from jointcut.wrappers.metadata.schemas import TensorAlias

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


def running(call: Call, consts: Sequence[Any], entry: Entry, programs: tuple[Any, ...]) -> Runner:
    """Runs the executables of an entry."""
    handed_back = {i: TensorAlias(source, at) for i, source, at in entry.handed_back}
    residuals = tuple(Residual(kind, index, -1) for kind, index in entry.residuals)

    def run(which: str, flat: Sequence[Any]) -> list[Any]:
        del which  # an entry is kept for one way of calling
        return programs[0](*flat)

    def backward(residuals: Sequence[Any], cotangents: Sequence[Any | None], keep: bool) -> list[Any]:
        del keep
        return programs[1](*residuals, *cotangents)

    return Runner(call, Programs(run, backward), tuple(consts), handed_back, residuals)
