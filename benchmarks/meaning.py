"""Check that two halves together mean the same as the joint program, bit for bit.

Both are run one equation at a time on given arrays. A loop is one equation whose body XLA compiles, and XLA may fuse it
differently on the two sides unless `jax_disable_most_optimizations` is set.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jointcut.partition.errors import VerifyError, message
from jointcut.partition.lower.emit import Halves
from jointcut.partition.lower.verify import run
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax import runtime
from jointcut.partition.program.roles import Role

REPORT = "This is a fault of jointcut: please report the program that shows it."


def verify_meaning(joint: Any, graph: Graph, halves: Halves, *args: Any) -> None:
    """Compare both halves with the joint program on `args`, op by op; raise `VerifyError` at the first difference."""
    primals = len(graph.role_inputs(Role.PRIMAL))
    with jax.disable_jit():
        wanted = runtime.evaluate(joint, *args)
        outputs, gradients = run(halves, graph, args[:primals], args[primals:])
    ends = {Role.OUTPUT: iter(outputs), Role.GRADIENT: iter(gradients)}
    for i, ((_, role), want) in enumerate(zip(graph.outputs, wanted, strict=True)):
        got = next(ends[role])
        if np.asarray(got).tobytes() != np.asarray(want).tobytes():
            off = np.max(np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64)))
            what = f"differs from the joint program by {off:.3g}."
            raise VerifyError(message(f"{role.value} {i}", what, REPORT))
