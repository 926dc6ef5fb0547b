"""Pull cotangents back through one step of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.aot.loops.parts import Parts, traced
from jointcut.partition.errors import TraceError, message
from jointcut.partition.program import jaxprs
from jointcut.wrappers.built_in.programs import Mask


@dataclass(frozen=True, eq=False)
class Step:
    """The pullback of one step, of those constants and parts of the carry that `inputs` marks, then the cotangents.

    It returns the cotangents of the parts of the carry `outputs`, then what is added to those of the constants
    `consts`.
    """

    closed: Any
    inputs: list[bool]
    num_consts: int
    outputs: list[int]
    consts: list[int]

    @classmethod
    def of(cls, parts: Parts, mask: Mask, outputs: list[int]) -> Step:
        """The pullback of the body from these parts of the carry, which have no derivative but through each other."""
        count = parts.num_consts
        reached = frozenset[int]().union(*(parts.depends[i] for i in outputs))
        consts = [i for i in range(count) if mask[i] and i in reached]
        wanted = [*consts, *(count + i for i in outputs)]
        cotangents = [jaxprs.cotangent_aval(parts.carry[i]) for i in outputs]

        def back(*flat: Any) -> list[Any]:
            values, cts = flat[: len(parts.avals)], flat[len(parts.avals) :]

            def chosen(*xs: Any) -> list[Any]:
                given = dict(zip(wanted, xs, strict=True))
                outs = jaxprs.evaluate(parts.quiet, *(given.get(i, x) for i, x in enumerate(values)))
                return [outs[i] for i in outputs]

            _, pull = jax.vjp(chosen, *(values[i] for i in wanted))
            back = pull(list(cts))
            return [*back[len(consts) :], *back[: len(consts)]]

        closed = traced(back, [*parts.avals, *cotangents])
        less, used = jaxprs.pruned(closed, [True] * len(wanted))
        return cls(less, used, count, outputs, consts)

    @property
    def carry(self) -> list[int]:
        """The parts of the carry that are read."""
        end = len(self.inputs) - len(self.outputs)
        return [i for i, on in enumerate(self.inputs[self.num_consts : end]) if on]

    def __call__(self, consts: Sequence[Any], carry: dict[int, Any], cts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Cotangents of the carry before the step, and what the step adds to those of the constants."""
        carried = [carry.get(i) for i in range(len(self.inputs) - len(self.outputs) - self.num_consts)]
        values = zip([*consts, *carried, *cts], self.inputs, strict=True)
        outs = jaxprs.evaluate(self.closed, *(x for x, on in values if on))
        return outs[: len(self.outputs)], outs[len(self.outputs) :]


def refuse_sums(step: Step, parts: Parts, name: str) -> None:
    """Raise `TraceError` if the step sums a gradient over devices that make different numbers of trips.

    Inside `jax.shard_map`, the gradient of a value that is equal on all devices is such a sum. In a loop that some
    devices have left it would never end.
    """
    apart = jaxprs.varying(jaxprs.opened(parts.cond)[0].outvars[0].aval)
    for i in [*step.consts, *(parts.num_consts + i for i in step.outputs)]:
        if axes := sorted(map(str, apart - jaxprs.varying(parts.avals[i]))):
            names = ", ".join(map(repr, axes))
            what = (
                f"is repeated as often as each device of axis {names} wants, and reads a {parts.avals[i].str_short()} "
                "that is equal on all of them, whose gradient is a sum over them."
            )
            cure = f"Pass that value through jax.lax.pcast(…, {axes[0]!r}, to='varying') before the loop."
            raise TraceError(message(name, what, cure))
