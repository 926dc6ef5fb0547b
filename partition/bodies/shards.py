"""Read a `jax.shard_map` and write one: its program runs once on each device of a mesh.

A value inside is the part of one device. A value that a device keeps passes between the halves as an array that is laid
over the mesh along its first axis. So every device finds its own part again and nothing moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jointcut.partition.bodies.scans import traced
from jointcut.partition.program.bodies import Kept, Once, OnceKind, Views
from jointcut.partition.program.graph import SHARDS
from jointcut.partition.program.jax import abstract, jaxprs, meshes, runtime


class Shards(OnceKind):
    """Read and write `jax.shard_map`."""

    op = SHARDS

    def once(self, eqn: Any) -> Once | None:
        """The program of each device; None for one with effects, or where types name sizes or a mesh around."""
        program, constants = jaxprs.opened(eqn.params["jaxpr"])
        around = [*eqn.invars, *eqn.outvars]
        if eqn.effects or constants or program.constvars or not all(map(_is_usual, around)):
            return None
        views = tuple(eqn.params["in_specs"]), tuple(eqn.params["out_specs"])
        return Once((program,), tuple(eqn.invars), None, views)

    def equation(
        self, like: Any, programs: Sequence[Any], chosen_by: Any, operands: Sequence[Any], results: Any, views: Views
    ) -> Any:
        """A `shard_map` over the same mesh."""
        del chosen_by, results
        (program,), params, (in_specs, out_specs) = programs, like.params, views
        mapped = jax.shard_map(
            lambda *local: tuple(runtime.evaluate(program, *local)),
            mesh=params["mesh"],
            in_specs=tuple(in_specs),
            out_specs=tuple(out_specs),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        inner, _ = jaxprs.opened(traced(mapped, *(abstract.struct(v.aval) for v in operands))[0])
        (eqn,) = inner.eqns
        names = dict(zip(inner.invars, operands, strict=True))
        eqn = jaxprs.rebound(eqn, [names[v] for v in eqn.invars], eqn.outvars)
        return eqn.replace(source_info=like.source_info, ctx=like.ctx)

    def keep(self, like: Any, kept: Sequence[Sequence[Any]]) -> Kept:
        """Arrays that are laid over the mesh along their first axis."""
        (avals,) = kept
        return _Laid(like, tuple(avals), tuple(tuple(axis for axis, _ in meshes.laid_over(like, a)) for a in avals))


@dataclass(frozen=True)
class _Laid(Kept):
    """The values that the program of a device keeps: the types of its parts, and the axes of the mesh for each."""

    like: Any
    local: tuple[Any, ...]
    axes: tuple[tuple[Any, ...], ...]

    @property
    def avals(self) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The types of the arrays of all devices."""
        sizes = self.like.params["mesh"].shape
        numbers = [math.prod(sizes[axis] for axis in own) for own in self.axes]
        shapes = [aval.shape or (1,) for aval in self.local]
        whole = [(n * shape[0], *shape[1:]) for n, shape in zip(numbers, shapes, strict=True)]
        structs = (jax.ShapeDtypeStruct(shape, aval.dtype) for shape, aval in zip(whole, self.local, strict=True))
        return tuple(jax.make_jaxpr(lambda *xs: xs)(*structs).in_avals)

    @property
    def inside(self) -> tuple[Any, ...]:
        """The types of the parts that one device has."""
        return tuple(aval.update(shape=(1,)) if aval.ndim == 0 else aval for aval in self.local)

    @property
    def views(self) -> tuple[Any, ...]:
        """The spec of each array."""
        return tuple(jax.P(own) if own else jax.P() for own in self.axes)

    def pack(self, program: int, atoms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Give each number an axis."""
        del program
        return self._written([_with_axis] * len(atoms), atoms)

    def unpack(self, program: int, atoms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Take this axis away."""
        del program
        return self._written([_without_axis if aval.ndim == 0 else _same for aval in self.local], atoms)

    def _written(self, functions: Sequence[Any], atoms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        eqns, results = list[Any](), list[Any]()
        with meshes.inside(self.like):
            for function, atom in zip(functions, atoms, strict=True):
                inner, _ = jaxprs.opened(jax.make_jaxpr(function)(abstract.struct(atom.aval)))
                for eqn in inner.eqns:  # one at most; JAX traces a function once for all atoms of a type
                    eqns.append(jaxprs.rebound(eqn, [atom], [jaxprs.fresh(v.aval) for v in eqn.outvars]))
                    (atom,) = eqns[-1].outvars
                results.append(atom)
        return eqns, results


def _with_axis(x: Any) -> Any:
    return x if x.ndim else lax.expand_dims(x, [0])


def _without_axis(x: Any) -> Any:
    return lax.squeeze(x, [0])


def _same(x: Any) -> Any:
    return x


def _is_usual(atom: Any) -> bool:
    """Whether an atom has a known size, and its type names no mesh around."""
    aval = atom.aval
    if abstract.is_reference(aval) or meshes.is_explicit(getattr(aval, "sharding", None)):
        return False
    return all(isinstance(size, int) for size in getattr(aval, "shape", ()))
