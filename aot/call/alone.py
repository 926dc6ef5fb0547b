"""Run a function forward only, without derivative or cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jointcut.aot.options.options import Options
from jointcut.aot.run.flat import forward_only
from jointcut.aot.run.runner import Runner
from jointcut.aot.stages import tracing
from jointcut.aot.trace import escapes
from jointcut.aot.trace.blame import explained, unique_paths
from jointcut.aot.trace.primal import primal
from jointcut.aot.trace.trees import Call
from jointcut.partition.program.jax import runtime
from jointcut.wrappers.arguments.tree import Bound


def alone(name: str, function: Callable[..., Any], options: Options, bound: Bound) -> Runner:
    """Return a runner of the function alone, compiled at the first call; its result, aux included, is one tree."""
    paths, shapes = unique_paths(bound), bound.abstract()
    with explained(name, function, paths, bound), escapes.refused(function, name, bound), runtime.paused_collection():
        target = tracing.wrapped_for(function, shapes, shapes.input_info(), options).target
        source = primal(target.entered, bound.unique, False)
    call = Call(
        name,
        replace(options, has_aux=False),
        shapes,
        source.results,
        wanted=(),
        sparse=frozenset(),
        is_train=False,
        entering=bound.entering,
    )
    return forward_only(call, source)
