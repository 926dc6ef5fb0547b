"""Run a loop backward from checkpoints.

The number of steps is known now, and so is the number of checkpoints that have become free. Between two checkpoints
steps are run again as in revolve (Griewank and Walther 2000, "Algorithm 799: revolve"), which makes as few steps as
possible: `again * steps - binomial(slots + again, again - 1)`, where `again` is the least number with
`steps <= binomial(slots + again, again)`, and `slots` counts the free checkpoints and the one at the start.

The checkpoints are a stack, ordered by place. The sweep takes the last one and goes forward from there, leaving
checkpoints on the stack, until the free ones suffice for the rest of the way, one before each step. Then it pulls the
cotangent back through these steps in one short loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jointcut.aot.loops.sweep.placing import Checkpoints, read, write
from jointcut.partition.program.jax import meshes

State = Any

FEW = 32  # checkpoints


def swept(
    step: Callable[[Any, list[Any]], list[Any]], back: Callable[[Any, list[Any], State], State],
    checkpoints: Checkpoints, state: State,
) -> State:  # fmt: skip
    """Pull `state` back through all steps, the last first, by `back(i, kept, state)`.

    `step(i, kept)` makes step `i` of the parts of the carry that the checkpoints hold.
    """
    if not checkpoints.rows:
        return _unkept(back, checkpoints.trips, state)
    order, places, used = _ordered(checkpoints)
    sweep = _Sweep(step, back, order)
    whole = (checkpoints.trips, _Stack(used, places, checkpoints.rows), state)
    return lax.while_loop(lambda s: s[0] > 0, lambda s: sweep.stretch(*s), whole)[-1]


class _Stack(NamedTuple):
    """The checkpoints: the first `used` of `places` are in use; `rows` are in the order in which they were written."""

    used: Any
    places: Any
    rows: list[Any]


@dataclass(frozen=True)
class _Sweep:
    """A sweep that makes steps by `step` and pulls back by `back`; checkpoint `i` is in row `order[i]`."""

    step: Callable[[Any, list[Any]], list[Any]]
    back: Callable[[Any, list[Any], State], State]
    order: Any

    def push(self, stack: _Stack, place: Any, kept: list[Any]) -> _Stack:
        """Write a checkpoint."""
        used, places, rows = stack
        rows = [write(r, x, self.order[used]) for r, x in zip(rows, kept, strict=True)]
        return _Stack(used + 1, places.at[used].set(place), rows)

    def top(self, stack: _Stack) -> list[Any]:
        """Read the last checkpoint."""
        return [read(r, self.order[stack.used - 1]) for r in stack.rows]

    def stretch(self, end: Any, stack: _Stack, state: State) -> tuple[Any, _Stack, State]:
        """Pull back through the last steps before `end`, and return the new end."""
        slots = len(self.order) - 1

        def far(s: State) -> State:
            place, kept, stack = s
            there = place + _distance(end - place, slots - stack.used + 1)
            _, kept = lax.while_loop(lambda m: m[0] < there, lambda m: (m[0] + 1, self.step(*m)), (place, kept))
            return there, kept, self.push(stack, there, kept)

        def fill(s: State) -> State:
            place, kept, stack = s
            kept = self.step(place, kept)
            return place + 1, kept, self.push(stack, place + 1, kept)

        def pull(s: State) -> State:
            last, used, state = s
            return last - 1, used - 1, self.back(last, self.top(stack._replace(used=used)), state)

        start = (stack.places[stack.used - 1], self.top(stack), stack)
        start = lax.while_loop(lambda s: end - s[0] > slots - s[2].used + 2, far, start)
        _, _, stack = lax.while_loop(lambda s: s[0] < end - 1, fill, start)
        last, used, state = lax.while_loop(
            lambda s: (s[1] > 0) & (stack.places[s[1] - 1] == s[0]), pull, (end - 1, stack.used, state)
        )
        return last + 1, stack._replace(used=used), state


def _unkept(back: Callable[[Any, list[Any], State], State], trips: Any, state: State) -> State:
    """Return the sweep over steps whose derivative is the same at every carry."""
    start = (trips - 1, state)
    return lax.while_loop(lambda s: s[0] >= 0, lambda s: (s[0] - 1, back(s[0], [], s[1])), start)[1]


def _ordered(checkpoints: Checkpoints) -> tuple[Any, Any, Any]:
    """Return the rows by place, then unused ones and the spare row; the places; and the number in use."""
    trips, plan, places, _ = checkpoints
    number, spare = jnp.arange(len(places), dtype=jnp.int32), jnp.array([len(places)], jnp.int32)
    written, dropped = jnp.sum(places >= 0, dtype=jnp.int32), _dropped(checkpoints)
    used = written - dropped

    def by_place() -> Any:
        return jnp.argsort(jnp.where(places < 0, trips, places)).astype(jnp.int32)

    # Up to `len(places)` trips they are in the order of writing; sorting a few is as fast as asking.
    order = by_place() if len(places) <= FEW else lax.cond(trips <= len(places), lambda: number, by_place)
    start = used - 1 - plan[2]  # of the dropped ones
    moved = jnp.where(number < used, number + dropped, number - used + start)
    order = order[jnp.where((number < start) | (number >= written), number, moved)]
    return jnp.concatenate([order, spare]), jnp.concatenate([places[order], spare]), used


def _dropped(checkpoints: Checkpoints) -> Any:
    """Return how many checkpoints within the last gap but one are better used within the last.

    It is the number with which no step behind the last checkpoint is run again more often than the stage allows.
    """
    trips, (stage, gaps, inner, *_), places, _ = checkpoints
    rest = jnp.float32(trips - jnp.max(places))
    written = jnp.sum(places >= 0, dtype=jnp.int32)
    most = written - inner - gaps  # neither within the last gap, nor at the beginning of one
    served = jnp.float32(stage) + 1  # by the last checkpoint alone

    def more(s: State) -> State:
        count, served = s
        return count + 1, served * jnp.float32(stage + count + 2) / jnp.float32(count + 2)

    start = (meshes.as_varying(jnp.zeros_like(most), most), meshes.as_varying(served, rest))
    count, _ = lax.while_loop(lambda s: (s[0] < most) & (s[1] < rest), more, start)
    return jnp.where(stage >= 2, count, 0)


def _distance(steps: Any, slots: Any) -> Any:
    """Return the distance from a checkpoint to the next, to run back `steps` steps with `slots` checkpoints.

    `slots` counts the one at the start; with that alone, the distance is all steps but one.
    """
    total, many = jnp.float32(jnp.where(slots > 1, steps, 1)), jnp.float32(slots)

    def served(s: State) -> Any:  # by one more repetition
        again, less = s
        return jnp.round(less * (many + again) / again)

    one = meshes.as_varying(jnp.float32(1), many)
    again, less = lax.while_loop(lambda s: served(s) < total, lambda s: (s[0] + 1, served(s)), (one, one))
    rest = jnp.round(less * many / (many + again - 1))  # steps of one slot fewer, run again as often as `less`
    first = jnp.clip(jnp.minimum(less, total - rest), 1, total - 1).astype(jnp.int32)
    return jnp.where(slots > 1, first, steps - 1)
