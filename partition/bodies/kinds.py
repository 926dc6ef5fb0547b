"""List the kinds of ops whose program can be opened, by the names of their primitives."""

from __future__ import annotations

from typing import Any

from jointcut.partition.bodies.branches import Branches
from jointcut.partition.bodies.scans import Scan
from jointcut.partition.bodies.shards import Shards
from jointcut.partition.program.bodies import SCAN, Inside, Kind, Once, OnceKind

#: Loops, and ops whose programs run at most once.
KINDS: dict[str, Kind] = {SCAN: Scan()}
ONCE_KINDS: dict[str, OnceKind] = {"cond": Branches(), "shard_map": Shards()}


def inside(eqn: Any) -> Inside | None:
    """The program in an equation, None where its kind is not listed."""
    kind = KINDS.get(eqn.primitive.name)
    return None if kind is None else kind.inside(eqn)


def once(eqn: Any) -> Once | None:
    """The programs in an equation that run at most once each; None where its kind is not listed or it stays closed."""
    kind = ONCE_KINDS.get(eqn.primitive.name)
    return None if kind is None else kind.once(eqn)
