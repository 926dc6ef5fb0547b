"""Compute results for one slice of their arrays, along the first axis.

Where an update treats each slice alone, as one of elements does, a program for one slice stands for the whole. What
reads no slice that changes, such as a count of the steps, is computed before, once for all slices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jointcut.aot.trace.analyse import depending
from jointcut.partition.program import jaxprs
from jointcut.partition.program.primitives import ELEMENTWISE

_REDUCING = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})


@dataclass(frozen=True)
class Slice:
    """A program for one slice of results.

    Attributes:
        program: a jaxpr that reads slices of arrays, then arrays whole.
        sliced: the variables of which it reads slices.
        whole: those that it reads whole.
    """

    program: Any
    sliced: tuple[Any, ...]
    whole: tuple[Any, ...]

    @classmethod
    def of(cls, eqns: Sequence[Any], wanted: Sequence[Any], changing: Collection[Any]) -> Slice | None:
        """The program for a slice of some variables, all with equally many slices.

        `changing` are those that are known slice by slice alone. Returns None if a slice needs more of them than its
        own.
        """
        late = depending(eqns, changing)
        cut, whole, kept = dict.fromkeys(wanted), dict[Any, None](), list[Any]()
        for eqn in reversed(eqns):
            if not any(v in cut for v in eqn.outvars):
                continue
            row = Row.of(eqn)
            if row is not None and not any(v in late for v in row.whole):
                kept.append(row)
                cut.update(dict.fromkeys(row.sliced))
                whole.update(dict.fromkeys(row.whole))
            elif any(v in late for v in eqn.outvars):
                return None
        made = {v for row in kept for v in row.eqn.outvars}
        given = [v for v in cut if v not in made]
        if any(v in late and v not in changing for v in given):
            return None
        names = {v: jaxprs.fresh(jaxprs.unstacked(v.aval)) for v in (*given, *made)}
        rows = [renamed for row in reversed(kept) for renamed in row.renamed(names)]
        program = jaxprs.build([*(names[v] for v in given), *whole], [names[v] for v in wanted], rows)
        return cls(program, tuple(given), tuple(whole))


@dataclass(frozen=True)
class Row:
    """An equation for one slice: its variables `sliced` stand for slices, those `whole` for whole arrays.

    Of arrays in `single`, which have one slice for all, that slice is read.
    """

    eqn: Any
    sliced: tuple[Any, ...]
    whole: tuple[Any, ...]
    single: tuple[Any, ...]

    @classmethod
    def of(cls, eqn: Any) -> Row | None:
        """The equation for one slice of its results, None where a slice needs more than one of an operand."""
        shape = _shape(eqn.outvars[0]) if eqn.outvars else ()
        if not shape or eqn.effects or not all(_shape(v) == shape and is_sliceable(v.aval) for v in eqn.outvars):
            return None
        params = _params(eqn, shape)
        if params is None:
            return None
        has_slices = eqn.primitive.name != "broadcast_in_dim" or eqn.params["broadcast_dimensions"][:1] == (0,)
        variables = [v for v in eqn.invars if not isinstance(v, jaxprs.Literal)]
        sliced = tuple(v for v in variables if has_slices and _shape(v)[:1] == shape[:1])
        single = tuple(v for v in variables if has_slices and _shape(v) and v not in sliced)
        return cls(eqn.replace(params=params), sliced, tuple(v for v in variables if v not in sliced), single)

    def renamed(self, names: dict[Any, Any]) -> list[Any]:
        """The equation of the slices with these names, behind those that read the only slice of an operand."""
        firsts = {v: jaxprs.fresh(jaxprs.unstacked(v.aval)) for v in self.single}
        operands = [v if isinstance(v, jaxprs.Literal) else firsts.get(v, v) for v in self.eqn.invars]
        operands = [names[v] if not isinstance(v, jaxprs.Literal) and v in self.sliced else v for v in operands]
        whole = jaxprs.rebound(self.eqn, operands, [names[v] for v in self.eqn.outvars])
        return [*(_only(v, first) for v, first in firsts.items()), whole]


def _only(v: Any, first: Any) -> Any:
    """The equation that reads the only slice of an array."""
    closed = jax.make_jaxpr(lambda x: lax.squeeze(x, [0]))(jaxprs.struct(v.aval))
    return jaxprs.rebound(jaxprs.opened(closed)[0].eqns[0], [v], [first])


def summed(eqn: Any) -> tuple[Any, Any] | None:
    """A reduction over slices, or several of them, as one within each slice, and one over these; None for others."""
    if eqn.primitive.name not in _REDUCING or 0 not in eqn.params["axes"]:
        return None
    (operand,), (result,) = eqn.invars, eqn.outvars
    part = jaxprs.fresh(result.aval.update(shape=(operand.aval.shape[0], *result.aval.shape)))
    within = eqn.params | {"axes": tuple(axis for axis in eqn.params["axes"] if axis)}
    over = eqn.params | {"axes": (0,)}
    return (
        jaxprs.rebound(eqn.replace(params=within), [operand], [part]),
        jaxprs.rebound(eqn.replace(params=over), [part], [result]),
    )


def is_sliceable(aval: Any) -> bool:
    """Whether arrays of this type are taken apart and put together slice by slice."""
    return jaxprs.is_plain(aval) and not jaxprs.is_on_host(aval) and not jaxprs.is_explicit(aval.sharding)


def _params(eqn: Any, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """The parameters of an equation for one slice, None where it joins slices."""
    name, params, first = eqn.primitive.name, eqn.params, _shape(eqn.invars[0]) if eqn.invars else ()
    if name in ELEMENTWISE:
        return params if all(len(_shape(v)) in (0, len(shape)) for v in eqn.invars) else None
    if name == "broadcast_in_dim":
        return _spread(params, shape)
    if first[:1] != shape[:1]:
        return None
    if name in _REDUCING and 0 not in params["axes"]:
        return params | {"axes": tuple(axis - 1 for axis in params["axes"])}
    if name == "transpose" and params["permutation"][0] == 0:
        return params | {"permutation": tuple(axis - 1 for axis in params["permutation"][1:])}
    if name == "squeeze" and 0 not in params["dimensions"]:
        return params | {"dimensions": tuple(axis - 1 for axis in params["dimensions"])}
    if name == "reshape" and params["dimensions"] is None:
        return params | {"new_sizes": tuple(params["new_sizes"][1:])}
    return None


def _spread(params: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """The parameters of `broadcast_in_dim` for one slice."""
    axes = tuple(axis - 1 for axis in params["broadcast_dimensions"])
    return params | {"shape": shape[1:], "broadcast_dimensions": axes[1:] if axes[:1] == (-1,) else axes}


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))
