"""Weigh plans: compile them side by side without optimisation, for their memory alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jointcut.aot.fitting.attempts import Weighed
from jointcut.aot.run.compile import begin
from jointcut.partition.plans.plan import Plan


@dataclass(frozen=True)
class Scales:
    """The plans of one program that were weighed so far; `lower` lowers the step of a plan."""

    lower: Callable[[Plan], jax.stages.Lowered]
    _known: dict[Any, Weighed[None]] = field(default_factory=dict, repr=False)

    def weigh(self, plans: Sequence[Plan]) -> list[Weighed[Any]]:
        """Weigh plans, each once; those that are not known are compiled at the same time."""
        return self._weigh(plans, roughly=False)

    def weigh_roughly(self, plans: Sequence[Plan]) -> list[Weighed[Any]]:
        """The same by `rough_options`: sooner, and not always to the byte."""
        return self._weigh(plans, roughly=True)

    def _weigh(self, plans: Sequence[Plan], roughly: bool) -> list[Weighed[Any]]:
        begun = []
        for plan in plans:
            if (plan.key, roughly) not in self._known:
                start = time.perf_counter()
                begun.append((plan, start, begin(self.lower(plan), roughly)))
        for plan, start, future in begun:
            memory = future.result()
            figures = memory.peak_bytes, memory.temp_bytes, 1e3 * (time.perf_counter() - start)
            self._known[plan.key, roughly] = Weighed(None, *figures)
        return [self._known[plan.key, roughly] for plan in plans]
