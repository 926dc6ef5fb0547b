"""Let gradients be complete before a layer is computed again, where a compiler would put them off.

Nothing in a step reads the gradient of a weight. XLA's scheduler that hides latency runs such products last, to hide
the sums over devices behind them, and holds until then what they multiply: what was recomputed of all layers. So the
cotangent that recomputed values wait for waits itself for the gradients that are complete by then, and for the terms of
those that are sums. That is in the bodies of loops, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

from jointcut.partition.lower.steps import Enter, Run, Settle, Step, Wait, runs
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.roles import Role


def settled(graph: Graph, steps: Iterable[Step]) -> tuple[Step, ...]:
    """The steps of a backward, with those that let cotangents wait for gradients."""
    return tuple(_settled(graph, tuple(steps), {v for v in graph.role_outputs(Role.GRADIENT) if v is not None}))


def _settled(graph: Graph, steps: tuple[Step, ...], ends: Set[int]) -> Iterator[Step]:
    """The steps of a region that hands on the values `ends`."""
    anchors, spine, readers = _anchors(steps), _spine(graph, steps), _readers(graph, steps)
    made = dict[int, int]()  # by value the place of the step; those that are settled are left out
    for place, step in enumerate(steps):
        if place in anchors:
            anchor = max(anchors[place], key=lambda v: made.get(v, -1))
            complete = [v for v in made if v not in spine and _is_complete(graph, v, ends, readers)]
            if complete:
                yield Settle(anchor, tuple(complete))
            made = {v: at for v, at in made.items() if v not in complete}
        yield _within(graph, step)
        if isinstance(step, Run | Enter):
            for v in _read(graph, step):
                readers[v].discard(step.op)
            made.update((v, place) for v in _made(graph, step) if not step.again and v in graph.arrays)


def _within(graph: Graph, step: Step) -> Step:
    """A step; of a loop of the backward, with the same done in its body."""
    if not isinstance(step, Enter) or step.again:
        return step
    ends = {*step.stacks, *(v for v in graph.bodies[step.op].carried if v is not None)}
    return replace(step, steps=tuple(_settled(graph, step.steps, ends)))


def _anchors(steps: tuple[Step, ...]) -> dict[int, list[int]]:
    """By the place of the first of some waits that follow each other: the cotangents that they wait for.

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
    """The cotangents for which something waits, and all that they are made of."""
    spine = {step.cotangent for step in steps if isinstance(step, Wait)}
    for step in reversed(steps):
        if isinstance(step, Run | Enter) and not spine.isdisjoint(_made(graph, step)):
            spine |= _read(graph, step)
    return spine


def _readers(graph: Graph, steps: tuple[Step, ...]) -> dict[int, set[int]]:
    """By value the ops of a region that read it."""
    readers: dict[int, set[int]] = {}
    for step in steps:
        if isinstance(step, Run | Enter):
            for v in _read(graph, step):
                readers.setdefault(v, set()).add(step.op)
    return readers


def _read(graph: Graph, step: Run | Enter) -> set[int]:
    """The values that a step reads, whole or step by step."""
    read = {v for run in runs([step]) for v in graph.ops[run.op].inputs}
    stacks = set(map(graph.whole, read))
    while not stacks <= read:
        read |= stacks
        stacks = set(map(graph.whole, stacks))
    return read


def _made(graph: Graph, step: Run | Enter) -> set[int]:
    """The values that a step makes."""
    return {*graph.ops[step.op].outputs, *(step.stacks if isinstance(step, Enter) else ())}
