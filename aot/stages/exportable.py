"""Trace and cut a function for export, for fixed or symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jointcut.aot.export.export import refuse_what_stays
from jointcut.aot.export.pair import Pair
from jointcut.aot.options.options import Options, name_of
from jointcut.aot.stages import tracing
from jointcut.aot.stages.symbolic import symbolic_cut
from jointcut.partition.errors import ArtefactError, message
from jointcut.partition.plans.backend import Backend
from jointcut.partition.program.sizes import is_symbolic
from jointcut.wrappers.arguments.tree import Bound


def exportable(
    function: Callable[..., Any],
    options: Options,
    bound: Bound,
    sizes: Mapping[str, int] | None,
    constraints: Sequence[str],
    platforms: Sequence[str],
) -> Pair:
    """Return the pair to export; with symbolic sizes, its plan is made for the numbers in `sizes`.

    Raises `ArtefactError` if the function cannot be exported, and as tracing and cutting do.
    """
    symbolic = any(isinstance(leaf, jax.ShapeDtypeStruct) and is_symbolic(leaf.shape) for leaf in bound.leaves)
    if symbolic or sizes or constraints:
        if options.passes:
            what = f"rewrites halves, and those of {name_of(function)} have symbolic sizes."
            cure = "Export with numbers for all sizes, or leave that wrapper out."
            raise ArtefactError(message(f"The wrapper {type(options.passes[0]).__name__}", what, cure))
        cut = symbolic_cut(function, options, bound, sizes or {}, constraints)
        return Pair(cut.cut.made, cut.traced, cut.split.on(Backend.of(platforms)).halves, cut.sizes)
    traced = tracing.trace(function, options, bound, options.chosen)
    refuse_what_stays(traced)
    return Pair.of(traced.partition().made, platforms)
