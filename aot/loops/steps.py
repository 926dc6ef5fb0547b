"""Pull cotangents back through one step of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jointcut.aot.loops.cutting import CutStep, is_large
from jointcut.aot.loops.parts import Parts, traced
from jointcut.partition.program import jaxprs
from jointcut.wrappers.built_in.programs import Mask


@dataclass(frozen=True, eq=False)
class Step:
    """The pullback of one step, from the cotangents of the parts of the carry `outputs`.

    Attributes:
        joint: `(constants, carry, cotangents) -> (outputs, cotangents of the outputs before the step, and of consts)`.
        num_consts: the number of constants.
        outputs: the parts of the carry that have cotangents.
        consts: the constants to whose cotangents the step adds something.
    """

    joint: Any
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

        def both(*flat: Any) -> list[Any]:
            values, cts = flat[: len(parts.avals)], flat[len(parts.avals) :]

            def chosen(*xs: Any) -> list[Any]:
                given = dict(zip(wanted, xs, strict=True))
                outs = jaxprs.evaluate(parts.quiet, *(given.get(i, x) for i, x in enumerate(values)))
                return [outs[i] for i in outputs]

            outs, pull = jax.vjp(chosen, *(values[i] for i in wanted))
            back = pull(list(cts))
            return [*outs, *back[len(consts) :], *back[: len(consts)]]

        return cls(traced(both, [*parts.avals, *cotangents]), count, outputs, consts)

    @cached_property
    def cut(self) -> CutStep:
        """Both halves of the step, and what the one keeps for the other."""
        return CutStep.of(self.joint, len(self._avals) - len(self.outputs), len(self.outputs))

    @cached_property
    def _avals(self) -> list[Any]:
        return [v.aval for v in jaxprs.opened(self.joint)[0].invars]

    @cached_property
    def _pull(self) -> tuple[Any, list[bool]]:
        """The program that runs, without the step's outputs, and which inputs it reads; cut if it is large."""
        closed, gradients = self.joint, len(self.outputs) + len(self.consts)
        wanted = [False] * len(self.outputs) + [True] * gradients
        if is_large(self.joint) and self.cut.split.plan.runs_again:
            closed, wanted = traced(self.cut, self._avals), [True] * gradients
        return jaxprs.pruned(closed, wanted)

    @property
    def program(self) -> Any:
        """The program that runs in each step of the sweep."""
        return self._pull[0]

    @property
    def carry(self) -> list[int]:
        """The parts of the carry that are read."""
        end = len(self._avals) - len(self.outputs)
        return [i for i, on in enumerate(self._pull[1][self.num_consts : end]) if on]

    def __call__(self, consts: Sequence[Any], carry: dict[int, Any], cts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Cotangents of the carry before the step, and what the step adds to those of the constants."""
        program, inputs = self._pull
        carried = [carry.get(i) for i in range(len(inputs) - len(self.outputs) - self.num_consts)]
        values = zip([*consts, *carried, *cts], inputs, strict=True)
        outs = jaxprs.evaluate(program, *(x for x, on in values if on))
        return outs[: len(self.outputs)], outs[len(self.outputs) :]
