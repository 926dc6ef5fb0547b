"""What XLA:CPU does to some ops, and which values `emit` therefore keeps apart from their readers.

Measured on the suite (`make bench`) with JAX 0.10 and 0.12. Other backends are left to fuse as they like.
"""

from __future__ import annotations

from jointcut.partition.graph import TOP, Graph
from jointcut.partition.plan import Plan
from jointcut.partition.policy import CALLS, ELEMENTWISE

#: Ops that XLA takes apart, so that what they do to a residual alone could start before the cotangent is there: the
#: gradient of a maximum pooling first looks where the maxima are, in eight arrays of the residual's size on CPU.
TAKEN_APART = frozenset({"select_and_scatter_add"})

#: Ops whose operands are first copied into another layout. An elementwise chain that is fused into such a copy is
#: computed in the copy's order, with each array that it reads out of step with the cache: twice as slow with two
#: arrays as with one. So what is recomputed for such an op is written out first (the variational autoencoder then
#: takes 0.95 of plain's time instead of 1.10, the U-Net 0.97 instead of 1.06).
LAID_OUT_ANEW = frozenset({"conv_general_dilated"})

#: Ops that the kernel library computes together with the elementwise chains before them, taken apart wherever it does
#: not know an op. Plain JAX keeps the ends of these chains for its backward, which prevents that.
ABSORBING = frozenset({"conv_general_dilated", "dot_general"})


def ends_of_chains(graph: Graph, plan: Plan) -> frozenset[int]:
    """Values that the forward writes out for a product though the backward computes them anew.

    Then the forward is fused as in a program that saves them. Outside loops only: inside, it gained nothing.
    """
    again = {i for i in plan.recomputed if graph.ops[i].name in ELEMENTWISE | CALLS}
    read = {v for op in graph.ops if op.name in ABSORBING and op.region == TOP for v in op.inputs}
    return frozenset(v for v in read if graph.values[v].maker in again)
