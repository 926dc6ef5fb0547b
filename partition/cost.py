"""Price every value in bytes.

A residual costs the bytes that stay alive between the halves: one copy of the array per trip of its loops. Inputs of
the program cost nothing, since the caller holds them, and so do outputs, since the caller gets them anyway. A price is
an exact integer; prices in seconds belong to the budget and come with it.
"""

from __future__ import annotations

from jointcut.partition.classify import Facts
from jointcut.partition.graph import Graph


def saving_bytes(graph: Graph, facts: Facts) -> list[int]:
    """For each value the bytes that saving it keeps alive between the halves."""
    free = {v for v, _ in graph.inputs} | facts.outputs
    return [0 if value.id in free else value.saved_bytes for value in graph.values]
