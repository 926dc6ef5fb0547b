"""Describe the inputs and outputs of programs by name and position.

Inputs are named `primals_1` and so on, outputs `output_1`, and results of the backward `gradient_1`, or `updated_1` if
an update turns gradients into new values. A *path* leads the user to the array, such as `args[0]['w']`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jointcut.wrappers.record import Record, aligned


@dataclass(frozen=True)
class BackwardSignature(Record):
    """The results of the backward of an exported pair.

    Attributes:
        gradients_to_parameters: maps the name of a gradient to the path of its leaf in `argnums`.
        gradients_to_user_inputs: the same for all other gradients: `vjp` differentiates every argument, and an array of
            an object that the function writes is a buffer, not a parameter.
        loss_output: name of the output that is differentiated, if it is one real number; empty otherwise.
        parts: maps the name of a gradient to `rows` or `places`, for a table whose gradient is two arrays: the rows
            that were read, and their positions. Other gradients are not listed.
        are_updated: whether the results are new values of the leaves, which an update makes of gradients; they are
            named `updated_1`.
    """

    gradients_to_parameters: dict[str, str]
    gradients_to_user_inputs: dict[str, str]
    loss_output: str
    parts: dict[str, str] = field(default_factory=dict)
    are_updated: bool = False

    def __str__(self) -> str:
        """Return a line for each gradient, or each new value: its name, and the path of its leaf."""
        of = self.gradients_to_parameters | self.gradients_to_user_inputs
        head, word = ("updated", "new value of") if self.are_updated else ("gradients", "of")
        rows = [(name, f"{word} {of[name]}", self.parts.get(name, "")) for name in sorted(of, key=_place)]
        return "\n".join([head, *aligned(rows)])


@dataclass(frozen=True)
class GraphSignature(Record):
    """The inputs and outputs of a program, by name and position.

    JAX has no modules. *Parameters* are the leaves of the arguments in `argnums`. *Buffers* are the references
    (`jax.Ref`) that the function takes or closes over, and the arrays of objects that it writes. *User inputs* are all
    other inputs.

    Attributes:
        parameters: paths of the parameters; `inputs_to_parameters` maps names of inputs to them.
        buffers: paths of the buffers; `inputs_to_buffers` maps names of inputs to them.
        user_inputs, user_outputs: names of inputs and outputs.
        buffers_to_mutate: maps the name of each new state, a result after the outputs, to the path of its buffer.
            (PyTorch's `parameters_to_mutate` and `user_inputs_to_mutate` are not needed: only buffers are written.)
        in_spec, out_spec: the trees of the arguments and of the result. An object that the function can write (a Flax
            NNX module) is replaced by the tree of its arrays.
        backward_signature: the signature of the backward, or None for inference.
        input_tokens, output_tokens: names of the kinds of ordered effects; JAX itself passes their tokens.
        buffers_mutated_in_place: paths of the references that the program writes in place, without a result.
        same_arrays: maps the path of a repeated array to the path of its first leaf. Both leaves are one input.
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    user_inputs: tuple[str, ...]
    user_outputs: tuple[str, ...]
    inputs_to_parameters: dict[str, str]
    inputs_to_buffers: dict[str, str]
    buffers_to_mutate: dict[str, str]
    in_spec: Any
    out_spec: Any
    backward_signature: BackwardSignature | None
    input_tokens: tuple[str, ...] = ()
    output_tokens: tuple[str, ...] = ()
    buffers_mutated_in_place: tuple[str, ...] = ()
    same_arrays: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a line for each input, output and gradient: its name, its kind, and the path of its leaf."""
        kinds = dict.fromkeys(self.user_inputs, ("user input", ""))
        kinds |= {name: ("parameter", self._with_others(path)) for name, path in self.inputs_to_parameters.items()}
        kinds |= {name: ("buffer", self._with_others(path)) for name, path in self.inputs_to_buffers.items()}
        outputs = [(name, "the loss" if name == self._loss else "") for name in self.user_outputs]
        outputs += [(name, f"new state of {path}") for name, path in self.buffers_to_mutate.items()]
        lines = ["inputs", *aligned([(name, *kinds[name]) for name in sorted(kinds, key=_place)])] if kinds else []
        lines += ["outputs", *aligned(outputs)] if outputs else []
        lines += [str(self.backward_signature)] if self.backward_signature else []
        return "\n".join(lines) or "neither inputs nor outputs"

    @property
    def _loss(self) -> str:
        return "" if self.backward_signature is None else self.backward_signature.loss_output

    def _with_others(self, path: str) -> str:
        """Return a path, the paths of leaves that are the same array, and whether it is written in place."""
        first = self.same_arrays.get(path, path)
        group = [first, *(other for other, same in self.same_arrays.items() if same == first)]
        shown = " = ".join([path, *(other for other in group if other != path)])
        return f"{shown}, written in place" if path in self.buffers_mutated_in_place else shown


def _place(name: str) -> tuple[str, int]:
    """Return a sort key: `primals_10` comes after `primals_9`."""
    word, _, number = name.rpartition("_")
    return word, int(number) if number.isdecimal() else 0
