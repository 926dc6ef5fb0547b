"""Tell how arrays lie on meshes, and over which axes they vary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax import lax
from jax._src import config as _config
from jax._src import core as _core
from jax.extend import core as jex

from jointcut.partition.program.jax.callers import argument, noticed
from jointcut.partition.program.jax.jaxprs import Equation, Var, fresh

#: For each axis of an array, the axes of a mesh that it lies along.
Spec = tuple[tuple[str, ...], ...]

#: The mesh in the type of an array that lies on none.
NO_MESH = jax.typeof(0.0).sharding.mesh


def is_explicit(sharding: Any) -> bool:
    """Whether a sharding is part of an array's type: true if it lays the array over a mesh with an explicit axis."""
    mesh = getattr(sharding, "mesh", None)
    return mesh is not None and not mesh.empty and jax.sharding.AxisType.Explicit in mesh.axis_types


def is_on_mesh(aval: Any) -> bool:
    """Whether an array of a type lies on a mesh."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty


def is_unreduced(aval: Any) -> bool:
    """Whether a type is that of a sum over devices that is not added up yet, or of an array with such a gradient."""
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    return bool(getattr(spec, "unreduced", None) or getattr(spec, "reduced", None))


def number_of_devices(x: Any) -> int | None:
    """On how many devices an array lies; None for a traced value of which this is not known."""
    if is_on_mesh(aval := jax.typeof(x)):
        return aval.sharding.mesh.size
    if not isinstance(x, _core.Tracer):
        return getattr(getattr(x, "sharding", None), "num_devices", 1)
    given = argument(x) if jax.sharding.get_abstract_mesh().empty else None
    return None if given is None else number_of_devices(given)


def spec_of(x: Any) -> tuple[Any, Spec | None] | None:
    """The mesh of several devices that an array or type lies on, and the axes of it along each of its own axes.

    On automatic axes a traced array lies as the argument of the user's `jax.jit` that it is. None for the axes if it is
    none, or an abstract value, which does not tell. None where there is no such mesh, or each device has a program
    of its own.
    """
    is_traced = isinstance(x, _core.Tracer | _core.AbstractValue)
    sharding = getattr(jax.typeof(x) if isinstance(x, _core.Tracer) else x, "sharding", None)
    mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
    kinds = jax.sharding.AxisType
    if mesh is None or spec is None or mesh.empty or mesh.size == 1 or kinds.Manual in mesh.axis_types:
        return None
    if is_traced and kinds.Auto in mesh.axis_types and getattr(x, "shape", ()):
        given = sharding_given(x)
        return mesh, None if given is None else _axes(mesh, given.spec, x)
    return mesh, _axes(mesh, spec, x)


def sharding_given(x: Any) -> Any | None:
    """How a traced value on automatic axes lies, if it is an argument of the user's `jax.jit` on the same mesh."""
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None) if isinstance(x, _core.Tracer) else None
    if mesh is None or mesh.empty or set(mesh.axis_types) != {jax.sharding.AxisType.Auto}:
        return None
    given = getattr(argument(x), "sharding", None)
    is_here = isinstance(given, jax.sharding.NamedSharding) and given.mesh.abstract_mesh == mesh
    return given if is_here else None


def heard(x: Any, otherwise: Callable[[Spec, Spec], None]) -> Any:
    """A traced value that is an argument of the user's `jax.jit` on automatic axes.

    JAX may run this trace for other shardings too. Then `otherwise` is called with how it lies now and lay before.
    """
    given = sharding_given(x)
    if given is None:
        return x
    shape, planned = jax.typeof(x), _axes(given.mesh, given.spec, x)

    def lies(sharding: Any) -> None:
        mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
        if mesh is not None and spec is not None and (now := _axes(mesh, spec, shape)) != planned:
            otherwise(now, planned)

    return noticed(x, lies)


def spec_in_words(spec: Spec) -> str:
    """How an array lies, as users write it.

    >>> spec_in_words(((), ("data",), ("a", "b"), ()))
    "P(None, 'data', ('a', 'b'))"
    """
    parts = [repr(axes[0] if len(axes) == 1 else axes or None) for axes in spec]
    while parts and parts[-1] == "None":
        parts.pop()
    return f"P({', '.join(parts)})"


def told_specs(eqn: Equation) -> list[Spec | None]:
    """For each result of an equation, the axes of a mesh along each of its axes; None where the equation does not tell.

    A `jax.shard_map` tells it, a constraint does, and so do types on explicit axes.
    """
    given: Sequence[Any] = ()
    if eqn.primitive.name == "shard_map":
        given = [(eqn.params["mesh"], spec) for spec in eqn.params["out_specs"]]
    elif eqn.primitive.name == "sharding_constraint":
        sharding = eqn.params["sharding"]
        given = [(getattr(sharding, "mesh", None), getattr(sharding, "spec", None))]
    if given and all(mesh is not None and spec is not None for mesh, spec in given):
        return [_axes(mesh, spec, v.aval) for (mesh, spec), v in zip(given, eqn.outvars, strict=True)]
    typed = [spec_of(v.aval) if is_explicit(getattr(v.aval, "sharding", None)) else None for v in eqn.outvars]
    return [None if one is None else one[1] for one in typed]


def read_specs(eqns: Iterable[Equation]) -> dict[Any, Spec]:
    """How the first `jax.shard_map` that reads a value lays it; none for values that no such equation reads."""
    found: dict[Any, Spec] = {}
    for eqn in eqns:
        specs = eqn.params["in_specs"] if eqn.primitive.name == "shard_map" else ()
        for v, spec in zip(eqn.invars, specs, strict=False):
            if isinstance(v, Var):
                found.setdefault(v, _axes(eqn.params["mesh"], spec, v.aval))
    return found


def mesh_within(jaxpr: Any) -> Any | None:
    """The mesh of the first `jax.shard_map` over several devices among the equations of a jaxpr; None without one."""
    meshes = (eqn.params["mesh"] for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map")
    return next((mesh for mesh in meshes if mesh.size > 1), None)


def _axes(mesh: Any, spec: Sequence[Any], x: Any) -> Spec:
    """The axes of several devices in a spec, along each axis of an array.

    Those over which it is a sum that is not added up (`unreduced`), or will be in a derivative, divide no axis.
    """
    spec = getattr(spec, "partitions", spec)
    given = (*spec, *(None,) * (len(getattr(x, "shape", ())) - len(spec)))
    every = (own if isinstance(own, tuple) else () if own is None else (own,) for own in given)
    return tuple(tuple(axis for axis in own if mesh.shape.get(axis, 1) > 1) for own in every)


def sharding_in_type(aval: Any) -> Any:
    """The sharding of an abstract value where it is part of its type: inside `shard_map`, or on an explicit axis."""
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or set(mesh.axis_types) == {jax.sharding.AxisType.Auto}:
        return None
    return sharding


def varying(aval: Any) -> frozenset[Any]:
    """The axes of a mesh over which a value varies from device to device inside `jax.shard_map`."""
    return getattr(getattr(aval, "manual_axis_type", None), "varying", frozenset())


def laid_over(eqn: Equation, aval: Any) -> list[tuple[Any, int]]:
    """The axes of a `jax.shard_map`'s mesh along which the devices have values of their own, with their sizes."""
    mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    over = varying(aval) if eqn.params["check_vma"] else manual
    return [(axis, size) for axis, size in mesh.shape.items() if axis in over]


def manual_mesh() -> Any | None:
    """The mesh of the `jax.shard_map` that we are traced in, None outside of any."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.manual_axes else None


def checks_varying() -> bool:
    """Whether the `jax.shard_map` that we are traced in knows over which axes its values vary."""
    return bool(_config._check_vma.value)


@contextmanager
def inside(eqn: Equation) -> Iterator[None]:
    """Enter the context of an equation's body: the mesh of a `jax.shard_map`; for other equations nothing changes."""
    if eqn.primitive.name != "shard_map":
        yield
        return
    mesh, manual = eqn.params["mesh"].abstract_mesh, eqn.params["newly_manual_axes"]
    with on_mesh(mesh.update_axis_types(dict.fromkeys(manual, jax.sharding.AxisType.Manual)), eqn.params["check_vma"]):
        yield


@contextmanager
def where_they_vary(*avals: Any) -> Iterator[None]:
    """Be on the mesh of some value of a `jax.shard_map`, where values vary from device to device; else where we are."""
    if (aval := next(filter(_is_of_one_device, avals), None)) is None:
        yield
        return
    with on_mesh(aval.sharding.mesh, True):
        yield


def _is_of_one_device(aval: Any) -> bool:
    return bool(getattr(getattr(getattr(aval, "sharding", None), "mesh", None), "manual_axes", ()))


@contextmanager
def on_mesh(mesh: Any, checks_varying: bool) -> Iterator[None]:
    """Be on a mesh, where each device has a program of its own along the manual axes."""
    axes = [(name, size) for name, size in mesh.shape.items() if name in mesh.manual_axes]
    with _core.extend_axis_env_nd(axes), jax.sharding.use_abstract_mesh(mesh), _config._check_vma(checks_varying):
        yield


def on_all_devices(aval: Any) -> Any:
    """The same abstract value, for an array that is equal on all devices of a mesh."""
    return aval.update(manual_axis_type=type(aval.manual_axis_type)()) if varying(aval) else aval


def varied(var: Var, aval: Any) -> Equation:
    """An equation that casts an array which is equal on all devices to an array that varies over the axes of `aval`."""
    axes = tuple(axis for axis in aval.sharding.mesh.axis_names if axis in varying(aval))
    return jex.new_jaxpr_eqn([var], [fresh(aval)], _core.pvary_p, {"axes": axes}, frozenset())


def as_varying(x: Any, *others: Any) -> Any:
    """The array `x`, varying over all axes that it or one of the other arrays varies over."""
    axes = frozenset[Any]().union(*(varying(jax.typeof(y)) for y in others)) - varying(jax.typeof(x))
    return lax.pcast(x, tuple(axes), to="varying") if axes else x
