"""Read which parts of a program may keep how many bytes for the backward.

A part consists of the equations traced under `with aot.budget("300MiB"):`. The mark stands in the name stack, so that
it survives `jax.jit`, `lax.scan`, `jax.vmap` and `jax.checkpoint`. A part may also be the values that a key of a policy
names. All that one line of the user's code marks is one part, however often the line runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from jointcut.partition.figures import human_bytes
from jointcut.partition.prices.constraints import Policy
from jointcut.partition.prices.keys import named_by, shown
from jointcut.partition.prices.rules import KeepAtMost
from jointcut.partition.program.graph import LITERAL, STEP, Graph
from jointcut.partition.program.places import BUDGET_SCOPE

_MARK = re.compile(re.escape(BUDGET_SCOPE) + r"(\d+)@([^/()]+)")


@dataclass(frozen=True)
class Allowance:
    """The most bytes that the values of one part keep in the device's memory between the halves.

    `part` names the part: the user's line, or the key of the policy.
    """

    part: str
    most_bytes: int
    values: frozenset[int]

    @property
    def reason(self) -> str:
        """The reason, in words, why a value of the part is not saved."""
        return f"aot.budget of {human_bytes(self.most_bytes)} for {self.part}"


def mark(most_bytes: int, line: str) -> str:
    """The name on a name stack of equations traced under a line.

    >>> mark(300, "train.py:41")
    'jointcut.budget=300@train.py:41'
    """
    return f"{BUDGET_SCOPE}{most_bytes}@{re.sub('[/()]', '_', line)}"


def bounds_of(policy: Policy | None, graph: Graph) -> tuple[Allowance, ...]:
    """The bounds of a program's parts; parts marked in name stacks come first."""
    marked: dict[tuple[str, str], set[int]] = defaultdict(set)
    for op in graph.ops:
        if op.name not in (STEP, LITERAL):
            for found in _marks(graph, op.scope, op.region):
                marked[found].update(op.outputs)
    bounds = [Allowance(f"what is made under {line}", int(size), frozenset(vs)) for (size, line), vs in marked.items()]
    rules = () if policy is None or callable(policy) else policy
    for key, demand in rules:
        if isinstance(demand, KeepAtMost):
            bounds.append(Allowance(f"policy[{shown(key)}]", demand.most_bytes, named_by(key, graph)))
    return tuple(bounds)


def _marks(graph: Graph, scope: str, region: int) -> Iterator[tuple[str, str]]:
    """The marks of an op: in its own name stack, and in the name stacks of the ops that hold it."""
    while True:
        yield from _MARK.findall(scope)
        holder = graph.regions[region].holder
        if holder is None:
            return
        scope, region = graph.ops[holder].scope, graph.ops[holder].region
