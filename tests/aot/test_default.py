"""The default is the best plan known: the minimum cut, one of clearly less memory in no more time, or JAX's own."""

from __future__ import annotations

import json
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.errors import PlanError
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.search import best, mincut
from jointcut.partition.search.budget import Planner
from larger import LARGER
from oracle import assert_same, plain, value_and_grad
from programs import named


def narrow(params, x):
    """Layers whose inner products are cheap beside the bytes that they make: keeping them takes longer."""

    def layer(x, layer):
        up, down = layer
        return x + jnp.tanh(x @ up) @ down, None

    return jnp.sum(lax.scan(layer, x, params)[0])


def arguments(rows, width, layers=12):
    shapes = ((layers, width, 4 * width), (layers, 4 * width, width)), (rows, width)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda s: type(s[0]) is int)


LOSSES = [named(name) for name in ("two_layers", "scan_over_layers", "auxiliary_output")]
SYMBOLIC = arguments(24, 8, 3)[0], aot.shapes("n, 8", "float32")
LARGE, SMALL, WIDE = arguments(4096, 32), arguments(64, 64), arguments(2048, 1024, 2)


@pytest.fixture
def eager(monkeypatch):
    """To keep a byte takes far longer than to compute it: a plan of the front is taken that keeps little."""
    monkeypatch.setattr(best, "REUSED_BYTES", 0)
    monkeypatch.setattr(best, "LEAST_PEAK", 0.0)
    monkeypatch.setitem(best.RATES, "cpu", Roofline(1e15, 1e15, 1e15, 1e6))


def products(plan, graph):
    return [i for i in plan.recomputed if graph.ops[i].name == "dot_general"]


def test_the_default_computes_a_product_twice_where_that_takes_less_memory_and_less_time():
    traced = aot.function(narrow).trace(*LARGE)
    default, cut = traced.partition(), traced.partition("min_cut")
    assert default.plan.strategy == "front" and products(default.plan, traced.graph)
    assert cut.plan.strategy == "min_cut" and not products(cut.plan, traced.graph)
    assert default.plan.bytes_saved < 0.5 * cut.plan.bytes_saved
    assert default.compile().activation_bytes < 0.7 * cut.compile().activation_bytes


def test_the_default_computes_no_tiny_products_twice_in_a_long_loop():
    """Each takes much longer than its flops: by these alone they would be computed again."""

    def loss(w, x):
        def step(h, _):
            return jnp.tanh(jnp.tanh(h @ w[0]) @ w[1]) + h, None

        return jnp.sum(lax.scan(step, x, length=512)[0])

    traced = aot.function(loss).trace(np.ones((2, 8, 8), np.float32), np.ones((1024, 8), np.float32))
    plan = traced.partition().plan
    assert plan.bytes_saved > best.REUSED_BYTES / 2
    assert not products(plan, traced.graph)
    product = next(op for op in traced.graph.ops if op.name == "dot_general")
    rates = best.RATES["cpu"]
    assert Roofline.seconds(rates, traced.graph, product) < 0.2 * rates.seconds(traced.graph, product)


@pytest.mark.parametrize("given", [SMALL, WIDE], ids=["recycled memory", "dear products"])
def test_the_default_is_the_minimum_cut_where_less_memory_would_not_save_time(given):
    traced = aot.function(narrow).trace(*given)
    assert traced.partition().plan == traced.partition("min_cut").plan


@pytest.mark.parametrize("program", LARGER, ids=lambda program: program.name)
def test_the_default_is_clearly_faster_than_jax_s_own_plan_or_clearly_smaller_or_computes_nothing_twice(program):
    with program.precision():
        function = aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux)
        problem = function.trace(*program.args, **program.kwargs).problem
    planner = Planner(problem.timed(best.RATES["cpu"]))
    default, whole = (
        planner.candidate(planner.priced(plan)) for plan in (best.best(problem), mincut.save_all(problem))
    )
    is_faster = default.step_seconds < whole.step_seconds - 0.01 * planner.common_seconds
    is_smaller = default.predicted_bytes < 0.95 * whole.predicted_bytes
    assert is_faster or is_smaller or not default.plan.recomputed or default.plan.key == whole.plan.key


def in_columns(q, k, mask, start, step):
    """A loop over chunks of keys, each with its columns of a mask, which lie in another order than the mask."""
    chunks = k.reshape(16, -1, k.shape[1]), jnp.moveaxis(mask.reshape(len(mask), 16, -1), 1, 0)
    return lax.scan(
        lambda carry, chunk: step(carry, chunk[0], jnp.where(chunk[1], q @ chunk[0].T, -1e9)), start, chunks
    )


@jax.custom_vjp
def attended(q, k, mask):
    """Attention in chunks, whose backward computes the weights again from the mask."""

    def step(carry, keys, scores):
        total, norm = carry
        return (total + jnp.exp(scores) @ keys, norm + jnp.exp(scores).sum(1)), None

    total, norm = in_columns(q, k, mask, (jnp.zeros_like(q), jnp.zeros(len(q))), step)[0]
    return total / norm[:, None]


def attended_back(kept, ct):
    q, k, mask = kept
    norm = in_columns(q, k, mask, jnp.zeros(len(q)), lambda norm, _, scores: (norm + jnp.exp(scores).sum(1), None))[0]
    shift = jnp.sum(attended(q, k, mask) * ct, 1)

    def step(dq, keys, scores):
        weights = jnp.exp(scores) / norm[:, None]
        slopes = weights * (ct @ keys.T - shift[:, None])
        return dq + slopes @ keys, weights.T @ ct + slopes.T @ q

    dq, dk = in_columns(q, k, mask, jnp.zeros_like(q), step)
    return dq, dk.reshape(k.shape), None


attended.defvjp(lambda *given: (attended(*given), given), attended_back)


@pytest.mark.parametrize("strategy", ["best", "save_all"])
def test_a_mask_in_another_order_is_not_held_twice_for_the_loop_of_the_backward_that_reads_it(strategy):
    def loss(w, x, places):
        mask = places[:, None] >= places
        return jnp.sum(attended(jnp.tanh(x @ w), jnp.tanh(x @ w.T), mask) ** 2)

    traced = aot.function(loss).trace(np.ones((16, 16), np.float32), np.ones((512, 16), np.float32), np.arange(512))
    assert traced.partition(strategy).compile().activation_bytes <= 1.1 * traced.plain_memory.temp_bytes


def test_strategy_min_cut_repeats_no_product_however_it_is_asked_for():
    by_option = aot.function(narrow, strategy="min_cut").trace(*LARGE).partition()
    assert by_option.plan.strategy == "min_cut"
    assert repr(aot.function(narrow)).endswith(": best>")
    with pytest.raises(PlanError, match="strategy and budget are given together"):
        aot.function(narrow, strategy="min_cut", budget=0.5)


def test_the_default_measures_nothing_and_is_one_in_every_way_of_calling(monkeypatch):
    monkeypatch.setattr(
        import_module("jointcut.aot.planning.budgets.rates"), "_measure", lambda device: pytest.fail("measured")
    )
    made = []
    module = import_module("jointcut.aot.planning.request")
    halved = module.halved
    monkeypatch.setattr(module, "halved", lambda *args: made.append(halved(*args)) or made[-1])
    jax.jit(jax.grad(aot.function(narrow))).trace(*LARGE)
    assert [half.plan.strategy for half in made] == ["front"]
    first, again = (aot.function(narrow).trace(*LARGE).partition().plan for _ in range(2))
    assert first == again and made[0].plan.bytes_saved == first.bytes_saved


def test_prices_of_the_options_decide_in_the_place_of_the_fixed_ones():
    slow = Roofline(1e9, 2.6e10, 3.1e10, 3.9e9)
    traced = aot.function(narrow, cost=slow).trace(*LARGE)
    assert traced.partition().plan == traced.partition("min_cut").plan


def test_a_backend_that_was_not_measured_keeps_the_minimum_cut(monkeypatch):
    graph = aot.function(narrow).trace(*LARGE).graph
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert best.best(graph) == mincut.min_cut(graph)


@pytest.mark.parametrize("program", LOSSES, ids=lambda program: program.name)
def test_smaller_plans_of_the_default_answer_as_jax(program, eager):
    with program.precision():
        function = aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux)
        assert function.trace(*program.args, **program.kwargs).partition().plan.strategy == "front"
        got = function.value_and_grad(*program.args, **program.kwargs)
        assert_same(got, plain(program, value_and_grad), program)


def test_the_default_holds_for_sizes_that_are_known_later(tmp_path, eager):
    folder = aot.function(narrow).export(
        tmp_path / "narrow", SYMBOLIC[0], SYMBOLIC[1], sizes={"n": 64}, platforms="cpu"
    )
    params, x = jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), arguments(24, 8, 3))
    assert json.loads((folder / "signature.json").read_text())["plan"]["strategy"] == "front"
    value, gradient = aot.load(folder).value_and_grad(params, x)
    want_value, want_gradient = jax.jit(jax.value_and_grad(narrow))(params, x)
    np.testing.assert_allclose(value, want_value, 1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), gradient, want_gradient)
