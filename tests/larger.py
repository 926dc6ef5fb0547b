"""Programs of the corpus on larger arguments, so that what is saved for the backward weighs more than 100 kB.

for program in LARGER: ...  # the same functions under the same names
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from corpus.networks import block_weights, perceptron_weights
from corpus.program import normal
from programs import Program, named

_ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "two_layers": lambda: (perceptron_weights(), normal(3, 6000, 3), normal(4, 6000, 2)),
    "transformer_block": lambda: (block_weights(5, width=64), normal(6, 64, 64)),
    "convolutions": lambda: (
        {"first": normal(7, 3, 3, 1, 2), "second": normal(8, 3, 3, 2, 2), "dense": normal(9, 2048, 2)},
        normal(10, 2, 64, 64, 1),
    ),
    "elman": lambda: ((normal(21, 2, 4), normal(22, 4, 4)), normal(23, 8000, 2)),
    "scan_over_layers": lambda: (block_weights(100, 3, width=64), normal(104, 64, 64)),
    "nested_scans": lambda: (normal(120, 64), normal(121, 20, 30, 64)),
    "unrolled_layers": lambda: (normal(136, 4, 64, 64, scale=0.1), normal(137, 128, 64)),
    "cond_in_scan": lambda: (normal(204, 8000), normal(205, 4, 8000)),
    "mixture_of_experts": lambda: (
        normal(209, 2, 64, 64, scale=0.1), normal(210, 64, 2, scale=0.1), normal(211, 256, 64),
    ),
    "checkpointed_scan_body": lambda: (normal(610, 8, 64, 64, scale=0.1), normal(611, 64, 64)),
    "dropout_network": lambda: (normal(700, 64, 256, scale=0.1), normal(701, 128, 64), jax.random.key(1)),
    "dropout_in_scan": lambda: (normal(702, 3, 64, 64, scale=0.1), normal(703, 128, 64), jax.random.key(2)),
}  # fmt: skip

#: Sums of many more numbers, some of which cancel.
_MORE_ATOL = 100

LARGER: tuple[Program, ...] = tuple(
    replace(program, make=make, atol=_MORE_ATOL * program.atol)
    for program, make in ((named(name), make) for name, make in _ARGUMENTS.items())
)


def larger(name: str) -> Program:
    """The program of that name on its larger arguments."""
    return next(program for program in LARGER if program.name == name)
