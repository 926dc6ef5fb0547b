"""Run equal blocks of a backward as one compiled loop, some at a time.

A block that calls hooks back is compiled once, in parts between its hooks, and runs block by block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jointcut.aot.tape.program import Divided, leave
from jointcut.aot.tape.walk import Structure, Walk
from jointcut.partition.program.jax import abstract, jaxprs

#: The number of blocks that run at a time.
CHUNK = 16

#: A number, as `BlockLoop` describes, and an output.
Key = tuple[int, int]
BlockHooks = Sequence[Callable[[Sequence[Any]], list[Any]]]


@dataclass(eq=False)
class BlockLoop:
    """Equal blocks of steps; each block passes cotangents to the next.

    A cotangent is named by a number and an output. Numbers below `period` are the steps of a block, the next `period`
    numbers the steps of the next block. From `2 * period` on follow the targets, and then the block's own leaves.

    Attributes:
        at: the step before which it runs.
        number: the number by which the backward calls it.
        steps: the steps of a block, whose residuals are constants and then slots.
        targets: the steps or leaves outside of the loop, with outputs, to which each block adds.
        types: the types of the residuals of a block.
        count: the number of blocks, if cotangents from outside enter later blocks too.
        ends: the carried cotangents and the sums, with types; tracing finds them.
        entries: the cotangents that enter each block from outside, with types.
        handed_on: the cotangents that a block passes to the next.
        owned: the blocks' own leaves that get a gradient.
    """

    at: int
    number: int
    steps: Structure
    targets: tuple[Key, ...]
    types: tuple[Any, ...]
    count: int = 0
    ends: list[tuple[Key, Any]] = field(default_factory=list)
    entries: list[tuple[Key, Any]] = field(default_factory=list)
    handed_on: set[Key] = field(default_factory=set)
    owned: list[int] = field(default_factory=list)

    @property
    def period(self) -> int:
        """The number of steps of a block."""
        return len(self.steps.steps)

    @property
    def first_own(self) -> int:
        """The first number of an own leaf."""
        return 2 * self.period + len(self.targets)

    def laid_out(self, entered: dict[Key, Any]) -> tuple[list[tuple[Key, Any]], list[Any]]:
        """Return the carried cotangents and sums, given the entering cotangents, and the arrays to call the loop with.

        An entering cotangent has the number of the step in the first block, plus `period` for each later block. If
        cotangents enter the first block alone, they are carried. Otherwise each gets an array for all blocks, with
        zeros where none enters.
        """
        period = self.period
        keys = dict.fromkeys((n % period, i) for n, i in entered if n >= period)
        known = {(n % period, i): jax.typeof(x).update(weak_type=False) for (n, i), x in entered.items()}
        self.entries[:] = [(key, known[key]) for key in keys]
        carried = {(n, i): known[n, i] for n, i in entered if n < period and (n, i) not in keys}
        self._close(carried)
        arrays = [entered.get(key) if key in carried and key not in keys else None for key, _ in self.ends]
        avals = [aval for _, aval in self.ends]
        for (n, i), aval in self.entries:
            arrays += [entered.get((k * period + n, i)) for k in range(self.count)]
            avals += [aval] * self.count
        given = zip(arrays, avals, strict=True)
        return self.ends, [abstract.full(aval, 0) if x is None else abstract.typed(x, aval) for x, aval in given]

    def _close(self, carried: dict[Key, Any]) -> None:
        """Find all carried cotangents and sums, if a block starts with `carried`."""
        sums: dict[Key, Any] = {}
        structs = [abstract.struct(aval) for aval in self.types]
        while True:
            given = {key: abstract.struct(aval) for key, aval in (dict(self.entries) | carried).items()}
            closed, made = jax.make_jaxpr(self._block, return_shape=True)(given, structs)
            pairs = zip(sorted(made), closed.out_avals, strict=True)
            avals = {key: aval.update(weak_type=False) for key, aval in pairs}
            following = {(n - self.period, i): aval for (n, i), aval in avals.items() if n < 2 * self.period}
            sums = {key: aval for key, aval in avals.items() if 2 * self.period <= key[0] < self.first_own}
            if following.keys() <= carried.keys():
                break
            carried = following | carried
        self.handed_on.update(following)
        self.owned[:] = sorted(n - self.first_own for n, _ in avals if n >= self.first_own)
        self.ends[:] = [*carried.items(), *sums.items()]

    def _block(self, carried: dict[Key, Any], residuals: Sequence[Any]) -> dict[Key, Any]:
        made = Walk(self.steps, residuals, leave).block(carried)
        return {key: x for key, x in made.items() if x is not None}

    def run(
        self,
        consts: Sequence[Any],
        slots: Sequence[Sequence[Any]],
        hooks: Sequence[BlockHooks],
        arrays: Sequence[Any],
    ) -> tuple[list[Any], list[list[Any]]]:
        """Return the carried cotangents and sums after all blocks, and the gradients of each block's own leaves.

        Each slot has an array for each block, and so has each entry in `arrays`; `hooks` are the hooks of each block.
        """
        count, size = len(hooks), len(self.ends)
        results, entries = list(arrays[:size]), [arrays[i : i + count] for i in range(size, len(arrays), count)]
        own: list[list[Any]] = []
        if self.steps.called:
            for k in range(count):
                inputs = [*consts, *(slot[k] for slot in slots), *(entry[k] for entry in entries), *results]
                made = self.parts(inputs, hooks[k])
                results, own = made[:size], [*own, made[size:]]
            return results, own
        for start in range(0, count, CHUNK):
            some = min(CHUNK, count - start)
            padded = [
                [[*x[start : start + some], *[x[start]] * (CHUNK - some)] for x in many] for many in (slots, entries)
            ]
            results, stacks = self.chunk(np.int32(some), list(consts), *padded, results)
            own += [[stack[k] for stack in stacks] for k in range(some)]
        return results, own

    def _step(self, residuals: Sequence[Any], entries: Sequence[Any], arrays: Sequence[Any]) -> tuple[Any, Any]:
        """Return the carried cotangents and sums after one block, and the gradients of its own leaves."""
        given = dict(zip((key for key, _ in self.ends), arrays, strict=True))
        sums = {key for key, _ in self.ends if key[0] >= 2 * self.period}
        entered = {key: x for key, x in given.items() if key not in sums}
        for (key, _), x in zip(self.entries, entries, strict=True):
            entered[key] = entered[key] + x if key in entered else x
        made = self._block(entered, residuals)
        after = {key: abstract.full(aval, 0) for key, aval in self.ends}
        after |= {(n - self.period, i): x for (n, i), x in made.items() if n < 2 * self.period}
        after |= {key: given[key] + made[key] for key in sums}
        own = [made[self.first_own + n, 0] for n in self.owned]
        return [abstract.typed(after[key], aval) for key, aval in self.ends], own

    @functools.cached_property
    def chunk(self) -> Callable[..., Any]:
        """The compiled loop over at most `CHUNK` blocks: a function of `(count, constants, slots, entries, arrays)`."""

        def chunk(some: Any, consts: Any, slots: Any, entries: Any, arrays: Any) -> Any:
            stacks, entering = ([jax.numpy.stack(x) for x in many] for many in (slots, entries))

            def step(k: Any, held: Any) -> Any:
                before, owned = held
                at = [[jax.lax.dynamic_index_in_dim(x, k, keepdims=False) for x in many] for many in (stacks, entering)]
                after, own = self._step([*consts, *at[0]], at[1], before)
                pairs = zip(owned, own, strict=True)
                return after, [jax.lax.dynamic_update_index_in_dim(x, y, k, 0) for x, y in pairs]

            shapes = jax.eval_shape(
                lambda: self._step([*consts, *(x[0] for x in stacks)], [x[0] for x in entering], arrays)[1]
            )
            owned = [jax.numpy.zeros((CHUNK, *x.shape), x.dtype) for x in shapes]
            return jax.lax.fori_loop(0, some, step, (list(arrays), owned))

        return jax.jit(chunk)

    @functools.cached_property
    def parts(self) -> Divided:
        """One block, compiled in parts: `(constants, slots, entries, arrays) -> arrays, gradients of own leaves`."""
        count, size = len(self.types), len(self.entries)

        def flat(*values: Any) -> list[Any]:
            after, own = self._step(values[:count], values[count : count + size], values[count + size :])
            return [*after, *own]

        avals = [*self.types, *(aval for _, aval in self.entries), *(aval for _, aval in self.ends)]
        jaxpr, consts = jaxprs.opened(jax.make_jaxpr(flat)(*map(abstract.struct, avals)))
        return Divided.of(jaxprs.constants_first(jaxpr), tuple(consts))
