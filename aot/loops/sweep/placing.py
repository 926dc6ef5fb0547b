"""Run a loop forward and leave checkpoints behind, without knowing how long it will run.

The number of trips that `s` checkpoints can serve with each step run again at most `r` times is `binomial(s + r, s)`
(Griewank and Walther 2000, "Algorithm 799: revolve"). When the number of steps is not known, checkpoints are moved
while the loop runs. At any time they are placed almost as revolve would place them (Stumm and Walther 2010, "New
algorithms for optimal online checkpointing"; Wang, Moin and Iaccarino 2009, "Minimal repetition dynamic checkpointing
algorithm for unsteady adjoint calculation").

Here the loop passes through stages 0, 1, 2, …; in stage `r` a step is run again at most `r` times. The checkpoints of a
stage begin the gaps of lengths `binomial(s - j + r, r)`, `j = 0, 1, …`. Checkpoints within the last gap have the
distances of the stage before; each new checkpoint replaces the last one in an earlier gap. Therefore

- up to `s` trips no step is run again, and with less than `(s + 1) (s + 2) / 2` trips each is run again at most once,
  which is optimal: all steps but `s` are;
- after that, few checkpoints are written, and between two of them a loop runs that does nothing but the body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.aot.loops.counters import FOREVER
from jointcut.partition.program.jax import abstract, meshes

FIRST_PLAN = (0, 1, 0, 0, 1)  # the figures of a `Plan`


class Checkpoints(NamedTuple):
    """The figures that the forward leaves beside its rows.

    `trips` is the number of steps. `plan` has the figures of the plan by which the last checkpoint was written.
    `places` has the number of steps before each row was written, -1 if never.
    """

    trips: Any
    plan: Any
    places: Any
    rows: list[Any]


class Plan(NamedTuple):
    """The next places of checkpoints: in stage `stage`, `gaps` gaps have begun, and the last has `inner` checkpoints.

    Checkpoint number `slot` is written next, the one after it is `slot + way`. `order` has the row of each number.
    """

    stage: Any
    gaps: Any
    inner: Any
    slot: Any
    way: Any
    order: Any

    @classmethod
    def of(cls, figures: Any, order: Any) -> Plan:
        """Return the plan with these figures, all but `order`."""
        stage, gaps, inner, slot, way = figures
        return cls(stage, gaps, inner, slot, way, order)


class _Orders(NamedTuple):
    """Write `writes` checkpoints, one before each step; then go `distance` steps; then follow `after`."""

    writes: Any
    distance: Any
    after: Plan


def placed(
    alive: Callable[[list[Any]], Any], step: Callable[[list[Any]], list[Any]], carry: Sequence[Any],
    kept: Sequence[int], slots: int, is_enough: bool = False,
) -> tuple[list[Any], Checkpoints]:  # fmt: skip
    """Run the loop; return its last carry, and checkpoints of the parts of the carry in `kept`.

    `alive` is the predicate and `step` the body. The rows have one more than `slots`, for the reverse sweep's use.
    If the slots should be enough for all trips, no checkpoint is moved. If they are not, only the first one counts.
    """

    def advance(trips: Any, carry: list[Any]) -> tuple[Any, Any, list[Any]]:
        carry = step(carry)
        return trips + 1, alive(carry), carry

    carry, lives = list(carry), alive(list(carry))
    rows = [meshes.as_varying(empty_rows(carry[i], slots + 1), lives) for i in kept]
    trips, places, figures, order = (meshes.as_varying(x, lives) for x in _numbers(slots))
    if is_enough:
        trips, carry, rows = _filled(advance, (trips, lives, carry, rows), kept, slots)
        used = jnp.where(trips <= slots, trips, 1)
        return carry, Checkpoints(trips, figures, jnp.where(order < used, order, -1), rows)

    def stretch(state: Any) -> Any:
        trips, lives, carry, places, rows, figures, order = state
        plan = Plan.of(figures, order)
        orders = _orders(plan, slots)
        fill = _filling(advance, plan, kept)
        start = (trips, jnp.int32(0), lives, carry, places, rows)
        trips, _, lives, carry, places, rows = lax.while_loop(lambda s: (s[1] < orders.writes) & s[2], fill, start)
        end = trips + orders.distance
        trips, lives, carry = lax.while_loop(
            lambda s: (s[0] < end) & s[1], lambda s: advance(s[0], s[2]), (trips, lives, carry)
        )
        figures = jnp.where(lives, jnp.stack(orders.after[:-1]), figures)
        return trips, lives, carry, places, rows, figures, orders.after.order

    start = (trips, lives, carry, places, rows, figures, order)
    trips, _, carry, places, rows, figures, _ = lax.while_loop(lambda s: s[1], stretch, start)
    return list(carry), Checkpoints(trips, figures, places, rows)


def _numbers(slots: int) -> tuple[Any, ...]:
    """Return trips, places of the rows, figures of the plan and order of the rows, before the first step."""
    return (
        jnp.int32(0), jnp.full(slots, -1, jnp.int32), jnp.array(FIRST_PLAN, jnp.int32),
        jnp.arange(slots, dtype=jnp.int32),
    )  # fmt: skip


def _filling(advance: Callable[..., Any], plan: Plan, kept: Sequence[int]) -> Callable[[Any], Any]:
    """Return the step of a loop that writes a checkpoint, then goes one step of the user's loop."""

    def fill(state: Any) -> Any:
        trips, done, _, carry, places, rows = state
        row = plan.order[plan.slot + done * plan.way]
        rows = [write(r, carry[i], row) for r, i in zip(rows, kept, strict=True)]
        places = places.at[row].set(trips)
        trips, lives, carry = advance(trips, carry)
        return trips, done + 1, lives, carry, places, rows

    return fill


def _filled(advance: Callable[..., Any], start: Any, kept: Sequence[int], slots: int) -> tuple[Any, list[Any], Any]:
    """Run the loop with a checkpoint before each of the first `slots` steps: its trips, last carry, and rows."""

    def fill(state: Any) -> Any:
        trips, _, carry, rows = state
        row = jnp.minimum(trips, slots)  # the last row is the sweep's
        rows = [write(r, carry[i], row) for r, i in zip(rows, kept, strict=True)]
        return *advance(trips, carry), rows

    trips, _, carry, rows = lax.while_loop(lambda s: s[1], fill, start)
    return trips, list(carry), rows


def binomial(slots: Any, again: Any) -> Any:
    """Return `slots + again` over `again`, as a float: the steps that `slots` serve, each run again `again` times."""

    def more(i: Any, served: Any) -> Any:
        return jnp.round(served * (slots + jnp.float32(i)) / jnp.float32(i))

    return lax.fori_loop(1, again + 1, more, meshes.as_varying(jnp.float32(1), slots, again))


def empty_rows(like: Any, count: int) -> Any:
    """Return an array for `count` rows of the type of `like`, whose contents do not matter."""
    aval: Any = jax.typeof(like)
    if not abstract.is_plain(aval):
        return jnp.broadcast_to(like, (count, *aval.shape))
    return lax.broadcast(abstract.full(aval, 0), (count,))  # it is laid out on a mesh as the rows are


def write(rows: Any, value: Any, row: Any) -> Any:
    """Return the rows, with one replaced."""
    return lax.dynamic_update_index_in_dim(rows, value, row, 0)


def read(rows: Any, row: Any) -> Any:
    """Return one of the rows."""
    return lax.dynamic_index_in_dim(rows, row, 0, keepdims=False)


def _orders(plan: Plan, slots: int) -> _Orders:
    """Return the next orders, in the current stage of the plan."""
    if slots == 1:
        return _Orders(jnp.int32(1), jnp.int32(FOREVER), plan)
    return lax.switch(jnp.minimum(plan.stage, 2), [_fill_all, _fill_gap, _place_one], plan)


def _fill_all(plan: Plan) -> _Orders:
    """Stage 0: a checkpoint before every step."""
    slots = plan.order.shape[0]
    after = _new_stage(plan)._replace(order=plan.order)
    return _whole(plan, _Orders(slots, 1, after))


def _fill_gap(plan: Plan) -> _Orders:
    """Stage 1: a checkpoint before every step of the gap but the last."""
    free = plan.order.shape[0] - plan.gaps
    ended = plan._replace(gaps=plan.gaps + 1, slot=plan.slot + free * plan.way, way=-plan.way)
    return _whole(plan, _Orders(free + 1, 1 + jnp.int32(free == 0), _where(free == 0, _new_stage(plan), ended)))


def _place_one(plan: Plan) -> _Orders:
    """A later stage: one checkpoint, and a long way to go."""
    free = plan.order.shape[0] - plan.gaps
    ends = plan.inner == free
    length = binomial((free + 1 - plan.inner).astype(jnp.float32), plan.stage - 1)
    distance = jnp.minimum(length, FOREVER).astype(jnp.int32) - 1 + jnp.int32(ends) + jnp.int32(free == 0)
    ended = plan._replace(gaps=plan.gaps + 1, inner=jnp.zeros_like(plan.inner), way=-plan.way)
    same = plan._replace(inner=plan.inner + 1, slot=plan.slot + plan.way)
    after = _where(free == 0, _new_stage(plan), _where(ends, ended, same))
    return _whole(plan, _Orders(1, distance, after))


def _new_stage(plan: Plan) -> Plan:
    """Return the plan for the second gap of the next stage: the first is all gaps of this stage and one more step.

    The checkpoints that began the gaps of a stage have the numbers 0, s - 1, 1, s - 2, …; they are numbered anew.
    """
    slots = plan.order.shape[0]
    numbers = np.arange(slots)
    zigzag = np.where(numbers % 2 == 0, numbers // 2, slots - (numbers + 1) // 2)
    return Plan.of((plan.stage + 1, *map(jnp.int32, (2, 0, slots - 1, -1))), plan.order[zigzag])


def _whole(plan: Plan, orders: _Orders) -> _Orders:
    """Return the orders as integers that vary over the axes that the plan varies over."""
    return jax.tree.map(lambda x: meshes.as_varying(jnp.int32(x), plan.order), orders)


def _where(flag: Any, yes: Plan, no: Plan) -> Plan:
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), yes, no)
