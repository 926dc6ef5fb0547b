"""Run a scan that updates parameters in its steps.

The scan carries the parameters and their state, and each step writes its slices into them. So no more than one slice of
a gradient is in memory. Slices are read and written in turn, with barriers between, so that XLA writes in place.
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
from jointcut.partition.program.jax import abstract, barriers, jaxprs, runtime


def updating(eqn: Any, leaves: Sequence[Leaf], env: dict[Any, Any]) -> tuple[dict[Any, Any], dict[int, Any]]:
    """Run a scan that updates: its results without the stacks of gradients, and the results of the updates by place.

    `env` has the values of the scan's operands, and of the variables that the updates read outside of them.
    """
    read, rest = dict[Any, Any](), dict[int, Any]()
    for leaf in leaves:
        values, known = leaf.values(env)
        read |= values
        rest |= known
    scan = _Updating.of(eqn, leaves, env, read)
    consts, carry, xs = scan.operands
    rows = [abstract.struct(abstract.unstacked(v.aval)) for v in xs]
    closed = jax.make_jaxpr(scan.step)(*([abstract.struct(v.aval) for v in group] for group in (consts, carry)), rows)
    count, stacks = scan.layout.num_carry, {leaf.stack for leaf in leaves}
    news = {w.place: jaxprs.fresh(w.old.aval) for w in scan.written}
    kept = [*(v for v in eqn.outvars[count:] if v not in stacks), *(v for leaf in leaves for v, _ in leaf.sums)]
    results = [*eqn.outvars[:count], *news.values(), *kept]
    whole = jaxprs.scan(eqn, closed, consts, carry, xs, results)
    operands = list(dict.fromkeys(jaxprs.variables(whole.invars)))
    outs = runtime.evaluate(jaxprs.build(operands, results, [whole]), *(scan.values[v] for v in operands))
    made = dict(zip(results, outs, strict=True))
    for leaf in leaves:
        rest |= leaf.joined(env | made)
    return {v: made[v] for v in eqn.outvars if v not in stacks}, rest | {place: made[v] for place, v in news.items()}


@dataclass(frozen=True)
class _Updating:
    """A scan that updates, and its step.

    Attributes:
        eqn, layout: the scan before the change, and its layout.
        leaves: the updates of parameters.
        written: the results that they write.
        values: the values of all variables that it reads.
        whole, sliced: the variables that the updates read whole, and slice by slice.
        number: the variable of the numbers of the steps.
        same: the place among `written` of each operand that the scan slices and an update writes.
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
        """Lay out a scan's reads and writes; `env` are the values of its operands, `read` of the updates' variables."""
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
        """The operands that the scan reads whole, the starts of its carries, and its sliced operands."""
        consts, carry, xs = self.layout.parts(self.eqn.invars)
        stacks = [v for i, v in enumerate(xs) if i not in self.same]
        return [*consts, *self.whole], [*carry, *(w.old for w in self.written)], [*stacks, *self.sliced, self.number]

    def step(self, consts: Sequence[Any], carry: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run one step of the scan, then the updates."""
        a, n, count = self.layout.num_consts, self.layout.num_carry, len(self.eqn.invars)
        i, stacks, rows = rows[-1], list(carry[n:]), list(rows[:-1])
        taken = barriers.held([abstract.row(stacks[k], i) for k in self.same.values()], are_slices=True)
        weights = dict(zip(self.same, taken, strict=True))
        own = [weights[p] if p in weights else rows.pop(0) for p in range(count - a - n)]
        results = runtime.evaluate(self.eqn.params["jaxpr"], *consts[:a], *carry[:n], *own)
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
        """Return the carries and the stacks after the slices of all gradients are used.

        `slices` are this step's slices, of gradients and of other operands; `whole` are operands that are read whole.
        """
        after, places = list(after), {w.old: k for k, w in enumerate(self.written)}
        waiting = [k for k, x in enumerate(after) if abstract.is_plain(jax.typeof(x))]
        left = [leaf.stack for leaf in self.leaves]

        def hold() -> None:
            held = iter(barriers.held([*(after[k] for k in waiting), *(slices[v] for v in left), *stacks]))
            for k in waiting:
                after[k] = next(held)
            slices.update((v, next(held)) for v in left)
            stacks[:] = held

        def read(v: Any) -> Any:
            return abstract.row(stacks[places[v]], i) if v in places else slices[v]

        for leaf in self.leaves:
            for group in leaf.groups:
                hold()
                news = [_made(w.new, read, whole) for w in group]
                for w, new in zip(group, barriers.held(news) if len(news) > 1 else news, strict=True):
                    stacks[places[w.old]] = abstract.with_row(stacks[places[w.old]], new, i)
            left.remove(leaf.stack)
        hold()
        return after, stacks


def _made(made: Slice, read: Callable[[Any], Any], whole: Mapping[Any, Any]) -> Any:
    """Compute a slice of a result, from slices that are read and from whole arrays."""
    return runtime.evaluate(made.program, *map(read, made.sliced), *(whole[v] for v in made.whole))[0]
