"""With rows in blocks a larger size holds a budget: found in few compilations, held, and told with its blocks."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.planning import weighing
from jointcut.aot.planning.budgets import searches
from jointcut.aot.planning.budgets.tiling import MOST_BLOCKS
from jointcut.aot.planning.size_search import MOST_COMPILED
from jointcut.aot.run.runnable import Runnable
from jointcut.aot.trace.shapes import concrete
from jointcut.partition.errors import BudgetError, TraceError
from jointcut.partition.prices.cost import Roofline

STEADY = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
WIDTH, WORDS, BUDGET = 16, 1024, 2_000_000


def head(w, x, y):
    """A linear layer with cross entropy: its logits are the peak."""
    logits = x @ w
    chosen = jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)


def normed(w, x):
    h = jnp.tanh(x @ w)
    h = h - jnp.mean(h, axis=0)
    return jnp.mean(jnp.tanh(h) ** 2)


def sorted_rows(w, x):
    return jnp.sum(jnp.sort(jnp.cumsum(x, axis=0), axis=0) @ w)


HEAD = (
    jax.ShapeDtypeStruct((WIDTH, WORDS), jnp.float32),
    aot.shapes(f"b, {WIDTH}", "float32"),
    aot.shapes("b", "int32"),
)


@pytest.fixture
def compiled(monkeypatch):
    """The steps that are compiled."""
    steps, compile_one = [], Runnable.compile
    monkeypatch.setattr(Runnable, "compile", lambda self, count: (steps.append(self), compile_one(self, count))[1])
    return steps


@cache
def found_once():
    return aot.largest(head, "b", BUDGET, *HEAD, cost=STEADY)


def of_size(size):
    return [concrete(leaf, {"b": size}) for leaf in HEAD]


def drawn(size):
    keys = jax.random.split(jax.random.key(0), 3)
    w, x = (jax.random.normal(k, leaf.shape) / 4 for k, leaf in zip(keys[:2], of_size(size)[:2], strict=True))
    return w, x, jax.random.randint(keys[2], (size,), 0, WORDS)


@pytest.mark.parametrize("weighs", [True, False])
def test_a_far_larger_size_holds_in_blocks_after_at_most_four_compilations(monkeypatch, compiled, weighs):
    searches.forget()
    if not weighs:
        monkeypatch.setattr(weighing, "can_weigh", lambda goal=None: False)
    found = aot.largest(head, "b", BUDGET, *HEAD, cost=STEADY)
    assert 1 <= len(compiled) <= (1 if weighs else MOST_COMPILED)
    assert found.peak_bytes == found.cut.compile().peak_bytes <= BUDGET
    assert found.peak_bytes >= 0.96 * BUDGET, "no other size may hold that is much larger"
    together = aot.largest(head, "b", BUDGET, *HEAD, cost=STEADY, tiles=False)
    assert together.tiles == () and {row.blocks for row in together.tried} == {1}
    assert found.size > 20 * together.size


def test_a_budget_finds_no_plan_for_a_size_that_is_larger_by_three_per_cent():
    size = found_once().size
    searches.forget()
    aot.function(head, budget=BUDGET, cost=STEADY).trace(*of_size(size)).partition()
    for more in (1.03, 1.06):
        with pytest.raises(BudgetError):
            aot.function(head, budget=BUDGET, cost=STEADY).trace(*of_size(int(more * size))).partition()


def test_the_step_in_blocks_computes_the_gradient_of_the_function():
    found = found_once()
    args = drawn(found.size)
    got, want = found.cut.compile().value_and_grad(*args), jax.value_and_grad(head)(*args)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-3, atol=1e-6)


def test_a_budget_takes_the_blocks_that_were_found_for_the_size(compiled):
    searches.forget()
    found = aot.largest(head, "b", BUDGET, *HEAD, cost=STEADY)
    compiled.clear()
    cut = aot.function(head, budget=BUDGET, cost=STEADY).trace(*of_size(found.size)).partition()
    assert not compiled, "the search was made"
    assert cut.plan.tiles == found.plan.tiles and cut.plan.values == found.plan.values


def test_the_result_says_how_many_blocks_and_lists_sizes_with_and_without():
    found = found_once()
    (tile,) = found.plan.tiles
    assert found.tiles == (str(tile),)
    assert re.fullmatch(
        rf"float32\[{found.size},{WORDS}\] of \w+ at .*test_largest_in_blocks\.py:\d+ \(head\): "
        r"\d+ blocks along axis 0, each forward with its backward.*",
        str(tile),
    )
    first, header, *lines = str(found).splitlines()
    rows = lines[: len(found.tried)]
    assert first == f"head: b={found.size:,} is the largest size within 2,000,000 bytes"
    assert header.split()[-2:] == ["blocks", "plan"]
    assert " ".join(map(str.strip, lines[len(rows) :])) == f"in blocks: {tile}"
    assert [int(row.split()[0].replace(",", "")) for row in rows] == [row.size for row in found.tried]
    by_size = {row.size: row.blocks for row in found.tried}
    assert sorted(by_size) == [row.size for row in found.tried], "each size once"
    assert by_size[found.size] == tile.blocks <= MOST_BLOCKS
    assert min(by_size.values()) == 1, "small sizes need no blocks"
    assert all(row.fits == (row.peak_bytes <= BUDGET) for row in found.tried)
    assert aot.Largest.from_json(found.to_json()) == found


def test_sizes_in_blocks_keep_the_constraints():
    found = aot.largest(head, "b", BUDGET, *HEAD, cost=STEADY, constraints=("mod(b, 10) == 0", "b <= 5000"))
    assert {row.size % 10 for row in found.tried} == {0}
    assert found.size == 5000 and found.tiles


def test_a_size_whose_smallest_holds_in_blocks_alone_is_found():
    """Without blocks not even the smallest size holds: it has 4,096 rows."""
    args = HEAD[0], aot.shapes(f"b*4096, {WIDTH}", "float32"), aot.shapes("b*4096", "int32")
    with pytest.raises(BudgetError) as refused:
        aot.largest(head, "b", BUDGET, *args, cost=STEADY, tiles=False)
    assert str(refused.value).startswith("budget of 2,000,000 bytes cannot be met, not even with b=1.\n")
    found = aot.largest(head, "b", BUDGET, *args, cost=STEADY)
    assert found.size >= 2 and found.tiles and found.cut.compile().peak_bytes <= BUDGET


def test_where_no_block_helps_the_answer_is_that_without():
    args = jax.ShapeDtypeStruct((8, 8), jnp.float32), aot.shapes("b, 8", "float32")
    found = aot.largest(sorted_rows, "b", "200kB", *args, cost=STEADY)
    assert found == aot.largest(sorted_rows, "b", "200kB", *args, cost=STEADY, tiles=False)
    assert "in blocks" not in str(found)


def test_rows_that_meet_in_between_run_in_blocks_before_and_behind():
    args = jax.ShapeDtypeStruct((16, 512), jnp.float32), aot.shapes("b, 16", "float32")
    together = aot.largest(normed, "b", "2MB", *args, cost=STEADY, tiles=False)
    found = aot.largest(normed, "b", "2MB", *args, cost=STEADY)
    assert found.size >= together.size
    size, given = found.size, [concrete(leaf, {"b": found.size}) for leaf in args]
    w, x = (jax.random.normal(jax.random.key(size), leaf.shape) / 4 for leaf in given)
    got, want = found.cut.compile().value_and_grad(w, x), jax.value_and_grad(normed)(w, x)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-3, atol=1e-6)


def test_a_budget_that_not_even_blocks_hold_is_refused_as_without():
    texts = []
    for tiles in (True, False):
        searches.forget()
        with pytest.raises(BudgetError) as refused:
            aot.largest(head, "b", "100kB", *HEAD, cost=STEADY, tiles=tiles)
        texts.append(str(refused.value))
    assert texts[0] == texts[1]
    assert texts[0].startswith("budget of 100,000 bytes cannot be met, not even with b=1.\n")


def test_blocks_that_are_asked_for_are_those_of_all_sizes():
    found = aot.largest(head, "b", BUDGET, *HEAD, cost=STEADY, tiles={"b": 4})
    assert {row.blocks for row in found.tried} <= {2, 3, 4}, "few rows do not fill four blocks"
    assert found.tiles == ("b of args[1]: 4 blocks along axis 0, each forward with its backward",)
    assert found.peak_bytes == found.cut.compile().peak_bytes <= BUDGET
    most = aot.largest(head, "b", BUDGET, *HEAD, cost=STEADY, tiles={"args[1]": 16})
    assert most.size > 2 * found.size and {row.size >= 16 for row in most.tried} == {True}


@pytest.mark.parametrize("shapes", [{"args[1]": "rows, ..."}, {"args[1]": "rows, d", "args[2]": "rows"}])
def test_a_name_of_the_users_own_for_the_rows_stays(shapes):
    found = aot.largest(head, "b", BUDGET, *HEAD, cost=STEADY, tiles={"rows": 16}, shapes=shapes)
    same = aot.largest(head, "b", BUDGET, *HEAD, cost=STEADY, tiles={"args[1]": 16})
    assert (found.size, found.peak_bytes) == (same.size, same.peak_bytes) and {
        row.size >= 16 for row in found.tried
    } == {True}


@pytest.mark.parametrize(
    ("tiles", "text"),
    [
        ({"c": 4}, "tiles['c'] names no argument with rows.\nKnown names: 'args[0]', 'args[1]', 'args[2]', 'b'."),
        ({"b": 0}, "tiles['b'] is 0.\nGive a number of blocks, such as 4."),
        ({"b": 4, "args[2]": 4}, "tiles['b'] and tiles['args[2]'] name the same rows, those of args[2] along axis 0.\n"
         "Give one of them."),
    ],
)  # fmt: skip
def test_blocks_that_no_size_has_are_refused(tiles, text):
    with pytest.raises(TraceError) as refused:
        aot.largest(head, "b", BUDGET, *HEAD, tiles=tiles)
    assert str(refused.value) == text
