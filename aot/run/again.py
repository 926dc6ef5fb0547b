"""Differentiate the halves once more, under the conventions of the function.

A gradient that is differentiated again is a half whose own backward has products too. All of these products are
guarded, whatever is known of their cotangents: second derivatives are rare, so the cost of the guards matters less.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from jointcut.aot.options.conventions import Conventions
from jointcut.aot.progress.progress import Stage
from jointcut.aot.trace.joint import joint
from jointcut.partition.program.jax import abstract, runtime
from jointcut.partition.rewrite.slopes import sloped
from jointcut.partition.split import split
from jointcut.wrappers.built_in.autograd import JITTED, Wrap, half


def differentiated_again(conventions: Conventions, name: str) -> Wrap:
    """Return how the halves of the function with this name are differentiated: by JAX, or with guarded products."""
    if conventions.zero_cotangent == "jax":
        return JITTED
    everywhere = replace(conventions, zero_cotangent="everywhere")

    def cut(closed: Any, mask: tuple[bool, ...]) -> Any:
        """Return the minimum cut: the function's own plan and budget are for its step."""
        paths = [f"input {i} of a half" for i in range(len(mask))]
        with Stage("inside", name):
            flat = functools.partial(runtime.evaluate, closed)
            program = joint(flat, abstract.input_structs(closed), False, mask, paths, conventions=everywhere)
            made = split(program.closed, program.roles, "min_cut")
        return made.graph, made.halves, program.consts

    wrap = Wrap(lambda flat, constants: half(flat, constants, sloped, cut, wrap), guards=True)
    return wrap
