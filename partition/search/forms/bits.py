"""Keep a mask as bits: one bit for an element, where an array of booleans has a byte.

Dropout's mask is kept, since drawing it again is dear. PyTorch keeps a byte for each element, as XLA does. Eight
neighbours along the last axis share a byte, so that an array divided between devices keeps its layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import LITERAL, OPEN, STEP, Form, Value
from jointcut.partition.search.forms.readers import is_fixed, is_usual
from jointcut.partition.search.forms.written import Rewriting

KIND = "a mask as bits"

#: Masks of fewer bytes are not packed.
LEAST_BYTES = 1024

#: The cost of packing and unpacking an element, in additions of floats, by the measurement in `choose`. There are six
#: operations on bytes. A vector holds four times as many bytes as floats, and the operations run while memory is
#: awaited.
ADDITIONS = 0.6


def candidates(problem: Problem) -> Iterator[Value]:
    """The masks that may have to be kept, and that are worth packing."""
    graph, sides = problem.graph, problem.sides
    for value in graph.values:
        maker = graph.maker_of(value.id)
        if value.dtype != "bool" or value.saved_bytes < LEAST_BYTES or value.shape[-1:] < (8,) or maker is None:
            continue
        if maker.id in sides.backward or maker.name in (*OPEN, STEP, LITERAL) or value.id in sides.outputs:
            continue
        if graph.loop_of(maker) == value.loop and is_usual(value):
            yield value


def write(new: Rewriting, problem: Problem, plan: Plan, masks: Iterable[Value], is_saved: bool = True) -> None:
    """Keep the masks that a plan saves as bits, or all masks. All readers read the bits instead, in the forward too."""
    graph, saved = problem.graph, frozenset(plan.values)
    for value in masks:
        v, maker = value.id, graph.ops[value.maker or 0]
        readers = [graph.ops[i] for i in graph.consumers[v]]
        if (is_saved and v not in saved) or any(map(is_fixed, readers)):
            continue
        bits = new.after(maker, pack_mask, [v])
        mask = new.after(maker, _unpacking(value.shape[-1]), [bits])
        new.instead(readers, v, mask)
        less = value.saved_bytes - new.value(bits).saved_bytes
        new.forms.append(Form(KIND, v, bits, less * is_saved))


def work(value: Value) -> tuple[float, int]:
    """The work of packing and unpacking a mask, in additions of vectors of floats, and the bytes that it spares."""
    elements = value.copies * math.prod(value.shape)
    packed = value.copies * math.prod(value.shape[:-1]) * -(-value.shape[-1] // 8)
    return ADDITIONS * elements, elements - packed


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
