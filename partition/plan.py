"""Record a decision: what is saved, what is recomputed, and why.

A `Plan` may come from a solver or from a hand: `Plan.of(graph, saved=[...])` completes a list of value ids. It *closes*
when everything that the backward reads is an input, is saved, or can be computed from such values by ops that may run
again; `checked` raises where it does not, and names the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jointcut.partition.classify import Facts, classify
from jointcut.partition.cost import saving_bytes
from jointcut.partition.errors import PlanError, message
from jointcut.partition.graph import SCAN, STEP, Graph
from jointcut.partition.policy import judge


@dataclass(frozen=True)
class Saved:
    """One value that the forward hands to the backward.

    `shape` and `dtype` are those of one copy, `copies` the trips of its loops, `bytes` all copies together. `source` is
    the user's line, `reason` why it is saved rather than recomputed.
    """

    value: int
    shape: tuple[int, ...]
    dtype: str
    copies: int
    bytes: int
    op: str
    scope: str
    source: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """What crosses from the forward to the backward, and what the backward computes again.

    `saved` lists residuals in program order, without inputs (the caller holds them); `recomputed` the ids of forward
    ops that the backward runs again, `deferred` those of ops that only the backward runs. `bound_bytes` is a lower
    bound on the bytes that any plan under the same rules must save, None where none was proved.
    """

    strategy: str
    saved: tuple[Saved, ...]
    recomputed: tuple[int, ...]
    deferred: tuple[int, ...]
    bound_bytes: int | None = None

    @property
    def values(self) -> tuple[int, ...]:
        """Ids of the saved values."""
        return tuple(s.value for s in self.saved)

    @property
    def bytes_saved(self) -> int:
        """Bytes alive between the halves, beyond what the caller holds."""
        return sum(s.bytes for s in self.saved)

    def __str__(self) -> str:
        """One line of totals, then the saved values, largest first."""
        total = f"{self.strategy}: {len(self.saved)} values, {self.bytes_saved:,} bytes saved"
        lines = [f"{total}; {len(self.recomputed)} ops recomputed"]
        for s in sorted(self.saved, key=lambda s: -s.bytes):
            trips = f"{s.copies} x " if s.copies > 1 else ""
            lines.append(f"{s.bytes:>14,}  {trips}{s.dtype}{list(s.shape)} {s.op} {s.source}: {s.reason}")
        return "\n".join(lines)

    @classmethod
    def of(
        cls,
        graph: Graph,
        saved: Iterable[int],
        *,
        strategy: str = "by hand",
        reasons: Mapping[int, str] | None = None,
        bound_bytes: int | None = None,
        facts: Facts | None = None,
    ) -> Plan:
        """Complete a list of value ids to a plan: what must be recomputed follows from what is saved.

        Raises `PlanError` where the plan does not close.
        """
        facts = facts or classify(graph)
        reasons = reasons or {}
        chosen = sorted(set(saved))
        _existing(graph, facts, chosen)
        again = needed(graph, facts, frozenset(chosen))
        prices = saving_bytes(graph, facts)
        records = tuple(_saved(graph, v, prices[v], reasons.get(v, "")) for v in chosen)
        records = tuple(r for r in records if graph.values[r.value].maker is not None)
        recomputed = tuple(i for i in again if i in facts.forward)
        deferred = tuple(i for i in again if i not in facts.forward)
        plan = cls(strategy, records, recomputed, deferred, bound_bytes)
        return checked(graph, facts, plan)


def _saved(graph: Graph, v: int, price: int, reason: str) -> Saved:
    value = graph.values[v]
    op = None if value.maker is None else graph.ops[value.maker]
    name, scope, source = (op.name, op.scope, op.source) if op else ("input", "", value.label)
    return Saved(v, value.shape, value.dtype, value.copies, price, name, scope, source, reason)


def _existing(graph: Graph, facts: Facts, values: Iterable[int]) -> None:
    for v in values:
        if not 0 <= v < len(graph.values) or facts.is_late(v):
            cure = "Save values of the forward only: see Graph.values and Value.maker."
            raise PlanError(message(f"plan.saved[%{v}]", "does not exist in the forward.", cure))


def needed(graph: Graph, facts: Facts, saved: frozenset[int]) -> list[int]:
    """Ids of the forward ops that the backward runs if these values are saved, in program order."""
    ops: set[int] = set()
    seen = set(saved)
    stack = [v for v in facts.wanted if v not in seen]
    while stack:
        v = stack.pop()
        maker = graph.values[v].maker
        if v in seen or maker is None:
            continue
        seen.add(v)
        if maker not in ops:
            ops.add(maker)
            stack.extend(v for v in graph.ops[maker].inputs if v not in seen)
    return sorted(ops)


def checked(graph: Graph, facts: Facts, plan: Plan) -> Plan:
    """Return the plan if it closes and breaks no rule, else raise `PlanError` naming the value and the rule."""
    verdicts = judge(graph, facts)
    _existing(graph, facts, plan.values)
    for v in plan.values:
        if graph.values[v].maker is not None and graph.ops[graph.values[v].maker or 0].name == STEP:
            cure = "Save the stack that it is taken from."
            raise PlanError(message(f"plan.saved[{graph.where(v)}]", "is one step of a stack.", cure))
    saved = set(plan.values)
    for i in (*plan.recomputed, *plan.deferred):
        for v in graph.ops[i].outputs:
            why = verdicts[v].not_recomputed
            hard = graph.ops[i].effects or graph.ops[i].name == SCAN or v in facts.escaping
            if v not in saved and hard and why:
                cure = f"Save it, or save what the backward computes from it. It is not recomputed because {why}."
                raise PlanError(message(graph.where(v), "is neither saved nor can it be recomputed.", cure))
    return plan
