"""Take a loop apart for its reverse sweep, and run the sweep on flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jointcut.aot.loops.buffers import Buffer
from jointcut.aot.loops.parts import Parts
from jointcut.aot.loops.sweep.placing import Checkpoints
from jointcut.aot.loops.sweep.steps import Step
from jointcut.aot.loops.sweep.sweeping import swept
from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.wrappers.built_in.zeros import filled

NUM_FIGURES = 4  # figures of the forward beside results and rows: trips of the lane, of all, plan and places


def runs_of(parts: Parts, trips: int | None) -> list[tuple[Any, int]]:
    """Return the programs of a loop, and how often each is expected to run."""
    count = 1 if trips is None else trips
    return [(parts.cond, count), (parts.body, count)]


def sweep(derivative: Any, step: Step, given: tuple[int, ...], laned: bool, flat: Sequence[Any]) -> list[Any]:
    """Run the reverse sweep of a `rules.Derivative` on the flat inputs of a `rules.Pull`."""
    parts, count = derivative.loop.parts, derivative.loop.parts.num_consts
    consts, rest = flat[:count], flat[len(parts.avals) :]
    (lane, *figures), rest = rest[:NUM_FIGURES], rest[NUM_FIGURES:]
    kept, by_rows = derivative.kept, derivative.filled
    rows, last, rest = list(rest[: len(kept)]), rest[len(kept) :], rest[len(kept) + len(by_rows) :]
    cts = dict(zip(given, rest, strict=True))
    less, inputs = jaxprs.pruned(parts.quiet, [i in kept for i in range(len(parts.carry))])

    def whole(carry: list[Any]) -> dict[int, Any]:
        values = dict(zip(kept, carry, strict=True))
        for b, end in zip(by_rows, last, strict=False):
            values[b.part] = b.before(values[b.counter], flat[count + b.part], end)
        return values

    def live(i: Any, new: list[Any], old: list[Any]) -> list[Any]:
        return [jnp.where(i < lane, a, b) for a, b in zip(new, old, strict=True)] if laned else new

    def forward(i: Any, carry: list[Any]) -> list[Any]:
        values = whole(carry)
        all_ = [*consts, *(values.get(j) for j in range(len(parts.carry)))]
        return live(i, runtime.evaluate(less, *(x for x, on in zip(all_, inputs, strict=True) if on)), carry)

    def back(i: Any, carry: list[Any], state: Any) -> Any:
        cts, sums = state
        after = {**still, **dict(zip(step.moved, cts, strict=True))}
        new, added = step(consts, whole(carry), [after[j] for j in step.outputs])
        return live(i, new, cts), live(i, [a + b for a, b in zip(sums, added, strict=True)], sums)

    avals = [abstract.cotangent_aval(parts.carry[i]) for i in step.outputs]
    start = dict(zip(step.outputs, filled([cts.get(i) for i in step.outputs], avals), strict=True))
    still = {i: start[i] for i in step.still}
    sums = [abstract.full(abstract.cotangent_aval(parts.avals[i]), 0) for i in step.consts]
    begin = [start[i] for i in step.moved], sums
    moved, sums = swept(forward, back, Checkpoints(figures[0], figures[1], figures[2], rows), begin)
    trips = lane if laned else figures[0]
    ends = {i: _cleared(derivative.written[i], flat[count:], trips, ct) for i, ct in still.items()}
    ends |= zip(step.moved, moved, strict=True)
    return [*sums, *(ends[i] for i in step.outputs if derivative.mask[count + i])]


def _cleared(buffer: Buffer, carry: Sequence[Any], trips: Any, cotangent: Any) -> Any:
    """Return the cotangent of an array's first state, if `trips` steps read nothing of it; `carry` is the first."""
    return buffer.cleared(carry[buffer.counter], trips, cotangent)
