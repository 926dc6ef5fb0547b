"""Pull cotangents back through one step of a loop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jointcut.aot.loops.parts import Parts, traced
from jointcut.aot.loops.sweep.cutting import CutStep, is_large
from jointcut.partition.errors import TraceError, message
from jointcut.partition.program.jax import abstract, jaxprs, meshes, runtime
from jointcut.partition.rewrite import guard, simplify
from jointcut.partition.rewrite.sparse import is_zero
from jointcut.wrappers.built_in.programs import Mask


@dataclass(frozen=True, eq=False)
class Step:
    """The pullback of one step, from the cotangents of the parts of the carry `outputs`.

    Attributes:
        joint: `(constants, carry, cotangents) -> (outputs, cotangents of the outputs before the step, and of consts)`.
        num_consts: the number of constants.
        outputs: the parts of the carry that have cotangents.
        consts: the constants to whose cotangents the step adds something.
        still: the outputs whose cotangents the step only clears of the rows that it wrote. They do not change, and
            are cleared after the last step (`Buffer.cleared`), since XLA would copy them in every step.
    """

    joint: Any
    num_consts: int
    outputs: list[int]
    consts: list[int]
    still: list[int]

    @classmethod
    def of(
        cls, parts: Parts, mask: Mask, outputs: list[int], written: Collection[int] = (), guards: str = "jax"
    ) -> Step:
        """Return the pullback of the body from these parts of the carry, which depend only on each other.

        `written` are the parts that are proved to be written row by row; `guards` is as in `rules.Loop`.
        """
        count = parts.num_consts
        reached = frozenset[int]().union(*(parts.depends[i] for i in outputs))
        consts = [i for i in range(count) if mask[i] and i in reached]
        wanted = [*consts, *(count + i for i in outputs)]
        cotangents = [abstract.cotangent_aval(parts.carry[i]) for i in outputs]

        def both(*flat: Any) -> list[Any]:
            values, cts = flat[: len(parts.avals)], flat[len(parts.avals) :]

            def chosen(*xs: Any) -> list[Any]:
                given = dict(zip(wanted, xs, strict=True))
                outs = runtime.evaluate(parts.quiet, *(given.get(i, x) for i, x in enumerate(values)))
                return [outs[i] for i in outputs]

            outs, pull = jax.vjp(chosen, *(values[i] for i in wanted))
            back = pull(list(cts))
            return [*outs, *back[len(consts) :], *back[: len(consts)]]

        joint = simplify.inlined(traced(both, [*parts.avals, *cotangents]))
        if guards != "jax":
            joint = guard.guarded_together(joint, len(cotangents), wanted, guards == "everywhere")
        jaxpr, _ = jaxprs.opened(joint)
        makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        ends = zip(outputs, jaxpr.invars[len(parts.avals) :], jaxpr.outvars[len(outputs) :], strict=False)
        still = [i for i, ct, end in ends if i in written and _is_cleared(ct, end, makers)]
        return cls(joint, count, outputs, consts, still)

    @property
    def moved(self) -> list[int]:
        """The outputs whose cotangents change from step to step."""
        return [i for i in self.outputs if i not in self.still]

    @cached_property
    def cut(self) -> CutStep:
        """Return both halves of the step, cut."""
        return CutStep.of(self.joint, len(self._avals) - len(self.outputs), len(self.outputs))

    @cached_property
    def _avals(self) -> list[Any]:
        return [v.aval for v in jaxprs.opened(self.joint)[0].invars]

    @cached_property
    def _pull(self) -> tuple[Any, list[bool]]:
        """The program that runs, without the step's outputs, and which inputs it reads; cut if it is large."""
        gradients = [i not in self.still for i in self.outputs] + [True] * len(self.consts)
        if is_large(self.joint) and self.cut.pays:
            return jaxprs.pruned(traced(self.cut, self._avals), gradients)
        return jaxprs.pruned(self.joint, [False] * len(self.outputs) + gradients)

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
        """Return the `moved` outputs' cotangents before the step, and its additions to the constants' cotangents.

        `cts` are the cotangents of all `outputs` after the step.
        """
        program, inputs = self._pull
        carried = [carry.get(i) for i in range(len(inputs) - len(self.outputs) - self.num_consts)]
        values = zip([*consts, *carried, *cts], inputs, strict=True)
        outs = runtime.evaluate(program, *(x for x, on in values if on))
        return outs[: len(self.moved)], outs[len(self.moved) :]


def _is_cleared(cotangent: Any, end: Any, makers: dict[Any, Any]) -> bool:
    """Whether a cotangent becomes another one only by zeros written into some rows."""
    eqn = None if isinstance(end, jaxprs.Literal) else makers.get(end)
    if eqn is None or eqn.invars[0] is not cotangent:
        return False
    if eqn.primitive.name == "scatter":
        return is_zero(eqn.invars[2], makers)
    return eqn.primitive.name == "dynamic_update_slice" and is_zero(eqn.invars[1], makers)


def refuse_sums(step: Step, parts: Parts, name: str) -> None:
    """Raise `TraceError` if the step sums a gradient over devices that make different numbers of trips.

    Inside `jax.shard_map`, the gradient of a value that is equal on all devices is such a sum. In a loop that some
    devices have left it would never end.
    """
    apart = meshes.varying(jaxprs.opened(parts.cond)[0].outvars[0].aval)
    for i in [*step.consts, *(parts.num_consts + i for i in step.outputs)]:
        if axes := sorted(map(str, apart - meshes.varying(parts.avals[i]))):
            names = ", ".join(map(repr, axes))
            what = (
                f"is repeated as often as each device of axis {names} wants, and reads a {parts.avals[i].str_short()} "
                "that is equal on all of them, whose gradient is a sum over them."
            )
            cure = f"Pass that value through jax.lax.pcast(…, {axes[0]!r}, to='varying') before the loop."
            raise TraceError(message(name, what, cure))
