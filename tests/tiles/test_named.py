"""Rows run in blocks by the name of a size; a name that stands for no such rows is refused in words."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.cache.store import Store
from jointcut.partition.errors import CallError, TraceError

WIDTH, ROWS, WORDS = 8, 24, 32
SHAPES = {"args[0]": "d, v", "args[1]": "b, d", "args[2]": "b"}


def loss(w, x, y):
    logits = x @ w
    chosen = jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)


def by_columns(w, batch):
    return jnp.mean(jnp.tanh(w.T @ batch["x"]) * batch["mask"])


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    w = 0.1 * jax.random.normal(keys[0], (WIDTH, WORDS))
    return w, jax.random.normal(keys[1], (ROWS, WIDTH)), jax.random.randint(keys[2], (ROWS,), 0, WORDS)


def in_columns():
    keys = jax.random.split(jax.random.key(1), 3)
    batch = {"x": jax.random.normal(keys[1], (WIDTH, ROWS)), "mask": jax.random.normal(keys[2], (ROWS,))}
    return jax.random.normal(keys[0], (WIDTH, WIDTH)), batch


def agrees(step, function, *args):
    got, want = step.value_and_grad(*args), jax.value_and_grad(function)(*args)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-7)
    return True


@pytest.mark.parametrize("blocks", [2, 5, ROWS])
def test_a_size_runs_in_blocks_by_its_name(blocks):
    step = aot.function(loss, tiles={"b": blocks}, shapes=SHAPES)
    assert agrees(step, loss, *arguments())
    (tile,) = step.trace(*arguments()).partition().plan.tiles
    assert str(tile) == f"b of args[1]: {tile.blocks} blocks along axis 0, each forward with its backward"
    assert tile.blocks == -(-ROWS // -(-ROWS // blocks))


def test_each_argument_has_the_rows_along_its_own_axis():
    step = aot.function(by_columns, tiles={"b": 4}, shapes={"args[1]['x']": "_, b", "args[1]['mask']": "b"})
    assert agrees(step, by_columns, *in_columns())
    (tile,) = step.trace(*in_columns()).partition().plan.tiles
    assert str(tile) == "b of args[1]['x']: 4 blocks along axis 1, each forward with its backward"


def test_one_text_names_the_sizes_of_all_arrays_below_a_path():
    def mean(w, batch):
        return jnp.mean(jnp.tanh(batch["x"] @ w) * batch["mask"][:, None])

    batch = {"x": jnp.ones((6, 4)), "mask": jnp.arange(6.0)}
    step = aot.function(mean, tiles={"b": 3}, shapes={"args[1]": "b, ..."})
    assert agrees(step, mean, jnp.eye(4), batch)
    assert step.trace(jnp.eye(4), batch).partition().plan.tiles[0].blocks == 3


def test_a_name_holds_inside_a_jit_and_where_the_size_is_another():
    step = aot.function(loss, tiles={"b": 4}, shapes=SHAPES)
    for rows in (ROWS, 2 * ROWS):
        w, x, y = arguments()
        args = w, jnp.resize(x, (rows, WIDTH)), jnp.resize(y, rows)
        np.testing.assert_allclose(jax.jit(jax.grad(step))(*args), jax.grad(loss)(*args), rtol=1e-5, atol=1e-7)
        assert f"tensor<4x{rows // 4}x{WIDTH}xf32>" in jax.jit(jax.grad(step)).lower(*args).as_text()


def test_a_cache_keeps_programs_with_blocks_apart_from_those_without(tmp_path):
    wishes = {"tiles": False}, {"tiles": {"args[1]": 4}}, {"tiles": {"b": 3}, "shapes": SHAPES}
    for number, wish in enumerate(wishes, 1):
        assert agrees(aot.function(loss, cache=tmp_path, **wish), loss, *arguments())
        store = Store.at(tmp_path)
        assert store is not None and len(store.entries()) == number


def test_two_axes_have_blocks_of_their_own():
    def product(x, z):
        return jnp.sum(jnp.sin(x) ** 2) + jnp.sum(jnp.cos(z))

    x, z = jnp.ones((12, 3)), jnp.arange(10.0)
    step = aot.function(product, argnums=(0, 1), tiles={"b": 4, "t": 5}, shapes={"args[0]": "b, 3", "args[1]": "t"})
    got, want = step.grad(x, z), jax.grad(product, argnums=(0, 1))(x, z)
    assert all(bool(jnp.allclose(a, b)) for a, b in zip(got, want, strict=True))
    assert [tile.blocks for tile in step.trace(x, z).partition().plan.tiles] == [4, 5]


def test_the_rows_of_a_named_size_are_followed_as_those_of_a_symbolic_one():
    named = aot.function(loss, shapes=SHAPES).trace(*arguments()).partition().axes("b")
    symbols = aot.shapes(f"{WIDTH}, {WORDS}", "float32"), aot.shapes(f"b, {WIDTH}", "float32"), aot.shapes("b", "int32")
    symbolic = aot.function(loss).trace(*symbols).axes("b")
    assert named.results == symbolic.results and named.mixing == symbolic.mixing == ()
    assert str(named).startswith(f"loss along b, {ROWS} rows: mixed by no op\n")


def normed(w, x):
    h = jnp.tanh(x @ w)
    h = h - jnp.mean(h, axis=0)
    return jnp.mean(jnp.tanh(h) ** 2)


def test_where_an_op_mixes_rows_the_plan_names_it_and_the_rest_runs_in_blocks():
    step = aot.function(normed, tiles={"b": 4}, shapes={"args[1]": "b, _"})
    args = jnp.eye(WIDTH), arguments()[1]
    assert agrees(step, normed, *args)
    (remark,) = (text for text in step.trace(*args).partition().plan.remarks if text.startswith("in blocks"))
    line = normed.__code__.co_firstlineno + 2
    where = rf"sub at .*test_named\.py:{line} \(normed\)"
    assert re.fullmatch(rf"in blocks: b of args\[1\], whose rows are mixed first by {where}: 4 blocks .*", remark)


# ------------------------------------------------------------------------------------------------------- refusals


def refused(error, function, args, **options):
    with pytest.raises(error) as caught:
        aot.function(function, **options).trace(*args).partition()
    return str(caught.value)


@pytest.mark.parametrize(
    ("tiles", "text"),
    [
        ({"c": 4}, "tiles['c'] names no argument with rows.\n"
         "Known names: 'args[0]', 'args[1]', 'args[2]', 'b', 'd', 'v'."),
        ({"b": 25}, "tiles['b'] asks for 25 blocks of 24 rows.\nGive at most 24."),
        ({"b": 4, "args[1]": 2}, "tiles['b'] and tiles['args[1]'] name the same rows, those of args[1] along axis 0.\n"
         "Give one of them."),
        ({"args[2]": 4, "args[1]": 2},
         "tiles['args[2]'] and tiles['args[1]'] name the same rows, those of args[1] along axis 0.\nGive one of them."),
    ],
)  # fmt: skip
def test_a_name_of_no_rows_and_rows_with_two_names_are_refused(tiles, text):
    assert refused(TraceError, loss, arguments(), tiles=tiles, shapes=SHAPES) == text


def test_without_named_shapes_a_name_stands_for_nothing():
    assert refused(TraceError, loss, arguments(), tiles={"b": 4}) == (
        "tiles['b'] names no argument with rows.\n"
        "If it is a size, say of which argument: shapes={'args[2]': 'b, ...'}. Known names: "
        "'args[0]', 'args[1]', 'args[2]'."
    )


def test_of_many_parameters_the_nearest_are_named():
    layers = {f"layer{i}": {"w": jnp.ones((3, 3)), "b": jnp.ones(3)} for i in range(20)}
    told = refused(
        TraceError, lambda p, x: jnp.sum(x @ p["layer0"]["w"]), (layers, jnp.ones((4, 3))), tiles={"rows": 4}
    )
    assert told.startswith(
        "tiles['rows'] names no argument with rows.\n"
        "If it is a size, say of which argument: shapes={'args[1]': 'rows, ...'}. Known names: 'args[1]', "
    )
    assert told.endswith(" and 29 more.") and told.count("args[0]") == 11


@pytest.mark.parametrize("tiles", [True, False, {"args[1]": 4}], ids=str)
def test_names_that_fit_no_argument_are_refused_with_and_without_blocks(tiles):
    assert refused(CallError, loss, arguments(), tiles=tiles, shapes={"args[7]": "b, ..."}) == (
        "shapes['args[7]'] names no array of the arguments.\n"
        "Known names: 'args[0]', 'args[1]', 'args[2]'. Did you mean 'args[2]'?"
    )
    text = refused(CallError, loss, arguments(), tiles=tiles, shapes={"args[1]": "b, b, b, b"})
    assert text.endswith(
        "which shapes='b, b, b, b' does not fit.\nWrite it as aot.shapes does: 'b, 128', 'b, ...', '_, t, ...'."
    )


def test_rows_that_every_op_mixes_are_refused_with_the_first_one():
    def mixed(w, x):
        return jnp.sum(jnp.cumsum(x, axis=0) @ w)

    first, second = refused(
        TraceError, mixed, (jnp.eye(2), jnp.ones((4, 2))), tiles={"b": 2}, shapes={"args[1]": "b, _"}
    ).split("\n")
    assert first == "tiles['b'] names rows that no op treats one by one."
    line = mixed.__code__.co_firstlineno + 1
    assert re.fullmatch(rf"They meet first in cumsum at .*test_named\.py:{line} \(.*mixed\)\.", second)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"args[9]": "b"}, "shapes['args[9]'] names no array of the arguments.\n"
         "Known names: 'args[0]', 'args[1]', 'args[2]'. Did you mean 'args[2]'?"),
        ({"args[1]": "b"}, "args[1] has the shape (24, 8), which shapes='b' does not fit.\n"
         "Write it as aot.shapes does: 'b, 128', 'b, ...', '_, t, ...'."),
        ({"args[1]": "b, 9"}, "args[1] has the shape (24, 8), which shapes='b, 9' does not fit.\n"
         "Write it as aot.shapes does: 'b, 128', 'b, ...', '_, t, ...'."),
        ({"args[1]": "b, _", "args[0]": "b, _"},
         "shapes gives the name 'b' to 24 of args[1] and to 8 of args[0].\nGive two names, or arrays of one size."),
        ({"args[1]": "2*b, _", "args[2]": "b"},
         "tiles['b'] names rows, of which args[1] has 2*b: nobody knows which belong together.\n"
         "Give the path of an argument."),
    ],
)  # fmt: skip
def test_shapes_that_the_arguments_do_not_have_are_refused(shapes, text):
    error = TraceError if text.startswith("tiles") else CallError
    assert refused(error, loss, arguments(), tiles={"b": 4}, shapes=shapes) == text


@pytest.mark.parametrize("shapes", ["b, 3", {"args[1]": 3}, {1: "b"}])
def test_shapes_that_are_none_are_refused_at_once(shapes):
    with pytest.raises(TraceError) as error:
        aot.function(loss, shapes=shapes)
    cure = "Give a dict from paths to texts of shapes: {'args[1]': 'b, 128'}."
    assert str(error.value) == f"shapes is {shapes!r}.\n{cure}"
