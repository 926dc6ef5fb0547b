"""Find the gradients that each value of an update needs.

A value of an update needs no gradient, or one, or joins several. With one sweep, a value that joins several is refused.
With two, small values of single gradients, such as their squared norms, may be joined after the first sweep. Values
that read both a gradient and a joined value are computed in the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jointcut.partition.errors import TraceError, message
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.places import line_of

#: The most elements that a value of one gradient may have to be kept from the first sweep on.
MOST_KEPT = 16


@dataclass
class Joins:
    """The gradients that the values of an update need.

    Attributes:
        owners: for each value that needs one gradient, the parameter of that gradient.
        late: the values that also need joined ones.
        joined: the values that are known after the first sweep.
        kept: the values of single gradients that joined ones are made of, with their owners.
    """

    owners: dict[Any, int] = field(default_factory=dict)
    late: set[Any] = field(default_factory=set)
    joined: set[Any] = field(default_factory=set)
    kept: dict[Any, int] = field(default_factory=dict)

    @classmethod
    def of(cls, jaxpr: Any, count: int, paths: Sequence[str], sweeps: int) -> Joins:
        """Find the gradients that the equations of an update need; its first `count` inputs are the gradients.

        Raises `TraceError`, with the equation, if it joins gradients and there is one sweep, or joins whole gradients.
        """
        joins = cls(dict(zip(jaxpr.invars, range(count), strict=False)))
        for eqn in jaxpr.eqns:
            joins._add(eqn, paths, sweeps)
        return joins

    def _add(self, eqn: Any, paths: Sequence[str], sweeps: int) -> None:
        read = list[Any](dict.fromkeys(jaxprs.variables(eqn.invars)))
        owned = [v for v in read if v in self.owners]
        owners = sorted({self.owners[v] for v in owned})
        meets = any(v in self.joined for v in read)
        small = all(v not in self.late and math.prod(v.aval.shape) <= MOST_KEPT for v in owned)
        if len(owners) > 1 and not (sweeps > 1 and small):
            raise TraceError(_refused(eqn, [paths[i] for i in owners], sweeps))
        if len(owners) > 1 or (meets and small):
            self.kept.update((v, self.owners[v]) for v in owned)
            self.joined.update(eqn.outvars)
        elif owners:
            self.owners.update((v, owners[0]) for v in eqn.outvars)
            if meets or any(v in self.late for v in owned):
                self.late.update(eqn.outvars)


def _refused(eqn: Any, paths: Sequence[str], sweeps: int) -> str:
    where = f"in {eqn.primitive.name} at {line_of(eqn)}"
    if sweeps == 1:
        what = f"joins the gradients of {paths[0]} and {paths[1]} {where}."
        cure = (
            "One sweep updates each leaf alone: pass sweeps=2, which goes back twice, or take value_and_grad first, "
            "and update after it."
        )
        return message("update", what, cure)
    what = f"joins more than {MOST_KEPT} numbers of the gradients of {paths[0]} and {paths[1]} {where}, or joins twice."
    return message(
        "update", what, "Two sweeps join a few numbers of each gradient: take value_and_grad, and update after it."
    )
