"""Count the values of branches once: only one branch runs, so their values lie in a space that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jointcut.partition.plans.saved import Saved
from jointcut.partition.program.graph import ONCE, Graph
from jointcut.partition.program.roles import Side

#: Why a saved value takes no bytes of its own.
SHARED = "in the space of another branch"


def in_shared_space(graph: Graph, saved: Sequence[Saved]) -> tuple[Saved, ...]:
    """The saved values; a value of a branch counts no bytes if another branch of its conditional keeps more."""
    rows = list(saved)
    for body in reversed([*graph.bodies.values()]):  # inner ones first
        op = graph.ops[body.op]
        if op.name not in ONCE or op.origin is not Side.FORWARD:
            continue
        around = [graph.ancestors[graph.values[s.value].loop] for s in rows]
        loops = [graph.regions[r].loop for r in body.regions]
        mine = [[i for i, own in enumerate(around) if loop in own] for loop in loops]
        sizes = [sum(rows[i].bytes for i in own) for own in mine]
        largest = sizes.index(max(sizes))
        for i in (i for k, own in enumerate(mine) if k != largest for i in own):
            reason = f"{rows[i].reason}, {SHARED}" if SHARED not in rows[i].reason else rows[i].reason
            rows[i] = replace(rows[i], bytes=0, reason=reason)
    return tuple(rows)
