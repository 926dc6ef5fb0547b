"""Describe a pair by names and positions.

Inputs of the forward are called `primals_1`, `primals_2` and so on, its results `output_1`, `saved_1`, and those of the
backward `tangents_1` and `gradient_1`: the names under which an exported pair is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jointcut.wrappers.arguments import objects
from jointcut.wrappers.metadata.schemas import InputAliasInfo, MutationType
from jointcut.wrappers.metadata.signatures import BackwardSignature, GraphSignature

if TYPE_CHECKING:
    from jointcut.aot.stages.traced import Traced


def graph_signature(traced: Traced, num_constants: int | None = None) -> GraphSignature:
    """Which input and output of the programs made from a traced call is which.

    `num_constants` inputs come first, by default those of the joint program.
    """
    metadata, bound = traced.metadata, traced.bound
    start = metadata.num_constants if num_constants is None else num_constants
    infos, kinds = metadata.input_info, input_kinds(traced)
    named = [(f"primals_{i + 1}", info) for i, info in enumerate(metadata.constant_info) if info.is_reference]
    names = [f"primals_{start + place + 1}" for place in bound.places]
    parameters, others, buffers = ([i for i, k in enumerate(kinds) if k == kind] for kind in _KINDS)
    buffered = [*named, *((names[i], infos[i]) for i in buffers)]
    states = traced.program.results.states
    return GraphSignature(
        parameters=tuple(infos[i].path for i in parameters),
        buffers=tuple(info.path for _, info in buffered),
        user_inputs=tuple(dict.fromkeys(names[i] for i in others)),
        user_outputs=tuple(f"output_{i + 1}" for i in range(metadata.num_outputs)),
        inputs_to_parameters=_first_path([(names[i], infos[i]) for i in parameters]),
        inputs_to_buffers=_first_path(buffered),
        buffers_to_mutate={f"output_{metadata.num_outputs + k + 1}": path for k, (_, path) in enumerate(states)},
        in_spec=objects.tree_of_arrays(bound.tree),
        out_spec=objects.tree_of_arrays(traced.program.results.tree),
        backward_signature=_backward(traced, kinds) if metadata.is_train else None,
        input_tokens=metadata.tokens,
        output_tokens=metadata.tokens,
        buffers_mutated_in_place=tuple(
            info.path
            for _, info in buffered
            if info.mutation_type is MutationType.MUTATED_IN_GRAPH or info.mutates_in_backward
        ),
        same_arrays={info.path: infos[info.duplicate_of].path for info in infos if info.duplicate_of is not None},
    )


_KINDS = ("parameter", "user_input", "buffer")


def input_kinds(traced: Traced) -> list[str]:
    """For each leaf of the arguments whether it is a `parameter`, a `buffer` or a `user_input`."""
    spans = traced.bound.spans
    chosen = {i for place in traced.options.chosen if place < len(spans) for i in spans[place]}

    def kind(i: int, info: InputAliasInfo) -> str:
        if info.is_reference or info.mutates_data:
            return "buffer"
        return "parameter" if i in chosen and info.requires_grad else "user_input"

    return [kind(i, info) for i, info in enumerate(traced.metadata.input_info)]


def _first_path(named: Sequence[tuple[str, InputAliasInfo]]) -> dict[str, str]:
    """Name of each input to the path of the first leaf that it is; others are among `same_arrays`."""
    paths: dict[str, str] = {}
    for name, info in named:
        paths.setdefault(name, info.path)
    return paths


def _backward(traced: Traced, kinds: Sequence[str]) -> BackwardSignature:
    infos = traced.metadata.input_info
    chosen = {i for i, kind in enumerate(kinds) if kind == "parameter"}
    gradients = {f"gradient_{n + 1}": i for n, i in enumerate(traced.owners)}
    carrying = [i for i, on in enumerate(traced.program.carries) if on]
    return BackwardSignature(
        gradients_to_parameters={name: infos[i].path for name, i in gradients.items() if i in chosen},
        gradients_to_user_inputs={name: infos[i].path for name, i in gradients.items() if i not in chosen},
        loss_output=f"output_{carrying[0] + 1}" if len(carrying) == 1 else "",
        parts=_parts(gradients),
    )


def _parts(gradients: Mapping[str, int]) -> dict[str, str]:
    """Rows and places of the tables whose gradients are two arrays."""
    parts: dict[str, str] = {}
    pairs = list(gradients.items())
    for (name, leaf), (following, other) in itertools.pairwise(pairs):
        if leaf == other:
            parts |= {name: "rows", following: "places"}
    return parts
