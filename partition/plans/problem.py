"""Hold a program with all that is known before a plan is searched for.

A `Problem` is made once for a program. Searches take it and answer with a `Plan`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from jointcut.partition.bodies.checkpoints import Adjustable, Numbers, adjustable_loops, with_checkpoints
from jointcut.partition.packing.forms import FORMS
from jointcut.partition.packing.packing import HOOK, Hooks, Packings
from jointcut.partition.plans.backend import PORTABLE, Backend
from jointcut.partition.prices.allowances import Allowance
from jointcut.partition.prices.cost import CostModel, recompute_seconds, saving_bytes
from jointcut.partition.prices.rules import (
    CheckpointPolicy,
    Constraint,
    Verdict,
    judge,
    must_keep,
    not_offloaded,
    told_to_keep,
)
from jointcut.partition.program.graph import Graph, Value
from jointcut.partition.program.primitives import FUSED
from jointcut.partition.program.sides import Sides, classify

#: The weight of a preference, as a multiple of the cost of saving its value. It is a guess. A plan that has to break
#: some preference breaks the one on the fewest bytes, and a plan that has to break none breaks none.
PREFERRED = 10


@dataclass(frozen=True)
class Problem:
    """A joint program, and all that is known of its ops and values.

    Attributes:
        graph: the joint program.
        sides: the ops that must run forward and the ops that must run backward.
        prices: for each value the bytes of the device that saving it keeps alive between the halves.
        verdicts: for each value the rules that forbid saving or recomputing it.
        constraints: the demands on single values, which the verdicts follow.
        backend: the backend that the halves are compiled for.
        seconds: for each op the time that running it again takes; empty where ops have no prices. Without prices, an op
            that a rule of cost forbids to run again is never run again; with prices, it costs its seconds.
        model: the cost model that gave these seconds, None where ops have no prices.
        hooks: a user's functions that saved values pass through; None if there are none.
        bounds: the parts with a bound on the bytes that they keep; the constraints enforce it.
        forms: the values that wait in a smaller form (see `packing`) if they are saved, each with the form's name.
        remarks: remarks on the demands that stand beside any plan.
        rates: the device's rates per second, which choose the default plan of ops without prices. None where the
            strategy has rates of its own, as for a CPU, or no rates are known.
        room_bytes: the device's memory for temporaries; None where it is not known.
    """

    graph: Graph
    sides: Sides
    prices: tuple[int, ...]
    verdicts: tuple[Verdict, ...]
    constraints: tuple[Constraint, ...] = ()
    backend: Backend = PORTABLE
    seconds: tuple[float, ...] = ()
    model: CostModel | None = None
    forms: tuple[tuple[int, str], ...] = ()
    hooks: Hooks | None = None
    bounds: tuple[Allowance, ...] = ()
    remarks: tuple[str, ...] = ()
    rates: CostModel | None = None
    room_bytes: int | None = None

    @classmethod
    def of(
        cls,
        graph: Graph,
        model: CostModel | None = None,
        constraints: Iterable[Constraint] = (),
        backend: Backend = PORTABLE,
        forms: Iterable[tuple[int, str]] = (),
    ) -> Self:
        """Return the problem of a graph; with a cost model its ops have prices in seconds.

        Raises `GraphError` where an output of the user needs a cotangent, and `PlanError` where the model gives a price
        that is negative, infinite or not a number.
        """
        demands = tuple(constraints)
        sides = told_to_keep(graph, classify(graph), demands)
        verdicts = judge(graph, sides, demands)
        made = cls(graph, sides, (), tuple(verdicts), demands, backend)._with(tuple(forms))
        return made if model is None else made.timed(model)

    def of_process(self, num_bytes: int) -> int:
        """Bytes for those of one device: devices of a CPU share the memory of their process, others do not."""
        return num_bytes * self.graph.devices if self.backend.name == "cpu" else num_bytes

    def _with(self, forms: tuple[tuple[int, str], ...]) -> Self:
        """The same problem with other forms, and the prices that follow."""
        made = replace(self, forms=forms, prices=tuple(saving_bytes(self.graph, self.sides)))
        if made.to_host or made.forms:
            made = replace(made, prices=tuple(0 if v in made.to_host else p for v, p in enumerate(made.on_device)))
        return made

    @property
    def packings(self) -> Packings:
        """The forms that schedules of the problem may name."""
        return Packings({HOOK: self.hooks.packing} if self.hooks else {})

    @cached_property
    def without_forms(self) -> Self:
        """The same problem, in which no value waits in another form."""
        return self._with(()) if self.forms else self

    @cached_property
    def segmentable(self) -> dict[Any, Any]:
        """The loops that can run in segments, by plan, as far as `lower.reruns.segmentable` was asked."""
        return {}

    @cached_property
    def adjustable(self) -> dict[int, Adjustable]:
        """The loops whose number of checkpoints a plan may choose, by the ops that leave these."""
        return adjustable_loops(self.graph)

    def at(self, numbers: Numbers) -> Self:
        """The same problem with other numbers of checkpoints in some loops; raises as `with_checkpoints` does."""
        if numbers and numbers not in self._at:
            graph = with_checkpoints(self.graph, self.adjustable, numbers)
            self._at[numbers] = replace(self, graph=graph)._with(self.forms)
        return self._at[numbers] if numbers else self

    @cached_property
    def _at(self) -> dict[Numbers, Any]:
        return {}

    def timed(self, model: CostModel) -> Self:
        """The same problem with its ops priced in seconds.

        An op of one instruction takes no time of its own: it is computed within the loop of each reader.
        """
        taken = recompute_seconds(self.graph, self.sides, model)
        seconds = (0.0 if op.name in FUSED else s for op, s in zip(self.graph.ops, taken, strict=True))
        return replace(self, seconds=tuple(seconds), model=model)

    def kept_bytes(self, bound: Allowance, saved: Iterable[int]) -> int:
        """The bytes that a part keeps in the device's memory if these values are saved there."""
        return sum(self.prices[v] for v in bound.values.intersection(saved))

    @cached_property
    def must_keep(self) -> frozenset[int]:
        """The values that must never be computed again."""
        return must_keep(self.constraints)

    @cached_property
    def asked_to_keep(self) -> frozenset[int]:
        """The values among `must_keep` that a user named."""
        return must_keep(self.constraints, is_asked=True)

    @cached_property
    def preferences(self) -> tuple[Constraint, ...]:
        """The preferences among the constraints: prices, followed where they cost no more than they are worth."""
        return tuple(c for c in self.constraints if not c.demand.is_must)

    @cached_property
    def to_host(self) -> frozenset[int]:
        """The values that wait in host memory if they are saved."""
        asked = (c.value for c in self.constraints if c.demand.is_for_host)
        return frozenset(v for v in asked if not self.not_offloaded(v))

    def not_offloaded(self, v: int) -> str:
        """Why a value of the forward cannot wait in host memory on the backend, in words; empty where it can."""
        return not_offloaded(self.graph, self.sides, v, in_nested=self.backend.moves_in_nested)

    @cached_property
    def on_device(self) -> tuple[int, ...]:
        """For each value the bytes that saving it in the device's memory keeps alive, whatever is demanded."""
        if not self.to_host and not self.forms:
            return self.prices
        plain, forms = saving_bytes(self.graph, self.sides), self.form_of
        return tuple(self.bytes_as(v, forms[v]) if price and v in forms else price for v, price in enumerate(plain))

    @cached_property
    def form_of(self) -> dict[int, str]:
        """The form of each value that has one."""
        return dict(self.forms)

    def bytes_as(self, v: int, form: str) -> int:
        """Bytes of all copies of a value in a form; with the empty name, in no form."""
        return bytes_in(self.graph.values[v], form)

    @cached_property
    def weighed(self) -> tuple[float, ...]:
        """The seconds of each op as a search weighs them; where nothing is preferred, they are `seconds`.

        If a value is preferred saved or offloaded, its op takes longer, by `PREFERRED` times the seconds that writing
        and reading the value takes. If a value is preferred recomputed, its op takes no time.
        """
        if not self.preferences or not self.seconds or self.model is None:
            return self.seconds
        weighed = list(self.seconds)
        for c in self.preferences:
            maker = self.graph.values[c.value].maker
            if maker is not None and c.demand in (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_OFFLOAD):
                weighed[maker] += PREFERRED * self.model.saving_seconds(self.graph.values[c.value].saved_bytes)
            elif maker is not None and c.demand is CheckpointPolicy.PREFER_RECOMPUTE:
                weighed[maker] = 0.0
        return tuple(weighed)

    @cached_property
    def without_preferences(self) -> Self:
        """The same problem with nothing preferred: a bound on its plans holds for the plans of this problem too.

        A value that is preferred recomputed may still be recomputed, however heavy.
        """
        if not self.preferences:
            return self
        musts = tuple(c for c in self.constraints if c.demand.is_must)
        lifting = (c for c in self.preferences if c.demand is CheckpointPolicy.PREFER_RECOMPUTE)
        return replace(self, constraints=musts, verdicts=tuple(judge(self.graph, self.sides, [*musts, *lifting])))


def as_problem(program: Graph | Problem, backend: Backend = PORTABLE) -> Problem:
    """Return a given problem unchanged; for a graph, return its problem on the given backend."""
    return program if isinstance(program, Problem) else Problem.of(program, backend=backend)


def bytes_in(value: Value, form: str) -> int:
    """Bytes of all copies of a value in a form; with the empty name, in no form."""
    return value.copies * FORMS[form].bytes(value.shape, value.dtype) if form else value.saved_bytes
