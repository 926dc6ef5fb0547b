"""Meet the habits of XLA:CPU: which values to keep apart from the ops that read them.

Measured on the suite (`make bench`) with JAX 0.10 and 0.12. Other backends are left to fuse as they like.
"""

from __future__ import annotations

from jointcut.partition.graph import TOP, Graph
from jointcut.partition.plan import Plan
from jointcut.partition.policy import CALLS, ELEMENTWISE

#: Ops that XLA takes apart, so that what they do to a residual alone could start before the cotangent is there: the
#: gradient of a maximum pooling first looks where the maxima are, in eight arrays of the residual's size on CPU.
TAKEN_APART = frozenset({"select_and_scatter_add"})

#: Ops whose operands XLA:CPU likes to compute on the way: it fuses an elementwise chain into the copy that brings an
#: operand into another layout, where each array that the chain reads is then read out of step with the cache, or into
#: the kernel itself, where it writes out whatever the kernel library does not know in the midst of the chain. Chains
#: that end in an array of their own take, in time over plain's: the unrolled GPT 0.65 instead of 0.75, the diffusion
#: step 0.69 instead of 0.81, the variational autoencoder 0.93 instead of 1.10.
PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})

#: What such a chain ends with.
_CHAIN = ELEMENTWISE | CALLS | {"expand_dims", "reshape", "squeeze"}


def ends_chain(graph: Graph, v: int) -> bool:
    """Whether a value is made by an elementwise op, or is such a value in another shape."""
    maker = graph.values[v].maker
    return maker is not None and graph.ops[maker].name in _CHAIN


def written_forward(graph: Graph, plan: Plan) -> frozenset[int]:
    """Values that the forward writes out for a product though the backward computes them anew.

    Plain JAX keeps these, so that its forward writes them out as well. Outside loops only: inside it gained nothing.
    """
    again = frozenset(plan.recomputed)
    read = {v for op in graph.ops if op.name in PRODUCTS and op.region == TOP for v in op.inputs}
    return frozenset(v for v in read if graph.values[v].maker in again and ends_chain(graph, v))
