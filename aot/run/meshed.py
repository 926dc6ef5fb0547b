"""Measure a part of a program of the user's, compiled for all devices of its mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jointcut.partition.errors import BudgetError, message
from jointcut.partition.program.jax import abstract, jaxprs, meshes, runtime
from jointcut.partition.tiles.layouts import Layout


def lowered(function: Callable[..., Any], closed: Any, layout: Layout | None = None) -> jax.stages.Lowered:
    """Lower a flat function in the current context, with the types of a jaxpr, to read XLA's figures of one device.

    Where `layout` tells how the inputs lie on automatic axes, they lie so. Raises `BudgetError` for a mesh of more
    devices than there are.
    """
    mesh = meshes.manual_mesh()
    if mesh is None:
        structs = _laid(abstract.input_structs(closed), layout)
        is_set = not jax.sharding.get_abstract_mesh().empty  # it knows its devices
        return jax.jit(function).lower(*(structs if is_set else map(on_devices, structs)))
    checks = meshes.checks_varying()
    with runtime.outside():
        program, arguments = _on(_devices(mesh), mesh, function, closed, checks)
        return program.lower(*arguments)


def on_devices(struct: Any) -> Any:
    """Return a type on explicit axes, which name no devices, with the available devices."""
    mesh = getattr(getattr(struct, "sharding", None), "mesh", None)
    if not isinstance(mesh, jax.sharding.AbstractMesh) or mesh.size > len(jax.devices()):
        return struct
    return struct.update(sharding=NamedSharding(_devices(mesh), struct.sharding.spec))


def _laid(structs: list[Any], layout: Layout | None) -> list[Any]:
    """Return types with the shardings that a layout on automatic axes tells."""
    if layout is None or not layout.is_known or set(layout.mesh.axis_types) != {AxisType.Auto}:
        return structs
    mesh = layout.mesh if isinstance(layout.mesh, jax.sharding.Mesh) else _devices(layout.mesh)
    specs = [PartitionSpec(*(axes or None for axes in layout.spec(n))) for n in range(len(structs))]
    placed = zip(structs, specs, range(len(structs)), strict=True)
    return [s.update(sharding=NamedSharding(mesh, spec)) if n < len(layout.specs) else s for s, spec, n in placed]


def _devices(mesh: Any) -> jax.sharding.Mesh:
    """Return a mesh of the available devices, in the form of a mesh of the user's."""
    devices = jax.devices()
    if len(devices) < mesh.size:
        what = f"is to be measured on a mesh of {mesh.size} devices, but there are {len(devices)}."
        raise BudgetError(message("budget", what, "Run where the devices are, or give a strategy or a plan instead."))
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
