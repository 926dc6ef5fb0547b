"""Say what a compiler does with the two halves, so that they are written for it once.

Barriers hold on every backend (`jaxprs.held`). What else a compiler has for habits stands in a `Backend`, which is
chosen before a plan is scheduled: the halves that are verified are those that run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jointcut.partition.graph import TOP, Graph
from jointcut.partition.plan import Plan
from jointcut.partition.policy import CALLS, ELEMENTWISE

#: What an elementwise chain ends with.
_CHAIN = ELEMENTWISE | CALLS | {"expand_dims", "reshape", "squeeze"}


@dataclass(frozen=True)
class Backend:
    """What a compiler does with a program.

    Attributes:
        name: the platform, as `jax.default_backend()` tells it, or "portable" for a program that runs on several.
        taken_apart: ops of the backward that the compiler takes apart, so that what they do to a residual alone could
            start before the cotangent is there. Each is called in a computation of its own.
        read_written: ops whose operands had better lie in memory than be computed on the way.
    """

    name: str
    taken_apart: frozenset[str] = frozenset()
    read_written: frozenset[str] = frozenset()

    @classmethod
    def here(cls) -> Backend:
        """The one that JAX compiles for by default."""
        return cls.of((jax.default_backend(),))

    @classmethod
    def of(cls, platforms: Sequence[str]) -> Backend:
        """The one for a program that is to run on each of these platforms."""
        if len(platforms) > 1:
            return PORTABLE
        return CPU if platforms[0] == "cpu" else cls(platforms[0])

    def written_forward(self, graph: Graph, plan: Plan) -> frozenset[int]:
        """Values that the forward writes out for an op though the backward computes them anew.

        Plain JAX keeps these, so that its forward writes them out as well. Outside loops only: inside it gained
        nothing.
        """
        again = frozenset(plan.recomputed)
        read = {v for op in graph.ops if op.name in self.read_written and op.region == TOP for v in op.inputs}
        return frozenset(v for v in read if graph.values[v].maker in again and ends_chain(graph, v))


#: Nothing is known of the compiler.
PORTABLE = Backend("portable")

#: Measured on the suite (`make bench`) with JAX 0.10 and 0.12.
#:
#: The gradient of a maximum pooling first looks where the maxima are, in eight arrays of the residual's size.
#:
#: An elementwise chain before a product is fused into the copy that brings an operand into another layout, where each
#: array that the chain reads is then read out of step with the cache, or into the kernel itself, where XLA writes out
#: whatever the kernel library does not know in the midst of the chain. Chains that end in an array of their own take,
#: in time over plain's: the unrolled GPT 0.65 instead of 0.75, the diffusion step 0.69 instead of 0.81, the variational
#: autoencoder 0.93 instead of 1.10.
CPU = Backend(
    "cpu",
    taken_apart=frozenset({"select_and_scatter_add"}),
    read_written=frozenset({"conv_general_dilated", "dot_general"}),
)


def ends_chain(graph: Graph, v: int) -> bool:
    """Whether a value is made by an elementwise op, or is such a value in another shape."""
    maker = graph.values[v].maker
    return maker is not None and graph.ops[maker].name in _CHAIN
