"""Compute results for one slice of their arrays, along the first axis.

If an update treats each slice alone, as an elementwise one does, a program for one slice stands for the whole. Values
that depend on no changing slice, such as a count of the steps, are computed before, once for all slices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jointcut.aot.trace.analyse import depending
from jointcut.partition.program.jax import abstract, jaxprs, meshes
from jointcut.partition.program.primitives import ELEMENTWISE, FOLDS
from jointcut.partition.program.ties import ties

#: The parameters that name axes.
_AXES = {"transpose": "permutation", "squeeze": "dimensions", **dict.fromkeys(FOLDS, "axes")}


@dataclass(frozen=True)
class Slice:
    """A program for one slice of results.

    Attributes:
        program: a jaxpr that reads slices of arrays, then arrays whole.
        sliced: the variables whose slices it reads.
        whole: the variables that it reads whole.
    """

    program: Any
    sliced: tuple[Any, ...]
    whole: tuple[Any, ...]

    @classmethod
    def of(cls, eqns: Sequence[Any], wanted: Sequence[Any], changing: Collection[Any]) -> Slice | None:
        """Return the program for a slice of some variables, all with equally many slices.

        `changing` are the variables that are known slice by slice alone. Returns None if a slice needs another.
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
        names = {v: jaxprs.fresh(abstract.unstacked(v.aval)) for v in (*given, *made)}
        rows = [renamed for row in reversed(kept) for renamed in row.renamed(names)]
        program = jaxprs.build([*(names[v] for v in given), *whole], [names[v] for v in wanted], rows)
        return cls(program, tuple(given), tuple(whole))


@dataclass(frozen=True)
class Row:
    """An equation for one slice: its variables `sliced` stand for slices, those `whole` for whole arrays.

    An array in `single` has only one slice, and every slice of the results reads it.
    """

    eqn: Any
    sliced: tuple[Any, ...]
    whole: tuple[Any, ...]
    single: tuple[Any, ...]

    @classmethod
    def of(cls, eqn: Any) -> Row | None:
        """Return the equation for one slice of its results, None where it needs more than one slice of an operand."""
        shape = _shape(eqn.outvars[0]) if eqn.outvars else ()
        if not shape or eqn.effects or not all(_shape(v) == shape and is_sliceable(v.aval) for v in eqn.outvars):
            return None
        tie = next((tie for tie in ties(eqn) if {*tie.results} == {0}), None)
        params = _params(eqn)
        if tie is None or params is None or not {0, None}.issuperset(tie.operands):
            return None
        places = [(v, a) for v, a in zip(eqn.invars, tie.operands, strict=True) if not isinstance(v, jaxprs.Literal)]
        sliced, whole = (tuple(v for v, a in places if a == place) for place in (0, None))
        has_slices = eqn.primitive.name != "broadcast_in_dim" or 0 in eqn.params["broadcast_dimensions"]
        single = tuple(v for v in whole if has_slices and _shape(v))
        return cls(eqn.replace(params=params), sliced, whole, single)

    def renamed(self, names: dict[Any, Any]) -> list[Any]:
        """Return the equation of the slices with these names, behind the reads of an operand's only slice."""
        firsts = {v: jaxprs.fresh(abstract.unstacked(v.aval)) for v in self.single}
        operands = [v if isinstance(v, jaxprs.Literal) else firsts.get(v, v) for v in self.eqn.invars]
        operands = [names[v] if not isinstance(v, jaxprs.Literal) and v in self.sliced else v for v in operands]
        whole = jaxprs.rebound(self.eqn, operands, [names[v] for v in self.eqn.outvars])
        return [*(_only(v, first) for v, first in firsts.items()), whole]


def _only(v: Any, first: Any) -> Any:
    """Return the equation that reads the only slice of an array."""
    closed = jax.make_jaxpr(lambda x: lax.squeeze(x, [0]))(abstract.struct(v.aval))
    return jaxprs.rebound(jaxprs.opened(closed)[0].eqns[0], [v], [first])


def summed(eqn: Any) -> tuple[Any, Any] | None:
    """Return a reduction over slices as two: one within each slice, and one over the results; None for others."""
    if eqn.primitive.name not in FOLDS or 0 not in eqn.params["axes"]:
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
    return abstract.is_plain(aval) and not abstract.is_on_host(aval) and not meshes.is_explicit(aval.sharding)


def _params(eqn: Any) -> dict[str, Any] | None:
    """Return the parameters of an equation for one slice, None for an equation without known ones."""
    name, params = eqn.primitive.name, eqn.params
    if name in ELEMENTWISE:
        return params
    if name in _AXES:
        return params | {_AXES[name]: tuple(axis - 1 for axis in params[_AXES[name]] if axis)}
    if name == "broadcast_in_dim":
        axes = tuple(axis - 1 for axis in params["broadcast_dimensions"] if axis)
        return params | {"shape": params["shape"][1:], "broadcast_dimensions": axes}
    if name == "reshape" and params["dimensions"] is None:
        return params | {"new_sizes": tuple(params["new_sizes"][1:])}
    return None


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))
