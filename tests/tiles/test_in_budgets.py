"""Where no choice of residuals holds a budget, rows run in blocks; a user may ask for blocks, or forbid them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jointcut import aot
from jointcut.aot.planning.budgets import searches
from jointcut.partition.errors import BudgetError, PlanError, TraceError
from jointcut.partition.plans import planfile
from jointcut.partition.prices.cost import Roofline

WIDTH, WORDS, TOKENS = 16, 2048, 512
STEADY = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
BUDGET = 0.25


def loss(w, x, y):
    """A linear layer with cross entropy: its logits are the peak."""
    logits = x @ w
    chosen = jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    w = 0.1 * jax.random.normal(keys[0], (WIDTH, WORDS))
    return w, jax.random.normal(keys[1], (TOKENS, WIDTH)), jax.random.randint(keys[2], (TOKENS,), 0, WORDS)


def plain_bytes():
    return jax.jit(jax.value_and_grad(loss)).lower(*arguments()).compile().memory_analysis().temp_size_in_bytes


def close(one, other):
    return all(
        bool(jnp.allclose(a, b, rtol=1e-5, atol=1e-7)) for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True)
    )


@pytest.fixture(scope="module")
def cut():
    return aot.function(loss, budget=BUDGET, cost=STEADY).trace(*arguments()).partition()


def test_a_quarter_is_held_where_one_array_is_the_peak(cut):
    assert cut.compile().activation_bytes <= BUDGET * plain_bytes()
    (tile,) = cut.plan.tiles
    assert tile.is_early
    assert tile.array.startswith(f"float32[{TOKENS},{WORDS}] of ")
    assert "test_in_budgets.py:" in tile.array
    assert f"in blocks: {tile}" in cut.plan.remarks


def test_value_and_gradient_are_those_of_jax():
    step = aot.function(loss, budget=BUDGET, cost=STEADY)
    assert close(step.value_and_grad(*arguments()), jax.value_and_grad(loss)(*arguments()))
    assert close(jax.jit(jax.grad(step))(*arguments()), jax.grad(loss)(*arguments()))
    value, pullback = step.vjp(*arguments())
    assert close(pullback(-3.0)[0], jax.vjp(loss, *arguments())[1](-3.0)[0])
    assert close(value, loss(*arguments()))


def test_it_is_the_same_under_vmap_and_in_a_second_derivative():
    step = aot.function(loss, budget=BUDGET, cost=STEADY)
    w, x, y = arguments()
    several = jnp.stack([w, 2 * w])
    mapped = [jax.vmap(jax.grad(f), (0, None, None))(several, x, y) for f in (step, loss)]
    assert close(*mapped)
    second = [jax.grad(lambda w, f=f: jnp.sum(jax.grad(f)(w, x, y) ** 2))(w) for f in (step, loss)]
    assert close(*second)


def test_an_update_runs_in_blocks_too():
    w, x, y = arguments()

    def descend(gradient, state, w):
        return w - 0.1 * gradient, state

    step = aot.function(loss, budget=BUDGET, cost=STEADY)
    _, new, _ = step.value_and_update(w + 0, (), x, y, update=descend)
    assert close(new, w - 0.1 * jax.grad(loss)(w, x, y))


def test_a_plan_file_holds_the_tiles(cut):
    text = planfile.dumps(cut.plan, cut.split.graph)
    for plan in (text, cut.plan):
        again = aot.function(loss, plan=plan).trace(*arguments()).partition()
        assert again.plan == cut.plan
        assert again.plan.tiles == cut.plan.tiles


def test_a_plan_file_for_other_rows_is_refused(cut):
    text = planfile.dumps(cut.plan, cut.split.graph).replace(f'"value": {cut.plan.tiles[0].value}}}', '"value": 9999}')
    with pytest.raises(PlanError) as error:
        aot.function(loss, plan=text).trace(*arguments()).partition()
    assert str(error.value) == (
        "plan.tiles name rows that this program does not have.\n"
        "Read the plan for the program that it was made for, or make a plan for this one."
    )


def test_blocks_are_found_once_for_all_ways_of_calling(monkeypatch):
    aot.function(loss, budget=BUDGET, cost=STEADY).trace(*arguments()).partition()
    monkeypatch.setattr(searches, "fit", None)
    again = aot.function(loss, budget=BUDGET, cost=STEADY).trace(*arguments()).partition()
    assert again.plan.tiles


def test_tiles_may_be_forbidden():
    with pytest.raises(BudgetError) as error:
        aot.function(loss, budget=BUDGET, cost=STEADY, tiles=False).trace(*arguments()).partition()
    assert str(error.value).startswith("budget of 25% of plain JAX's activations cannot be met.\n")


def test_a_budget_that_no_block_holds_is_refused_with_the_smallest_peak_found():
    with pytest.raises(BudgetError) as error:
        aot.function(loss, budget=0.001, cost=STEADY).trace(*arguments()).partition()
    w, x, y = arguments()
    fixed = w.nbytes * 2 + x.nbytes + y.nbytes + 4
    assert error.value.least_bytes is not None
    assert error.value.least_bytes - fixed < BUDGET * plain_bytes()
    met = aot.function(loss, budget=error.value.least_bytes, cost=STEADY).trace(*arguments()).partition().compile()
    assert met.peak_bytes <= error.value.least_bytes


def test_arrays_that_are_passed_twice_are_one_input():
    def twice(w, v, x, y):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ v + y) ** 2)

    w, x = jnp.ones((64, 64)) / 8, jax.random.normal(jax.random.key(0), (512, 64))
    step = aot.function(twice, argnums=(0, 1), budget=0.3, cost=STEADY)
    assert step.trace(w, w, x, x).partition().plan.tiles
    assert close(step.grad(w, w, x, x), jax.grad(twice, argnums=(0, 1))(w, w, x, x))


def test_a_refusal_names_the_op_that_mixes_rows():
    def normed(w, x):
        h = jnp.tanh(x @ w)
        return jnp.mean((h - jnp.mean(h, axis=0)) ** 2)

    with pytest.raises(BudgetError) as error:
        aot.function(normed, budget=0.001, cost=STEADY).trace(jnp.ones((64, 64)), jnp.ones((512, 64))).partition()
    (note,) = error.value.__notes__
    line = r".*test_in_budgets\.py:\d+ \(.*normed\)"
    assert re.fullmatch(rf"Rows of args\[1\] are mixed first by sub at {line}, so no block goes past it\.", note)


def test_the_least_is_found_without_blocks():
    cut = aot.function(loss, budget=0.0, cost=STEADY).trace(*arguments()).partition()
    assert not cut.plan.tiles


# -------------------------------------------------------------------------------------------------- asked for


@pytest.mark.parametrize("blocks", [1, 4, 7])
def test_a_batch_runs_in_blocks_where_it_is_asked_for(blocks):
    step = aot.function(loss, tiles={"args[1]": blocks})
    assert close(step.value_and_grad(*arguments()), jax.value_and_grad(loss)(*arguments()))
    (tile,) = step.trace(*arguments()).partition().plan.tiles
    assert str(tile) == f"args[1]: {blocks} blocks along axis 0, each forward with its backward"


@pytest.mark.parametrize(
    ("tiles", "text"),
    [
        ({"args[1]": 0}, "tiles['args[1]'] is 0.\nGive a number of blocks, such as 4."),
        ({"args[1]": 2.0}, "tiles['args[1]'] is 2.0.\nGive a number of blocks, such as 4."),
        ({"args[1]": -3}, "tiles['args[1]'] is -3.\nGive a number of blocks, such as 4."),
        ({"b": True}, "tiles['b'] is True.\nGive a number of blocks, such as 4."),
        ({1: 4}, "tiles has the key 1.\nGive the path of an argument, 'args[1]', or the name of a size."),
        (
            "args[1]",
            "tiles is 'args[1]'.\n"
            "Give True, False, or a dict from paths or names to numbers of blocks: {'args[1]': 4}.",
        ),
        ((("b", 4), ("b", 2)), "tiles names 'b' twice.\nGive one number of blocks."),
    ],
)
def test_a_wish_that_is_none_is_refused_at_once(tiles, text):
    with pytest.raises(TraceError) as error:
        aot.function(loss, tiles=tiles)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("tiles", "text"),
    [
        (
            {"args[9]": 4},
            "tiles['args[9]'] names no argument with rows.\n"
            "Known names: 'args[0]', 'args[1]', 'args[2]'. Did you mean 'args[2]'?",
        ),
        ({"args[1]": 600}, "tiles['args[1]'] asks for 600 blocks of 512 rows.\nGive at most 512."),
    ],
)
def test_a_wish_that_the_arguments_do_not_allow_is_refused(tiles, text):
    with pytest.raises(TraceError) as error:
        aot.function(loss, tiles=tiles).trace(*arguments()).partition()
    assert str(error.value) == text


def test_arrays_of_unequal_lengths_are_no_rows():
    def of_two(w, batch):
        return jnp.sum(batch["x"] @ w) + jnp.sum(batch["z"])

    with pytest.raises(TraceError) as error:
        batch = {"x": jnp.ones((4, 2)), "z": jnp.ones(3)}
        aot.function(of_two, tiles={"args[1]": 2}).trace(jnp.ones((2, 2)), batch).partition()
    assert str(error.value) == (
        "tiles['args[1]'] names arrays of 4 rows (args[1]['x']) and of 3 rows (args[1]['z']).\n"
        "Give the path of arrays whose first axes are equally long."
    )


def test_rows_that_meet_are_not_parted_in_silence():
    def mixed(w, x):
        return jnp.sum(jnp.cumsum(x, axis=0) @ w)

    with pytest.raises(TraceError) as error:
        aot.function(mixed, tiles={"args[1]": 2}).trace(jnp.ones((2, 2)), jnp.ones((4, 2))).partition()
    first, second = str(error.value).split("\n")
    assert first == "tiles['args[1]'] names rows that no op treats one by one."
    assert second.startswith("They meet first in cumsum at ")
    assert "test_in_budgets.py:" in second


def test_a_batch_of_one_has_no_blocks():
    with pytest.raises(TraceError) as error:
        aot.function(lambda w, x: jnp.sum(x @ w), tiles={"args[1]": 1}).trace(
            jnp.ones((2, 2)), jnp.ones((1, 2))
        ).partition()
    assert str(error.value) == "tiles['args[1]'] asks for 1 block of 1 row.\nLeave it out."


def test_rows_that_a_loop_adds_up_are_parted_into_equal_blocks_or_not_at_all():
    def recurrent(w, x):
        return jnp.mean(jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row), None), x[:, 0], x.transpose(1, 0, 2))[0])

    x = jnp.ones((7, 3, 4))
    with pytest.raises(TraceError) as error:
        aot.function(recurrent, tiles={"args[1]": 4}).trace(jnp.eye(4), x).partition()
    assert str(error.value) == (
        "tiles['args[1]'] asks for 4 blocks of 7 rows, which must be equally large.\n"
        "Give a number that divides 7, or leave it out."
    )
    step = aot.function(recurrent, tiles={"args[1]": 5})
    assert step.trace(jnp.eye(4), jnp.ones((8, 3, 4))).partition().plan.tiles[0].blocks == 4
