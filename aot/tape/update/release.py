"""Update each parameter as soon as its gradient is complete, inside the backward.

A gradient is gone once its parameter is updated, so that all gradients are never alive together. What the backward
computes next waits for the update, and the new parameter takes the memory of the old one. It corresponds to PyTorch's
optimiser step in the backward, and to LOMO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.aot.tape.program import Backward, leave
from jointcut.aot.tape.sweep import Sweep
from jointcut.aot.tape.update.updates import Updates
from jointcut.aot.tape.walk import Structure, Walk
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
        params, state = [arrays[i] for i in self.params], [arrays[i] for i in self.state]
        outputs: list[Any] = [None] * updates.count
        finished: set[int] = set()

        def finish(place: int, gradient: Any) -> None:
            (run, places), given = updates.parts[place], list(params)
            given[place] = gradient
            made = run(*given, *state, *params)
            pending = walk.pending()
            behind = jaxprs.held([*pending.values(), *made])
            walk.replace(dict(zip(pending, behind[: len(pending)], strict=True)))
            finished.add(place)
            for i, x in zip(places, behind[len(pending) :], strict=True):
                outputs[i] = x

        walk = Walk(structure, arrays, leave, finish=finish)
        walk(cotangents)
        for place, x in enumerate(params):
            if place not in finished:
                finish(place, jaxprs.full(jaxprs.cotangent_aval(jax.typeof(x)), 0))
        run, places = updates.rest
        for i, x in zip(places, run(*params, *state, *params), strict=True):
            outputs[i] = x
        return outputs
