"""Run on eight devices of the host: what `test_on_devices` claims, one function for each claim, told as JSON.

Warnings are errors here as they are in the tests.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import mixing
from benchmarks.parallel import moves
from claims import tell
from jointcut import aot
from jointcut.partition.errors import PlanError, TraceError
from jointcut.partition.plans.backend import CPU, PORTABLE
from jointcut.partition.plans.planfile import dumps
from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.partition.program.roles import Tile
from jointcut.partition.tiles.layouts import Layout
from jointcut.partition.tiles.tile import grown, variables

LINE = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
TYPED = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
GRID = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
TYPED_GRID = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
KEYS = jax.random.split(jax.random.key(0), 4)
ROWS, WORDS = 2048, 512
W = {
    "in": 0.1 * jax.random.normal(KEYS[0], (16, 32)),
    "out": 0.1 * jax.random.normal(KEYS[1], (32, WORDS)),
    "table": jax.random.normal(KEYS[2], (WORDS, 16)),
}
X, Y = jax.random.normal(KEYS[3], (ROWS, 16)), jnp.arange(ROWS) % WORDS


def losses(w, x, y):
    logits = jnp.tanh(x @ w["in"]) @ w["out"]
    own = jnp.sum(logits * (jnp.arange(WORDS)[None] == y[:, None]), axis=1)
    return jax.nn.logsumexp(logits, axis=1) - own


def head(w, x, y):
    return jnp.mean(losses(w, x, y))


def masked(w, x, y):
    keeps = (y % 3 > 0).astype(x.dtype)
    return jnp.sum(losses(w, x, y) * keeps) / jnp.sum(keeps)


def dropped(w, x, y):
    return head(w, x * jax.random.bernoulli(jax.random.key(7), 0.8, x.shape), y)


def placed(w, x, y):
    return head(w, x + jnp.sin(0.01 * jnp.arange(ROWS))[:, None], y)


def embedded(w, x, y):
    return head(w, x + jnp.take(w["table"], y, axis=0), y)


def repeated(w, x, y):
    x, _ = lax.scan(lambda x, w: (x + jnp.sin(jnp.tanh(x @ w) @ w.T), None), x, jnp.stack([w["in"]] * 3))
    return head(w, x, y)


def normed(w, x, y):
    return head(w, (x - jnp.mean(x, 0)) * lax.rsqrt(jnp.var(x, 0) + 1e-3), y)


def half(w, x, y):
    return head(jax.tree.map(lambda a: a.astype(jnp.bfloat16), w), x.astype(jnp.bfloat16), y).astype(jnp.float32)


PROGRAMS = [head, masked, dropped, placed, embedded, repeated]
LAID = {
    "data": (LINE, P("d"), P()),
    "FSDP": (LINE, P("d"), P("d")),
    "tensor": (GRID, P("d"), P(None, "m")),
    "both axes": (GRID, P(("d", "m")), P()),
}


def laid(mesh, rows, weights):
    w = jax.device_put(W, NamedSharding(mesh, weights))
    return w, *jax.device_put((X, Y), NamedSharding(mesh, rows))


def near(got, want, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(np.max(np.abs(b)), 1e-3))


def temporaries(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def is_as_plain(program, args, tiles, least=0.75):
    """A step in blocks against plain JAX's: gradients, shardings, sums over devices by count and bytes, and memory."""
    plain = jax.jit(jax.value_and_grad(program)).lower(*args).compile()
    cut = aot.function(program, tiles=tiles).trace(*args).partition()
    (step,) = cut.made.programs(1)
    got, want = cut.compile().value_and_grad(*args), plain(*args)
    near(got, want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)
    ours, theirs = moves(step.as_text()), moves(plain.as_text())
    assert temporaries(step) <= least * temporaries(plain), (temporaries(step), temporaries(plain))
    return cut, ours, theirs


def each_device_runs_blocks_of_its_own_rows_and_devices_add_up_once():
    for program in PROGRAMS:
        for tiles in ({"args[1]": 8}, {"args[1]": 5})[: 1 + (program in (head, dropped))]:
            cut, ours, theirs = is_as_plain(program, laid(*LAID["data"]), tiles)
            (tile,) = cut.plan.tiles
            assert (tile.over, tile.is_early) == (("d",), True), str(tile)
            assert ours.keys() == theirs.keys() == {"all-reduce"}, (program.__name__, ours, theirs)
            assert all(a <= b for a, b in zip(ours["all-reduce"], theirs["all-reduce"], strict=True)), (ours, theirs)


def weights_in_parts_are_gathered_once_and_added_up_once():
    for program in (head, masked, embedded, repeated):
        _, ours, theirs = is_as_plain(program, laid(*LAID["FSDP"]), {"args[1]": 8})
        assert ours.keys() <= theirs.keys(), (program.__name__, ours, theirs)
        assert all(ours[name][0] <= theirs[name][0] for name in ours), (program.__name__, ours, theirs)


def other_axes_of_the_mesh_are_as_ever():
    for program in (head, dropped):
        is_as_plain(program, laid(*LAID["tensor"]), {"args[1]": 8})
        cut, ours, theirs = is_as_plain(program, laid(*LAID["both axes"]), {"args[1]": 8})
        assert cut.plan.tiles[0].over == ("d", "m")
        assert ours.keys() == theirs.keys() == {"all-reduce"}, (ours, theirs)


def rows_that_meet_in_between_run_in_loops_one_behind_the_other():
    args = laid(*LAID["data"])
    cut, ours, theirs = is_as_plain(normed, args, {"args[1]": 8}, least=1.6)
    assert not cut.plan.tiles[0].is_early
    assert ours.keys() == theirs.keys() == {"all-reduce"}, (ours, theirs)
    assert ours["all-reduce"][0] <= theirs["all-reduce"][0], (ours, theirs)
    made = aot.function(losses, tiles={"args[1]": 4}).trace(*args).partition()
    out, pull = made.compile().vjp(*args)
    want, pulled = jax.vjp(lambda w: losses(w, *args[1:]), args[0])
    near((out, pull(jnp.cos(out))), (want, pulled(jnp.cos(want))[0]))
    assert made.plan.tiles[0].over == ("d",)


def sums_are_added_in_float32_over_devices_too():
    args, wide = laid(*LAID["data"]), jax.tree.map(lambda a: np.asarray(a, np.float32), W)
    exact = jax.grad(head)(jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), wide), X, Y)
    got = aot.function(half, tiles={"args[1]": 8}).grad(*args)
    near(got, exact, 2e-2)


def explicit_axes_are_as_automatic_ones():
    def looked_up(w, x, y):
        return head(w, x + w["table"].at[y].get(out_sharding=P("d")), y)

    for program, weights in (
        (head, P()),
        (dropped, P()),
        (masked, P()),
        (looked_up, P()),
        (placed, P()),
        (head, P("d")),
    ):
        with jax.set_mesh(TYPED):
            _, ours, theirs = is_as_plain(program, laid(TYPED, P("d"), weights), {"args[1]": 8}, 1.0)
        assert all(ours[name][0] <= theirs[name][0] for name in ours), (program.__name__, ours, theirs)
    with jax.set_mesh(TYPED_GRID):
        args = laid(TYPED_GRID, P("d"), P(None, "m"))
        cut, *_ = is_as_plain(head, args, {"args[1]": 8})
        assert cut.plan.tiles[0].over == ("d",)
        step = aot.function(head, tiles={"args[1]": 8})
        near(jax.jit(jax.grad(lambda *args: step(*args)))(*args), jax.jit(jax.grad(head))(*args))


def a_budget_puts_rows_of_devices_into_blocks():
    for layout in ("data", "FSDP"):
        args = laid(*LAID[layout])
        plain = jax.jit(jax.value_and_grad(head)).lower(*args).compile()
        cut = aot.function(head, budget=0.4).trace(*args).partition()
        (step,) = cut.made.programs(1)
        near(cut.compile().value_and_grad(*args), plain(*args))
        assert [tile.over for tile in cut.plan.tiles] == [("d",)], cut.plan.tiles
        assert temporaries(step) <= 0.4 * temporaries(plain)
        ours, theirs = moves(step.as_text()), moves(plain.as_text())
        assert all(ours[name][0] <= theirs[name][0] for name in ours), (layout, ours, theirs)
        text = str(cut.plan.tiles[0])
        assert "blocks along axis 0 on each device along 'd'" in text, text


def inside_a_transformation_one_automatic_axis_is_known_and_several_are_not():
    step, args = aot.function(head, tiles={"args[1]": 8}), laid(*LAID["data"])
    for whole in (jax.value_and_grad(step), step.value_and_grad):
        made = jax.jit(whole).lower(*args).compile()
        plain = jax.jit(jax.value_and_grad(head)).lower(*args).compile()
        near(made(*args), plain(*args))
        assert moves(made.as_text()) == moves(plain.as_text())
        assert temporaries(made) <= 0.75 * temporaries(plain)
    near(jax.grad(step)(*args), jax.grad(head)(*args))
    text = (
        "tiles['args[1]'] names rows on automatic axes 'd' and 'm', and inside a transformation they do not tell "
        "along which.\nCall its own value_and_grad outside of jax.jit, make the axes explicit, or use jax.shard_map."
    )
    computed = jax.jit(jax.grad(lambda w, x, y: step(w, jnp.abs(x), y)))
    assert told(lambda: computed(*laid(*LAID["both axes"]))) == text
    near(jax.jit(jax.grad(step))(*laid(*LAID["both axes"])), jax.grad(head)(W, X, Y))
    near(jax.jit(jax.grad(step))(W, X, Y), jax.jit(jax.grad(head))(W, X, Y))


def told(call, kind=TraceError):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was refused")


def rows_that_lie_otherwise_are_told():
    def of_pair(w, pair):
        return head(w, *pair)

    w, x, y = laid(*LAID["data"])
    everywhere = jax.device_put(Y, NamedSharding(LINE, P()))
    step = aot.function(of_pair, tiles={"args[1]": 8})
    assert told(lambda: step.grad(w, (x, everywhere))) == (
        "tiles['args[1]'] names rows that lie along 'd' (args[1][0]) and along no axis of a mesh (args[1][1]).\n"
        "Lay them alike, or give the path of arrays that lie alike."
    )
    assert told(lambda: aot.function(head, tiles={"args[1]": 257}).grad(w, x, y)) == (
        "tiles['args[1]'] asks for 257 blocks of 256 rows of each device.\nGive at most 256."
    )
    near(aot.function(head, tiles={"args[1]": 8}).grad(w, x, everywhere), jax.grad(head)(W, X, Y))
    whole = jax.device_put((X, Y), NamedSharding(LINE, P()))
    near(aot.function(head, tiles={"args[1]": 8}).grad(w, *whole), jax.grad(head)(W, X, Y))


def a_plan_with_blocks_on_devices_is_read_back_and_refused_elsewhere():
    args = laid(*LAID["data"])
    cut = aot.function(head, tiles={"args[1]": 8}).trace(*args).partition()
    text = dumps(cut.plan, cut.split.graph)
    read = aot.function(head, plan=text)
    assert read.trace(*args).partition().plan.tiles[0].over == ("d",)
    near(read.grad(*args), jax.grad(head)(W, X, Y))
    assert told(lambda: read.grad(W, X, Y), PlanError) == (
        "plan.tiles have rows along 'd', an axis of a mesh on which no argument lies.\n"
        "Lay the arguments over a mesh with this axis, or make a plan."
    )


def second_derivatives_are_those_of_plain_jax():
    args = laid(*LAID["data"])
    step = aot.function(head, tiles={"args[1]": 8})

    def curved(slope):
        return jax.jvp(lambda w: slope(w, *args[1:]), (args[0],), (args[0],))[1]

    near(curved(step.grad), curved(jax.grad(head)), 2e-5)


def a_layout_is_followed_through_reshapes_products_and_loops():
    def deep(w, x):
        x = x.reshape(64, 32, 16)
        y = x.reshape(-1, 16) @ w
        z, _ = lax.scan(lambda z, _: (jnp.tanh(z @ w.T @ w), None), y, None, length=2)
        return x, y, z, jnp.sum(z, 0), z.reshape(2048 * 32)

    closed = jax.make_jaxpr(deep)(W["in"], X)
    rows = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(LINE, P("d")))
    weights = jax.ShapeDtypeStruct(W["in"].shape, X.dtype, sharding=NamedSharding(LINE, P("d")))
    layout = Layout.among([weights, rows])
    assert layout is not None
    values = layout.laid(closed)
    ends = jaxprs.opened(closed)[0].outvars
    assert [values.parts(v) for v in ends] == [8, 8, 8, 1, 8]
    assert [values.axes(v, 0) for v in ends] == [("d",)] * 3 + [()] + [("d",)]
    assert Layout.among([jax.ShapeDtypeStruct(X.shape, X.dtype), X]) is None


def random_programs_that_mix_rows_are_as_plain_jax():
    """In float64, around several values of each, with forward and backward of a block together and apart."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with jax.enable_x64(True):
        for seed in (1, 2, 4, 7):
            rows = mixing.program(seed)
            value, pull = jax.vjp(lambda *given, rows=rows: rows.loss(*given, *rows.arguments[3:]), *rows.arguments[:3])
            want = [value, *pull(jnp.ones((), value.dtype))]
            program, given = mixing.joint_of(rows)
            program = replace(program, layout=Layout(mesh, ((("d",),),)))
            tiles = [*some_tiles(program, 3)]
            assert tiles, seed
            for tile in tiles:
                closed = program.with_tile(tile, CPU if seed % 2 else PORTABLE).closed
                got = jax.jit(lambda *flat, closed=closed: runtime.evaluate(closed, *flat))(*given)
                assert any(eqn.primitive.name == "shard_map" for eqn in jaxprs.opened(closed)[0].eqns), str(tile)
                near(got, want, 1e-9)


def some_tiles(program, most):
    """Tiles of rows of two devices around the largest values of a program, each way once."""
    numbered, seen = variables(program.closed), set()
    for n in sorted(range(len(numbered)), key=lambda n: -abstract.aval_bytes(numbered[n].aval)):
        for axis, size in enumerate(getattr(numbered[n].aval, "shape", ())):
            for is_early in (True, False) if size % 2 == 0 else ():
                block_bytes = 0 if is_early and not seen else None
                tile = Tile(n, axis, 0, 2, is_early, block_bytes=block_bytes, over=("d",))
                found = grown(program.closed, program.roles, tile)
                if found is None or (is_early, found.tiling.eqns) in seen or len(seen) == most:
                    continue
                seen.add((is_early, found.tiling.eqns))
                yield tile


def budgets_find_blocks_on_explicit_axes():
    with jax.set_mesh(TYPED):
        whole, rows = NamedSharding(TYPED, P()), NamedSharding(TYPED, P("d"))
        args = jax.device_put(W, whole), jax.device_put(X, rows), jax.device_put(Y, rows)
        cut = aot.function(head, budget=0.3).trace(*args).partition()
        assert cut.plan.tiles and cut.plan.tiles[0].over == ("d",), cut.plan.tiles
        near(cut.compile().value_and_grad(*args), jax.value_and_grad(head)(W, X, Y))
    w, x, _ = laid(TYPED, P("d"), P())  # where no mesh is set, and no type is like its text
    deep = lambda w, x: jnp.mean(jnp.sin(jnp.tanh(jnp.sin(jnp.tanh(x @ w["in"])))))  # noqa: E731
    cut = aot.function(deep, budget=0.5).trace(w, x).partition()
    assert cut.plan.tiles and cut.plan.tiles[0].over == ("d",), cut.plan.tiles
    near(cut.compile().value_and_grad(w, x), jax.jit(jax.value_and_grad(deep))(w, x))


def updates_of_parameters_run_in_blocks():
    def update(slopes, state, w):
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, slopes)
        return jax.tree.map(lambda p, m: p - 0.1 * m, w, state), state

    def plain(w, state, x, y):
        value, slopes = jax.value_and_grad(head)(w, x, y)
        return value, *update(slopes, state, w)

    for mesh, options in product((LINE, TYPED), ({"tiles": {"args[1]": 8}}, {"budget": 0.4})):
        w, x, y = laid(mesh, P("d"), P("d"))
        start = lambda w=w: (w | {}, jax.tree.map(jnp.zeros_like, w))  # noqa: E731 - a step gives up its arrays
        whole = jax.jit(plain).lower(*start(), x, y).compile()
        want, step = whole(*start(), x, y), aot.function(head, **options)
        if "tiles" in options:
            in_jit = jax.jit(lambda *args, step=step: step.value_and_update(*args, update=update))
            assert temporaries(in_jit.lower(*start(), x, y).compile()) <= 0.5 * temporaries(whole)
        given = jax.tree.map(jnp.copy, start())
        got = step.value_and_update(*given, x, y, update=update)
        near(got, want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)


def an_axis_of_one_device_has_all_rows():
    mesh = jax.make_mesh((1, 8), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    w = jax.device_put(W, NamedSharding(mesh, P())) | {
        "out": jax.device_put(W["out"], NamedSharding(mesh, P(None, "m")))
    }
    args = w, *jax.device_put((X, Y), NamedSharding(mesh, P("d")))
    made = aot.function(head, tiles={"args[1]": 4})
    assert made.trace(*args).partition().plan.tiles[0].over == ()
    near(made.value_and_grad(*args), jax.value_and_grad(head)(W, X, Y))


CLAIMS = [
    budgets_find_blocks_on_explicit_axes,
    updates_of_parameters_run_in_blocks,
    an_axis_of_one_device_has_all_rows,
    each_device_runs_blocks_of_its_own_rows_and_devices_add_up_once,
    weights_in_parts_are_gathered_once_and_added_up_once,
    other_axes_of_the_mesh_are_as_ever,
    rows_that_meet_in_between_run_in_loops_one_behind_the_other,
    sums_are_added_in_float32_over_devices_too,
    explicit_axes_are_as_automatic_ones,
    a_budget_puts_rows_of_devices_into_blocks,
    inside_a_transformation_one_automatic_axis_is_known_and_several_are_not,
    rows_that_lie_otherwise_are_told,
    a_plan_with_blocks_on_devices_is_read_back_and_refused_elsewhere,
    second_derivatives_are_those_of_plain_jax,
    a_layout_is_followed_through_reshapes_products_and_loops,
    random_programs_that_mix_rows_are_as_plain_jax,
]


if __name__ == "__main__":
    tell(CLAIMS)
