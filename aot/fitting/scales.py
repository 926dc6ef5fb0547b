"""Weigh plans: learn side by side what memory they take, each once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jointcut.aot.fitting.attempts import Weighed
from jointcut.aot.run.weigh import begin
from jointcut.partition.plans.plan import Plan


@dataclass(frozen=True)
class Scales:
    """The plans of one program that were weighed so far; `lower` lowers the step of a plan."""

    lower: Callable[[Plan], jax.stages.Lowered]
    _known: dict[Any, Weighed[None]] = field(default_factory=dict, repr=False)

    def weigh(self, plans: Sequence[Plan]) -> list[Weighed[Any]]:
        """Weigh plans; those that are not known yet at the same time."""
        begun = []
        for plan in plans:
            if plan.key not in self._known:
                start = time.perf_counter()
                begun.append((plan, start, begin(self.lower(plan))))
        for plan, start, future in begun:
            memory = future.result()
            figures = memory.peak_bytes, memory.temp_bytes, 1e3 * (time.perf_counter() - start)
            self._known[plan.key] = Weighed(None, *figures)
        return [self._known[plan.key] for plan in plans]
