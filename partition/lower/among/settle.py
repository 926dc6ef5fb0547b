"""Let gradients be complete before a layer is computed again, where a compiler would put them off.

Nothing in a step reads the gradient of a weight. XLA's latency-hiding scheduler therefore runs such products last, to
hide the sums over devices behind them. Until then it holds their operands: the recomputed values of all layers. To
prevent this, the cotangent that recomputed values wait for waits itself for the gradients that are complete by then.
It also waits for the terms of gradients that are sums. The same is done in the bodies of loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

from jointcut.partition.lower.follow import made_by, read_by
from jointcut.partition.lower.steps import Branch, Enter, Fork, Run, Settle, Step, Update, Wait
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.roles import Role


def settled(graph: Graph, steps: Iterable[Step]) -> tuple[Step, ...]:
    """Add steps to a backward that let cotangents wait for gradients."""
    return tuple(_settled(graph, tuple(steps), graph.results(Role.GRADIENT)))


def _settled(graph: Graph, steps: tuple[Step, ...], ends: Set[int]) -> Iterator[Step]:
    """The steps of a region that hands on the values `ends`."""
    anchors, spine, readers = _anchors(steps), _spine(graph, steps), _readers(graph, steps)
    made = dict[int, int]()  # the place of the step, by value; settled values are left out
    for place, step in enumerate(steps):
        if place in anchors:
            anchor = max(anchors[place], key=lambda v: made.get(v, -1))
            complete = [v for v in made if v not in spine and _is_complete(graph, v, ends, readers)]
            if complete:
                yield Settle(anchor, tuple(complete))
            made = {v: at for v, at in made.items() if v not in complete}
        yield _within(graph, step)
        if isinstance(step, Update):
            made = {v: at for v, at in made.items() if v not in step.made}
        if isinstance(step, Run | Enter | Fork):
            for v in read_by(graph, step):
                readers[v].discard(step.op)
            made.update((v, place) for v in made_by(graph, step) if not step.again and v in graph.arrays)


def _within(graph: Graph, step: Step) -> Step:
    """The step itself; for a loop of the backward, the loop with `settled` applied to its body."""
    if isinstance(step, Fork) and not step.again:
        pairs = zip(step.branches, graph.bodies[step.op].ends, strict=True)
        bodies = (_settled(graph, b.steps, {*b.stacks, *(v for v in ends if v is not None)}) for b, ends in pairs)
        stacks = (branch.stacks for branch in step.branches)
        return replace(step, branches=tuple(map(Branch, map(tuple, bodies), stacks)))
    if not isinstance(step, Enter) or step.again:
        return step
    ends = {*step.stacks, *(v for v in graph.bodies[step.op].carried if v is not None)}
    return replace(step, steps=tuple(_settled(graph, step.steps, ends)))


def _anchors(steps: tuple[Step, ...]) -> dict[int, list[int]]:
    """Find the cotangents that each group of adjacent waits waits for, by the place of its first step.

    A value that waits for the same cotangent once more does not wait anew; see `Followed.wait`.
    """
    anchors, known, start = dict[int, list[int]](), set[Wait](), 0
    for place, step in enumerate(steps):
        if not isinstance(step, Wait):
            start = place + 1
        elif step not in known:
            anchors.setdefault(start, []).append(step.cotangent)
            known.add(step)
    return anchors


def _is_complete(graph: Graph, v: int, ends: Set[int], readers: dict[int, set[int]]) -> bool:
    """Whether a gradient, or a term of one, is there: only sums still read it."""
    rest = readers.get(v, set())
    return bool(rest or v in ends) and all(graph.ops[i].name == "add_any" for i in rest)


def _spine(graph: Graph, steps: tuple[Step, ...]) -> set[int]:
    """The cotangents that something waits for, and all values that they are computed from."""
    spine = {step.cotangent for step in steps if isinstance(step, Wait)}
    for step in reversed(steps):
        if isinstance(step, Run | Enter | Fork) and not spine.isdisjoint(made_by(graph, step)):
            spine |= read_by(graph, step)
    return spine


def _readers(graph: Graph, steps: tuple[Step, ...]) -> dict[int, set[int]]:
    """The ops of a region that read each value, by value."""
    readers: dict[int, set[int]] = {}
    for step in steps:
        if isinstance(step, Run | Enter | Fork):
            for v in read_by(graph, step):
                readers.setdefault(v, set()).add(step.op)
    return readers
