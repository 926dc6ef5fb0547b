"""Describe in JSON how an exported pair is called.

`signature.json` holds a `Contract` and the checksums of the files. With it nobody needs the source of the model: it
lists every array in order, with its path in the user's arguments or results, and the program that it belongs to.
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

from jointcut.partition.errors import ArtefactError, RecordError, message
from jointcut.wrappers.metadata.convention import is_inexact
from jointcut.wrappers.metadata.descriptors import (
    CURE,
    GradientOutput,
    Input,
    Output,
    ResidualInput,
    Tangent,
    as_tuple,
    plain_tree,
    read_all,
)
from jointcut.wrappers.metadata.signatures import GraphSignature
from jointcut.wrappers.record import Record

_ARRAYS = {
    "inputs": Input,
    "outputs": Output,
    "residuals": ResidualInput,
    "tangents": Tangent,
    "gradients": GradientOutput,
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
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # the address of an object in memory


@dataclass(frozen=True)
class StaticArgument(Record):
    """A Python value that the programs are specialised for: its path (`args[1]`), the name of its type, its `repr`."""

    path: str
    type: str
    value: str

    @classmethod
    def of(cls, path: str, kind: type, value: Any) -> StaticArgument:
        """Return the record of a value; an address in its `repr` is left out, since it differs in other processes."""
        return cls(path, kind.__name__, _ADDRESS.sub("", repr(value)))


@dataclass(frozen=True)
class Tree(Record):
    """The tree of a function's result, where it has a JSON form."""

    spec: Any


@dataclass(frozen=True)
class Contract:
    """The calling convention of an exported pair.

    Attributes:
        name: the name of the function.
        inputs, outputs, residuals, tangents, gradients: every array, in the order of the programs (`descriptors`).
        platforms: the platforms that the programs were lowered for, by `jax.export`'s names.
        mlir_platform: the platform of the readable `.mlir` files.
        argnums, has_aux: as in `aot.function`.
        positional: the number of positional arguments; `statics` are the Python values among all arguments.
        order: the number of times that the artefact can be differentiated.
        sizes: the number for each symbolic size that the plan was made for; empty without symbolic sizes.
        graph_signature: PyTorch's record, with `BackwardSignature`; its trees are plain dicts and tuples.
        result_tree: the JSON form of the result's own tree; None if it has none.
        plan: the saved values with reasons, in the form of `jointcut.partition.plans.planfile`.
        programs: the file names and the calling-convention version of each program.
        versions: the versions of jointcut, jax, jaxlib and Python at export.
    """

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    residuals: tuple[ResidualInput, ...]
    tangents: tuple[Tangent, ...]
    gradients: tuple[GradientOutput, ...]
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
        """Number of leading inputs that are constants."""
        return sum(i.kind == "constant" for i in self.inputs)

    @property
    def is_train(self) -> bool:
        """Whether there is a backward."""
        return "backward" in self.programs

    @property
    def is_filtered(self) -> bool:
        """Whether a filter left out arrays in `argnums`: without one, every float there has a gradient."""
        chosen = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
        places = {("args", place % self.positional) for place in chosen} if self.positional else set()
        owners = {gradient.of for gradient in self.gradients}
        return any(i.keys[:2] in places and is_inexact(i.aval.dtype) and i.name not in owners for i in self.inputs)

    @property
    def returned(self) -> tuple[Output, ...]:
        """The outputs that the function returns: all except the states, which come last."""
        return tuple(o for o in self.outputs if o.kind != "state")

    @property
    def states(self) -> tuple[Output, ...]:
        """The outputs that are new states of inputs."""
        return self.outputs[len(self.returned) :]

    @cached_property
    def own_result_spec(self) -> Any | None:
        """The tree that the function returns; None if its classes cannot be imported."""
        if self.result_tree is None:
            return None
        try:
            return Tree.from_json(self.result_tree).spec
        except RecordError:
            return None

    @property
    def result_spec(self) -> Any:
        """The tree of the result: its own tree if its classes can be imported, else dicts and tuples."""
        spec = self.own_result_spec
        return jax.tree.structure(self._plain_result) if spec is None else spec

    @cached_property
    def result_order(self) -> tuple[int, ...]:
        """The index of the output at each leaf of `result_spec`, and then the indices of the states.

        The order differs if a dict, which sorts its keys, replaces a class.
        """
        count = len(self.returned)
        order = range(count) if self.own_result_spec is not None else jax.tree.leaves(self._plain_result)
        return (*order, *range(count, len(self.outputs)))

    @property
    def _plain_result(self) -> Any:
        """The indices of the outputs, each at its place in dicts and tuples."""
        if not self.has_aux:
            return plain_tree([(o.keys, i) for i, o in enumerate(self.returned)])
        halves = [[(o.keys[1:], i) for i, o in enumerate(self.outputs) if o.kind == kind] for kind in ("output", "aux")]
        return tuple(map(plain_tree, halves))

    @property
    def saved_bytes(self) -> int:
        """Bytes of the residuals of kind `saved`."""
        return sum(r.bytes for r in self.residuals if r.kind == "saved")

    def to_json(self) -> dict[str, Any]:
        """Return the contract as a JSON object."""
        document: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in _ARRAYS:
            document[name] = [item.to_json() for item in document[name]]
        document["statics"] = [dataclasses.asdict(s) for s in self.statics]
        document["graph_signature"] = json.loads(self.graph_signature.to_json())
        document["result_tree"] = None if self.result_tree is None else json.loads(self.result_tree)
        document["platforms"] = list(self.platforms)
        document["argnums"] = list(self.argnums) if isinstance(self.argnums, tuple) else self.argnums
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any], where: str) -> Contract:
        """Return the contract in a JSON object; raises `ArtefactError` if it holds none."""
        names = [f.name for f in dataclasses.fields(cls)]
        if missing := [name for name in names if name not in document]:
            raise ArtefactError(message(where, f"lacks {', '.join(missing)}.", CURE))
        fields = {name: document[name] for name in names}
        for name, kinds in _TYPES.items():
            if type(fields[name]) not in kinds:
                expected = " or ".join(kind.__name__ for kind in kinds)
                what = f"is of the type {type(fields[name]).__name__}, not {expected}."
                raise ArtefactError(message(f"{where}[{name!r}]", what, CURE))
        for name, kind in _ARRAYS.items():
            fields[name] = read_all(kind, document[name], f"{where}[{name!r}]")
        try:
            fields["statics"] = tuple(map(_static, document["statics"]))
            fields["graph_signature"] = GraphSignature.from_json(json.dumps(document["graph_signature"]))
            fields["result_tree"] = document["result_tree"] and json.dumps(document["result_tree"])
            fields["platforms"] = tuple(map(_text, document["platforms"]))
            contract = cls(**{**fields, "argnums": as_tuple(document["argnums"])})
            _ = contract.result_order  # raises if the tree does not fit the outputs
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            what = f"is not as it was written: {(str(error).splitlines() or [''])[0].rstrip('.')}."
            raise ArtefactError(message(where, what, CURE)) from error
        return contract


def _static(fields: Any) -> StaticArgument:
    static = StaticArgument(**fields)
    _ = _text(static.path), _text(static.type), _text(static.value)
    return static


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
