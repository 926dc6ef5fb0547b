"""Let gradients be complete before a layer is computed again, where a compiler would put them off.

Nothing in a step reads the gradient of a weight. XLA's latency-hiding scheduler therefore runs such products last, to
hide the sums over devices behind them. Until then it holds their operands: the recomputed values of all layers. To
prevent this, the cotangent that recomputed values wait for waits itself for the gradients that are complete by then.
It also waits for the terms of gradients that are sums. The same is done in the bodies of loops.

Over several devices each wait ends a sum over them. XLA makes one sum of those that come together, if they have less
than 30 MiB, so a cotangent waits for many gradients at once: for a sixteenth of all, or in a loop for all of one step.
From 25 MiB on, the size of a bucket of PyTorch's `DistributedDataParallel`, nothing is gained by more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

from jointcut.partition.lower.follow import made_by, read_by
from jointcut.partition.lower.steps import Branch, Enter, Fork, Run, Settle, Step, Update, Wait
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.roles import Role

#: The bytes of gradients for which a cotangent waits over several devices, and their share of those of all layers.
BUCKET_BYTES, BUCKETS = 25 * 2**20, 16


def settled(graph: Graph, steps: Iterable[Step], several: bool = False) -> tuple[Step, ...]:
    """Add steps to a backward that let cotangents wait for gradients, which `several` devices may have to add up."""
    return tuple(_settled(graph, tuple(steps), graph.results(Role.GRADIENT), BUCKETS if several else 0))


def _settled(graph: Graph, steps: tuple[Step, ...], ends: Set[int], buckets: int) -> Iterator[Step]:
    """The steps of a region that hands on the values `ends`, with about so many waits at most; with 0, with all."""
    gradients = _gradients(graph, steps, ends) if buckets else set[int]()
    least_bytes = min(BUCKET_BYTES, _bytes(graph, gradients & ends) // max(buckets, 1))
    anchors, spine, readers = _anchors(steps), _spine(graph, steps), _readers(graph, steps)
    made = dict[int, int]()  # the place of the step, by value; settled values are left out
    for place, step in enumerate(steps):
        if place in anchors:
            anchor = max(anchors[place], key=lambda v: made.get(v, -1))
            complete = [v for v in made if v not in spine and _is_complete(graph, v, ends, readers)]
            if complete and _bytes(graph, gradients.intersection(complete)) >= least_bytes:
                yield Settle(anchor, tuple(complete))
                made = {v: at for v, at in made.items() if v not in complete}
        yield _within(graph, step, min(buckets, 1))
        if isinstance(step, Update):
            made = {v: at for v, at in made.items() if v not in step.made}
        if isinstance(step, Run | Enter | Fork):
            for v in read_by(graph, step):
                readers[v].discard(step.op)
            made.update((v, place) for v in made_by(graph, step) if not step.again and v in graph.arrays)


def _gradients(graph: Graph, steps: tuple[Step, ...], ends: Set[int]) -> set[int]:
    """The values of `ends` that no step of a loop hands to the next to be pulled back, and the terms of their sums."""
    spine = _spine(graph, steps)
    pairs = (zip(body.carried_in, body.carried, strict=True) for body in graph.bodies.values())
    pulled = {out for at, out in itertools.chain.from_iterable(pairs) if at in spine}
    found, todo = set[int](), [*ends - pulled]
    while todo:
        v = todo.pop()
        maker = graph.maker_of(v)
        todo.extend(maker.inputs if v not in found and maker is not None and maker.name == "add_any" else ())
        found.add(v)
    return found


def _bytes(graph: Graph, values: Iterable[int]) -> int:
    return sum(graph.values[v].bytes for v in values)


def _within(graph: Graph, step: Step, buckets: int) -> Step:
    """The step itself; for a loop of the backward, the loop with `settled` applied to its body."""
    if isinstance(step, Fork) and not step.again:
        pairs = zip(step.branches, graph.bodies[step.op].ends, strict=True)
        ends = ((b, {*b.stacks, *(v for v in ends if v is not None)}) for b, ends in pairs)
        bodies = (_settled(graph, b.steps, handed, buckets) for b, handed in ends)
        stacks = (branch.stacks for branch in step.branches)
        return replace(step, branches=tuple(map(Branch, map(tuple, bodies), stacks)))
    if not isinstance(step, Enter) or step.again:
        return step
    ends = {*step.stacks, *(v for v in graph.bodies[step.op].carried if v is not None)}
    return replace(step, steps=tuple(_settled(graph, step.steps, ends, buckets)))


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
