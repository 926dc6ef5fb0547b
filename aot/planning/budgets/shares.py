"""Take the bytes of a budget for each of several devices, where a step is part of a program of the user's.

A function that is given the arguments of a `jax.jit` is weighed as these lie. Where it is given what the step computed,
this is not known on automatic axes: the step is weighed for one device, as if it held the whole batch. With `devices`,
or a target of several, each is taken to hold the differentiated arguments and their gradients whole, and a share of the
rest. Types that carry a sharding, and steps that are called outside, are weighed for each device anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax

from jointcut.aot.options.limits import Limit
from jointcut.aot.trace.joint import Joint
from jointcut.partition.errors import BudgetError, message
from jointcut.partition.figures import human_bytes
from jointcut.partition.program.jax import abstract, jaxprs, meshes, runtime
from jointcut.partition.program.roles import Role


def shared(budget: Limit, program: Joint, devices: int | None) -> Limit:
    """Return the bytes of all devices for a budget of each; other budgets, and budgets of one device, are unchanged."""
    if devices is None or budget.peak_bytes is None or not _is_whole(program):
        return budget
    whole = _whole_bytes(program)
    return replace(budget, peak_bytes=max(devices * (budget.peak_bytes - whole) + whole, 1))


@contextmanager
def told(budget: Limit, program: Joint, devices: int | None) -> Iterator[None]:
    """Say in a `BudgetError` how many devices its bytes are for, and how to give them for one.

    Raises `BudgetError` if the mesh of the arguments has no such number of `devices` that share a batch.
    """
    _refuse_others(program, devices)
    try:
        yield
    except BudgetError as error:
        count = jax.device_count() if devices is None else devices
        if budget.peak_bytes is not None and count > 1 and _is_whole(program):
            error.add_note(_note(budget, program, devices, count))
        elif (count := _devices(program)) > 1:
            error.add_note(f"All of these are bytes of one of {count} devices.")
            for note in _too_large(budget, program):
                error.add_note(note)
        raise


def _devices(program: Joint) -> int:
    """On how many devices a program is laid, or runs in a `jax.shard_map` around."""
    mesh = meshes.manual_mesh()
    return program.graph.devices if mesh is None else mesh.size


def _refuse_others(program: Joint, devices: int | None) -> None:
    layout = program.layout
    if devices is None or layout is None or layout.mesh.size % devices == 0:
        return
    axes = ", ".join(f"{axis!r}: {size}" for axis, size in layout.mesh.shape.items())
    what = f"is for each of {devices} devices that share the batch, and the arguments lie on a mesh of {axes}."
    cure = f"Give a number of devices= that divides {layout.mesh.size}, or a target of as many devices as the mesh has."
    raise BudgetError(message("budget", what, cure))


def _too_large(budget: Limit, program: Joint) -> Iterator[str]:
    """Name the largest argument that is whole on each device, if it alone takes more than the budget.

    In a `jax.shard_map` around it may also be a part.
    """
    laid, most = program.laid, budget.peak_bytes
    if most is None:
        return
    inputs = zip(jaxprs.opened(program.closed)[0].invars, program.roles.input_paths, strict=False)
    sizes = {path: abstract.aval_bytes(v.aval) for v, path in inputs if laid is None or laid.parts(v) == 1}
    path = max(sizes, key=lambda path: sizes[path], default="")
    if path and sizes[path] > most:
        whole = " on each device" if laid is None else ", whole on each device"
        yield f"{path} alone takes {sizes[path]:,} bytes{whole}. Lay it in parts over the mesh."


def _note(budget: Limit, program: Joint, devices: int | None, count: int) -> str:
    if devices is None:
        return (
            f"Inside a transformation of yours these are the bytes of all {count} devices together. Where they share "
            f"the batch, give the bytes of one and say how many they are: aot.function(..., devices={count})."
        )
    each = f"{budget.peak_bytes:,} bytes on each of {count} devices"
    held = human_bytes(_whole_bytes(program))
    return f"These are the bytes of all together, for {each}, of which {held} are parameters and gradients on each."


def _is_whole(program: Joint) -> bool:
    """Whether a step is weighed as if one device held it all, though several may run it."""
    inputs = jaxprs.opened(program.closed)[0].invars
    is_placed = program.laid is not None or any(meshes.is_explicit(getattr(v.aval, "sharding", None)) for v in inputs)
    return runtime.tracing() and meshes.manual_mesh() is None and not is_placed


def _whole_bytes(program: Joint) -> int:
    """Return the bytes of the differentiated arguments, and of the gradients."""
    pairs = zip(jaxprs.opened(program.closed)[0].invars, program.roles.inputs, strict=True)
    primals = [v.aval for v, role in pairs if role is Role.PRIMAL]
    return 2 * sum(abstract.aval_bytes(primals[i]) for i in program.differentiated)
