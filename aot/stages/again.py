"""Differentiate the halves once more, under the conventions of the function.

A gradient that is differentiated again is a half whose own backward has products too. There all are guarded, whatever
their cotangents are known to be: second derivatives are rare, and their cost is not that of a step.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from jointcut.aot.choices.conventions import Conventions
from jointcut.aot.progress.progress import Stage
from jointcut.aot.trace.joint import joint
from jointcut.partition.program import jaxprs
from jointcut.partition.rewrite.slopes import sloped
from jointcut.partition.split import split
from jointcut.wrappers.built_in.autograd import JITTED, Wrap, half


def differentiated_again(conventions: Conventions, name: str) -> Wrap:
    """How the halves of the function with this name are differentiated: by JAX, or with guarded products."""
    if conventions.zero_cotangent == "jax":
        return JITTED
    everywhere = replace(conventions, zero_cotangent="everywhere")

    def cut(closed: Any, mask: tuple[bool, ...]) -> Any:
        """The minimum cut: the function's own plan and budget are for its step."""
        paths = [f"input {i} of a half" for i in range(len(mask))]
        with Stage("inside", name):
            flat = functools.partial(jaxprs.evaluate, closed)
            program = joint(flat, jaxprs.input_structs(closed), False, mask, paths, conventions=everywhere)
            made = split(program.to_cut, program.roles, "min_cut")
        return made.graph, made.halves, program.consts

    wrap = Wrap(lambda flat, constants: half(flat, constants, sloped, cut, wrap), guards=True)
    return wrap
