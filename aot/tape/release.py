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
from jointcut.aot.update.step import BackwardPass, Filling, after, in_sweeps, refuse_twice
from jointcut.aot.update.updates import Updates
from jointcut.partition.program import jaxprs
from jointcut.partition.rewrite import simplify


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
        if updates.num_kept and structure.called:
            refuse_twice(f"the hook {structure.called[0].place.named}")
        structs = [[jaxprs.struct(jax.typeof(x)) for x in xs] for xs in (self.arrays, cotangents)]
        made, hooked = _gradients(structure, *structs)

        def whole(arrays: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
            def sweep(filling: Filling, before: Sequence[Any]) -> None:
                made(filling, [*hooked, *arrays], after(cts, before))

            return in_sweeps(updates, [arrays[i] for i in self.params], [arrays[i] for i in self.state], sweep)

        jaxpr, consts = jaxprs.opened(jax.make_jaxpr(whole)(*structs))
        closed = jaxprs.build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)
        given_up = tuple(sorted({*self.params, *self.state}))
        return Backward(structure, closed, tuple(consts), (), len(self.arrays), 0, given_up)


def _gradients(
    structure: Structure, arrays: Sequence[Any], cotangents: Sequence[Any]
) -> tuple[BackwardPass, list[Any]]:
    """The backward of a structure for arrays and cotangents of these types, and the constants that it reads first."""
    reached: list[int] = []

    def whole(arrays: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        results = Walk(structure, arrays, leave)(cts)
        reached[:] = [i for i, x in enumerate(results) if x is not None]
        return [results[i] for i in reached]

    jaxpr, consts = jaxprs.opened(simplify.inlined(jax.make_jaxpr(whole)(arrays, cotangents)))
    inner, _ = jaxprs.opened(jaxprs.build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns))
    return BackwardPass(inner, len(consts) + len(arrays), reached), consts
