"""Hold one cut: the plan, the two jaxprs, and what their inputs and outputs mean to the caller."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jointcut.aot import checked
from jointcut.aot import compile as compiling
from jointcut.aot.fit import Fitted
from jointcut.aot.gradient import Gradient, gradient
from jointcut.aot.signature import graph_signature
from jointcut.aot.traced import TracedCall
from jointcut.partition.displays import graph_page
from jointcut.partition.emit import Residual
from jointcut.partition.figures import counted
from jointcut.partition.page.page import framed, page
from jointcut.partition.plan import Plan
from jointcut.partition.split import Split
from jointcut.wrappers.metadata import GraphSignature, ViewAndMutationMeta
from jointcut.wrappers.tree import Bound


@dataclass(frozen=True)
class CutCall:
    """A traced function cut in two: the plan, the halves, and what they mean to the caller.

    Attributes:
        traced: the function as it was traced.
        split: the plan and the two jaxprs.
        fitted: how the plan was found, where a budget was to be met.
    """

    traced: TracedCall
    split: Split
    fitted: Fitted[Any] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        """`<Cut loss: 3 values saved, 49152 bytes>`."""
        return (
            f"<Cut {self.traced.name}: {counted(len(self.plan.values), 'value')} saved, {self.plan.bytes_saved} bytes>"
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """In a notebook the graph with the cut drawn through it, and what is saved."""
        data = graph_page(self.traced.name, repr(self), self.split.graph, self.plan)
        return {"text/plain": repr(self), "text/html": framed(page(data))}

    @property
    def plan(self) -> Plan:
        """What is saved, what is recomputed, and why."""
        return self.split.plan

    @property
    def forward(self) -> Any:
        """The forward as a closed jaxpr: `(constants, arguments) -> (outputs, saved residuals)`."""
        return self.split.forward

    @property
    def backward(self) -> Any:
        """The backward as a closed jaxpr: `(residuals, cotangents) -> gradients`."""
        return self.split.backward

    @property
    def residuals(self) -> tuple[Residual, ...]:
        """Where each leading input of the backward comes from."""
        return self.split.halves.residuals

    @property
    def metadata(self) -> ViewAndMutationMeta:
        """As `Traced.metadata`, with the residuals that the backward may overwrite."""
        return replace(self.traced.metadata, bw_donated_idxs=compiling.donated(self.split.halves))

    @cached_property
    def signature(self) -> GraphSignature:
        """Which input and output of the halves is which, by name and position."""
        return graph_signature(self.traced)

    @cached_property
    def gradient(self) -> Gradient:
        """The halves in the form of TorchScript's `Gradient`."""
        traced = self.traced
        wanted = [traced.bound.places[i] for i in traced.owners]
        return gradient(self.split, traced.consts, traced.program.carries, wanted)

    @cached_property
    def _checked_programs(self) -> checked.Programs:
        return checked.Programs.of(self.split)

    def looked_at(self, bound: Bound) -> checked.Checked:
        """One call in debug mode."""
        return checked.Checked(self.traced, self.split, self._checked_programs, bound)
