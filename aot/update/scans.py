"""Run a scan that updates parameters in its steps.

The scan carries the parameters and their state, and each step writes its slices into them, so that no more than one
slice of a gradient is in memory. Slices are read and written one after the other, with barriers between, so that XLA
writes in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from jointcut.aot.update.leaves import Leaf, Written
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
    results = [*eqn.outvars[:count], *news.values(), *(v for v in eqn.outvars[count:] if v not in stacks)]
    whole = jaxprs.scan(eqn, closed, consts, carry, xs, results)
    operands = list(dict.fromkeys(v for v in whole.invars if not isinstance(v, jaxprs.Literal)))
    made = jaxprs.evaluate(jaxprs.build(operands, results, [whole]), *(scan.values[v] for v in operands))
    made = dict(zip(results, made, strict=True))
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
        sliced = dict.fromkeys(v for w in written for v in w.new.sliced if v not in own)
        whole = dict.fromkeys(v for w in written for v in w.new.whole)
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
        known = dict(zip((*self.whole, *self.sliced), (*consts[a:], *rows), strict=True))
        made = dict(zip(self.eqn.outvars[n:], results[n:], strict=True))
        gradients = {leaf.stack: made.pop(leaf.stack) for leaf in self.leaves}
        after, stacks = self._updated(results[:n], gradients, stacks, known, i)
        return [*after, *stacks], list(made.values())

    def _updated(
        self, after: Sequence[Any], gradients: dict[Any, Any], stacks: list[Any], known: Mapping[Any, Any], i: Any
    ) -> tuple[list[Any], list[Any]]:
        """The carries and the stacks once slices of all gradients are used; `known` is what the updates read."""
        after, places = list(after), {w.old: k for k, w in enumerate(self.written)}
        waiting = [k for k, x in enumerate(after) if jaxprs.is_plain(jax.typeof(x))]

        def hold() -> None:
            held = iter(jaxprs.held([*(after[k] for k in waiting), *gradients.values(), *stacks]))
            for k in waiting:
                after[k] = next(held)
            gradients.update(zip(gradients, held, strict=False))
            stacks[:] = held

        def read(v: Any) -> Any:
            return _slice(stacks[places[v]], i) if v in places else gradients[v] if v in gradients else known[v]

        for leaf in self.leaves:
            for group in leaf.groups:
                hold()
                news = [
                    jaxprs.evaluate(w.new.program, *map(read, w.new.sliced), *(known[v] for v in w.new.whole))[0]
                    for w in group
                ]
                for w, new in zip(group, jaxprs.held(news) if len(news) > 1 else news, strict=True):
                    stacks[places[w.old]] = _with_slice(stacks[places[w.old]], new, i)
            del gradients[leaf.stack]
        hold()
        return after, stacks


def _slice(stack: Any, i: Any) -> Any:
    zeros = [np.uint32(0)] * (stack.ndim - 1)
    return lax.squeeze(lax.dynamic_slice(stack, [i, *zeros], (1, *stack.shape[1:])), [0])


def _with_slice(stack: Any, new: Any, i: Any) -> Any:
    return lax.dynamic_update_slice(stack, lax.expand_dims(new, [0]), [i, *([np.uint32(0)] * new.ndim)])
