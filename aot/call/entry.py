"""Run programs that another process compiled.

An entry of the cache holds executables of flat arrays, and how to call them. Everything else, such as the caller's
trees, comes from the function itself. JAX pickles executables, and loading a pickle can run any code. So bytes are
loaded only if the store's key proves that this user wrote them.
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
    """The executables of one signature, and how to call them.

    Attributes:
        consts: for each leading constant of the programs, its position among the constants of the function's own trace;
            None if only the differentiated program, which is then the key, has them.
        handed_back: outputs that the programs do not return, as position, source and alias.
        residuals: kind and index of each residual.
        is_train, sparse: whether there is a backward, and the gradients that are rows, as in `Joint`.
        arity: the numbers of inputs and outputs of each program.
        programs: the executables, pickled by JAX; empty until `holding` adds them.
    """

    consts: tuple[int, ...] | None
    handed_back: tuple[tuple[int, str, int], ...]
    residuals: tuple[tuple[str, int], ...]
    is_train: bool
    sparse: tuple[int, ...]
    arity: tuple[tuple[int, int], ...] = ()
    programs: tuple[bytes, ...] = ()

    def holding(self, programs: Sequence[jax.stages.Compiled]) -> Entry:
        """Return the entry with executables of flat arrays; raises JAX's error if it cannot serialise them."""
        arity = tuple((program.in_tree.num_leaves, program.out_tree.num_leaves) for program in programs)
        pickled = tuple(serialize_executable.serialize(program)[0] for program in programs)
        return replace(self, arity=arity, programs=pickled)

    def to_bytes(self) -> bytes:
        """Return the entry as bytes: the length of a JSON header, the header, and the executables."""
        head = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "programs"}
        text = json.dumps(head | {"bytes": list(map(len, self.programs))}).encode()
        return b"".join([_HEAD.pack(len(text)), text, *self.programs])

    @classmethod
    def from_bytes(cls, data: bytes) -> Entry:
        """Read an entry written by `to_bytes`."""
        (length,) = _HEAD.unpack_from(data)
        start = _HEAD.size + length
        head = json.loads(data[_HEAD.size : start])
        programs = []
        for size in head.pop("bytes"):
            programs.append(data[start : start + size])
            start += size
        return cls(**{name: _tuples(value) for name, value in head.items()}, programs=tuple(programs))

    def loaded(self, device: Any) -> tuple[Callable[..., list[Any]], ...]:
        """Return the executables on a device of this machine; raises JAX's error if it cannot load them."""
        return tuple(_loaded(*program, device) for program in zip(self.programs, self.arity, strict=True))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _loaded(data: bytes, arity: tuple[int, int], device: Any) -> Any:
    inputs, outputs = (tuple(range(n)) for n in arity)
    in_tree, out_tree = jax.tree.structure((inputs, {})), jax.tree.structure(list(outputs))
    return serialize_executable.deserialize_and_load(data, in_tree, out_tree, device.platform, [device])


def running(call: Call, consts: Sequence[Any], entry: Entry, programs: tuple[Any, ...]) -> Runner:
    """Return a runner of the executables of an entry."""
    handed_back = {i: TensorAlias(source, index) for i, source, index in entry.handed_back}
    residuals = tuple(Residual(kind, index, -1) for kind, index in entry.residuals)

    def run(which: str, flat: Sequence[Any]) -> list[Any]:
        del which  # an entry is for one way of calling
        return programs[0](*flat)

    def backward(residuals: Sequence[Any], cotangents: Sequence[Any | None], keep: bool) -> list[Any]:
        del keep
        return programs[1](*residuals, *cotangents)

    return Runner(call, Programs(run, backward), tuple(consts), handed_back, residuals, is_apart=len(programs) == 2)
