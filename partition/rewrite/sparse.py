"""Split a gradient that is a sum of scattered rows into the rows and their places.

The gradient of an embedding table is mostly zeros: `jax.vjp` scatters a few rows into an array of the table's size. If
the user wants just the rows, the scatter is left out of the joint program, which returns the rows and their places
instead. `torch.nn.Embedding(sparse=True)` does the same in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.jax.abstract import struct
from jointcut.partition.program.jax.jaxprs import Atom, Equation, Literal, opened
from jointcut.partition.program.primitives import ADDING
from jointcut.partition.rewrite.simplify import renamed

_SPREAD = ("broadcast_in_dim", "convert_element_type", "reshape")


def scatters(eqns: Sequence[Equation], gradient: Atom) -> list[Equation] | None:
    """The equations that scatter rows into zeros, if `gradient` is a sum of their results and nothing else; or None."""
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    scattering: list[Equation] = []
    stack = [gradient]
    while stack:
        atom = stack.pop()
        eqn = None if isinstance(atom, Literal) else makers.get(atom)
        if is_zero(atom, makers):
            continue
        if eqn is not None and eqn.primitive.name in ADDING:
            stack.extend(eqn.invars)
        elif eqn is not None and _scatters_rows(eqn):
            stack.append(eqn.invars[0])
            scattering.append(eqn)
        else:
            return None
    return scattering[::-1]


def is_zero(atom: Atom, makers: dict[Any, Any]) -> bool:
    """Whether a value is zero by structure: a literal zero, or a literal zero spread over a shape."""
    while not isinstance(atom, Literal):
        eqn = makers.get(atom)
        if eqn is None or eqn.primitive.name not in _SPREAD:
            return False
        atom = eqn.invars[0]
    return jaxprs.is_zero(atom)


def _scatters_rows(eqn: Equation) -> bool:
    if eqn.primitive.name != "scatter-add":
        return False
    numbers: Any = eqn.params["dimension_numbers"]
    indices: Any = eqn.invars[1].aval
    updates: Any = eqn.invars[2].aval
    batch = len(indices.shape) - 1
    rows = tuple(range(batch, len(updates.shape)))
    dims = (numbers.update_window_dims, numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims)
    plain = not numbers.operand_batching_dims and not numbers.scatter_indices_batching_dims
    table: Any = eqn.invars[0].aval
    plain = plain and tuple(updates.shape[batch:]) == tuple(table.shape[1:])
    return plain and indices.shape[-1] == 1 and tuple(map(tuple, dims)) == (rows, (0,), (0,))


def taken_apart(scattering: Sequence[Equation], table: Any) -> tuple[list[Equation], list[Atom]]:
    """Equations that concatenate the rows of some scatters and their places, and the variables of both results.

    `table` is the abstract value of the gradient, `(length, *row)`. Rows have shape `(number, *row)`, places
    `(number, 1)`, int32 or a wider dtype of the scatters. A row whose place lies outside the table is dropped.
    """
    operands = [v for eqn in scattering for v in (eqn.invars[2], eqn.invars[1])]
    clips = ["CLIP" in str(eqn.params["mode"]) for eqn in scattering]

    def lay(*flat: Any) -> tuple[Any, Any]:
        rows = [x.reshape(-1, *table.shape[1:]) for x in flat[::2]]
        places = [x.reshape(-1, 1) for x in flat[1::2]]
        if not rows:
            return jnp.zeros((0, *table.shape[1:]), table.dtype), jnp.zeros((0, 1), np.int32)
        length = table.shape[0]
        places = [x.astype(jnp.promote_types(x.dtype, np.int32)) for x in places]
        inside = [
            jnp.clip(x, 0, length - 1) if on else jnp.where(x < 0, length, x)  # BCOO takes negative places from the end
            for x, on in zip(places, clips, strict=True)
        ]
        return jnp.concatenate(rows), jnp.concatenate(inside)

    made, _ = opened(jax.make_jaxpr(lay)(*(struct(v.aval) for v in operands)))
    return renamed(made, dict(zip(made.invars, operands, strict=True)))
