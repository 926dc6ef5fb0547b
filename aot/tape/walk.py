"""Run the backward of a structure, step by step, on arrays or on tracers.

When a step runs, the cotangents of its outputs are complete. They go through the hooks on these values and through the
`pre_hook` of a call. Then the residuals are unpacked, and the backward of the op runs. The `post_hook` of a call sees
the gradients. Each gradient is added to the cotangent of its value. Once the last part of a leaf's gradient is added,
the gradient goes through the leaf's hooks, is added to its reference and goes through `post_accumulate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jointcut.aot.tape.sweep import Called, Step
from jointcut.partition.program.jax import abstract
from jointcut.partition.program.places import line_at

#: A function that calls a hook: it takes the hook's number, flat values, and the types of the results.
Call = Callable[[int, Sequence[Any], Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class Structure:
    """The steps of a backward, without values.

    Attributes:
        steps: the nodes, latest first.
        leaf_hooks: the hooks of each leaf.
        seeds: the step and output of each cotangent.
        loop: equal blocks of steps (a `BlockLoop`), numbered after the steps, or None.
    """

    steps: Sequence[Step]
    leaf_hooks: Sequence[tuple[Called, ...]]
    seeds: Sequence[tuple[int, int]]
    loop: Any = None

    @property
    def kept_by(self) -> dict[int, str]:
        """What each residual is kept for, by its place: ` of tanh at train.py:12`, the first op or hook to need it."""
        kept: dict[int, str] = {}
        for step in self.steps:
            at = f" at {line_at(step.source)}" if step.source is not None else ""
            for hook in (x for x in (*step.saved, *step.hooks, *step.after) if isinstance(x, Called)):
                kept.update(dict.fromkeys(hook.read, f" of {hook.place.words}"))
                kept.update(dict.fromkeys(hook.arrays, f" of {step.record.name}{at}, packed"))
            kept.update((x, f" of {step.record.name}{at}") for x in step.saved if isinstance(x, int))
        return kept

    @property
    def called(self) -> list[Called]:
        """The hooks that are called back."""
        hooks = [h for step in self.steps for h in (*step.saved, *step.hooks, *step.after) if isinstance(h, Called)]
        hooks += [h for leaf in self.leaf_hooks for h in leaf]
        return [h for h in hooks if not h.place.is_traced]


@dataclass
class Walk:
    """One run of a structure.

    Attributes:
        structure: the structure that runs.
        flat: the residuals.
        call: the function that calls a hook that is not traced.
        looked: a function that is called after each step, with its number and the gradients, and after each hook.
        refs: the references that gradients are added to, None for a leaf without one.
    """

    structure: Structure
    flat: Sequence[Any]
    call: Call
    looked: Callable[[int, Any, Sequence[Any]], None] | None = None
    refs: Sequence[Any] = ()
    results: list[Any] = field(default_factory=list)
    _held: dict[tuple[int, int], Any] = field(default_factory=dict)
    _left: dict[int, int] = field(default_factory=dict)
    _passed: dict[int, list[Any]] = field(default_factory=dict)

    def __call__(self, cotangents: Sequence[Any]) -> list[Any]:
        """Return the gradients of the leaves for the cotangents of the seeds; None where no gradient flows."""
        structure = self.structure
        self.results = [None] * len(structure.leaf_hooks)
        edges = [*structure.seeds, *(structure.loop.targets if structure.loop else ())]
        edges += [edge for step in structure.steps for edge in step.edges]
        for number, _ in edges:
            self._left[number] = self._left.get(number, 0) + 1
        for edge, ct in zip(structure.seeds, cotangents, strict=True):
            self._add(edge, ct)
        for number, step in enumerate(structure.steps):
            self._looped(number)
            self._run(number, step)
        self._looped(len(structure.steps))
        return self.results

    def block(self, carried: dict[tuple[int, int], Any]) -> dict[tuple[int, int], Any]:
        """Run the steps from the cotangents of some outputs, and return the cotangents that are left.

        Cotangents are keyed by a number, of a step or of another receiver, and an output.
        """
        self._held = dict(carried)
        for number, step in enumerate(self.structure.steps):
            self._run(number, step)
        return self._held

    def _looped(self, number: int) -> None:
        """Run the loop, if it comes before step `number`."""
        loop, count = self.structure.loop, len(self.structure.steps)
        if loop is None or loop.at != number:
            return
        entered = {(n - count, i): self._held.pop((n, i)) for n, i in list(self._held) if n >= count}
        ends, arrays = loop.laid_out(entered)
        left = self.call(loop.number, arrays, [aval for _, aval in ends])
        results = {key: x for (key, _), x in zip(ends, left, strict=True)}
        for (n, i), x in results.items():
            if n < loop.period and (n, i) in loop.handed_on:
                self._add((number + n, i), x)
        for t, target in enumerate(loop.targets):
            self._add(target, results.get((2 * loop.period + t, 0)))

    def _run(self, number: int, step: Step) -> None:
        record = step.record
        held = [self._held.pop((number, i), None) for i in range(record.num_outputs)]
        for hook in step.hooks:
            held = self._hooked(number, step, hook, held)
        cotangents = self._passed[number] = [held[i] for i in record.cotangents]
        grads: Sequence[Any] = [None] * len(step.edges)
        if any(ct is not None for ct in cotangents):
            saved = [self._saved(number, step, x) for x in step.saved]
            with jax.named_scope(record.name):
                grads = record.backward(saved, cotangents)
        if self.looked is not None:
            self.looked(number, None, grads)
        for hook in step.after:
            grads = self._hooked(number, step, hook, list(grads))
        for edge, gradient in zip(step.edges, grads, strict=True):
            self._add(edge, gradient)

    def _saved(self, number: int, step: Step, x: int | Called) -> Any:
        if isinstance(x, int):
            return self.flat[x]
        del step
        (residual,) = self._called(number, x, [self.flat[i] for i in x.arrays])
        return residual

    def _hooked(self, number: int, step: Step, hook: Called, held: Sequence[Any]) -> list[Any]:
        """Return the cotangents after a hook, which gets arrays also for zero cotangents."""
        del step
        place, held = hook.place, list(held)
        if all(held[i] is None for i in place.outputs):
            return held
        given = [held[i] for i in place.outputs]
        if hook.partner is not None:
            given += self._passed.get(hook.partner, [])
        given += [None] * (len(place.types) - len(given))
        arrays = [abstract.full(aval, 0) if x is None else x for x, aval in zip(given, place.types, strict=True)]
        for i, x in zip(place.outputs, self._called(number, hook, arrays), strict=True):
            held[i] = x
        return held

    def _called(self, number: int, hook: Called, arrays: Sequence[Any]) -> list[Any]:
        if hook.place.is_traced:
            results = hook.place(arrays, [self.flat[i] for i in hook.read])
        else:
            results = self.call(hook.number, arrays, hook.place.returns)
        if self.looked is not None:
            self.looked(number, hook.place, results)
        return results

    def _add(self, edge: tuple[int, int], gradient: Any) -> None:
        """Add a part of the cotangent of a value; with the last part of a leaf, finish the leaf."""
        number, before = edge[0], self._held.get(edge)
        if gradient is not None:
            self._held[edge] = gradient if before is None else before + gradient
        if number < 0:
            self._left[number] -= 1
            if not self._left[number]:
                self._leaf(-1 - number)

    def _leaf(self, place: int) -> None:
        gradient = self._held.pop((-1 - place, 0), None)
        if gradient is None:
            return
        hooks = self.structure.leaf_hooks[place]
        for hook in hooks:
            if hook.place.kind == "on_cotangent":
                (gradient,) = self._called(-1 - place, hook, [gradient])
        ref = self.refs[place] if self.refs else None
        if ref is not None:
            ref[...] += gradient
            gradient = ref[...]
        for hook in hooks:
            if hook.place.kind == "post_accumulate":
                before = gradient
                (gradient,) = self._called(-1 - place, hook, [gradient])
                if ref is not None and gradient is not before:
                    ref[...] = gradient
        self.results[place] = gradient
