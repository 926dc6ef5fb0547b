"""Weigh plans: learn side by side what memory they take, each once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax

from jointcut.aot.choices.target import Target
from jointcut.aot.fitting.attempts import Weighed
from jointcut.aot.run.weigh import aside, weigh
from jointcut.partition.plans.plan import Plan


@dataclass(frozen=True)
class Scales:
    """The plans of one program that were weighed so far; `lower` lowers the step of a plan, for the target `goal`."""

    lower: Callable[[Plan], jax.stages.Lowered]
    goal: Target | None = None
    _begun: dict[Any, Future[Weighed[Any]]] = field(default_factory=dict, repr=False)

    def weigh(self, plans: Sequence[Plan]) -> list[Future[Weighed[Any]]]:
        """Begin to weigh plans, those that are not known yet at the same time."""
        return [self._begun.get(plan.key) or self._begin(plan) for plan in plans]

    def _begin(self, plan: Plan) -> Future[Weighed[Any]]:
        start = time.perf_counter()
        lowered = self.lower(plan)

        def figures() -> Weighed[None]:
            memory = weigh(lowered, self.goal)
            return Weighed(None, memory.peak_bytes, memory.temp_bytes, 1e3 * (time.perf_counter() - start))

        self._begun[plan.key] = aside(figures)
        return self._begun[plan.key]
