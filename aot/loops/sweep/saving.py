"""Let a loop with checkpoints beside its results be one call to JAX's transformations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jointcut.aot.loops.parts import Parts, led, traced
from jointcut.aot.loops.sweep.placing import placed
from jointcut.aot.loops.sweep.reverse import NUM_FIGURES, runs_of
from jointcut.partition.program.bodies import CHECKPOINTED
from jointcut.partition.program.jax import abstract, own_primitives
from jointcut.wrappers.built_in.programs import Plain, picked_of
from jointcut.wrappers.table import Table

_saving_p = own_primitives.call_primitive(CHECKPOINTED)


class Saving(Plain):
    """A loop with checkpoints beside its results: figures, then the rows of the parts of the carry that are `kept`.

    After them come the last states of the parts `filled`. `run` is the loop that runs: `loop` itself, or its form under
    `jax.vmap` that also counts the trips of each lane. All lanes together have as many checkpoints as one lane alone:
    the sweep from them, which is mapped on its own, takes the same number.
    """

    def __init__(
        self, loop: Any, run: Parts, kept: Sequence[int], filled: Sequence[int], slots: int, trips: int
    ) -> None:
        """Take a `rules.Loop`, its form that runs, the kept and filled parts of its carry, and the checkpoint count.

        `trips` is the number that the cost model counts.
        """
        self.loop, self.kept, self.filled, self.slots = loop, list(kept), list(filled), slots
        self.trips = trips
        self._counts = len(run.carry) > len(loop.parts.carry)
        self._ran = run
        super().__init__(traced(self._outputs, loop.parts.avals))
        self._mapped: Table[tuple[Saving, list[bool]]] = Table()
        self._numbered: Table[Saving] = Table()

    def runs(self) -> Sequence[tuple[Any, int]]:
        """As `CallRules.runs`."""
        return runs_of(self._ran, self.trips)

    def with_checkpoints(self, number: int) -> Saving:
        """As `CallRules.with_checkpoints`."""
        loop, kept, filled = self.loop, self.kept, self.filled
        return self._numbered.of(number, lambda: Saving(loop, self._ran, kept, filled, number, self.trips))

    def __call__(self, *flat: Any) -> list[Any]:
        """Run the loop, or its form under the current transformation."""
        return _saving_p.bind(*flat, jaxpr=self.closed, rules=self)

    def _outputs(self, *flat: Any) -> list[Any]:
        run, count = self._ran, self._ran.num_consts
        consts, carry = flat[:count], list(flat[count:])
        if self._counts:
            carry.append(abstract.full(run.carry[-1], 0))
        slots = self.slots
        alive, step = (lambda c: run.alive(consts, c)), (lambda c: run.step(consts, c))
        outs, points = placed(alive, step, carry, self.kept, slots, slots == self.loop.bounded.most)
        lane = outs.pop() if self._counts else points.trips
        return [*outs, lane, points.trips, points.plan, points.places, *points.rows, *(outs[i] for i in self.filled)]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[list[Any], list[Any | None]]:
        """As `CallRules.jvp`: the tangents of the loop's results; the checkpoints have none (see above)."""
        mask, picked = picked_of(primals, tangents)
        outs = self(*primals)
        rest = [None] * (len(outs) - len(self.loop.parts.carry))
        derivative = self.loop.derivative(mask)
        if not derivative.moving:
            return outs, [None] * len(outs)
        residuals = outs[len(self.loop.parts.carry) :]
        other = derivative.saving
        is_alike = (other.kept, other.filled, other.slots) == (self.kept, self.filled, self.slots)
        if other is not self and (self._counts or not is_alike):
            residuals = other(*primals)[len(self.loop.parts.carry) :]
        return outs, [*derivative.linear([*primals, *residuals])(*picked), *rest]

    def mapped(self, axis: Any, dims: tuple[int | None, ...]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """As `CallRules.mapped`: the mapped loop with checkpoints, and if trips differ the trips of each lane."""

        def make() -> tuple[Saving, list[bool]]:
            loop, has = self.loop.over(axis, dims, self.slots)
            form = partial(Saving, loop, kept=self.kept, filled=self.filled, slots=self.slots, trips=self.trips)
            run, marks = (self._ran if self._counts else self._ran.counted()).mapped(axis, (*dims, None))
            return (form(run), marks) if self._counts or marks[-1] else (form(loop.parts), [*has, False])

        saving, has = self._mapped.of((axis, dims), make)
        count = self.loop.parts.num_consts
        figures = [0 if has[-1] else None, *[None] * (NUM_FIGURES - 1)]
        rows = [*(1 if has[i] else None for i in self.kept), *(0 if has[i] else None for i in self.filled)]
        out_dims = [*(0 if on else None for on in has[:-1]), *figures, *rows]
        return lambda *flat: saving(*led(axis, count, dims, has[:-1], flat)), out_dims
