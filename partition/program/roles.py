"""Name what each input and output of the joint program stands for.

A joint program computes `(primals, cotangents) -> (outputs, gradients)`. `Roles` gives the role of each flat position,
the user's name for it (`args[0]['w']`), and the number of leading equations that were traced before the backward began.
`UpdateOps` names the equations with which one parameter is updated.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

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
class Tile:
    """Rows of a joint program that run block by block.

    Attributes:
        value: the number of a value among the inputs and then the results of all equations: the rows lie along its
            `axis`.
        axis: an axis of this value.
        least_bytes: values of fewer bytes are the border of the equations in blocks.
        blocks: the number of blocks.
        is_early: whether the backward of a block runs together with its forward.
        array: the value in words: its type, op and line, or its path.
        block_bytes: the temporaries that a block may take, by the model: its backward computes values again. None where
            it keeps all.
        over: the axes of a mesh along which the rows lie: each device there has so many blocks of its own rows.
    """

    value: int
    axis: int
    least_bytes: int
    blocks: int
    is_early: bool = False
    array: str = field(default="", compare=False)
    block_bytes: int | None = None
    over: tuple[str, ...] = ()

    def __str__(self) -> str:
        """`float32[64,99] of exp at loss.py:6: 8 blocks along axis 0, each forward with its backward`."""
        how = ", each forward with its backward" * self.is_early
        how += ", which computes values again" * (self.block_bytes is not None)
        on = f" on each device along {' and '.join(map(repr, self.over))}" if self.over else ""
        return f"{self.array or f'value {self.value}'}: {self.blocks} blocks along axis {self.axis}{on}{how}"


@dataclass(frozen=True)
class UpdateOps:
    """The ops with which one parameter is updated: they make its new value and its new state.

    In `Roles` these are places of an input and of equations, in a graph ids of a value and of ops.

    Attributes:
        parameter: the input that is updated.
        ops: the ops, in order.
        sweep: 1 or 2. If the backward runs twice, the ops of the first sweep make numbers for the second.
    """

    parameter: int
    ops: tuple[int, ...]
    sweep: int = 1


@dataclass(frozen=True)
class Roles:
    """The roles of all flat inputs and outputs of a joint program, in order.

    Attributes:
        inputs: primals, cotangents, or a mixture.
        outputs: outputs, gradients, or a mixture.
        forward_ops: the number of leading equations that were traced before the backward; None where the number is not
            known. Then every equation that needs no cotangent counts as forward.
        replaced: positions of the inputs whose memory the gradients take. For an update the gradients are new
            parameters and state.
        updates: the equations with which parameters are updated.
        tiles: the rows that run block by block, in the order in which the program was rewritten for them.
        input_paths: the user's name for each input, such as `args[0]['w']`; shorter where the last ones have no known
            name.
    """

    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]
    forward_ops: int | None = None
    input_paths: tuple[str, ...] = ()
    replaced: tuple[int, ...] = ()
    updates: tuple[UpdateOps, ...] = ()
    tiles: tuple[Tile, ...] = ()

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


@dataclass(frozen=True)
class Move:
    """What the devices of a mesh exchange where the compiler finds it necessary, once for each run of an op.

    Attributes:
        op: the op that must run again if it is exchanged again.
        kind: "all-reduce" or "all-gather".
        bytes: the size of the result on each device.
        readers: the ops of both halves that need an array whole, each with its operand.
    """

    op: int
    kind: str
    bytes: int
    readers: tuple[tuple[int, int], ...] = ()
