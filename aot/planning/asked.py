"""Find the rows that a name stands for, and run them in blocks where a user asks for it.

A name is the path of an argument, whose arrays have the rows along their first axis, or the name of a size: all
arguments with that size have the rows, each along the first axis of that size. Sizes have names in symbolic shapes, or
by the option `shapes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from jointcut.aot.trace.joint import Joint
from jointcut.aot.trace.shapes import shapes
from jointcut.partition.errors import CallError, TraceError, choices, message, nearest
from jointcut.partition.figures import counted
from jointcut.partition.plans.backend import Backend
from jointcut.partition.program.axes import Rows
from jointcut.partition.program.jax import abstract
from jointcut.partition.program.roles import Role, Side, Tile
from jointcut.partition.program.sizes import is_symbolic, names
from jointcut.partition.tiles.apart import apart
from jointcut.partition.tiles.tile import Prepared, grown, meeting, variables

_FEW = 12  # names in a message

#: Shapes in which sizes may be names, by the path of an argument.
Shapes = Mapping[str, Sequence[Any]]


def in_asked_blocks(program: Joint, asking: Mapping[str, int], named: Shapes, backend: Backend) -> Joint:
    """Return a program in which the rows that names stand for run in numbers of blocks.

    Forward and backward of a block run together if the backward can be done for a cotangent of one. Rows that lie on
    several devices stay there: each runs so many blocks of its own. Raises `TraceError` if a name stands for no rows,
    or for the same as another one, if the blocks are more than the rows, or if nothing treats the rows alone; and if
    sums over devices wait to be added up.
    """
    if program.unreduced:
        what = f"asks for blocks, and {program.unreduced} is `reduced` or `unreduced` along an axis of its mesh."
        raise TraceError(message("tiles", what, "Leave tiles out, or add up after the function: jax.reshard(x, P())."))
    known: dict[str, Rows] = {}
    numbered, seeds = variables(program.closed), [_seed(program, *pair, named) for pair in asking.items()]
    for name, seed in zip(asking, seeds, strict=True):
        for other in (other for other, rows in known.items() if rows.place(numbered[seed.value]) == seed.axis):
            what = f"name the same rows, those of {program.roles.input_path(seed.value)} along axis {seed.axis}."
            raise TraceError(message(f"tiles[{other!r}] and tiles[{name!r}]", what, "Give one of them."))
        tile, region = _grown(program, name, seed)
        program, known[name] = program.with_tile(tile, backend), region.tiling.rows
        if program.roles.tiles[-1].blocks < min(seed.blocks, 2):
            count = _rows_of_a_device(program, seed)
            what = f"asks for {counted(seed.blocks, 'block')} of {counted(count, 'row')}, which must be equally large."
            cure = f"Give a number that divides {count}, or leave it out."
            raise TraceError(message(f"tiles[{name!r}]", what, cure))
    return program


def _seed(program: Joint, name: str, blocks: int, named: Shapes) -> Tile:
    """Return the rows that a name stands for, in the largest array that has them, for a number of blocks."""
    numbered, where = variables(program.closed), f"tiles[{name!r}]"
    rows = rows_of(program, name, where, named)
    value = max(rows, key=lambda n: abstract.aval_bytes(numbered[n].aval))
    count, path = numbered[value].aval.shape[rows[value]], program.roles.input_path(value)
    array = path if is_at(path, name) else f"{name} of {path}"
    seed = Tile(value, rows[value], 0, blocks, array=array, over=_axes_of(program, rows, where))
    if blocks > (count := _rows_of_a_device(program, seed)) or count < 2:
        what = f"asks for {counted(blocks, 'block')} of {counted(count, 'row')}{' of each device' * bool(seed.over)}."
        raise TraceError(message(where, what, f"Give at most {count}." if count > 1 else "Leave it out."))
    return replace(seed, array=f"{array}{_mixed(program, rows)}")


def _rows_of_a_device(program: Joint, seed: Tile) -> int:
    """Return how many of the rows lie on one device."""
    count = variables(program.closed)[seed.value].aval.shape[seed.axis]
    return count // (program.layout.devices(seed.over).number if program.layout else 1)


def _axes_of(program: Joint, rows: Mapping[int, int], where: str) -> tuple[str, ...]:
    """Return the axes of a mesh along which the rows of some inputs lie; none where all devices have all rows.

    Inside a transformation of JAX's rows on automatic axes do not tell where they lie. If there is one axis, they are
    laid along that. Raises `TraceError`, about `where`, if there are several, or if they lie along different ones.
    """
    if (layout := program.layout) is None:
        return ()
    if unknown := [n for n in rows if layout.specs[n : n + 1] == (None,)]:
        axes = [axis for axis, size in layout.mesh.shape.items() if size > 1]
        count = variables(program.closed)[unknown[0]].aval.shape[rows[unknown[0]]]
        if len(axes) == 1 and count % layout.mesh.size == 0:
            return (axes[0],)
        what = f"names rows on automatic axes {_axes(axes)}, and inside a transformation they do not tell along which."
        if len(axes) == 1:
            what = f"names {count} rows, which {layout.mesh.size} devices along {_axes(axes)} cannot share equally."
        cure = "Call its own value_and_grad outside of jax.jit, make the axes explicit, or use jax.shard_map."
        raise TraceError(message(where, what, cure))
    known = {program.roles.input_path(n): ([*layout.spec(n)[axis:], ()])[0] for n, axis in rows.items()}
    (one, axes), *others = known.items()
    if (other := next((pair for pair in others if pair[1] != axes), None)) is not None:
        what = f"names rows that lie along {_axes(axes)} ({one}) and along {_axes(other[1])} ({other[0]})."
        raise TraceError(message(where, what, "Lay them alike, or give the path of arrays that lie alike."))
    return axes


def _axes(axes: Sequence[str]) -> str:
    return " and ".join(map(repr, axes)) or "no axis of a mesh"


def _mixed(program: Joint, rows: Mapping[int, int]) -> str:
    """Say which op of the forward is the first to mix rows, with its line; nothing where no op does."""
    _, mixing = apart(program.closed, program.roles, rows, program.carries)
    first = next((op for op in mixing if op.side is Side.FORWARD), None)
    if first is None:
        return ""
    return f", whose rows are mixed first by {first.op}{f' at {first.source}' if first.source else ''}"


def _grown(program: Joint, name: str, seed: Tile) -> tuple[Tile, Prepared]:
    """Return the tile with forward and backward of a block together, or else apart, and the equations in it."""
    for tile in (replace(seed, is_early=True), seed):
        if (region := grown(program.closed, program.roles, tile)) is not None:
            return tile, region
    met = meeting(program.closed, program.roles, seed)
    cure = f"They meet first in {met}." if met else "Leave it out."
    raise TraceError(message(f"tiles[{name!r}]", "names rows that no op treats one by one.", cure))


# ------------------------------------------------------------------------------------- the rows that a name stands for


def rows_of(program: Joint, name: str, where: str, named: Shapes) -> dict[int, int]:
    """Return the axis of the rows that a name stands for, by the number of each input that has them.

    `named` has names for sizes that are numbers in the program. Raises `TraceError`, about `where`, if the arguments
    have no such rows.
    """
    inputs = zip(program.roles.input_paths, variables(program.closed), strict=False)
    sized = [[*map(str, named.get(path, getattr(v.aval, "shape", ())))] for path, v in inputs]
    known = {size for shape in sized for size in shape if size in names(size)}
    if name not in known:
        return dict.fromkeys(_arrays_at(program, name, where, sorted(known)), 0)
    having = [n for n, shape in enumerate(sized) if program.roles.inputs[n] is Role.PRIMAL and name in names(shape)]
    for n in (n for n in having if name not in sized[n]):
        size = next(size for size in sized[n] if name in names(size))
        what = f"names rows, of which {program.roles.input_paths[n]} has {size}: nobody knows which belong together."
        raise TraceError(message(where, what, "Give the path of an argument."))
    return {n: sized[n].index(name) for n in having}


def _arrays_at(program: Joint, path: str, where: str, others: Iterable[str] = ()) -> list[int]:
    """Return the numbers of the inputs at the path of an argument, or below, that have rows along their first axis.

    Raises `TraceError`, about `where`, if there are none, or if they differ in length. `others` may be named instead.
    """
    inputs = enumerate(zip(program.roles.input_paths, variables(program.closed), program.roles.inputs, strict=False))
    primals = {n: (at, getattr(v.aval, "shape", ())) for n, (at, v, role) in inputs if role is Role.PRIMAL}
    sizes = {at: shape[0] for at, shape in primals.values() if shape and is_at(at, path)}
    if not sizes:
        known = [*others, *(at for at, shape in primals.values() if shape)]
        raise TraceError(message(where, "names no argument with rows.", _cure(path, known, has_names=bool(others))))
    if len(set(sizes.values())) > 1:
        by_size = sorted(sizes.items(), key=lambda pair: -pair[1] if isinstance(pair[1], int) else 0)
        (one, many), *_, (other, few) = by_size
        what = f"names arrays of {many} rows ({one}) and of {few} rows ({other})."
        raise TraceError(message(where, what, "Give the path of arrays whose first axes are equally long."))
    return [n for n, (at, _) in primals.items() if at in sizes]


def _cure(path: str, known: Sequence[str], *, has_names: bool) -> str:
    """Return what to name instead of a path or name that stands for no rows; of many the nearest."""
    told = choices(path, known) if len(known) <= _FEW else f"Known names: {nearest(path, known, _FEW)}."
    if not path.isidentifier() or has_names:
        return told
    like = next((at for at in reversed(known) if "[" in at), "args[0]")
    return f"If it is a size, say of which argument: shapes={{{like!r}: '{path}, ...'}}. {told}"


def is_at(path: str, prefix: str) -> bool:
    """Whether a path is another one, or leads on from it."""
    return path.startswith(prefix) and path[len(prefix) :][:1] in ("", ".", "[")


def named_shapes(program: Joint, given: Mapping[str, str]) -> Shapes:
    """Return the shapes of the arguments in which a user gave names to sizes, by path.

    Raises `CallError` for a path without arrays, for sizes that the arrays do not have, and for a name of two sizes.
    """
    found: dict[str, Sequence[Any]] = {}
    first: dict[str, tuple[Any, str]] = {}
    inputs = zip(program.roles.input_paths, variables(program.closed), program.roles.inputs, strict=False)
    arrays = {path: v.aval for path, v, role in inputs if role is Role.PRIMAL}
    for prefix, spec in given.items():
        at = {path: aval for path, aval in arrays.items() if is_at(path, prefix) and hasattr(aval, "shape")}
        if not at:
            cure = _cure(prefix, [*arrays], has_names=True)
            raise CallError(message(f"shapes[{prefix!r}]", "names no array of the arguments.", cure))
        for path, aval in at.items():
            found[path] = sizes = _sizes(path, aval, spec)
            for name, number in zip(map(str, sizes), aval.shape, strict=True):
                known, other = first.setdefault(name, (number, path))
                if name in names(name) and known != number:
                    what = f"gives the name {name!r} to {known} of {other} and to {number} of {path}."
                    raise CallError(message("shapes", what, "Give two names, or arrays of one size."))
    return found


def _sizes(path: str, aval: Any, spec: str) -> Sequence[Any]:
    """Return the shape of an array in which sizes have names, such as `(b, 128)`."""
    if is_symbolic(aval.shape):
        return aval.shape
    try:
        sizes = shapes(spec, like=jax.ShapeDtypeStruct(aval.shape, aval.dtype)).shape
    except CallError:
        sizes = ()
    pairs = [*zip(sizes, aval.shape, strict=False)]
    if len(sizes) == len(aval.shape) and all(names(size) or size == number for size, number in pairs):
        return sizes
    what = f"has the shape {aval.shape}, which shapes={spec!r} does not fit."
    raise CallError(message(path, what, "Write it as aot.shapes does: 'b, 128', 'b, ...', '_, t, ...'."))
