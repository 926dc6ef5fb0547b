"""Run a program on each device of a mesh, for the rows that it has.

A program that was written for no mesh becomes the body of a `jax.shard_map`. Its equations are moved to the mesh as one
device sees it: the axes along which the rows lie are its own, and on all others XLA lays the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import core as _core
from jax._src import pjit as _pjit

from jointcut.partition.program.jax.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    fresh,
    no_debug_info,
    opened,
    rebound,
)
from jointcut.partition.program.jax.meshes import Spec, is_on_mesh, on_mesh

#: How an array is laid that lies on no mesh; the parameters of equations that say how results are laid; and the
#: primitives that do nothing else.
_NOWHERE = jax.typeof(0.0).sharding
_LAYING = frozenset({"sharding", "out_sharding"})
_LAYING_ANEW = _pjit.reshard_p, _pjit.sharding_constraint_p


@dataclass(frozen=True)
class Devices:
    """The devices of a mesh along some of its axes: each may have rows of its own."""

    mesh: Any
    axes: tuple[str, ...]

    @property
    def number(self) -> int:
        """How many parts the rows have."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def _manual(self) -> Any:
        """The mesh as a program of one device sees it: no other axis is explicit there."""
        auto, manual = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Manual
        types = {axis: manual if axis in self.axes else auto for axis in self.mesh.axis_names}
        return self.mesh.abstract_mesh.update_axis_types(types)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Be where the program of one device is traced."""
        with on_mesh(self._manual, False):
            yield

    def equations(
        self, closed: ClosedJaxpr, operands: Sequence[tuple[Var, Spec]], results: Sequence[tuple[Var, Spec]]
    ) -> list[Equation]:
        """A `jax.shard_map` that runs a program on each device; a spec tells how an operand or a result is laid.

        The program was written outside, for no mesh. On explicit axes the type of a result says how it is laid in the
        end.
        """
        moved, _ = opened(closed)
        moved = _moved(moved, self._manual)
        in_specs, out_specs = (tuple(_partition_spec(spec) for _, spec in ends) for ends in (operands, results))
        is_typed = jax.sharding.AxisType.Explicit in self.mesh.axis_types
        step = jax.shard_map(
            lambda *local: tuple(_core.eval_jaxpr(moved, (), *local)),
            mesh=None if is_typed else self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.axes),
            check_vma=False,
        )
        avals: list[Any] = [v.aval for v, _ in operands]
        given = [{"weak_type": aval.weak_type, "sharding": aval.sharding if is_typed else None} for aval in avals]
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, **how) for aval, how in zip(avals, given, strict=True)]
        if is_typed:
            step = jax.sharding.auto_axes(step, out_sharding=tuple(_sharding(v) for v, _ in results))
        inner, consts = opened(jax.make_jaxpr(step)(*structs))
        assert not consts, "the program reads its operands alone"
        names = dict(zip(inner.invars, (v for v, _ in operands), strict=True))
        return _renamed(inner, names, [v for v, _ in results])


# ------------------------------------------------------------------------------------------- moving a program to a mesh


def _partition_spec(spec: Spec) -> Any:
    return jax.P(*(axes or None for axes in spec))


def _sharding(v: Any) -> Any:
    return v.aval.sharding


def _renamed(jaxpr: Jaxpr, names: dict[Any, Atom], outvars: Sequence[Var]) -> list[Equation]:
    """The equations of a jaxpr with the names of a place, and with these results."""
    names |= dict(zip(jaxpr.outvars, outvars, strict=True))
    eqns = []
    for eqn in jaxpr.eqns:
        invars = [v if isinstance(v, Literal) else names.get(v, v) for v in eqn.invars]
        eqns.append(rebound(eqn, invars, [names.get(v, v) for v in eqn.outvars]))
    return eqns


def _moved(jaxpr: Jaxpr, mesh: Any) -> Jaxpr:
    """A jaxpr whose equations run on a mesh as a program of one device sees it."""
    eqns = [_in_context(eqn, mesh) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns, debug_info=no_debug_info(jaxpr.invars, jaxpr.outvars))


def _in_context(eqn: Equation, mesh: Any) -> Equation:
    """The equation, and all in its programs, in the context of another mesh."""
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        ctx = _core.current_jaxpr_eqn_context()
    params = {key: _changed(value, lambda inner: _moved(inner, mesh)) for key, value in eqn.params.items()}
    return eqn.replace(ctx=ctx, params=params)


def _changed(param: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    """A parameter with each jaxpr changed."""
    if isinstance(param, Jaxpr):
        return change(param)
    if isinstance(param, ClosedJaxpr):
        inner, consts = opened(param)
        return ClosedJaxpr(change(inner), consts)
    if isinstance(param, tuple) and not hasattr(param, "_fields"):
        return tuple(_changed(each, change) for each in param)
    return param


@contextmanager
def nowhere() -> Iterator[None]:
    """Be on no mesh."""
    with jax.sharding.use_abstract_mesh(_NOWHERE.mesh):
        yield


def unlaid(aval: Any) -> Any:
    """The type of an array without its mesh."""
    return aval.update(sharding=_NOWHERE) if is_on_mesh(aval) else aval


def without_mesh(eqns: Sequence[Equation]) -> list[Equation]:
    """The equations with types and parameters that name no mesh; none lays an array anew."""
    return _without_mesh(eqns, {})


def _without_mesh(eqns: Sequence[Equation], names: dict[Var, Atom]) -> list[Equation]:
    written = []
    for eqn in eqns:
        invars = [_atom_without(v, names) for v in eqn.invars]
        if eqn.primitive in _LAYING_ANEW:
            names[eqn.outvars[0]] = invars[0]
            continue
        params = {key: _changed(value, _jaxpr_without) for key, value in eqn.params.items() if key not in _LAYING}
        params |= dict.fromkeys(_LAYING & eqn.params.keys())
        outvars: Any = [_atom_without(v, names) for v in eqn.outvars]
        written.append(rebound(eqn.replace(params=params), invars, outvars))
    return written


def _jaxpr_without(jaxpr: Jaxpr) -> Jaxpr:
    names: dict[Var, Atom] = {}
    invars = [_atom_without(v, names) for v in jaxpr.invars]
    constvars = [_atom_without(v, names) for v in jaxpr.constvars]
    eqns = _without_mesh(jaxpr.eqns, names)
    outvars = [_atom_without(v, names) for v in jaxpr.outvars]
    info = no_debug_info(invars, outvars)
    return jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=eqns, debug_info=info)


def _atom_without(atom: Atom, names: dict[Var, Atom]) -> Any:
    if isinstance(atom, Literal):
        return Literal(atom.val, unlaid(atom.aval))
    if atom not in names:
        names[atom] = fresh(unlaid(atom.aval)) if is_on_mesh(atom.aval) else atom
    return names[atom]
