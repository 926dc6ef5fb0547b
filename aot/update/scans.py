"""Run a scan that updates parameters in its steps.

The scan carries the parameters and their state, and each step writes its slices into them, so that no more than one
slice of a gradient is in memory. Slices are read and written one after the other, with barriers between, so that XLA
writes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from jointcut.aot.update.leaves import Leaf, Written
from jointcut.aot.update.slices import Slice
from jointcut.partition.program import jaxprs


def updating(eqn: Any, leaves: Sequence[Leaf], env: dict[Any, Any]) -> tuple[dict[Any, Any], dict[int, Any]]:
    """Run a scan that updates: its results without the stacks of gradients, and those of the updates by place.

    `env` has the values of the scan's operands, and of what the updates read outside of them.
    """
    read, rest = dict[Any, Any](), dict[int, Any]()
    for leaf in leaves:
        values, known = leaf.values(env)
        read |= values
        rest |= known
    scan = _Updating.of(eqn, leaves, env, read)
    consts, carry, xs = scan.operands
    rows = [jaxprs.struct(jaxprs.unstacked(v.aval)) for v in xs]
    closed = jax.make_jaxpr(scan.step)(*([jaxprs.struct(v.aval) for v in group] for group in (consts, carry)), rows)
    count, stacks = scan.layout.num_carry, {leaf.stack for leaf in leaves}
    news = {w.place: jaxprs.fresh(w.old.aval) for w in scan.written}
    kept = [*(v for v in eqn.outvars[count:] if v not in stacks), *(v for leaf in leaves for v, _ in leaf.sums)]
    results = [*eqn.outvars[:count], *news.values(), *kept]
    whole = jaxprs.scan(eqn, closed, consts, carry, xs, results)
    operands = list(dict.fromkeys(v for v in whole.invars if not isinstance(v, jaxprs.Literal)))
    outs = jaxprs.evaluate(jaxprs.build(operands, results, [whole]), *(scan.values[v] for v in operands))
    made = dict(zip(results, outs, strict=True))
    for leaf in leaves:
        rest |= leaf.joined(env | made)
    return {v: made[v] for v in eqn.outvars if v not in stacks}, rest | {place: made[v] for place, v in news.items()}


@dataclass(frozen=True)
class _Updating:
    """A scan that updates, and its step.

    Attributes:
        eqn, layout: the scan as it was.
        leaves, written: what it updates.
        values: of all that it reads, by variable.
        whole, sliced: variables that all updates together read whole, and slice by slice.
        number: the variable of the numbers of the steps.
        same: for operands of which it takes slices, and that it writes to, the place among `written`.
    """

    eqn: Any
    layout: jaxprs.ScanLayout
    leaves: Sequence[Leaf]
    written: Sequence[Written]
    values: Mapping[Any, Any]
    whole: Sequence[Any]
    sliced: Sequence[Any]
    number: Any
    same: Mapping[int, int]

    @classmethod
    def of(cls, eqn: Any, leaves: Sequence[Leaf], env: dict[Any, Any], read: dict[Any, Any]) -> _Updating:
        """Lay out what a scan reads and writes; `env` are the values of its operands, `read` those of the updates."""
        layout, written = jaxprs.scan_layout(eqn), [w for leaf in leaves for w in leaf.written]
        own = {*(leaf.stack for leaf in leaves), *(w.old for w in written)}
        slices = [made for leaf in leaves for made in leaf.slices]
        sliced = dict.fromkeys(v for made in slices for v in made.sliced if v not in own)
        whole = dict.fromkeys(v for made in slices for v in made.whole)
        numbers = lax.iota(np.uint32, layout.length)
        number = jaxprs.fresh(jax.typeof(numbers))
        xs = enumerate(eqn.invars[layout.num_consts + layout.num_carry :])
        pairs = [(i, env[v]) for i, v in xs if not isinstance(v, jaxprs.Literal)]
        same = {i: k for i, x in pairs for k, w in enumerate(written) if x is read[w.old]}
        return cls(eqn, layout, leaves, written, {**env, **read, number: numbers}, [*whole], [*sliced], number, same)

    @property
    def operands(self) -> tuple[list[Any], list[Any], list[Any]]:
        """What the scan reads whole, where its carries start, and what it takes slices of."""
        a, b = self.layout.num_consts, self.layout.num_consts + self.layout.num_carry
        stacks = [v for i, v in enumerate(self.eqn.invars[b:]) if i not in self.same]
        carry = [*self.eqn.invars[a:b], *(w.old for w in self.written)]
        return [*self.eqn.invars[:a], *self.whole], carry, [*stacks, *self.sliced, self.number]

    def step(self, consts: Sequence[Any], carry: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """One step: that of the scan, then the updates."""
        a, n, count = self.layout.num_consts, self.layout.num_carry, len(self.eqn.invars)
        i, stacks, rows = rows[-1], list(carry[n:]), list(rows[:-1])
        taken = jaxprs.held([_slice(stacks[k], i) for k in self.same.values()])
        weights = dict(zip(self.same, taken, strict=True))
        own = [weights[p] if p in weights else rows.pop(0) for p in range(count - a - n)]
        results = jaxprs.evaluate(self.eqn.params["jaxpr"], *consts[:a], *carry[:n], *own)
        made = dict(zip(self.eqn.outvars[n:], results[n:], strict=True))
        slices = dict(zip(self.sliced, rows, strict=True))
        slices.update((leaf.stack, made.pop(leaf.stack)) for leaf in self.leaves)
        whole = dict(zip(self.whole, consts[a:], strict=True))
        sums = [_made(sum_of, slices.__getitem__, whole) for leaf in self.leaves for _, sum_of in leaf.sums]
        after, stacks = self._updated(results[:n], stacks, slices, whole, i)
        return [*after, *stacks], [*made.values(), *sums]

    def _updated(
        self, after: Sequence[Any], stacks: list[Any], slices: dict[Any, Any], whole: Mapping[Any, Any], i: Any
    ) -> tuple[list[Any], list[Any]]:
        """The carries and the stacks once slices of all gradients are used.

        `slices` are those of gradients and of what the updates read, and `whole` is what they read whole.
        """
        after, places = list(after), {w.old: k for k, w in enumerate(self.written)}
        waiting = [k for k, x in enumerate(after) if jaxprs.is_plain(jax.typeof(x))]
        left = [leaf.stack for leaf in self.leaves]

        def hold() -> None:
            held = iter(jaxprs.held([*(after[k] for k in waiting), *(slices[v] for v in left), *stacks]))
            for k in waiting:
                after[k] = next(held)
            slices.update((v, next(held)) for v in left)
            stacks[:] = held

        def read(v: Any) -> Any:
            return _slice(stacks[places[v]], i) if v in places else slices[v]

        for leaf in self.leaves:
            for group in leaf.groups:
                hold()
                news = [_made(w.new, read, whole) for w in group]
                for w, new in zip(group, jaxprs.held(news) if len(news) > 1 else news, strict=True):
                    stacks[places[w.old]] = _with_slice(stacks[places[w.old]], new, i)
            left.remove(leaf.stack)
        hold()
        return after, stacks


def _made(made: Slice, read: Callable[[Any], Any], whole: Mapping[Any, Any]) -> Any:
    """A slice of a result, of slices that are read and of whole arrays."""
    return jaxprs.evaluate(made.program, *map(read, made.sliced), *(whole[v] for v in made.whole))[0]


def _slice(stack: Any, i: Any) -> Any:
    zeros = [np.uint32(0)] * (stack.ndim - 1)
    return lax.squeeze(lax.dynamic_slice(stack, [i, *zeros], (1, *stack.shape[1:])), [0])


def _with_slice(stack: Any, new: Any, i: Any) -> Any:
    return lax.dynamic_update_slice(stack, lax.expand_dims(new, [0]), [i, *([np.uint32(0)] * new.ndim)])
