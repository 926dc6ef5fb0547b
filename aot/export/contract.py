"""Say in JSON how an exported pair is called.

A `Contract` is what `signature.json` holds beside the files' checksums. Whoever has it needs no model source: it names
every array by position, says where the user finds it, and which program takes and gives which.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jointcut.aot.export.descriptors import (
    CURE,
    Gradient,
    Input,
    Output,
    ResidualInput,
    Tangent,
    as_tuple,
    plain_tree,
    read_all,
)
from jointcut.partition.errors import ArtefactError, RecordError, message
from jointcut.wrappers.metadata.signatures import GraphSignature
from jointcut.wrappers.record import Record

_ARRAYS = {
    "inputs": Input,
    "outputs": Output,
    "residuals": ResidualInput,
    "tangents": Tangent,
    "gradients": Gradient,
}
_TYPES: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "platforms": (list,),
    "mlir_platform": (str,),
    "argnums": (int, list),
    "has_aux": (bool,),
    "positional": (int,),
    "statics": (list,),
    "order": (int,),
    "sizes": (dict,),
    "graph_signature": (dict,),
    "result_tree": (dict, type(None)),
    "plan": (dict,),
    "programs": (dict,),
    "versions": (dict,),
}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # where an object lies, which is no property of it


@dataclass(frozen=True)
class StaticArgument(Record):
    """A Python value that the programs are specialised for: `args[1]`, its type's name, and its `repr`."""

    path: str
    type: str
    value: str

    @classmethod
    def of(cls, path: str, kind: type, value: Any) -> StaticArgument:
        """The record of a value; an address in its `repr` is left out, since no other process has it."""
        return cls(path, kind.__name__, _ADDRESS.sub("", repr(value)))


@dataclass(frozen=True)
class Tree(Record):
    """The tree of a function's results, where it has a JSON form."""

    spec: Any


@dataclass(frozen=True)
class Contract:
    """How an exported pair is called.

    Attributes:
        name: of the function.
        inputs, outputs, residuals, tangents, gradients: every array, in the order of the programs (`descriptors`).
        platforms: for which the programs were lowered, as `jax.export` names them.
        mlir_platform: the one that the readable `.mlir` files are for.
        argnums, has_aux: as in `aot.function`.
        positional: how many positional arguments there are; `statics` are the Python values among all arguments.
        order: how often the artefact can be differentiated.
        sizes: what each symbolic size counted as when the plan was made; empty without symbolic sizes.
        graph_signature: PyTorch's record, with `BackwardSignature`; its trees are plain dicts and tuples.
        result_tree: the JSON form of the result's own tree, None where it has none.
        plan: what is saved and why, as `jointcut.partition.plans.planfile` writes it.
        programs: file names and calling-convention version of each program.
        versions: of jointcut, jax, jaxlib and Python when it was written.
    """

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    residuals: tuple[ResidualInput, ...]
    tangents: tuple[Tangent, ...]
    gradients: tuple[Gradient, ...]
    platforms: tuple[str, ...]
    mlir_platform: str
    argnums: int | tuple[int, ...]
    has_aux: bool
    positional: int
    statics: tuple[StaticArgument, ...]
    order: int
    sizes: dict[str, int]
    graph_signature: GraphSignature
    result_tree: str | None
    plan: dict[str, Any]
    programs: dict[str, dict[str, Any]]
    versions: dict[str, str]

    @property
    def num_constants(self) -> int:
        """How many leading inputs are constants."""
        return sum(i.kind == "constant" for i in self.inputs)

    @property
    def is_train(self) -> bool:
        """Whether there is a backward."""
        return "backward" in self.programs

    @property
    def returned(self) -> tuple[Output, ...]:
        """The outputs that the function returned itself: all but the states, which come last."""
        return tuple(o for o in self.outputs if o.kind != "state")

    @property
    def states(self) -> tuple[Output, ...]:
        """The outputs that are new values of inputs."""
        return self.outputs[len(self.returned) :]

    @cached_property
    def own_result_spec(self) -> Any | None:
        """The tree that the function itself returned, None where its classes are not at hand."""
        if self.result_tree is None:
            return None
        try:
            return Tree.from_json(self.result_tree).spec
        except RecordError:
            return None

    @property
    def result_spec(self) -> Any:
        """The tree of the result: its own where its classes are at hand, else dicts and tuples."""
        own = self.own_result_spec
        return jax.tree.structure(self._plain_result) if own is None else own

    @cached_property
    def result_order(self) -> tuple[int, ...]:
        """For each leaf of `result_spec` the output that stands there, then the states.

        Dicts sort their keys, classes need not.
        """
        count = len(self.returned)
        order = range(count) if self.own_result_spec is not None else jax.tree.leaves(self._plain_result)
        return (*order, *range(count, len(self.outputs)))

    @property
    def _plain_result(self) -> Any:
        """The numbers of the outputs, each at its place in dicts and tuples."""
        if not self.has_aux:
            return plain_tree([(o.keys, i) for i, o in enumerate(self.returned)])
        halves = [[(o.keys[1:], i) for i, o in enumerate(self.outputs) if o.kind == kind] for kind in ("output", "aux")]
        return tuple(map(plain_tree, halves))

    @property
    def saved_bytes(self) -> int:
        """Bytes of the residuals that only the backward needs."""
        return sum(r.bytes for r in self.residuals if r.kind == "saved")

    def to_json(self) -> dict[str, Any]:
        """The contract as a JSON object."""
        found: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in _ARRAYS:
            found[name] = [item.to_json() for item in found[name]]
        found["statics"] = [dataclasses.asdict(s) for s in self.statics]
        found["graph_signature"] = json.loads(self.graph_signature.to_json())
        found["result_tree"] = None if self.result_tree is None else json.loads(self.result_tree)
        found["platforms"] = list(self.platforms)
        found["argnums"] = list(self.argnums) if isinstance(self.argnums, tuple) else self.argnums
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any], where: str) -> Contract:
        """The contract in a JSON object; raises `ArtefactError` for what is none."""
        names = [f.name for f in dataclasses.fields(cls)]
        if missing := [name for name in names if name not in found]:
            raise ArtefactError(message(where, f"lacks {', '.join(missing)}.", CURE))
        made = {name: found[name] for name in names}
        for name, kinds in _TYPES.items():
            if type(made[name]) not in kinds:
                expected = " or ".join(kind.__name__ for kind in kinds)
                what = f"is of the type {type(made[name]).__name__}, not {expected}."
                raise ArtefactError(message(f"{where}[{name!r}]", what, CURE))
        for name, kind in _ARRAYS.items():
            made[name] = read_all(kind, found[name], f"{where}[{name!r}]")
        try:
            made["statics"] = tuple(map(_static, found["statics"]))
            made["graph_signature"] = GraphSignature.from_json(json.dumps(found["graph_signature"]))
            made["result_tree"] = found["result_tree"] and json.dumps(found["result_tree"])
            made["platforms"] = tuple(map(_text, found["platforms"]))
            contract = cls(**{**made, "argnums": as_tuple(found["argnums"])})
            _ = contract.result_order
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            what = f"is not as it was written: {(str(error).splitlines() or [''])[0].rstrip('.')}."
            raise ArtefactError(message(where, what, CURE)) from error
        return contract


def _static(found: Any) -> StaticArgument:
    made = StaticArgument(**found)
    _ = _text(made.path), _text(made.type), _text(made.value)
    return made


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"{found!r} is no text")
    return found
