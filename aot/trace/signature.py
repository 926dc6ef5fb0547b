"""Describe a pair by names and positions.

The forward's inputs are named `primals_1`, `primals_2` and so on, its results `output_1` and `saved_1`. The backward's
cotangents are named `tangents_1`, its results `gradient_1`. An exported pair uses these names.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from jointcut.aot.trace.data import Trace
from jointcut.wrappers.arguments import objects
from jointcut.wrappers.metadata.convention import is_real
from jointcut.wrappers.metadata.schemas import InputAliasInfo, MutationType
from jointcut.wrappers.metadata.signatures import BackwardSignature, GraphSignature


def graph_signature(traced: Trace, num_constants: int | None = None) -> GraphSignature:
    """Name the inputs and outputs of the programs of a traced call.

    The first `num_constants` inputs are constants; the default is the number of the joint program.
    """
    metadata, bound = traced.analysed, traced.bound
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


def input_kinds(traced: Trace) -> list[str]:
    """Return the kind of each leaf of the arguments: `parameter`, `buffer` or `user_input`."""
    spans = traced.bound.spans
    chosen = {i for place in traced.options.chosen if place < len(spans) for i in spans[place]}

    def kind(i: int, info: InputAliasInfo) -> str:
        if info.is_reference or info.mutates_data:
            return "buffer"
        return "parameter" if i in chosen and info.requires_grad else "user_input"

    return [kind(i, info) for i, info in enumerate(traced.analysed.input_info)]


def _first_path(named: Sequence[tuple[str, InputAliasInfo]]) -> dict[str, str]:
    """Map the name of each input to the path of its first leaf; `same_arrays` has the others."""
    paths: dict[str, str] = {}
    for name, info in named:
        paths.setdefault(name, info.path)
    return paths


def _backward(traced: Trace, kinds: Sequence[str]) -> BackwardSignature:
    infos = traced.analysed.input_info
    chosen = {i for i, kind in enumerate(kinds) if kind == "parameter"}
    word = "updated" if traced.program.is_updated else "gradient"
    gradients = {f"{word}_{n + 1}": i for n, i in enumerate(traced.owners)}
    carrying = [i for i, on in enumerate(traced.program.carries) if on]
    aval = traced.program.results.avals[carrying[0]] if len(carrying) == 1 else None
    is_loss = aval is not None and aval.shape == () and is_real(aval.dtype)
    return BackwardSignature(
        gradients_to_parameters={name: infos[i].path for name, i in gradients.items() if i in chosen},
        gradients_to_user_inputs={name: infos[i].path for name, i in gradients.items() if i not in chosen},
        loss_output=f"output_{carrying[0] + 1}" if is_loss else "",
        parts=_parts(gradients),
        are_updated=traced.program.is_updated,
    )


def _parts(gradients: Mapping[str, int]) -> dict[str, str]:
    """Return the kind, `rows` or `places`, of each gradient that is one of a table's two arrays."""
    parts: dict[str, str] = {}
    pairs = list(gradients.items())
    for (name, leaf), (following, other) in itertools.pairwise(pairs):
        if leaf == other:
            parts |= {name: "rows", following: "places"}
    return parts
