"""Differentiate a loop, to any order and in both modes.

Three programs stand for a loop `y = F(c, x)` of constants `c` and carry `x`, each one call to JAX's transformations:

- `Loop` is `F`. Forward mode runs the loop that also carries tangents. Reverse mode runs
- `Saving`, which is `F` with checkpoints beside its results, and then
- `Pull`, which takes cotangents `ȳ` to `Jᵀȳ` by a sweep from the checkpoints.

The derivatives of the last two do not look at checkpoints, which depend on `c` and `x` alone. `Pull` is linear in `ȳ`,
so with tangents `dx`, `dȳ` its own tangent is `∇ₓ⟨ȳ, J dx⟩ + Jᵀdȳ`, and the transpose of that takes `u` to `∇ₓ⟨ȳ, J u⟩`
and `J u`. Both are derivatives of `F` again, and are computed as such: by loops, forward and backward, of this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.aot.loops.buffers import Buffer, buffers
from jointcut.aot.loops.memory import Memory
from jointcut.aot.loops.parts import Parts, led, over, traced
from jointcut.aot.loops.placing import Checkpoints, placed
from jointcut.aot.loops.steps import Step, refuse_sums
from jointcut.aot.loops.sweeping import swept
from jointcut.partition.errors import DerivativeError, message
from jointcut.partition.program import jaxprs
from jointcut.wrappers.built_in.programs import Mask, Plain, Program, picked_of, pushed
from jointcut.wrappers.built_in.zeros import filled
from jointcut.wrappers.table import Table

_loop_p = jaxprs.call_primitive("while_loop")
_saving_p = jaxprs.call_primitive("while_loop_with_checkpoints")
_pull_p = jaxprs.call_primitive("while_loop_backward")
_linear_p = jaxprs.linear_primitive("while_loop_linear")

NUM_FIGURES = 4  # what the forward leaves beside results and rows: trips of the lane, of all, plan and places


class Loop(Program):
    """A loop that JAX can differentiate; `name` is that of its body, for errors.

    `known` are the values of inputs that are known integers, by their places.
    """

    def __init__(self, parts: Parts, memory: Memory, name: str, known: Mapping[int, int] | None = None) -> None:
        """Take a loop, how much memory its derivative may have, its name, and known values of its inputs."""
        super().__init__(_loop_p, traced(parts.run, parts.avals))
        self.parts, self.memory, self.name, self.known = parts, memory, name, known or {}
        self._derivatives: Table[Derivative] = Table()
        self._mapped: Table[tuple[Loop, list[bool]]] = Table()

    def derivative(self, mask: Mask) -> Derivative:
        """What belongs to the derivative with respect to the inputs in `mask`."""
        return self._derivatives.of(mask, lambda: Derivative.of(self, mask))

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[list[Any], list[Any | None]]:
        """As `CallRules.jvp`. Raises `DerivativeError` if the body has effects that must not happen twice."""
        mask, _ = picked_of(primals, tangents)
        if self.parts.moving(mask):
            self.refuse_effects()
        return super().jvp(primals, tangents)

    def refuse_effects(self) -> None:
        """Raise `DerivativeError` if the body has an effect other than printing."""
        for eqn in jaxprs.opened(self.parts.quiet)[0].eqns:
            names = jaxprs.effect_names(eqn)
            if names:
                where = f"{self.name}"
                what = f"has the effect {names[0]}, in {jaxprs.source_of(eqn)}; so the loop has no derivative."
                cure = "Steps would be run again. Return the value in the carry, and have the effect after the loop."
                raise DerivativeError(message(where, what, cure))

    def halved(self, mask: Mask, primals: Sequence[Any]) -> tuple[list[Any], Callable[..., list[Any | None]]]:
        """As `Program.halved`: the loop with checkpoints."""
        derivative = self.derivative(mask)
        if not derivative.moving:
            return self(*primals), lambda *tangents: [None] * len(self.parts.carry)
        count = len(self.parts.carry)
        outs = derivative.saving(*primals)
        return outs[:count], derivative.linear([*primals, *outs[count:]])

    def pushed(self, mask: Mask, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any | None]]:
        """As `Program.pushed`: the loop that carries tangents."""
        derivative, count = self.derivative(mask), self.parts.num_consts
        num_moved = sum(mask[:count])
        given = iter(tangents[num_moved:])
        starts: list[Any] = [next(given) if on else None for on in mask[count:]]
        carry = self.parts.carry
        avals = [jaxprs.tangent_aval(carry[i]) for i in derivative.moving]
        moved = filled([starts[i] for i in derivative.moving], avals)
        outs = derivative.tangent(*primals[:count], *tangents[:num_moved], *primals[count:], *moved)
        moves = dict(zip(derivative.moving, outs[len(carry) :], strict=True))
        return outs[: len(carry)], [moves.get(i) for i in range(len(carry))]

    def over(self, axis: Any, dims: tuple[int | None, ...]) -> tuple[Loop, list[bool]]:
        """The loop over one more axis, and which parts of its carry have it; made once for each axis."""

        def make() -> tuple[Loop, list[bool]]:
            parts, has = self.parts.mapped(axis, dims)
            return Loop(parts, self.memory, self.name), has

        return self._mapped.of((axis, dims), make)

    def mapped(self, axis: Any, dims: tuple[int | None, ...]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """As `CallRules.mapped`: another such loop."""
        loop, has = self.over(axis, dims)
        return lambda *flat: loop(*led(axis, self.parts.num_consts, dims, has, flat)), [0 if on else None for on in has]


class Derivative:
    """A loop's derivative with respect to the inputs in `mask`.

    `moving` are the parts of the carry that have one. `kept` are those that the steps of the reverse sweep read, which
    alone are in the checkpoints, but for `filled`: arrays whose state follows from the last one.
    """

    def __init__(
        self, loop: Loop, mask: Mask, moving: list[int], kept: list[int], filled: Sequence[Buffer] = ()
    ) -> None:
        """As `of` makes it."""
        self.loop, self.mask, self.moving, self.kept, self.filled = loop, mask, moving, kept, tuple(filled)
        self._pulls: Table[Pull] = Table()

    @classmethod
    def of(cls, loop: Loop, mask: Mask) -> Derivative:
        """Find out what moves and what is kept."""
        parts, count = loop.parts, loop.parts.num_consts
        moving = parts.moving(mask)
        if not moving:
            return cls(loop, mask, [], [])
        written, used = buffers(parts, loop.known), set(Step.of(parts, mask, moving).carry)
        while True:
            used |= {written[i].counter for i in used if i in written}
            kept = sorted(used - written.keys())
            _, inputs = jaxprs.pruned(parts.quiet, [i in kept for i in range(len(parts.carry))])
            found = used | {i for i, on in enumerate(inputs[count:]) if on}
            if found == used:
                return cls(loop, mask, moving, kept, [written[i] for i in sorted(used) if i in written])
            used = found

    @cached_property
    def saving(self) -> Saving:
        """The loop that leaves checkpoints."""
        return Saving(self.loop, self.loop.parts, self.kept, [buffer.part for buffer in self.filled])

    @cached_property
    def tangent(self) -> Loop:
        """The loop that also carries tangents."""
        return Loop(self.loop.parts.tangent(self.mask), self.loop.memory, self.loop.name)

    def linear(self, residuals: Sequence[Any]) -> Callable[..., list[Any | None]]:
        """The linear map from tangents of the inputs in `mask` to those of the loop's results."""

        def move(*tangents: Any) -> list[Any | None]:
            moved = iter(_linear_p.bind(*residuals, *tangents, rules=self.rules, num_residuals=len(residuals)))
            return [next(moved) if i in self.moving else None for i in range(len(self.loop.parts.carry))]

        return move

    @property
    def rules(self) -> jaxprs.LinearRules:
        """The linear map: its value by the loop that carries tangents, its transpose by the sweep."""
        parts = self.loop.parts
        avals = [jaxprs.tangent_aval(parts.carry[i]) for i in self.moving]
        inputs = len(parts.avals)

        def apply(residuals: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
            _, moved = self.loop.pushed(self.mask, list(residuals[:inputs]), list(linear))
            return [moved[i] for i in self.moving]

        def transpose(residuals: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
            given = tuple(i for i, ct in zip(self.moving, cotangents, strict=True) if ct is not None)
            pull = self._pulls.of(given, lambda: Pull.of(self, given))
            back = iter(pull(*residuals, *(ct for ct in cotangents if ct is not None)))
            return [next(back) if i in pull.sources else None for i, on in enumerate(self.mask) if on]

        return jaxprs.LinearRules(lambda *_: avals, apply, transpose)


class Saving(Plain):
    """A loop with checkpoints beside its results: figures, then the rows of the parts of the carry that are `kept`.

    After them come the last states of the parts `filled`. `run` is the loop that runs: `loop` itself, or its form under
    `jax.vmap` that also counts the trips of each lane.
    """

    def __init__(self, loop: Loop, run: Parts, kept: Sequence[int], filled: Sequence[int]) -> None:
        """Take the loop, the form of it that runs, and which parts of its carry are kept, and which are filled."""
        self.loop, self.kept, self.filled = loop, list(kept), list(filled)
        self._counts = len(run.carry) > len(loop.parts.carry)
        self._ran = run
        super().__init__(traced(self._outputs, loop.parts.avals))
        self._mapped: Table[tuple[Saving, list[bool]]] = Table()

    def __call__(self, *flat: Any) -> list[Any]:
        """Run the loop, or its form under the current transformation."""
        return _saving_p.bind(*flat, jaxpr=self.closed, rules=self)

    def _outputs(self, *flat: Any) -> list[Any]:
        run, count = self._ran, self._ran.num_consts
        consts, carry = flat[:count], list(flat[count:])
        if self._counts:
            carry.append(jaxprs.full(run.carry[-1], 0))
        slots = self.loop.memory.slots([run.carry[i] for i in self.kept])
        outs, points = placed(lambda c: run.alive(consts, c), lambda c: run.step(consts, c), carry, self.kept, slots)
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
        if derivative.saving is not self and (self._counts or derivative.kept != self.kept):
            residuals = derivative.saving(*primals)[len(self.loop.parts.carry) :]
        return outs, [*derivative.linear([*primals, *residuals])(*picked), *rest]

    def mapped(self, axis: Any, dims: tuple[int | None, ...]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """As `CallRules.mapped`: the mapped loop with checkpoints, where trips differ with the trips of each lane."""

        def make() -> tuple[Saving, list[bool]]:
            loop, has = self.loop.over(axis, dims)
            if self._counts:
                run, marks = self._ran.mapped(axis, (*dims, None))
                return Saving(loop, run, self.kept, self.filled), marks
            run, marks = self._ran.counted().mapped(axis, (*dims, None))
            if marks[-1]:
                return Saving(loop, run, self.kept, self.filled), marks
            return Saving(loop, loop.parts, self.kept, self.filled), [*has, False]

        saving, has = self._mapped.of((axis, dims), make)
        count = self.loop.parts.num_consts
        figures = [0 if has[-1] else None, *[None] * (NUM_FIGURES - 1)]
        rows = [*(1 if has[i] else None for i in self.kept), *(0 if has[i] else None for i in self.filled)]
        out_dims = [*(0 if on else None for on in has[:-1]), *figures, *rows]
        return lambda *flat: saving(*led(axis, count, dims, has[:-1], flat)), out_dims


class Pull(Program):
    """Cotangents of the inputs `sources` of a loop, from its inputs, its checkpoints, and cotangents of its results.

    `closed_for(laned)` is the sweep; a laned one leaves the cotangents of a lane as they are behind its last trip.
    """

    def __init__(
        self, derivative: Derivative, given: tuple[int, ...], sources: list[int], closed_for: Callable[[bool], Any],
        linear: Callable[[Mask], jaxprs.LinearRules] | None = None, laned: bool = False,
    ) -> None:  # fmt: skip
        """As `of` and `mapped` make it. `linear` is the derivative with respect to some inputs."""
        super().__init__(_pull_p, closed_for(laned))
        self.derivative, self.given, self.sources = derivative, given, sources
        self._closed_for, self._laned = closed_for, laned
        self._linear = linear or self._second
        self._mapped: Table[Pull] = Table()

    @classmethod
    def of(cls, derivative: Derivative, given: tuple[int, ...]) -> Pull:
        """The sweep from cotangents of these parts of the carry."""
        parts, mask = derivative.loop.parts, derivative.mask
        step = Step.of(parts, mask, parts.moved_by(set(given), derivative.moving))
        refuse_sums(step, parts, derivative.loop.name)
        starts = [parts.num_consts + i for i in step.outputs if mask[parts.num_consts + i]]
        saved = jaxprs.opened(derivative.saving.closed)[0].outvars[len(parts.carry) :]
        cts = [jaxprs.cotangent_aval(parts.carry[i]) for i in given]
        avals = [*parts.avals, *(v.aval for v in saved), *cts]

        def closed_for(laned: bool) -> Any:
            return traced(lambda *flat: _sweep(derivative, step, given, laned, flat), avals)

        return cls(derivative, given, [*step.consts, *starts], closed_for)

    def halved(self, mask: Mask, primals: Sequence[Any]) -> tuple[list[Any], Callable[..., list[Any | None]]]:
        """As `Program.halved`: the outputs by the sweep, their tangents as in `_second`."""
        rules = self._linear(mask)

        def move(*tangents: Any) -> list[Any | None]:
            return _linear_p.bind(*primals, *tangents, rules=rules, num_residuals=len(primals))

        return self(*primals), move

    def pushed(self, mask: Mask, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any | None]]:
        """As `Program.pushed`."""
        return self(*primals), list(self._linear(mask).apply(list(primals), list(tangents)))

    def mapped(self, axis: Any, dims: tuple[int | None, ...]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """As `CallRules.mapped`: all outputs have the axis, as their first."""
        count = len(self.derivative.loop.parts.avals)
        lane = dims[count]

        def make() -> Pull:
            laned = self._laned or lane is not None
            return Pull(
                self.derivative, self.given, self.sources, lambda deep: self._over(axis, dims, deep),
                lambda mask: self._linear(mask).mapped(axis, dims, _marked(dims, mask)), laned,
            )  # fmt: skip

        return self._mapped.of((axis, dims), make), [0] * len(self.sources)

    def _over(self, axis: Any, dims: tuple[int | None, ...], laned: bool) -> Any:
        closed = self._closed_for(laned)
        inner = jaxprs.opened(closed)[0].invars
        avals = [jaxprs.with_axis(axis, d, v.aval) for v, d in zip(inner, dims, strict=True)]
        return traced(over(axis, lambda *flat: jaxprs.evaluate(closed, *flat), dims, 0), avals)

    def _second(self, mask: Mask) -> jaxprs.LinearRules:
        """The derivative of the outputs with respect to the inputs in `mask`, as the docstring of this file has it."""
        loop, count = self.derivative.loop, len(self.derivative.loop.parts.avals)
        inputs, num_inputs = mask[:count], sum(mask[:count])
        firsts = tuple(i in self.sources for i in range(count))
        avals = [jaxprs.tangent_aval(loop.parts.avals[i]) for i in self.sources]

        def given(moves: Sequence[Any | None]) -> list[Any]:
            carry = loop.parts.carry
            return filled([moves[i] for i in self.given], [jaxprs.tangent_aval(carry[i]) for i in self.given])

        def apply(residuals: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
            values, cts = residuals[:count], residuals[len(residuals) - len(self.given) :]
            moved = iter(linear[num_inputs + sum(mask[count : len(mask) - len(self.given)]) :])
            marks = mask[len(mask) - len(self.given) :]
            moves = filled(
                [next(moved) if on else None for on in marks], map(jaxprs.tangent_aval, map(jax.typeof, cts))
            )

            def both(*xs: Any) -> tuple[list[Any], list[Any]]:
                values_ = _put(values, firsts, xs)
                outs, tangents = pushed(loop, inputs, values_, linear[:num_inputs])
                return [outs[i] for i in self.given], given(tangents)

            _, back = jax.vjp(both, *(values[i] for i in self.sources))
            return list(back((moves, list(cts))))

        def transpose(residuals: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
            values, cts = residuals[:count], residuals[len(residuals) - len(self.given) :]
            along = filled(cotangents, avals)

            def moved(*xs: Any) -> list[Any]:
                _, tangents = pushed(loop, firsts, _put(values, inputs, xs), along)
                return given(tangents)

            moves, back = jax.vjp(moved, *(x for x, on in zip(values, inputs, strict=True) if on))
            marks = mask[len(mask) - len(self.given) :]
            nothing = [None] * sum(mask[count : len(mask) - len(self.given)])
            return [*back(list(cts)), *nothing, *(m for m, on in zip(moves, marks, strict=True) if on)]

        return jaxprs.LinearRules(lambda *_: avals, apply, transpose)


def _sweep(derivative: Derivative, step: Step, given: tuple[int, ...], laned: bool, flat: Sequence[Any]) -> list[Any]:
    """Run the reverse sweep on the flat inputs of a `Pull`."""
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
        return live(i, jaxprs.evaluate(less, *(x for x, on in zip(all_, inputs, strict=True) if on)), carry)

    def back(i: Any, carry: list[Any], state: Any) -> Any:
        cts, sums = state
        new, added = step(consts, whole(carry), cts)
        return live(i, new, cts), live(i, [a + b for a, b in zip(sums, added, strict=True)], sums)

    avals = [jaxprs.cotangent_aval(parts.carry[i]) for i in step.outputs]
    start = filled([cts.get(i) for i in step.outputs], avals)
    sums = [jaxprs.full(jaxprs.cotangent_aval(parts.avals[i]), 0) for i in step.consts]
    cts_out, sums = swept(forward, back, Checkpoints(figures[0], figures[1], figures[2], rows), (start, sums))
    ends = [ct for i, ct in zip(step.outputs, cts_out, strict=True) if derivative.mask[count + i]]
    return [*sums, *ends]


def _put(values: Sequence[Any], mask: Sequence[bool], xs: Sequence[Any]) -> list[Any]:
    given = iter(xs)
    return [next(given) if on else x for x, on in zip(values, mask, strict=True)]


def _marked(dims: Sequence[int | None], mask: Mask) -> list[int | None]:
    return [d for d, on in zip(dims, mask, strict=True) if on]
