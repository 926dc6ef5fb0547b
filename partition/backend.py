"""Say what a compiler does with the two halves, so that they are written for it once.

Barriers hold on every backend (`jaxprs.held`). What else a compiler has for habits stands in a `Backend`, which is
chosen before a plan is scheduled: the halves that are verified are those that run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.partition import jaxprs
from jointcut.partition.graph import TOP, Graph
from jointcut.partition.plan import Plan
from jointcut.partition.policy import CALLS, ELEMENTWISE
from jointcut.partition.roles import Side

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
        spreading: ops that the compiler hands to a library of kernels, with the elementwise chain before them. Numbers
            in that chain that something else reads as well, the backward say, are each spread over an array of their
            own.
    """

    name: str
    taken_apart: frozenset[str] = frozenset()
    read_written: frozenset[str] = frozenset()
    spreading: frozenset[str] = frozenset()

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
        top = [op for op in graph.ops if op.region == TOP]
        read = {v for op in top if op.name in self.read_written for v in op.inputs}
        found = {v for v in read if graph.values[v].maker in again and ends_chain(graph, v)}
        spread = {v for op in top if op.name in self.spreading for v in op.inputs}
        return frozenset(found | {v for v in spread if _spread(graph, v, plan, again) > 1})


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
#:
#: The mean of a gelu of a product: 10.5 MB of temporaries where the gelu's four numbers are spread, 4.2 MB where it
#: ends in an array of its own, 6.3 MB for plain JAX.
CPU = Backend(
    "cpu",
    taken_apart=frozenset({"select_and_scatter_add"}),
    read_written=frozenset({"conv_general_dilated", "dot_general"}),
    spreading=frozenset({"reduce_max", "reduce_min", "reduce_sum"}),
)


def ends_chain(graph: Graph, v: int) -> bool:
    """Whether a value is made by an elementwise op, or is such a value in another shape."""
    maker = graph.values[v].maker
    return maker is not None and graph.ops[maker].name in _CHAIN


def _spread(graph: Graph, v: int, plan: Plan, again: frozenset[int]) -> int:
    """How many arrays hold the numbers and repeated rows that are read by an elementwise chain and once more elsewhere.

    The chain ends with a value, and begins where a saved value is read by the backward: that is written out. Elsewhere
    is in ops that run again, or with repeated rows anywhere.
    """
    work, seen, found = [v], {v}, set[Any]()
    while work:
        v = work.pop()
        readers = [graph.ops[i] for i in graph.consumers[v]]
        if v in plan.values and any(r.id in again or r.origin is Side.BACKWARD for r in readers):
            continue
        op = graph.maker_of(v)
        if op is not None and op.name == "broadcast_in_dim" and len(readers) > 1:
            found.add(v)
        if op is None or op.name not in _CHAIN:
            continue
        if op.id in again:
            atoms = () if op.payload is None else op.payload.invars  # of a graph read from text
            found.update(str(atom) for atom in atoms if isinstance(atom, jaxprs.Literal))
            found.update({op.id} if op.name in CALLS else ())  # of relu and its like, which hold a number
        work += [before for before in op.inputs if before not in seen]
        seen.update(op.inputs)
    return len(found)
