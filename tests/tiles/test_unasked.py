"""Rows in blocks without a budget: where the model of an H100 finds that smaller and no slower."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.default_blocks import gpt_case
from jointcut import aot
from jointcut.aot.planning.budgets import unasked as module


def loss(w, x, labels):
    """A linear layer with cross entropy."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], 1)
    return -jnp.mean(chosen)


def shapes(tokens=8192, width=4096, words=50257):
    types = (width, words), (tokens, width)
    floats = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in types)
    return *floats, jax.ShapeDtypeStruct((tokens,), jnp.int32)


def cut_for(target, *arguments, **options):
    return aot.function(loss, argnums=(0, 1), target=target, **options).trace(*arguments).partition()


def test_an_h100_runs_a_large_vocabulary_in_blocks_and_a_cpu_does_not():
    blocks, whole = cut_for("h100", *shapes()), cut_for("h100", *shapes(), tiles=False)
    assert [(tile.blocks, tile.is_early) for tile in blocks.plan.tiles] == [(8, True)]
    assert not whole.plan.tiles and not cut_for(None, *shapes()).plan.tiles
    small, large = (cut.pareto().chosen for cut in (blocks, whole))
    assert small.peak_bytes < 0.6 * large.peak_bytes
    assert "8 blocks along axis 0" in str(blocks.plan)


def test_a_small_array_stays_whole():
    assert not cut_for("h100", *shapes(tokens=64)).plan.tiles


@pytest.mark.parametrize("options", [{"strategy": "min_cut"}, {"policy": {"dot_general": aot.MUST_SAVE}}])
def test_only_the_default_strategy_looks_for_blocks(options):
    has_blocks = "policy" in options
    assert bool(cut_for("h100", *shapes(), **options).plan.tiles) == has_blocks


def test_gradients_are_those_of_the_whole(monkeypatch):
    monkeypatch.setattr(module, "LARGE_BYTES", 0)
    keys = jax.random.split(jax.random.key(0), 3)
    w, x = (jax.random.normal(key, shape) for key, shape in zip(keys, ((8, 999), (4096, 8)), strict=False))
    labels = jax.random.randint(keys[2], (4096,), 0, 999)
    plan = cut_for("h100", w, x, labels).plan
    assert plan.tiles
    value, gradients = aot.function(loss, argnums=(0, 1), plan=plan).value_and_grad(w, x, labels)
    wanted, expected = jax.value_and_grad(loss, argnums=(0, 1))(w, x, labels)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_block_of_a_deep_model_computes_values_again():
    """A block of the whole model keeps 1.5 GB for its backward if it keeps all; it need not."""
    case = gpt_case(50_304, 12, 768, 16)
    few, many = (
        aot.function(case.loss, target="h100", tiles=t).trace(*case.arguments).partition() for t in (True, False)
    )
    (tile,) = few.plan.tiles
    assert tile.is_early and tile.block_bytes is not None
    small, large = few.pareto(), many.pareto()
    assert small.chosen.peak_bytes < 0.5 * large.chosen.peak_bytes
    assert small.common_seconds + small.chosen.seconds <= large.common_seconds + large.chosen.seconds


def test_a_step_that_the_device_has_no_room_for_runs_in_blocks_though_no_array_is_a_large_share():
    """On a TPU v5e of 16 GiB, where JAX's own plan takes 36 GB; 8 GB of these are the largest array."""
    case = gpt_case(128_256, 6, 1024, 32)
    cut = aot.function(case.loss, target="v5e").trace(*case.arguments).partition()
    assert [tile.blocks for tile in cut.plan.tiles] == [8]
    assert cut.pareto().chosen.peak_bytes < 10e9
