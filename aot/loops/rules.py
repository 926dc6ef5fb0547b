"""Differentiate a loop, to any order and in both modes.

Three programs stand for a loop `y = F(c, x)` of constants `c` and carry `x`, each one call to JAX's transformations:

- `Loop` is `F`. Forward mode runs the loop that also carries tangents. Reverse mode runs
- `Saving`, which is `F` with checkpoints beside its results, and then
- `Pull`, which takes cotangents `ȳ` to `Jᵀȳ` by a sweep from the checkpoints.

The derivatives of the last two do not look at checkpoints, which depend on `c` and `x` alone. `Pull` is linear in `ȳ`,
so with tangents `dx`, `dȳ` its own tangent is `∇ₓ⟨ȳ, J dx⟩ + Jᵀdȳ`. The transpose of this tangent takes `u` to
`∇ₓ⟨ȳ, J u⟩` and `J u`. Both are derivatives of `F` again, and are computed as such, by loops of this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax

from jointcut.aot.loops.buffers import Buffer, buffers, without_gaps
from jointcut.aot.loops.counters import Counters
from jointcut.aot.loops.memory import Memory
from jointcut.aot.loops.parts import Parts, led, over, talks, traced
from jointcut.aot.loops.sweep.cutting import has_sizes
from jointcut.aot.loops.sweep.reverse import NUM_FIGURES, runs_of, sweep
from jointcut.aot.loops.sweep.saving import Saving
from jointcut.aot.loops.sweep.steps import Step, refuse_sums
from jointcut.aot.options.conventions import CHOICES
from jointcut.partition.bodies.checkpoints import steps_again
from jointcut.partition.program.bodies import Nested
from jointcut.partition.program.jax import abstract, jaxprs, own_primitives, runtime
from jointcut.wrappers.built_in.programs import Mask, Program, picked_of, pushed
from jointcut.wrappers.built_in.zeros import filled
from jointcut.wrappers.table import Table

LOOP = "while_loop"  # the name of a loop's primitive

_loop_p = own_primitives.call_primitive(LOOP)
_pull_p = own_primitives.call_primitive("while_loop_backward")
_linear_p = own_primitives.linear_primitive("while_loop_linear")


class Loop(Program):
    """A loop that JAX can differentiate; `name` is the name of its body, for errors.

    `known` are the values of inputs that are known integers, by their places. `trips` is the expected number of trips,
    None where the user gave none. `guards` is the `zero_cotangent` of its `Conventions`.
    """

    def __init__(
        self, parts: Parts, memory: Memory, name: str, known: Mapping[int, int] | None = None, trips: int | None = None,
        guards: str = "jax",
    ) -> None:  # fmt: skip
        """Take a loop, the memory of its derivative, its name, and the known values of its inputs and trips."""
        super().__init__(_loop_p, traced(parts.run, parts.avals), guards != "jax")
        self.parts, self.memory, self.name, self.known, self.trips = parts, memory, name, known or {}, trips
        self.zero_cotangent = guards
        self._derivatives: Table[Derivative] = Table()
        self._mapped: Table[tuple[Loop, list[bool]]] = Table()
        self.stacks: Table[Any] = Table()  # jitted functions of `loops`, by the number of rows

    def like(
        self, parts: Parts, memory: Memory | None = None, known: Mapping[int, int] | None = None,
        guards: str | None = None,
    ) -> Loop:  # fmt: skip
        """Return another loop, which takes all that is not given from this one; only `known` inputs are known."""
        guards = self.zero_cotangent if guards is None else guards
        return Loop(parts, memory or self.memory, self.name, known, self.trips, guards)

    def under(self, guards: str, change: Callable[[Any], Any]) -> Loop:
        """Return the same loop with its body changed, under the stricter of these conventions and its own."""
        parts = Parts(self.parts.cond, change(self.parts.body), self.parts.num_consts)
        return self.like(parts, known=self.known, guards=stricter(guards, self.zero_cotangent))

    @cached_property
    def counters(self) -> Counters:
        """The counters of the loop."""
        return Counters.of(self.parts, self.known)

    @cached_property
    def bounded(self) -> Memory:
        """The memory of its derivative, given the proved or expected number of trips."""
        exact = self.counters.trips if self.counters.is_exact else None
        return self.memory.bounded(self.counters.trips, exact if self.trips is None else self.trips)

    def derivative(self, mask: Mask) -> Derivative:
        """Return the derivative with respect to the inputs in `mask`."""
        return self._derivatives.of(mask, lambda: Derivative.of(self, mask))

    def runs(self) -> Sequence[tuple[Any, int]]:
        """As `CallRules.runs`: predicate and body, once where no number of trips is expected."""
        return runs_of(self.parts, self.trips)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[list[Any], list[Any | None]]:
        """As `CallRules.jvp`. Raises `DerivativeError` if the body has effects that must not happen twice."""
        mask, _ = picked_of(primals, tangents)
        if self.parts.moving(mask):
            self.parts.refuse_effects(self.name)
        return super().jvp(primals, tangents)

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
        avals = [abstract.tangent_aval(carry[i]) for i in derivative.moving]
        moved = filled([starts[i] for i in derivative.moving], avals)
        outs = derivative.tangent(*primals[:count], *tangents[:num_moved], *primals[count:], *moved)
        moves = dict(zip(derivative.moving, outs[len(carry) :], strict=True))
        return outs[: len(carry)], [moves.get(i) for i in range(len(carry))]

    def over(self, axis: Any, dims: tuple[int | None, ...], slots: int | None = None) -> tuple[Loop, list[bool]]:
        """Return the loop over one more axis, and which parts of its carry have it; made once for each axis.

        It has `slots` checkpoints. By default it has as many as there is memory for with all lanes.
        """

        def make() -> tuple[Loop, list[bool]]:
            parts, has = self.parts.mapped(axis, dims)
            memory = self.bounded if slots is None else self.bounded.fixed(slots)
            return self.like(parts, memory, guards="everywhere" if talks(self.parts.body, axis) else None), has

        return self._mapped.of((axis, dims, slots), make)

    def mapped(self, axis: Any, dims: tuple[int | None, ...]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """As `CallRules.mapped`: another such loop."""
        loop, has = self.over(axis, dims)
        return lambda *flat: loop(*led(axis, self.parts.num_consts, dims, has, flat)), [0 if on else None for on in has]


def stricter(one: str, other: str) -> str:
    """Return the choice for `zero_cotangent` that guards more."""
    return max(one, other, key=CHOICES["zero_cotangent"].index)


class Derivative:
    """A loop's derivative with respect to the inputs in `mask`.

    `moving` are the parts of the carry that have a derivative. `kept` are the parts that the steps of the reverse sweep
    read. Checkpoints hold these alone, except `filled`: arrays whose state follows from the last one.
    """

    def __init__(
        self, loop: Loop, mask: Mask, moving: list[int], kept: list[int], filled: Sequence[Buffer] = (),
        written: Mapping[int, Buffer] | None = None,
    ) -> None:  # fmt: skip
        """Take the fields of `of`; `written` are all arrays that are filled row by row, read by a step or not."""
        self.loop, self.mask, self.moving, self.kept, self.filled = loop, mask, moving, kept, tuple(filled)
        self.written = written or {}
        self._pulls: Table[Pull] = Table()

    @classmethod
    def of(cls, loop: Loop, mask: Mask) -> Derivative:
        """Find the parts that move and the parts that are kept."""
        parts, count = loop.parts, loop.parts.num_consts
        moving = parts.moving(mask)
        if not moving:
            return cls(loop, mask, [], [])
        written = buffers(parts, loop.counters)
        used = set(Step.of(parts, mask, moving, without_gaps(written), loop.zero_cotangent).carry)
        while True:
            used |= {written[i].counter for i in used if i in written}
            kept = sorted(used - written.keys())
            _, inputs = jaxprs.pruned(parts.quiet, [i in kept for i in range(len(parts.carry))])
            found = used | {i for i, on in enumerate(inputs[count:]) if on}
            if found == used:
                return cls(loop, mask, moving, kept, [written[i] for i in sorted(used) if i in written], written)
            used = found

    @property
    def types(self) -> list[Any]:
        """The types of the arrays in a checkpoint."""
        return [self.loop.parts.carry[i] for i in self.kept]

    @cached_property
    def slots(self) -> int:
        """The number of checkpoints."""
        return self.loop.bounded.slots(self.types)

    @cached_property
    def most_slots(self) -> int:
        """The number of checkpoints that a budget may give."""
        return self.loop.bounded.most_slots(self.types)

    @cached_property
    def saving(self) -> Saving:
        """The loop that leaves checkpoints."""
        filled, trips = [buffer.part for buffer in self.filled], self.loop.trips or self.most_slots
        return Saving(self.loop, self.loop.parts, self.kept, filled, self.slots, trips)

    def pull(self, given: tuple[int, ...]) -> Pull:
        """Return the sweep from cotangents of these parts of the carry; made once."""
        return self._pulls.of(given, lambda: Pull.of(self, given))

    @cached_property
    def tangent(self) -> Loop:
        """The loop that also carries tangents; if it guards products, its own derivative guards all of them."""
        loop, guards = self.loop, "everywhere" if self.loop.guards else None
        return loop.like(loop.parts.tangent(self.mask, loop.guards), loop.bounded, guards=guards)

    def linear(self, residuals: Sequence[Any]) -> Callable[..., list[Any | None]]:
        """Return the linear map from tangents of the inputs in `mask` to tangents of the loop's results."""

        def move(*tangents: Any) -> list[Any | None]:
            moved = iter(_linear_p.bind(*residuals, *tangents, rules=self.rules, num_residuals=len(residuals)))
            return [next(moved) if i in self.moving else None for i in range(len(self.loop.parts.carry))]

        return move

    @cached_property
    def rules(self) -> own_primitives.LinearRules:
        """The linear map: its value by the loop that carries tangents, its transpose by the sweep."""
        parts = self.loop.parts
        avals = [abstract.tangent_aval(parts.carry[i]) for i in self.moving]
        inputs = len(parts.avals)

        def apply(residuals: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
            _, moved = self.loop.pushed(self.mask, list(residuals[:inputs]), list(linear))
            return [moved[i] for i in self.moving]

        def transpose(residuals: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
            given = tuple(i for i, ct in zip(self.moving, cotangents, strict=True) if ct is not None)
            pull = self.pull(given)
            back = iter(pull(*residuals, *(ct for ct in cotangents if ct is not None)))
            return [next(back) if i in pull.sources else None for i, on in enumerate(self.mask) if on]

        return own_primitives.LinearRules(lambda *_: avals, apply, transpose)


class Pull(Program):
    """Cotangents of the inputs `sources` of a loop, from its inputs, its checkpoints, and cotangents of its results.

    `closed_for(laned)` is the sweep; a laned sweep does not change the cotangents of a lane behind its last trip.
    """

    def __init__(
        self, derivative: Derivative, given: tuple[int, ...], sources: list[int], closed_for: Callable[[bool], Any],
        linear: Callable[[Mask], own_primitives.LinearRules] | None = None, laned: bool = False,
        step: Step | None = None, slots: int | None = None,
    ) -> None:  # fmt: skip
        """Take the fields of `of` and `mapped`.

        `linear` is the derivative by some inputs, `step` one step, and `slots` the number of checkpoints if it is not
        that of the derivative.
        """
        super().__init__(_pull_p, closed_for(laned), derivative.loop.guards)
        self.derivative, self.given, self.sources = derivative, given, sources
        self._closed_for, self._laned, self._step = closed_for, laned, step
        self.slots = derivative.slots if slots is None else slots
        self._linear = linear or self._second
        self._mapped: Table[Pull] = Table()
        self._numbered: Table[Pull] = Table()

    @classmethod
    def of(
        cls, derivative: Derivative, given: tuple[int, ...], slots: int | None = None, step: Step | None = None
    ) -> Pull:
        """Return the sweep from cotangents of these parts of the carry; its `slots` and `step` may be known."""
        parts, mask, loop, saving = derivative.loop.parts, derivative.mask, derivative.loop, derivative.saving
        if step is None:
            outputs = parts.moved_by(set(given), derivative.moving)
            step = Step.of(parts, mask, outputs, without_gaps(derivative.written), loop.zero_cotangent)
            refuse_sums(step, parts, loop.name)
        saving = saving if slots is None else saving.with_checkpoints(slots)
        saved = jaxprs.opened(saving.closed)[0].outvars[len(parts.carry) :]
        starts = [parts.num_consts + i for i in step.outputs if mask[parts.num_consts + i]]
        cts = [abstract.cotangent_aval(parts.carry[i]) for i in given]
        avals = [*parts.avals, *(v.aval for v in saved), *cts]

        def closed_for(laned: bool) -> Any:
            run = partial(sweep, derivative, step, given, laned)
            return traced(lambda *flat: run(flat), avals)

        return cls(derivative, given, [*step.consts, *starts], closed_for, step=step, slots=slots)

    def nested(self) -> Nested | None:
        """As `CallRules.nested`: the step that is pulled back; None under `jax.vmap`, where it has more axes."""
        if self._step is None or not has_sizes(self._step.joint):
            return None
        split, loop, most = self._step.cut.split, self.derivative.loop, self.derivative.most_slots
        row = sum(map(abstract.aval_bytes, self.derivative.types))
        return Nested(loop.trips, split.graph, split.plan, loop.name, self.slots, row, self._rows, most)

    @property
    def _rows(self) -> tuple[int, ...]:
        """The places of the inputs that have a row for each checkpoint, if their number may be chosen."""
        derivative = self.derivative
        if not derivative.loop.memory.is_default or self.slots != derivative.slots:
            return ()
        first = len(derivative.loop.parts.avals) + NUM_FIGURES - 1  # the last figure is the places
        return tuple(range(first, first + 1 + len(derivative.kept)))

    def with_checkpoints(self, number: int) -> Pull:
        """As `CallRules.with_checkpoints`."""
        assert self._step is not None, "a loop under `jax.vmap` keeps its number"
        return self._numbered.of(number, lambda: Pull.of(self.derivative, self.given, number, self._step))

    def runs(self) -> Sequence[tuple[Any, int]] | None:
        """As `CallRules.runs`: each step back, and the steps that run again between checkpoints."""
        if self._step is None or not has_sizes(self._step.joint):
            return None
        again = steps_again(trips := self.derivative.saving.trips, self.slots)
        return [(self._step.program, trips), *(runs_of(self.derivative.loop.parts, again) if again else ())]

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
                lambda mask: self._linear(mask).mapped(axis, dims, [d for d, on in zip(dims, mask, strict=True) if on]),
                laned, slots=self.slots,
            )  # fmt: skip

        return self._mapped.of((axis, dims), make), [0] * len(self.sources)

    def _over(self, axis: Any, dims: tuple[int | None, ...], laned: bool) -> Any:
        closed = self._closed_for(laned)
        inner = jaxprs.opened(closed)[0].invars
        avals = [own_primitives.with_axis(axis, d, v.aval) for v, d in zip(inner, dims, strict=True)]
        return traced(over(axis, lambda *flat: runtime.evaluate(closed, *flat), dims, 0), avals)

    def _second(self, mask: Mask) -> own_primitives.LinearRules:
        """Return the derivative of the outputs by the inputs in `mask`, as this file's docstring defines it."""
        loop, count = self.derivative.loop, len(self.derivative.loop.parts.avals)
        inputs, num_inputs = mask[:count], sum(mask[:count])
        firsts = tuple(i in self.sources for i in range(count))
        avals = [abstract.tangent_aval(loop.parts.avals[i]) for i in self.sources]

        def given(moves: Sequence[Any | None]) -> list[Any]:
            carry = loop.parts.carry
            return filled([moves[i] for i in self.given], [abstract.tangent_aval(carry[i]) for i in self.given])

        def apply(residuals: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
            values, cts = residuals[:count], residuals[len(residuals) - len(self.given) :]
            moved = iter(linear[num_inputs + sum(mask[count : len(mask) - len(self.given)]) :])
            marks = mask[len(mask) - len(self.given) :]
            moves = filled(
                [next(moved) if on else None for on in marks], map(abstract.tangent_aval, map(jax.typeof, cts))
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

        return own_primitives.LinearRules(lambda *_: avals, apply, transpose)


def _put(values: Sequence[Any], mask: Sequence[bool], xs: Sequence[Any]) -> list[Any]:
    given = iter(xs)
    return [next(given) if on else x for x, on in zip(values, mask, strict=True)]
