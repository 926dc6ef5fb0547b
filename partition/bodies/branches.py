"""Read a conditional and write one; the values that its branches keep lie in slots that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.partition.bodies.scans import traced
from jointcut.partition.bodies.slots import Space
from jointcut.partition.program.bodies import Kept, Once, OnceKind, Views
from jointcut.partition.program.graph import BRANCHES
from jointcut.partition.program.jax import abstract, jaxprs, meshes, side_effects
from jointcut.partition.rewrite.simplify import renamed


class Branches(OnceKind):
    """Read and write `lax.cond` and `lax.switch`."""

    op = BRANCHES

    def once(self, eqn: Any) -> Once | None:
        """The branches; None for a conditional with effects or constants, or with sizes or a mesh in its types."""
        opened = [jaxprs.opened(branch) for branch in eqn.params["branches"]]
        atoms = [*eqn.invars, *eqn.outvars, *(v for branch, _ in opened for v in branch.outvars)]
        if (
            side_effects.has_effects(eqn)
            or any(consts or branch.constvars for branch, consts in opened)
            or not all(map(_is_usual, atoms))
        ):
            return None
        return Once(tuple(branch for branch, _ in opened), tuple(eqn.invars[1:]), eqn.invars[0])

    def equation(
        self, like: Any, programs: Sequence[Any], chosen_by: Any, operands: Sequence[Any], results: Any, views: Views
    ) -> Any:
        """A conditional with other branches."""
        del views
        return like.replace(
            invars=[chosen_by, *operands],
            outvars=[*map(jaxprs.fresh, results)],
            params=dict(like.params, branches=tuple(programs)),
            effects=frozenset[Any]().union(*(program.effects for program in programs)),  # axes of collectives
        )

    def keep(self, like: Any, kept: Sequence[Sequence[Any]]) -> Kept:
        """Arrays in slots that branches share."""
        del like
        return _Shared(Space.of([[_in_numbers(aval) for aval in branch] for branch in kept]), tuple(map(tuple, kept)))


@dataclass(frozen=True)
class _Shared(Kept):
    """The values that branches keep, in slots, with random keys as numbers; `kept` are the types of each branch."""

    space: Space
    kept: tuple[tuple[Any, ...], ...]

    @property
    def avals(self) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The types of the slots."""
        return self.space.avals

    def pack(self, program: int, atoms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Fill the slots."""

        def pack(*arrays: Any) -> list[Any]:
            return self.space.pack(program, [jax.random.key_data(x) if _is_key(x) else x for x in arrays])

        return _written(pack, self.kept[program], atoms)

    def unpack(self, program: int, atoms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Take the arrays of one branch out of the slots."""

        def unpack(*slots: Any) -> list[Any]:
            pairs = zip(self.space.unpack(program, slots), self.kept[program], strict=True)
            return [jax.random.wrap_key_data(x, impl=_impl(aval)) if _is_key(aval) else x for x, aval in pairs]

        return _written(unpack, self.avals, atoms)


def _is_usual(atom: Any) -> bool:
    """Whether an atom has a known size, and its type names no mesh, so that it may share space with others."""
    aval = atom.aval
    if abstract.is_reference(aval):
        return False
    is_placed = meshes.is_explicit(getattr(aval, "sharding", None))
    return not is_placed and all(isinstance(size, int) for size in aval.shape)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _in_numbers(aval: Any) -> Any:
    """The type of an array; for random keys, the type of their numbers."""
    return jax.make_jaxpr(jax.random.key_data)(abstract.struct(aval)).out_avals[0] if _is_key(aval) else aval


def _impl(aval: Any) -> Any:
    """The generator of random keys of a type."""
    impls = list[Any]()
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), abstract.struct(aval))
    return impls[0]


def _written(function: Callable[..., Any], avals: Sequence[Any], atoms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The equations of a function of some atoms, and its results."""
    inner, _ = jaxprs.opened(traced(function, *map(abstract.struct, avals))[0])
    return renamed(inner, dict(zip(inner.invars, atoms, strict=True)))
