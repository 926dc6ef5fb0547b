"""Keep a mask as bits: one bit for an element, where an array of booleans has a byte.

Dropout's mask is kept, since drawing it again is dear. PyTorch keeps a byte for each element, as XLA does. Eight
neighbours along the last axis share a byte, so that an array that is divided between devices stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import LITERAL, OPEN_LOOP, STEP, TOP, Form, Value
from jointcut.partition.search.forms.readers import is_usual, readers
from jointcut.partition.search.forms.written import Rewriting

KIND = "a mask as bits"

#: Masks of fewer bytes stay as they are.
LEAST_BYTES = 1024


def candidates(problem: Problem) -> Iterator[Value]:
    """The masks that a backward reads and that are worth packing."""
    graph = problem.graph
    for v in problem.sides.wanted:
        value, maker = graph.values[v], graph.maker_of(v)
        if value.dtype != "bool" or value.saved_bytes < LEAST_BYTES or value.shape[-1:] < (8,) or maker is None:
            continue
        if maker.name not in (OPEN_LOOP, STEP, LITERAL) and graph.loop_of(maker) == value.loop and is_usual(value):
            yield value


def write(new: Rewriting, problem: Problem, plan: Plan) -> None:
    """Keep the masks that a plan saves as bits."""
    graph, free = problem.graph, problem.sides.outputs
    for v in plan.values:
        value, maker = graph.values[v], graph.maker_of(v)
        if value.dtype != "bool" or v in free or maker is None or value not in list(candidates(problem)):
            continue
        regions = readers(problem, plan, value)
        if regions is None:
            continue
        bits = new.after(maker, pack_mask, [v])
        for ops in regions.values():
            mask = new.before(ops[0], _unpacking(value.shape[-1]), [bits])
            new.instead(ops, v, mask)
        new.forms.append(Form(KIND, v, bits, value.saved_bytes - new.value(bits).saved_bytes))


def pack_mask(mask: Any) -> Any:
    """The bits of a mask: (..., n) booleans become (..., ceil(n / 8)) uint8, the first element in the lowest bit."""
    rest = -mask.shape[-1] % 8
    padded = lax.pad(mask, False, [(0, 0, 0)] * (mask.ndim - 1) + [(0, rest, 0)]) if rest else mask
    eights = padded.reshape(*padded.shape[:-1], padded.shape[-1] // 8, 8).astype(np.uint8)
    return jnp.sum(eights << lax.iota(np.uint8, 8), axis=-1, dtype=np.uint8)


@functools.cache
def _unpacking(length: int) -> Callable[[Any], Any]:
    def unpack_mask(bits: Any) -> Any:
        eights = (bits[..., None] >> lax.iota(np.uint8, 8)) & np.uint8(1)
        mask = eights.reshape(*bits.shape[:-1], 8 * bits.shape[-1]).astype(bool)
        return mask if mask.shape[-1] == length else mask[..., :length]

    return unpack_mask
