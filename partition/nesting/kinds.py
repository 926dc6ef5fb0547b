"""List the kinds of ops whose program can be opened, by the names of their primitives."""

from __future__ import annotations

from typing import Any

from jointcut.partition.nesting.scans import Scan
from jointcut.partition.program.bodies import SCAN, Inside, Kind

KINDS: dict[str, Kind] = {SCAN: Scan()}


def inside(eqn: Any) -> Inside | None:
    """The program in an equation, None where its kind is not listed."""
    kind = KINDS.get(eqn.primitive.name)
    return None if kind is None else kind.inside(eqn)
