"""Name what each input and output of the joint program stands for.

A joint program computes `(primals, cotangents) -> (outputs, gradients)`. `Roles` says which flat position is which,
how the user calls it (`args[0]['w']`), and how many leading equations were traced before the backward began.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jointcut.partition.errors import GraphError, message


class Role(enum.Enum):
    """The meaning of one flat input or output of a joint program."""

    PRIMAL = "primal"
    """An array that the function takes."""
    COTANGENT = "cotangent"
    """The derivative of the loss by an output, from which the backward starts."""
    OUTPUT = "output"
    """An array that the function returns."""
    GRADIENT = "gradient"
    """The derivative of the loss by a primal."""


class Side(enum.Enum):
    """The half of a training step in which an op was traced, or runs."""

    FORWARD = "forward"
    """From the primals to the outputs."""
    BACKWARD = "backward"
    """From residuals and cotangents to the gradients."""


@dataclass(frozen=True)
class Roles:
    """The roles of all flat inputs and outputs of a joint program, in order.

    Attributes:
        inputs: primals, cotangents, or a mixture.
        outputs: outputs, gradients, or a mixture.
        forward_ops: how many leading equations were traced before the first one of the backward; None where the number
            is not known. Then every equation that needs no cotangent counts as forward.
        replaced: positions of the inputs whose memory the gradients take: those of an update, new parameters and state.
        input_paths: the user's name for each input, such as `args[0]['w']`; shorter where the last ones have no known
            name.
    """

    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]
    forward_ops: int | None = None
    input_paths: tuple[str, ...] = ()
    replaced: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse roles on the wrong end of the program."""
        if bad := [r.value for r in self.inputs if r in (Role.OUTPUT, Role.GRADIENT)]:
            raise GraphError(message("roles.inputs", f"holds {bad}.", "An input is a primal or a cotangent."))
        if bad := [r.value for r in self.outputs if r in (Role.PRIMAL, Role.COTANGENT)]:
            raise GraphError(message("roles.outputs", f"holds {bad}.", "An output is an output or a gradient."))

    @classmethod
    def simple(cls, primals: int, cotangents: int, outputs: int, gradients: int) -> Roles:
        """Roles of a joint program in the usual order: primals, cotangents; outputs, gradients."""
        return cls(
            (Role.PRIMAL,) * primals + (Role.COTANGENT,) * cotangents,
            (Role.OUTPUT,) * outputs + (Role.GRADIENT,) * gradients,
        )

    def input_path(self, index: int) -> str:
        """The user's name for input number `index`."""
        return self.input_paths[index] if index < len(self.input_paths) else f"input {index}"
