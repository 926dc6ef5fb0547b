"""Update each parameter as soon as its gradient is complete, inside the backward.

A gradient is gone once its parameter is updated, so that all gradients are never alive together; its parts are added up
as they come. What the backward computes next waits for the update, and the new parameter takes the memory of the old
one. It corresponds to PyTorch's optimiser step in the backward, and to LOMO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.aot.tape.program import Backward, leave
from jointcut.aot.tape.sweep import Sweep
from jointcut.aot.tape.walk import Structure, Walk
from jointcut.aot.update.step import Finish, after, in_sweeps, refuse_twice
from jointcut.aot.update.updates import Updates
from jointcut.partition.program import jaxprs


@dataclass(frozen=True)
class Release:
    """The inputs of a backward that updates.

    Attributes:
        arrays: residuals, parameters and state, each array once.
        params, state: places of the parameters and of the state among `arrays`.
    """

    arrays: list[Any]
    params: tuple[int, ...]
    state: tuple[int, ...]

    @classmethod
    def of(cls, sweep: Sweep, params: Sequence[Any], state: Sequence[Any]) -> Release:
        """List the inputs; the residuals of the sweep come first."""
        arrays = list(sweep.flat)
        known = {id(x): i for i, x in enumerate(arrays)}

        def place(x: Any) -> int:
            if id(x) not in known:
                known[id(x)] = len(arrays)
                arrays.append(x)
            return known[id(x)]

        return cls(arrays, tuple(map(place, params)), tuple(map(place, state)))

    @property
    def key(self) -> Any:
        """What the program depends on beside the sweep."""
        types = tuple(jax.typeof(self.arrays[i]) for i in (*self.params, *self.state))
        return self.params, self.state, types

    def backward(self, structure: Structure, cotangents: Sequence[Any], updates: Updates) -> Backward:
        """The program `(arrays, cotangents) -> (params, state)`."""
        structs = [[jaxprs.struct(jax.typeof(x)) for x in xs] for xs in (self.arrays, cotangents)]
        traced = jax.make_jaxpr(lambda arrays, cts: self._updated(structure, updates, arrays, cts))(*structs)
        jaxpr, consts = jaxprs.opened(traced)
        closed = jaxprs.build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)
        given_up = tuple(sorted({*self.params, *self.state}))
        return Backward(structure, closed, tuple(consts), (), len(self.arrays), 0, given_up)

    def _updated(
        self, structure: Structure, updates: Updates, arrays: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        if updates.num_kept and structure.called:
            refuse_twice(f"the hook {structure.called[0].place.named}")

        def sweep(finish: Finish, arrays_before: Sequence[Any]) -> None:
            def hold(made: Sequence[Any]) -> list[Any]:
                if pending := walk.pending():
                    walk.replace(dict(zip(pending, jaxprs.held([*pending.values(), *made]), strict=False)))
                return list(made)

            walk = Walk(
                structure,
                arrays,
                leave,
                finish=lambda place, gradient: finish(place, gradient, hold),
                settle=lambda part: hold([part])[0],
            )
            walk(after(cotangents, arrays_before))

        return in_sweeps(updates, [arrays[i] for i in self.params], [arrays[i] for i in self.state], sweep)
