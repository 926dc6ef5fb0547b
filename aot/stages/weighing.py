"""Compile the plans of one trace, or weigh them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jointcut.aot.fitting.attempts import Ways, Weighed
from jointcut.aot.fitting.notes import Held
from jointcut.aot.fitting.scales import Scales
from jointcut.aot.run.weigh import can_weigh
from jointcut.aot.stages.compiled import Compiled
from jointcut.partition.errors import RoomError
from jointcut.partition.plans.plan import Plan

if TYPE_CHECKING:
    from jointcut.aot.stages.cut import Cut
    from jointcut.aot.stages.traced import Traced


@dataclass(frozen=True)
class Weighing:
    """The plans of one trace that were cut, weighed and compiled so far."""

    traced: Traced
    _cuts: dict[Any, Cut] = field(default_factory=dict)
    _compiled: dict[Any, Weighed[Compiled]] = field(default_factory=dict)

    @property
    def executables(self) -> int:
        """The number of programs of a step."""
        return 1 if self.traced.is_scalar else 2

    @property
    def ways(self) -> Ways[Compiled]:
        """How plans are compiled, and how they are weighed; steps of two programs are not weighed."""
        return Ways(self.measure, self._weigh_all if self.is_quick else None)

    @property
    def ways_to_tell(self) -> Ways[Compiled]:
        """How plans are weighed for a report, which runs none of them; they are compiled where that is as quick."""
        return Ways(self._weigh, self._weigh_all, compiles=False) if self.is_quick else self.ways

    @property
    def is_quick(self) -> bool:
        """Whether weighing is quicker than compiling; steps of two programs are not weighed."""
        return self.executables == 1 and can_weigh(self.traced.options.goal)

    @cached_property
    def _scales(self) -> Scales:
        return Scales(lambda plan: self._cut(plan).jits.lowered("step"), self.traced.options.goal)

    def measure(self, plan: Plan) -> Weighed[Compiled]:
        """Compile a plan, to run it. One for which XLA finds no room on a target that is not here is only weighed."""
        key = plan.key
        if key not in self._compiled:
            start = time.perf_counter()
            try:
                compiled = self._cut(plan).compile()
                figures = compiled.peak_bytes, compiled.activation_bytes, compiled.compile_ms
            except RoomError as error:
                compiled = Compiled(self._cut(plan), self.executables)
                peak_bytes = self.traced.program.fixed_bytes + error.temp_bytes
                figures = peak_bytes, error.temp_bytes, 1e3 * (time.perf_counter() - start)
            self._compiled[key] = Weighed(compiled, *figures)
        return self._compiled[key]

    def _weigh_all(self, plans: Sequence[Plan]) -> list[Future[Weighed[Any]]]:
        """Begin to weigh plans; those whose halves run apart are compiled at once."""
        others = iter(self._scales.weigh([plan for plan in plans if not self._cut(plan).is_apart]))
        return [self._compiled_now(plan) if self._cut(plan).is_apart else next(others) for plan in plans]

    def _compiled_now(self, plan: Plan) -> Future[Weighed[Any]]:
        compiled = Future[Weighed[Any]]()
        compiled.set_result(self.measure(plan))
        return compiled

    def _weigh(self, plan: Plan) -> Weighed[Compiled]:
        if self._cut(plan).is_apart:
            return self.measure(plan)
        return replace(self._scales.weigh([plan])[0].result(), made=Compiled(self._cut(plan), self.executables))

    def take(self, plan: Plan, held: Held) -> Weighed[Compiled]:
        """A plan with known figures, to be compiled when it first runs."""
        key = plan.key
        if key not in self._compiled:
            cut = self._cut(plan)
            compiled = Compiled(cut, 2 if cut.is_apart else self.executables)
            self._compiled[key] = Weighed(compiled, held.peak_bytes, held.activation_bytes, held.compile_ms)
        return self._compiled[key]

    def forget(self) -> None:
        """Let go of the programs that were only weighed; what they take stays known."""
        for key in [key for key in self._cuts if key not in self._compiled]:
            self._cuts.pop(key, None)

    def _cut(self, plan: Plan) -> Cut:
        if (cut := self._cuts.get(plan.key)) is None:
            cut = self._cuts[plan.key] = self.traced._cut(lambda graph: plan)
        return cut
