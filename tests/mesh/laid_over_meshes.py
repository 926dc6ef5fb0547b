"""Run on eight devices of the host: programs of the corpus that lie over meshes, with the gradients of one device.

python tests/mesh/laid_over_meshes.py PART PARTS

Each axis is made eight times as long, and numbers are float64, where plain JAX takes the program so. It lies on axes of
both kinds, with its data by rows or with all arrays along axes as drawn, and its data also in a `shard_map`. In turn it
is called and stands in the user's jit, by the default plan and by the one of least memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from claims import tell
from jointcut import aot
from oracle import loss
from programs import CORPUS, EVERY_PROGRAM, OF_EACH_KIND, Program, named

SIZES = {"line": ((8,), ("d",)), "grid": ((2, 4), ("d", "m"))}
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Auto}
MESHES = {
    (name, kind): jax.make_mesh(*size, axis_types=(of,) * len(size[0]))
    for (name, size), (kind, of) in product(SIZES.items(), KINDS.items())
}
PLACES = (*product(("data", "drawn"), ("automatic", "explicit")), ("data", "manual"))
WAYS = tuple(product((None, 0.0), (False, True)))  # a budget, and whether in the user's jit


def as_plain_over_meshes(program, number):
    function = loss(program, program.function)
    args, want = given(program, jax.jit(jax.value_and_grad(function, program.argnums)))
    draws = np.random.default_rng(number)
    rtol = program.rtol if "half" in program.tags else 1e-12
    ways = [WAYS[i % 4] for i in draws.permutation(len(PLACES))]
    for (how, kind), (budget, is_in_jit) in zip(PLACES, ways, strict=True):
        mesh = MESHES["grid" if how == "drawn" and draws.integers(2) else "line", kind]
        case = f"{program.name}: {how}, {kind}, {dict(mesh.shape)}, {budget=}, {is_in_jit=}"
        places = shardings(args, program.argnums, how, mesh, draws)
        on_mesh = mapped(function, mesh, places) if kind == "manual" else function
        with jax.set_mesh(mesh) if draws.integers(2) else nullcontext():
            put = jax.tree.map(lambda leaf, to: jax.device_put(leaf, to) if is_array(leaf) else leaf, args, places)
            try:
                plain = jax.jit(jax.value_and_grad(on_mesh, program.argnums))(*put)
            except Exception as refusal:  # noqa: BLE001 - JAX has no public name for types that it refuses
                assert kind != "automatic", case
                assert isinstance(refusal, ValueError | TypeError) or "Sharding" in type(refusal).__name__, case
                continue
            try:
                got = ours(on_mesh, program.argnums, budget, is_in_jit)(*put)
                near(got, plain if kind == "manual" else want, rtol)
                if kind == "explicit":
                    lie_alike(got, plain)
            except Exception as error:
                error.add_note(case)
                raise


def given(program, step):
    """The arguments that plain JAX takes, and what its step gives on one device."""
    for times in (8, 1):
        args = jax.tree.map(partial(longer, times=times), program.args)
        with suppress(TypeError, ValueError, IndexError):
            return args, step(*args)
    return program.args, step(*program.args)


def longer(leaf, times):
    """An array with longer axes, no two rows alike, in float64."""
    if not is_array(leaf):
        return leaf
    made = np.tile(np.asarray(leaf), [times if size > 1 else 1 for size in leaf.shape])
    if not np.issubdtype(made.dtype, np.inexact):
        return jnp.asarray(made)
    wide = made.astype(np.complex128 if made.dtype.kind == "c" else np.float64)
    return jnp.asarray(wide * (1 + 0.1 * np.cos(np.arange(wide.size)).reshape(wide.shape)))


def is_array(leaf):
    return isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def shardings(args, argnums, how, mesh, draws):
    """Shardings of the arguments: of data, which is not differentiated, by rows, or of all along axes as drawn."""
    ours = {argnums} if isinstance(argnums, int) else {*argnums}

    def one(is_data, leaf):
        axes = [None] * np.ndim(leaf)
        for name, size in mesh.shape.items() if is_array(leaf) else ():
            fitting = [i for i, n in enumerate(leaf.shape) if n and n % size == 0 and axes[i] is None]
            if how == "drawn" and fitting:
                axes[draws.choice(fitting)] = name
            elif how == "data" and is_data and 0 in fitting:
                axes[0] = name
        return NamedSharding(mesh, P(*axes))

    is_data = [len(args) == 1 or i not in ours for i in range(len(args))]
    return tuple(jax.tree.map(partial(one, d), arg) for d, arg in zip(is_data, args, strict=True))


def mapped(function, mesh, places):
    """The mean of a function over the devices of a mesh, each with its rows."""
    specs = jax.tree.map(lambda place: place.spec, places)
    return jax.shard_map(lambda *args: lax.pmean(function(*args), "d"), mesh=mesh, in_specs=specs, out_specs=P())


def ours(function, argnums, budget, is_in_jit):
    cut = aot.function(function, argnums=argnums, budget=budget)
    return jax.jit(jax.value_and_grad(lambda *args: cut(*args), argnums)) if is_in_jit else cut.value_and_grad


def near(got, want, rtol):
    """Equal types and numbers, relative to the largest of each array."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, path
        if b.dtype != jax.dtypes.float0:
            a, b = np.asarray(a), np.asarray(b)
            most = np.max(np.abs(b), where=np.isfinite(b), initial=1e-3)
            np.testing.assert_allclose(a, b, rtol, rtol * most, err_msg=jax.tree_util.keystr(path))


def lie_alike(got, want):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        if isinstance(b, jax.Array):
            assert a.sharding.is_equivalent_to(b.sharding, b.ndim), (path, a.sharding, b.sharding)


def claim_of(program: Program, number: int) -> Callable[[], None]:
    def claim():
        with jax.enable_x64(True):
            as_plain_over_meshes(program, number)

    claim.__name__ = program.name
    return claim


if __name__ == "__main__":
    part, parts = map(int, sys.argv[1:])
    programs = [program for program in CORPUS if EVERY_PROGRAM or program.name in OF_EACH_KIND]
    programs.remove(named("sharded_map"))  # it has a mesh of its own
    tell([claim_of(program, number) for number, program in [*enumerate(programs)][part::parts]])
