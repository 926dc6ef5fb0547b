"""Keep the place of the element that a pooling has chosen, where the pooled array is not exact later.

The backward of a maximum pooling reads the pooled array once more, to find the element of each window that gets the
cotangent. In an array that waited in a smaller form, many numbers are equal, and the first of them would get the
cotangent. With bfloat16 the gradient of a ResNet was off by three hundredths. So the forward keeps the place of the
element in its window, one byte for a window, and the backward reads only that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import LITERAL, OPEN, STEP, Form, Op
from jointcut.partition.search.forms.readers import is_usual
from jointcut.partition.search.forms.written import Rewriting

KIND = "the element that a pooling chose"

#: Windows of more elements are left alone: each element is an array in the program of the backward.
LARGEST_WINDOW = 64

_SELECT = "select_and_scatter_add"


def poolings(problem: Problem) -> Iterator[Op]:
    """The ops of the backward that choose an element of each window of an array of the forward."""
    for op in problem.graph.ops:
        if op.name == _SELECT and op.id in problem.sides.backward and op.operands[1] is not None:
            maker = problem.graph.maker_of(op.operands[1])
            if maker is not None and not problem.sides.is_late(op.operands[1]):
                yield op


def candidates(problem: Problem) -> Iterator[Op]:
    """The poolings that may read the place of the element instead."""
    graph = problem.graph
    for op in poolings(problem):
        source, pooled = op.operands
        maker = graph.maker_of(pooled or 0)
        if source is None or pooled is None or maker is None or maker.name in (*OPEN, STEP, LITERAL):
            continue
        is_known = op.payload.params["select_prim"].name in ("ge", "le")
        is_small = math.prod(op.payload.params["window_dimensions"]) <= LARGEST_WINDOW
        at_home = graph.loop_of(maker) == graph.values[pooled].loop == graph.loop_of(op)
        if is_known and is_small and at_home and all(is_usual(graph.values[v]) for v in (source, pooled)):
            yield op


def write(new: Rewriting, problem: Problem, ops: Iterable[Op]) -> None:
    """Let poolings of the backward read the place of the chosen element."""
    graph = problem.graph
    for op in ops:
        source, pooled = op.operands
        assert source is not None and pooled is not None, "a candidate"
        maker, params = graph.maker_of(pooled), op.payload.params
        assert maker is not None, "a candidate"
        windows = tuple(tuple(params[name]) for name in ("window_dimensions", "window_strides", "padding"))
        places = new.after(maker, _choosing(params["select_prim"].name, *windows), [pooled])
        new.instead_of(op, _spreading(graph.values[pooled].shape, *windows), [source, places])
        new.forms.append(Form(KIND, pooled, places, 0))


@functools.cache
def _choosing(
    name: str, window: Sequence[int], strides: Sequence[int], padding: Sequence[tuple[int, int]]
) -> Callable[[Any], Any]:
    """The function that finds the place of the chosen element in each window.

    It goes through a window in order, as JAX does: an element gives way to the next one unless it is as great (`ge`)
    or as small (`le`). Outside the array there are infinities, and a cotangent that goes there is lost.
    """
    beyond, is_kept = (-np.inf, lax.ge) if name == "ge" else (np.inf, lax.le)

    def chosen_places(x: Any) -> Any:
        padded = lax.pad(x, jnp.asarray(beyond, x.dtype), [(low, high, 0) for low, high in padding])
        first, *others = (_elements(padded, offset, strides, window) for offset in np.ndindex(*window))
        places, best = jnp.zeros(first.shape, np.uint8), first
        for k, now in enumerate(others, 1):
            stays = is_kept(best, now)
            places, best = jnp.where(stays, places, np.uint8(k)), jnp.where(stays, best, now)
        return places

    return chosen_places


@functools.cache
def _spreading(
    shape: Sequence[int], window: Sequence[int], strides: Sequence[int], padding: Sequence[tuple[int, int]]
) -> Callable[[Any, Any], Any]:
    """The function that adds the cotangents of windows to the chosen elements."""

    def spread_to_chosen(source: Any, places: Any) -> Any:
        zero, total = jnp.zeros((), source.dtype), None
        for k, offset in enumerate(np.ndindex(*window)):
            own = jnp.where(places == np.uint8(k), source, zero)
            rows = zip(shape, source.shape, offset, strides, padding, strict=True)
            config = []
            for size, count, first, stride, (low, _) in rows:
                start = first - low
                config.append((start, size - start - ((count - 1) * stride + 1), stride - 1))
            here = lax.pad(own, zero, config)
            total = here if total is None else total + here
        return total

    return spread_to_chosen


def _elements(padded: Any, offset: Sequence[int], strides: Sequence[int], window: Sequence[int]) -> Any:
    """The elements at one place of all windows."""
    counts = [(size - w) // s + 1 for size, w, s in zip(padded.shape, window, strides, strict=True)]
    ends = [o + (n - 1) * s + 1 for o, n, s in zip(offset, counts, strides, strict=True)]
    return lax.slice(padded, offset, ends, strides)
