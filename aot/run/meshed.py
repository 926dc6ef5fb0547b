"""Measure a part of a program of the user's, compiled for all devices of its mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jointcut.aot.options.target import Target
from jointcut.partition.errors import BudgetError, TargetError, message
from jointcut.partition.figures import counted
from jointcut.partition.program.jax import abstract, jaxprs, meshes, runtime
from jointcut.partition.tiles.layouts import Layout


def lowered(
    function: Callable[..., Any], closed: Any, layout: Layout | None = None, goal: Target | None = None
) -> jax.stages.Lowered:
    """Lower a flat function in the current context, with the types of a jaxpr, to read XLA's figures of one device.

    Where `layout` tells how the inputs lie on automatic axes, they lie so, on the devices of `goal` if there is one.
    Raises `BudgetError` for a mesh of more devices than there are.
    """
    mesh = meshes.manual_mesh()
    if mesh is None:
        structs = _laid(abstract.input_structs(closed), layout, goal)
        is_set = not jax.sharding.get_abstract_mesh().empty  # it knows its devices
        if not is_set:
            _refuse_nameless(structs)
        return jax.jit(function).lower(*(structs if is_set else (on_devices(each, goal) for each in structs)))
    checks = meshes.checks_varying()
    with runtime.outside():
        program, arguments = _on(_devices(mesh, goal), mesh, function, closed, checks)
        return program.lower(*arguments)


def _refuse_nameless(structs: Sequence[Any]) -> None:
    """Raise `BudgetError` for types on explicit axes that were traced for no kind of device."""
    meshes_of = (_without_devices(each) for each in structs if meshes.is_explicit(each.sharding))
    if any(mesh is not None and mesh.abstract_device is None for mesh in meshes_of):
        what = "is to be measured, and the arguments lie on a jax.sharding.AbstractMesh, which names no devices."
        cure = "Trace for a mesh of devices, such as aot.target('h100x8').mesh(...), or give a strategy or a plan."
        raise BudgetError(message("budget", what, cure))


def on_devices(struct: Any, goal: Target | None = None) -> Any:
    """Return a type on a mesh without devices, as on explicit axes, with those of a target or the available ones."""
    mesh = _without_devices(struct)
    if mesh is None or mesh.size > len(_available(mesh, goal)):
        return struct
    return struct.update(sharding=NamedSharding(_devices(mesh, goal), struct.sharding.spec))


def given_devices(path: str, struct: Any, goal: Target | None) -> Any:
    """Return the type of an argument as `on_devices` does; raise `TargetError` where there are too few devices."""
    mesh, placed = _without_devices(struct), on_devices(struct, goal)
    if mesh is None or placed is not struct:
        return placed
    what = (
        f"lies on a jax.sharding.AbstractMesh of {mesh.size} devices, which names none, and "
        f"{'there' if goal is None else goal.name} {_has(goal)}."
    )
    cure = (
        f"Name a target of {mesh.size}, as in aot.function(..., target='h100x8'), or lay it on a mesh of devices, such "
        "as aot.target('h100x8').mesh(...)."
    )
    raise TargetError(message(path, what, cure))


def _has(goal: Target | None) -> str:
    if goal is not None:
        return f"has {counted(goal.count, 'device')}"
    count = len(jax.devices())
    return f"{'is' if count == 1 else 'are'} {counted(count, 'device')} here"


def _without_devices(struct: Any) -> Any | None:
    """The mesh of a type's sharding if it names no devices."""
    mesh = getattr(getattr(struct, "sharding", None), "mesh", None)
    return mesh if isinstance(mesh, jax.sharding.AbstractMesh) and not mesh.empty else None


def _available(mesh: Any, goal: Target | None) -> Sequence[Any]:
    return jax.devices() if goal is None or goal.count != mesh.size else goal.devices


def _laid(structs: list[Any], layout: Layout | None, goal: Target | None) -> list[Any]:
    """Return types with the shardings that a layout on automatic axes tells."""
    if layout is None or not layout.is_known or set(layout.mesh.axis_types) != {AxisType.Auto}:
        return structs
    mesh = layout.mesh if isinstance(layout.mesh, jax.sharding.Mesh) else _devices(layout.mesh, goal)
    specs = [PartitionSpec(*(axes or None for axes in layout.spec(n))) for n in range(len(structs))]
    placed = zip(structs, specs, range(len(structs)), strict=True)
    return [s.update(sharding=NamedSharding(mesh, spec)) if n < len(layout.specs) else s for s, spec, n in placed]


def _devices(mesh: Any, goal: Target | None) -> jax.sharding.Mesh:
    """Return a mesh of a target's devices or the available ones, in the form of a mesh of the user's."""
    devices = _available(mesh, goal)
    if len(devices) < mesh.size:
        what = f"is to be measured on a mesh of {mesh.size} devices, but there are {len(devices)}."
        cure = "Run where the devices are, name a target of as many, or give a strategy or a plan instead."
        raise BudgetError(message("budget", what, cure))
    kinds = tuple(AxisType.Auto if kind is AxisType.Manual else kind for kind in mesh.axis_types)
    return jax.sharding.Mesh(np.array(devices[: mesh.size]).reshape(mesh.axis_sizes), mesh.axis_names, kinds)


def _on(
    devices: jax.sharding.Mesh, mesh: Any, function: Callable[..., Any], closed: Any, checks: bool
) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """Return the function jitted over a mesh, and its arguments; values that differ by device get an axis for it."""
    jaxpr, _ = jaxprs.opened(closed)
    into, out = ([_axes(mesh, v.aval) for v in variables] for variables in (jaxpr.invars, jaxpr.outvars))

    def one(*arrays: Any) -> list[Any]:
        results = function(*(x[0] if axes else x for x, axes in zip(arrays, into, strict=True)))
        leaves = jax.tree.leaves(results)
        return [x[None] if axes else x for x, axes in zip(leaves, out, strict=True)]

    specs = [tuple(PartitionSpec(axes) if axes else PartitionSpec() for axes in side) for side in (into, out)]
    mapped = jax.shard_map(
        one, mesh=devices, in_specs=specs[0], out_specs=list(specs[1]), axis_names=set(mesh.manual_axes),
        check_vma=checks,
    )  # fmt: skip
    return jax.jit(mapped), [_stacked(devices, v.aval, axes) for v, axes in zip(jaxpr.invars, into, strict=True)]


def _axes(mesh: Any, aval: Any) -> tuple[Any, ...]:
    """Return the axes over which a value varies, in the order of the mesh."""
    return tuple(axis for axis in mesh.axis_names if axis in meshes.varying(aval))


def _stacked(devices: jax.sharding.Mesh, aval: Any, axes: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """Return the type of an argument for all devices; one that differs by device is stacked along a leading axis."""
    count = int(np.prod([devices.shape[axis] for axis in axes], dtype=int))
    parts = getattr(abstract.struct(aval).sharding, "spec", None) or (None,) * len(aval.shape)
    shape, parts = ((count, *aval.shape), (tuple(axes), *parts)) if axes else (aval.shape, parts)
    return jax.ShapeDtypeStruct(shape, aval.dtype, sharding=NamedSharding(devices, PartitionSpec(*parts)))
