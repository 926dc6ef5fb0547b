"""The corpus: every small program on which the laws are run, gathered from the files of `corpus/`.

from programs import CORPUS, named

@pytest.mark.parametrize("program", CORPUS, ids=lambda program: program.name)
def test_a_law(program): ...
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from corpus import branches, calls, checkpoints, conventions, draws, loops, networks, numerics
from corpus.program import TAGS, Program, programs_of

__all__ = ["CORPUS", "EVERY_PROGRAM", "OF_EACH_KIND", "TAGS", "Program", "named", "tagged", "undrawn"]

FILES = (networks, loops, branches, numerics, conventions, calls, checkpoints, draws)
CORPUS: tuple[Program, ...] = tuple(program for file in FILES for program in programs_of(file))
assert len({program.name for program in CORPUS}) == len(CORPUS), "two programs have one name"

#: Whether every law is asked of every program.
EVERY_PROGRAM = "JOINTCUT_EVERY_PROGRAM" in os.environ

# That the halves mean what the program means is asked of all programs (`laws/test_equal_to_vjp.py`). How else they may
# be called takes half an hour on two cores over the whole corpus: such laws run over these, and over all with
# JOINTCUT_EVERY_PROGRAM=1.
# fmt: off
OF_EACH_KIND = frozenset([
    "two_layers", "transformer_block", "layer_norm", "cross_entropy", "energy_and_forces",
    "bfloat16_weights", "scan_with_constants", "scan_without_xs", "scan_with_several_carries",
    "reverse_scan", "scan_of_no_steps", "nested_scans", "scan_with_ys_used_outside",
    "scan_with_counter", "fori_loop", "cond_on_data", "cond_in_scan", "guarded_root",
    "gather_and_scatter", "fourier_filter", "complex_weights", "float64_weights",
    "integer_and_key_leaves", "none_leaves", "dataclass_weights", "keyword_arguments", "unused_inputs",
    "output_is_input", "same_array_twice", "several_outputs", "auxiliary_output", "constant_function",
    "python_numbers", "weak_types", "custom_vjp_clip", "custom_jvp_steep", "pallas_kernel",
    "sharded_map", "nested_jits", "vmap_inside", "stop_gradient_on_one_path",
    "checkpointed_scan_body", "checkpoint_in_checkpoint", "dropout_network", "dropout_in_scan",
])
# fmt: on
assert {program.name for program in CORPUS} >= OF_EACH_KIND


def named(name: str) -> Program:
    """The program of that name."""
    return next(program for program in CORPUS if program.name == name)


def tagged(tag: str) -> tuple[Program, ...]:
    """The programs that bear a tag of `TAGS`."""
    assert tag in TAGS, tag
    return tuple(program for program in CORPUS if tag in program.tags)


def undrawn(make: Callable[[], Any]) -> Any:
    """A program of `benchmarks/` with the shapes of its arguments in their place: to draw them takes seconds."""
    made = []
    shapes = jax.eval_shape(lambda: (made.append(make()), made[0].arguments)[1])
    return replace(made[0], arguments=shapes)
