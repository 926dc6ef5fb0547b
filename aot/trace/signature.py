"""Describe a pair by names and positions.

The forward's inputs are named `primals_1`, `primals_2` and so on, its results `output_1` and `saved_1`. The backward's
cotangents are named `tangents_1`, its results `gradient_1`. An exported pair uses these names.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.tree_util import GetAttrKey, tree_flatten_with_path

from jointcut.aot.trace.data import Trace
from jointcut.aot.trace.joint import Joint
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.roles import Role
from jointcut.wrappers.arguments import objects
from jointcut.wrappers.arguments.tree import struct
from jointcut.wrappers.metadata.convention import is_real
from jointcut.wrappers.metadata.descriptors import (
    BOXED,
    Descriptors,
    GradientOutput,
    Input,
    Output,
    Size,
    Tangent,
    plain_keys,
)
from jointcut.wrappers.metadata.schemas import InputAliasInfo, MutationType, SubclassMeta
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
_TWO = ("rows", "places")


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


# ------------------------------------------------------------------------------------------ array by array


def described(traced: Trace) -> Descriptors:
    """Describe the arrays of the joint program of a traced call, in its order."""
    bound, program = traced.bound, traced.program
    inputs, outputs = inputs_of(traced, traced.consts, bound.entering), outputs_of(traced)
    paths = [path for path, _ in places_of(traced)]
    at = len(traced.consts)
    of = [replace(inputs[at + bound.places[i]], path=paths[i]) for i in traced.owners]
    return _described(program, inputs, outputs, of, traced.subclass_metadata)


def described_inside(program: Joint) -> Descriptors:
    """Describe the arrays of a program that JAX differentiates, inside a transformation."""
    jaxpr, _ = jaxprs.opened(program.closed)
    count, results = program.roles.inputs.count(Role.PRIMAL), program.results
    chosen = {count + place for place in program.differentiated}
    inputs = []
    for i, v in enumerate(jaxpr.invars[:count]):
        kind = "constant" if i < len(program.consts) else "parameter" if i in chosen else "user_input"
        aval = getattr(v.aval, "inner_aval", v.aval)
        rest = {"kind": kind, "path": program.roles.input_path(i), "keys": (), "sharding": None}
        inputs.append(Input.like(aval, name=f"primals_{i + 1}", **rest))
    pairs = enumerate(zip(results.avals, results.paths, strict=True))
    outputs = [Output.like(a, name=f"output_{i + 1}", kind="output", path=path, keys=()) for i, (a, path) in pairs]
    return _described(program, tuple(inputs), tuple(outputs), [inputs[i] for i in sorted(chosen)], None)


def _described(
    program: Joint,
    inputs: tuple[Input, ...],
    outputs: tuple[Output, ...],
    of: Sequence[Input],
    metadata: SubclassMeta | None,
) -> Descriptors:
    """Add what follows from the program; `of` are the inputs that the gradients belong to."""
    jaxpr, _ = jaxprs.opened(program.closed)
    boundary = len(jaxpr.eqns) if program.roles.forward_ops is None else program.roles.forward_ops
    if not program.is_train:
        return Descriptors(inputs, outputs, (), (), boundary, metadata=metadata)
    tangents = tangents_of(program, outputs, [v.aval for v in jaxpr.invars[len(inputs) :]])
    gradients = gradients_of(program, of, [v.aval for v in jaxpr.outvars[len(outputs) :]])
    return Descriptors(inputs, outputs, tangents, gradients, boundary, metadata=metadata)


def inputs_of(traced: Trace, constants: Sequence[Any], leaves: Sequence[int]) -> tuple[Input, ...]:
    """Describe constants, and then these leaves of the arguments."""
    inputs = []
    for i, constant in enumerate(constants):
        rest = {"kind": "constant", "path": f"constant {i}", "keys": (), "sharding": None}
        inputs.append(Input.like(_content(struct(constant)), name=f"primals_{i + 1}", **rest))
    places, kinds = places_of(traced), input_kinds(traced)
    for n, i in enumerate(leaves, len(constants)):
        (path, keys), leaf = places[i], traced.bound.leaves[i]
        sharding = getattr(leaf, "sharding", None)
        rest = {"kind": kinds[i], "path": path, "keys": keys, "sharding": None if sharding is None else str(sharding)}
        inputs.append(Input.like(_content(leaf), name=f"primals_{n + 1}", **rest))
    return tuple(inputs)


def _content(leaf: Any) -> Any:
    """Return the type of a reference's content, or the array itself."""
    return getattr(jax.typeof(leaf), "inner_aval", leaf)


def outputs_of(traced: Trace) -> tuple[Output, ...]:
    """Describe the results of the function, and its new states."""
    results = traced.program.results
    returned, _ = tree_flatten_with_path(jax.tree.unflatten(results.tree, range(results.num_in_tree)))
    arguments = places_of(traced)
    states = [arguments[place] for place, _ in results.states]
    grown = [() for _ in range(results.num_returned - results.num_in_tree)]
    keys = [*(plain_keys(path) for path, _ in returned), *grown, *(keys for _, keys in states)]
    paths = [*results.paths[: results.num_returned], *(path for path, _ in states)]
    kinds = ["output"] * len(results.main) + ["aux"] * results.num_aux + ["state"] * len(results.states)
    outputs = zip(results.avals, paths, keys, kinds, strict=True)
    return tuple(
        Output.like(aval, name=f"output_{i + 1}", kind=kind, path=path, keys=output_keys)
        for i, (aval, path, output_keys, kind) in enumerate(outputs)
    )


def tangents_of(program: Joint, outputs: Sequence[Output], avals: Sequence[Any]) -> tuple[Tangent, ...]:
    """Describe the cotangents that a backward takes, whose types are `avals`."""
    carrying = [o for o, carries in zip(outputs, program.carries, strict=True) if carries]
    pairs = zip(carrying, avals, strict=True)
    return tuple(Tangent.like(a, name=f"tangents_{i + 1}", of=o.name) for i, (o, a) in enumerate(pairs))


def gradients_of(program: Joint, of: Sequence[Input], avals: Sequence[Any]) -> tuple[GradientOutput, ...]:
    """Describe the results of a backward, whose types are `avals`; `of` are the inputs that they belong to."""
    count = len(avals) - len(program.sparse)
    parts = [part for k in range(count) for part in (_TWO if k in program.sparse else ("whole",))]
    gradients = enumerate(zip(of, avals, parts, strict=True))
    return tuple(
        GradientOutput.like(aval, name=f"gradient_{n + 1}", of=owner.name, path=owner.path, part=part)
        for n, (owner, aval, part) in gradients
    )


def places_of(traced: Trace) -> list[tuple[str, tuple[Size, ...]]]:
    """Return the path of each leaf as text and as keys: `("args", 0, "w")`, `("kwargs", "mask")`.

    An array that a box holds as its only `value`, as in Flax's variables, has the path of the box.
    """
    bound = traced.bound
    tree = bound.rebuild_places()
    leaves, _ = tree_flatten_with_path(tree)
    are_boxed = boxed([keys for keys, _ in leaves])
    return [
        (path.removesuffix(f".{BOXED}"), keys[:-1]) if is_boxed else (path, keys)
        for path, keys, is_boxed in zip(bound.paths(), argument_keys(tree, bound.dynamic), are_boxed, strict=True)
    ]


def argument_keys(tree: Any, dynamic: Sequence[int]) -> list[tuple[Size, ...]]:
    """Return the keys of each leaf of `(args, kwargs)`; `dynamic` are the positions of the dynamic arguments."""
    leaves, _ = tree_flatten_with_path(tree)
    paths = []
    for (half, first, *rest), _ in leaves:
        if half.idx == 0:
            paths.append(("args", dynamic[first.idx], *plain_keys(rest)))
        else:
            paths.append(("kwargs", *plain_keys([first, *rest])))
    return paths


def boxed(paths: Sequence[Any]) -> list[bool]:
    """Return, for each JAX path, whether it ends with the attribute `value` of an object that holds nothing else."""
    leaves_below = Counter(keys[:n] for keys in paths for n in range(len(keys)))
    return [bool(keys) and keys[-1] == GetAttrKey(BOXED) and leaves_below[keys[:-1]] == 1 for keys in paths]
