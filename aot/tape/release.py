"""Update each parameter as soon as its gradient is complete, inside the backward.

The parts of a gradient are added as they arrive. The gradient is freed once its parameter is updated, so that all
gradients are never alive together. The backward with its updates is a joint program without outputs. Its schedule lets
the next ops wait for each update, and the new parameter takes the memory of the old one. This corresponds to PyTorch's
optimiser step in the backward, and to LOMO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.aot.hooks.hook import ISLAND
from jointcut.aot.tape.program import Backward, leave
from jointcut.aot.tape.sweep import Sweep
from jointcut.aot.tape.walk import Structure, Walk
from jointcut.aot.trace.joint import Joint
from jointcut.aot.trace.primal import Results
from jointcut.aot.update.released import with_update
from jointcut.aot.update.step import refuse_twice
from jointcut.aot.update.updates import Updates
from jointcut.partition.lower import verify
from jointcut.partition.lower.emit import Halves
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.roles import Role, Roles
from jointcut.partition.rewrite import simplify
from jointcut.partition.split import split


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
        """The key that determines the program, besides the sweep."""
        types = tuple(jax.typeof(self.arrays[i]) for i in (*self.params, *self.state))
        return self.params, self.state, types

    def backward(self, structure: Structure, cotangents: Sequence[Any], updates: Updates) -> Backward:
        """Return the program `(arrays, cotangents) -> (params, state)`."""
        if updates.num_kept and structure.called:
            place = structure.called[0].place
            refuse_twice(place.words, place.kind == ISLAND)
        arrays, cts = ([abstract.struct(jax.typeof(x)) for x in xs] for xs in (self.arrays, cotangents))
        program = with_update(_joint(structure, arrays, cts, self.params), updates, self.params, self.state)
        halves = split(program.closed, program.roles, "save_all").halves
        given_up = tuple(sorted({*self.params, *self.state}))
        return Backward(structure, _one(halves), program.consts, (), len(self.arrays), 0, given_up)


def _joint(structure: Structure, arrays: Sequence[Any], cotangents: Sequence[Any], params: Sequence[int]) -> Joint:
    """Return the joint program `(constants, arrays, cotangents) -> gradients` of a structure; it has no outputs.

    `params` are places among the types `arrays`. There is a gradient for each parameter, zero where none flows.
    """

    def whole(arrays: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        pairs = zip(Walk(structure, arrays, leave)(cts), (arrays[i] for i in params), strict=True)
        return [abstract.full(abstract.cotangent_aval(jax.typeof(p)), 0) if x is None else x for x, p in pairs]

    jaxpr, consts = jaxprs.opened(simplify.inlined(jax.make_jaxpr(whole)(arrays, cotangents)))
    closed = jaxprs.constants_first(jaxpr)
    inputs = (Role.PRIMAL,) * (len(consts) + len(arrays)) + (Role.COTANGENT,) * len(cotangents)
    return Joint(closed, Roles(inputs, (Role.GRADIENT,) * len(params), 0), tuple(consts), Results.flat((), False)[1])


def _one(halves: Halves) -> Any:
    """Return both halves of a program without outputs as one program `(primals, cotangents) -> gradients`."""
    forward, backward = (jaxprs.opened(half)[0] for half in (halves.forward, halves.backward))
    residuals = verify.routed(halves.residuals, forward.invars, forward.outvars, 0)
    eqns, outvars = simplify.renamed(backward, dict(zip(backward.invars, residuals, strict=False)))
    return jaxprs.build([*forward.invars, *backward.invars[len(residuals) :]], outvars, [*forward.eqns, *eqns])
