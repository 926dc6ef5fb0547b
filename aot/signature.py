"""Describe a pair by names and positions.

Inputs of the forward are called `primals_1`, `primals_2` and so on, its results `output_1`, `saved_1`, and those of the
backward `tangents_1` and `gradient_1`: the names under which an exported pair is known.
"""

from __future__ import annotations

from jointcut.aot.traced import TracedCall
from jointcut.wrappers.metadata import BackwardSignature, GraphSignature


def graph_signature(traced: TracedCall, num_constants: int | None = None) -> GraphSignature:
    """Which input and output of the programs made from a traced call is which.

    `num_constants` inputs come first, by default those of the joint program.
    """
    metadata, bound = traced.metadata, traced.bound
    start = len(traced.consts) if num_constants is None else num_constants
    chosen = {i for place in traced.options.chosen if place < len(bound.spans) for i in bound.spans[place]}
    names = {i: f"primals_{start + place + 1}" for i, place in enumerate(bound.places)}
    infos = dict(enumerate(metadata.input_info))
    buffers = [i for i in infos if infos[i].is_reference or infos[i].mutates_data]
    parameters = [i for i in infos if i in chosen and infos[i].requires_grad and i not in buffers]
    others = [i for i in infos if i not in {*parameters, *buffers}]
    references = [i for i in buffers if infos[i].is_reference]
    states = traced.program.results.states
    return GraphSignature(
        parameters=tuple(infos[i].path for i in parameters),
        buffers=tuple(infos[i].path for i in buffers),
        user_inputs=tuple(dict.fromkeys(names[i] for i in others)),
        user_outputs=tuple(f"output_{i + 1}" for i in range(metadata.num_outputs)),
        inputs_to_parameters={names[i]: infos[i].path for i in parameters},
        inputs_to_buffers={names[i]: infos[i].path for i in buffers},
        buffers_to_mutate={f"state_{k + 1}": infos[i].path for k, i in enumerate(references) if infos[i].mutates_data}
        | {f"output_{metadata.num_outputs + k + 1}": path for k, (_, path) in enumerate(states)},
        in_spec=bound.tree,
        out_spec=traced.program.results.tree,
        backward_signature=_backward(traced, chosen) if metadata.is_train else None,
        input_tokens=metadata.tokens,
        output_tokens=metadata.tokens,
    )


def _backward(traced: TracedCall, chosen: set[int]) -> BackwardSignature:
    infos = traced.metadata.input_info
    chosen = {i for i in chosen if not infos[i].mutates_data}
    gradients = {f"gradient_{n + 1}": i for n, i in enumerate(traced.owners)}
    carrying = [i for i, info in enumerate(traced.metadata.output_info) if info.requires_grad]
    return BackwardSignature(
        gradients_to_parameters={name: infos[i].path for name, i in gradients.items() if i in chosen},
        gradients_to_user_inputs={name: infos[i].path for name, i in gradients.items() if i not in chosen},
        loss_output=f"output_{carrying[0] + 1}" if len(carrying) == 1 else "",
    )
