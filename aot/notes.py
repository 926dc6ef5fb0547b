"""Remember on disk which plan held a budget.

The search for a plan compiles a few. What it found is noted under everything that it depends on, so that the next
process compiles that plan alone; its compiled step is weighed as ever, and a note that does not hold is not followed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeVar

from jointcut.aot.cache.caching import store_for
from jointcut.aot.cache.environment import environment
from jointcut.aot.cache.fingerprint import WithoutRules, fingerprint
from jointcut.aot.cache.store import Store
from jointcut.aot.fit import Attempt, Fitted, Weighed
from jointcut.aot.joint import Joint
from jointcut.aot.limits import Limit
from jointcut.aot.options import Options
from jointcut.partition import planfile
from jointcut.partition.errors import IdentityError, PlanError
from jointcut.partition.graph import Graph
from jointcut.partition.plan import Plan

_T = TypeVar("_T")


@dataclass(frozen=True)
class Note:
    """The place for what is known of one program under one budget."""

    store: Store
    key: str
    label: str

    @classmethod
    def of(cls, name: str, program: Joint, options: Options, budget: Limit) -> Note | None:
        """None without a cache, or where something has no identity, or for what the device has free just now."""
        store = store_for(options.cache)
        if store is None or budget.of_device:
            return None
        how = (budget.fraction, budget.peak_bytes, options.cost, options.donated, options.keep_unused)
        try:
            key = fingerprint(
                kind="plan",
                program=WithoutRules(program.closed),
                roles=tuple(role.name for role in (*program.roles.inputs, *program.roles.outputs)),
                sparse=tuple(sorted(program.sparse)),
                how=how,
                environment=environment(),
            )
        except IdentityError:
            return None
        return cls(store, key, f"{name} plan within {budget}")

    def plan(self, graph: Graph) -> tuple[Plan, int] | None:
        """The plan, and the bytes of temporaries that its step took."""
        data = self.store.get(self.key)
        if data is None:
            return None
        found = json.loads(data)
        try:
            return planfile.loads(found["plan"], graph), found["activation_bytes"]
        except PlanError:  # the same program, read into another graph by another jointcut
            return None

    def write(self, plan: Plan, graph: Graph, activation_bytes: int) -> None:
        """Note what the search found."""
        document = {"plan": planfile.dumps(plan, graph), "activation_bytes": activation_bytes}
        self.store.put(self.key, json.dumps(document).encode(), self.label)


def followed(plan: Plan, weighed: Weighed[_T]) -> Fitted[_T]:
    """The result of a search that was spared."""
    figures = weighed.peak_bytes, weighed.activation_bytes, True, weighed.compile_ms
    tried = Attempt(plan.strategy, plan.bytes_saved, plan.peak_bytes or weighed.peak_bytes, *figures)
    return Fitted(plan, weighed, (tried,))
