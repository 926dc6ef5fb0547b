"""Rows that run in blocks give what they give whole, and rows that meet are never parted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import mixing
from jointcut import aot
from jointcut.partition import Plan, split
from jointcut.partition.errors import PlanError
from jointcut.partition.plans.backend import CPU, GPU, PORTABLE
from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.partition.program.roles import Role, Tile
from jointcut.partition.tiles import hoist, pieces
from jointcut.partition.tiles.tile import grown, meeting, variables
from programs import CORPUS, EVERY_PROGRAM, OF_EACH_KIND

SEEDS, TOGETHER = (100 if EVERY_PROGRAM else 16), 4
PROGRAMS = [p for p in CORPUS if EVERY_PROGRAM or p.name in OF_EACH_KIND]
ROWS, WIDTH = 12, 8


@pytest.fixture(scope="module", autouse=True)
def wide():
    """Errors of rounding would hide errors of ours."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def joint_of(function, *args, **options):
    """The joint program of a function."""
    return aot.function(function, **options).trace(*args).program


def largest(program):
    """The numbers of the values of a joint program, the largest first."""
    numbered = variables(program.closed)
    return sorted(range(len(numbered)), key=lambda n: -abstract.aval_bytes(numbered[n].aval))


def weights_and_batch():
    draws = np.random.default_rng(0)
    return jnp.asarray(draws.normal(size=(WIDTH, WIDTH))), jnp.asarray(draws.normal(size=(ROWS, WIDTH)))


def of_rows(function):
    """The joint program of a loss of weights and a batch, and the tile of the batch."""
    program = joint_of(function, *weights_and_batch())
    value = next(n for n, v in enumerate(variables(program.closed)) if v.aval.shape == (ROWS, WIDTH))
    return program, partial(Tile, value, 0, 0)


def scans_of(closed):
    return [eqn for eqn in jaxprs.opened(closed)[0].eqns if eqn.primitive.name == "scan"]


# ------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("first", range(0, SEEDS, TOGETHER), ids="from {}".format)
def test_random_programs_in_blocks_equal_their_vjp(first):
    assert sum(mixing.check(mixing.program(seed)) for seed in range(first, first + TOGETHER))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program_of_the_corpus_in_blocks_gives_what_it_gives_whole(program):
    with jax.enable_x64(False), program.precision():
        traced = aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux).trace(
            *program.args, **program.kwargs
        )
        joint = traced.program
        inputs = jaxprs.opened(joint.closed)[0].invars
        given = [drawn(v.aval, n) for n, v in enumerate(inputs)]
        whole = runtime.evaluate(joint.closed, *given)
        for closed in some_tilings(joint):
            for got, want in zip(runtime.evaluate(closed, *given), whole, strict=True):
                assert_close(got, want, has_half="16[" in str(joint.closed))


def drawn(aval, n):
    """An array of a type: small numbers of both signs, for which nothing cancels that is large."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.reshape(jax.random.split(jax.random.key(n), int(np.prod(aval.shape))), aval.shape)
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, aval.dtype)
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        return (0.3 * jax.random.normal(jax.random.key(n), aval.shape)).astype(aval.dtype)
    return jnp.ones(aval.shape, aval.dtype)


def some_tilings(joint, most=3):
    """The program in two blocks around its largest values, each way once."""
    seen = set()
    for n in largest(joint):
        for axis in range(len(getattr(variables(joint.closed)[n].aval, "shape", ()))):
            for is_early in (True, False):
                found = grown(joint.closed, joint.roles, Tile(n, axis, 0, 2, is_early))
                if found is None or (is_early, found.tiling.eqns) in seen:
                    continue
                seen.add((is_early, found.tiling.eqns))
                yield joint.with_tile(Tile(n, axis, 0, 2, is_early)).closed
                if len(seen) == most:
                    return


def assert_close(got, want, has_half):
    """Equal but for the order of sums; not a number where the other is not."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if want.dtype == jax.dtypes.float0:
        return
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    one, other = (np.asarray(x).astype(np.result_type(x.dtype, np.float32)) for x in (got, want))
    finite = np.where(np.isfinite(other), np.abs(other), 0)
    scale = 1 + (finite.max() if finite.size else 0)
    np.testing.assert_allclose(one, other, rtol=0, atol=(3e-2 if has_half else 1e-4) * scale)


# ---------------------------------------------------------------------------------------------- rows that meet


@pytest.mark.parametrize(
    ("meets", "op"),
    [
        (lambda x: jnp.cumsum(x, axis=0), "cumsum"),
        (lambda x: jnp.sort(x, axis=0), "sort"),
        (lambda x: x - x[::-1], "rev"),
        (lambda x: jnp.roll(x, 1, axis=0), "slice"),
        (lambda x: x[jnp.asarray([1, 0, *range(2, ROWS)])], "gather"),
        (lambda x: jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c), x[0], x)[1], "slice"),
        (lambda x: x / jnp.max(x), "reduce_max"),
    ],
)
def test_the_first_op_in_which_rows_meet_is_named(meets, op):
    program, tile = of_rows(lambda w, x: jnp.sum((meets(x) @ w) ** 2))
    met = meeting(program.closed, program.roles, tile(2))
    assert met.startswith(f"{op} at "), met
    assert "test_tiles.py:" in met


def test_rows_that_meet_end_a_tile_and_what_lies_around_is_still_in_blocks():
    program, tile = of_rows(lambda w, x: jnp.sum(jnp.tanh(jnp.cumsum(jnp.tanh(x @ w), axis=0) @ w)))
    found = grown(program.closed, program.roles, tile(2))
    eqns = jaxprs.opened(program.closed)[0].eqns
    names = [eqns[i].primitive.name for i in sorted(found.tiling.eqns)]
    assert "tanh" in names
    assert "cumsum" not in names


# ----------------------------------------------------------------------- forward and backward of a block together


def losses():
    """Losses of one number, and why the backward of a block cannot be done before the cotangent is known; or None."""

    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1.0, 1.0),))
    return {
        "a sum": (lambda w, x: jnp.sum(jnp.tanh(x @ w)), True),
        "a mean": (lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), True),
        "a weighted mean": (lambda w, x: jnp.sum(x[:, 0] * jnp.tanh(x @ w)[:, 0]) / jnp.sum(x[:, 0]), True),
        "two terms": (lambda w, x: jnp.mean(jnp.tanh(x @ w)) + 0.1 * jnp.sum(jnp.sin(x @ w)), True),
        "a clipped cotangent": (lambda w, x: jnp.sum(clipped(jnp.tanh(x @ w))), False),
        "a root of a sum": (lambda w, x: jnp.sqrt(jnp.sum(jnp.tanh(x @ w) ** 2)), True),
        "batch statistics": (lambda w, x: jnp.sum(jnp.tanh(x @ w - jnp.mean(x @ w, axis=0)) ** 2), False),
    }


@pytest.mark.parametrize("name", losses())
def test_a_block_runs_backward_with_its_forward_where_the_loss_is_linear_in_its_cotangent(name):
    loss, is_early = losses()[name]
    program, tile = of_rows(loss)
    found = grown(program.closed, program.roles, tile(4, True))
    assert (found is not None) == is_early
    if found is None:
        return
    made = program.with_tile(tile(4, True))
    closed, boundary = made.closed, made.roles.forward_ops
    scans = [eqn.primitive.name == "scan" for eqn in jaxprs.opened(closed)[0].eqns]
    assert sum(scans) == sum(scans[:boundary]) == 1
    w, x = weights_and_batch()
    ct = jnp.asarray(-2.5)
    value, pull = jax.vjp(lambda w: loss(w, x), w)
    got = runtime.evaluate(closed, *program.consts, w, x, ct)
    for one, other in zip(got, (value, *pull(ct)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


def test_in_float16_forward_and_backward_stay_apart():
    w, x = (a.astype(jnp.float16) for a in weights_and_batch())
    program = joint_of(lambda w, x: jnp.sum(jnp.tanh(x @ w)), w, x)
    jaxpr = jaxprs.opened(program.closed)[0]
    cotangents = [v for v, role in zip(jaxpr.invars, program.roles.inputs, strict=True) if role is Role.COTANGENT]
    batch = next(v for v in jaxpr.invars if v.aval.shape == (ROWS, WIDTH))
    assert hoist.grown_early(program.closed, program.roles.forward_ops, cotangents, batch, 0, 0) is None


# --------------------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize("is_early", [True, False])
def test_the_size_of_a_program_does_not_depend_on_the_number_of_blocks(is_early):
    program = joint_of(lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2), jnp.eye(8), jnp.ones((128, 8)))
    value = next(n for n, v in enumerate(variables(program.closed)) if v.aval.shape == (128, 8))
    sizes = []
    for blocks in (8, 64):
        closed = program.with_tile(Tile(value, 0, 0, blocks, is_early)).closed
        jaxpr = jaxprs.opened(closed)[0]
        sizes.append(sum(1 + sum(len(inner.eqns) for inner in jaxprs.inner_jaxprs(eqn)) for eqn in jaxpr.eqns))
    assert sizes[0] == sizes[1]


def test_sums_of_narrow_numbers_are_added_up_in_float32():
    w, x = (a.astype(jnp.bfloat16) for a in weights_and_batch())
    program = joint_of(lambda w, x: jnp.sum(jnp.tanh(x @ w).astype(jnp.float32)), w, x)
    value = next(n for n, v in enumerate(variables(program.closed)) if v.aval.shape == (ROWS, WIDTH))
    (scan,) = (
        e
        for e in jaxprs.opened(program.with_tile(Tile(value, 0, 0, 4, True)).closed)[0].eqns
        if e.primitive.name == "scan"
    )
    carried = scan.outvars[: jaxprs.scan_layout(scan).num_carry]
    assert {(v.aval.shape, str(v.aval.dtype)) for v in carried} == {((), "float32"), ((WIDTH, WIDTH), "float32")}


@pytest.mark.parametrize("blocks", [2, 5, 12])
def test_random_masks_are_those_of_the_whole_batch(blocks):
    key = jax.random.key(3)

    def loss(w, x):
        keep = jax.random.bernoulli(key, 0.7, x.shape)
        noise = jax.vmap(lambda k: jax.random.normal(k, (WIDTH,), x.dtype))(jax.random.split(key, ROWS))
        return jnp.sum(jnp.where(keep, jnp.tanh(x @ w), 0) * noise)

    w, x = weights_and_batch()
    got = aot.function(loss, tiles={"args[1]": blocks}).grad(w, x)
    np.testing.assert_allclose(got, jax.grad(loss)(w, x), rtol=1e-12)


@pytest.mark.parametrize("backend", [CPU, GPU, PORTABLE], ids=lambda backend: backend.name)
@pytest.mark.parametrize("block_bytes", [0, 10**9])
def test_a_block_that_computes_values_again_gives_the_same(backend, block_bytes):
    def loss(w, x):
        for _ in range(6):
            x = jnp.tanh(x @ w) * jnp.sin(x)
        return jnp.mean(x**2)

    program, tile = of_rows(loss)
    cut = program.with_tile(replace(tile(3, True), block_bytes=block_bytes), backend)
    w, x = weights_and_batch()
    value, pull = jax.vjp(lambda w: loss(w, x), w)
    got = runtime.evaluate(cut.closed, *program.consts, w, x, jnp.asarray(-2.5))
    for one, other in zip(got, (value, *pull(-2.5)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


def test_a_block_that_may_take_little_computes_values_again():
    def loss(w, x):
        for _ in range(12):
            x = jnp.tanh(x @ w) * jnp.sin(x)
        return jnp.mean(x**2)

    program, tile = of_rows(loss)
    products = []
    for block_bytes in (0, 10**9):
        closed = program.with_tile(replace(tile(3, True), block_bytes=block_bytes), CPU).closed
        (scan,) = (eqn for eqn in jaxprs.opened(closed)[0].eqns if eqn.primitive.name == "scan")
        products.append(str(scan.params["jaxpr"]).count("dot_general"))
    assert products[0] > products[1]


def rounds(w, x):
    """Two rounds of messages along edges, which are added up at nodes in between."""
    sources, ends = jnp.arange(ROWS) % 5, (3 * jnp.arange(ROWS)) % 5
    nodes = jnp.sum(x, axis=0) * jnp.ones((5, 1), x.dtype)
    for _ in range(2):
        messages = jnp.tanh((nodes[sources] + x) @ w)
        nodes = nodes + jax.ops.segment_sum(messages, ends, 5)
    return jnp.mean(nodes**2)


def test_rows_that_meet_in_between_run_in_several_loops():
    program, tile = of_rows(rounds)
    found = grown(program.closed, program.roles, tile(3))
    boundary = program.roles.forward_ops
    halves = [min(level) < boundary for level in found.tiling.levels]
    assert halves.count(True) >= 2
    assert halves.count(False) >= 2
    closed = program.with_tile(tile(3)).closed
    assert len(scans_of(closed)) == len(found.tiling.levels)


def save_nothing(graph):
    return Plan.of(graph, [])


@pytest.mark.parametrize("strategy", ["min_cut", "best", "save_all", save_nothing])
@pytest.mark.parametrize("loss", [rounds, losses()["a mean"][0]], ids=["rounds", "a mean"])
def test_the_halves_of_a_program_in_blocks_give_what_jax_gives(loss, strategy):
    program, tile = of_rows(loss)
    made = program.with_tile(tile(3))
    if strategy is save_nothing and loss is rounds:  # the backward needs a sum of a loop, and no loop runs twice
        with pytest.raises(PlanError, match="is neither saved nor can it be recomputed"):
            split(made.closed, made.roles, strategy)
        return
    cut = split(made.closed, made.roles, strategy)
    w, x = weights_and_batch()
    ct = jnp.asarray(-2.5)
    value, pull = jax.vjp(lambda w: loss(w, x), w)
    outputs, gradients = cut([*program.consts, w, x], [ct])
    for one, other in zip((*outputs, *gradients), (value, *pull(ct)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_a_table_that_a_call_makes_for_all_blocks_is_not_read_by_rows():
    def loss(w, x):
        order = jax.jit(lambda n: jnp.clip(n, 0, ROWS - 1))(jnp.arange(ROWS))
        return jnp.sum(jnp.tanh(x @ w) * order[:, None]) + jnp.sum(jax.lax.cond(w[0, 0] > 0, lambda: x, lambda: 2 * x))

    program, tile = of_rows(loss)
    w, x = weights_and_batch()
    for is_early in (True, False):
        value, gradient = runtime.evaluate(program.with_tile(tile(4, is_early)).closed, *program.consts, w, x, 1.0)
        np.testing.assert_allclose(value, loss(w, x), rtol=1e-9)
        np.testing.assert_allclose(gradient, jax.grad(loss)(w, x), rtol=1e-9)


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_that_is_larger_than_a_block_is_added_in_pieces(monkeypatch, is_early, dtype):
    monkeypatch.setattr(pieces, "LEAST_BYTES", 1)
    w, x = (jnp.asarray(a, dtype) for a in weights_and_batch())

    def loss(w, x):
        return jnp.mean(jnp.sin(x @ w).astype(jnp.float32))

    program = joint_of(loss, w, x)
    value = next(n for n, v in enumerate(variables(program.closed)) if v.aval.shape == (ROWS, WIDTH))
    tile = Tile(value, 0, 0, 4, is_early)
    assert all("scan[" not in str(eqn.params["jaxpr"]) for eqn in scans_of(program.with_tile(tile, GPU).closed))
    closed = program.with_tile(tile, CPU).closed
    scans = [jaxprs.scan_layout(eqn).body for eqn in scans_of(closed)]
    (inner,) = (jaxprs.scan_layout(eqn).body for body in scans for eqn in body.eqns if eqn.primitive.name == "scan")
    (product,) = (eqn.outvars[0].aval for eqn in inner.eqns if eqn.primitive.name == "dot_general")
    assert abstract.aval_bytes(product) <= ROWS // 4 * WIDTH * w.dtype.itemsize
    got = runtime.evaluate(closed, *program.consts, w, x, jnp.float32(1.0))
    want = jax.value_and_grad(loss)(w, x)
    for one, other in zip(got, want, strict=True):
        one, other = (np.asarray(a, "float32") for a in (one, other))
        assert np.max(np.abs(one - other)) <= (1e-2 if dtype == "bfloat16" else 1e-6) * np.max(np.abs(other))


def test_an_array_that_blocks_read_in_another_order_is_moved_in_each_block():
    """So that no loop over blocks waits for moved copies of all weights."""

    def loss(w, x):
        return jnp.mean(jnp.sin(jnp.tanh(x @ w[::-1]) @ w[:, ::-1]))

    program, tile = of_rows(loss)
    w, x = weights_and_batch()
    for is_early in (True, False):
        closed = program.with_tile(tile(4, is_early)).closed
        eqns = jaxprs.opened(closed)[0].eqns
        moved = {v for eqn in eqns if eqn.primitive.name == "rev" for v in eqn.outvars}
        scans = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
        assert [sum(v in moved for v in jaxprs.variables(scan.invars)) for scan in scans] == [0] * len(scans)
        assert any(e.primitive.name == "rev" for scan in scans for e in jaxprs.scan_layout(scan).body.eqns)
        value, gradient = runtime.evaluate(closed, *program.consts, w, x, 1.0)
        np.testing.assert_allclose(value, loss(w, x), rtol=1e-9)
        np.testing.assert_allclose(gradient, jax.grad(loss)(w, x), rtol=1e-9)
