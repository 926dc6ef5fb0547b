"""A large step of a loop is cut on its own; text, plan and report say so, and `aot.trips` prices the loop."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.aot.loops import interned
from jointcut.aot.loops.sweep import cutting
from jointcut.partition import parse, show
from jointcut.partition.errors import CallError, GraphError
from jointcut.wrappers.table import Table

WS = [0.05 * jax.random.normal(jax.random.key(i), (128, 128)) for i in range(4)]
X = jax.random.normal(jax.random.key(9), (512, 128))


def block(h, ws):
    for w in ws:
        rest = h - h.mean(-1, keepdims=True)
        h = h + jax.nn.gelu(rest / jnp.sqrt(1e-5 + (rest**2).mean(-1, keepdims=True)) @ w) @ w.T
    return h


def loss(ws, x, n):
    out = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, block(c[1], ws)), (0, x))[1]
    return (out**2).mean()


def by_python(ws, x, n):
    for _ in range(n):
        x = block(x, ws)
    return (x**2).mean()


@pytest.fixture(scope="module")
def cut():
    return aot.function(loss).trace(WS, X, jnp.int32(3)).partition()


def test_a_large_step_keeps_less_and_the_gradient_is_the_same(cut):
    step = jax.jit(jax.value_and_grad(by_python), static_argnums=2)
    value, grads = cut.compile().value_and_grad(WS, X, jnp.int32(3))
    for got, want in zip(jax.tree.leaves((value, grads)), jax.tree.leaves(step(WS, X, 3)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)
    rows = sum(s.bytes for s in cut.plan.saved)
    one = jax.jit(jax.value_and_grad(by_python), static_argnums=2).lower(WS, X, 1).compile()
    plain = one.memory_analysis().temp_size_in_bytes  # of one step, as JAX derives it
    assert cut.compile().memory.step.temp_bytes - rows < 0.7 * plain


def test_plan_text_and_report_tell_of_it(cut):
    (loop,) = cut.plan.nested
    assert loop.plan.strategy == "min_cut" and loop.plan.recomputed and loop.trips is None
    line = (
        f"{loop.name}: at most 10 checkpoints, fewer or up to 64 under a budget, each of 262.1 kB; "
        "a step keeps 1.85 MB for its own backward and runs "
        f"{len(loop.plan.recomputed)} ops again; trips unknown"
    )
    assert line in str(cut.plan).splitlines() and f"test_steps.py:{loss.__code__.co_firstlineno + 1} (loss)" in line
    report = cut.explain(measure=False)
    assert line in report.bounds
    assert [row["recomputed"] for row in report.to_dict()["loops"]] == [len(loop.plan.recomputed)]
    text = show(cut.split.graph)
    assert re.search(r" steps x\? keeps 10 up to 64 at \d+ \d+ {\n    primal %0:", text)
    assert parse(text) == cut.split.graph and parse(text).nested.keys() == cut.split.graph.nested.keys()


def test_a_small_step_is_not_cut():
    plan = aot.function(loss).trace(WS, X[:8], jnp.int32(3)).partition().plan
    assert plan.nested[0].plan.strategy == "save_all"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "primal %0:float32[]\n%1:float32[] = f %0 steps x? {\nprimal %0:float32[]",
            "line 3 ends the text inside a body.",
        ),
        ("primal %0:float32[]\n%1:float32[] = f %0 steps x2 {\nnonsense\n}", "line 3 reads 'nonsense': "),
        ("primal %0:float32[]\n%1:float32[] = f %0 steps x2 {\noutput %7\n}", "line 3 reads %7, which no line makes."),
        ("primal %0:float32[]\n%1:float32[] = f %0 steps 2 {", "line 2 ends with 'steps 2 {'."),
        ("primal %0:float32[]\n%1:float32[] = f %0 steps x? keeps 2 {", "line 2 ends with 'steps x? keeps 2 {'."),
    ],
)
def test_the_text_of_a_step_that_is_wrong_is_refused_with_its_line(text, said):
    with pytest.raises(GraphError) as caught:
        parse(text)
    assert str(caught.value).startswith(said)


def test_the_trips_of_a_step_are_read_back():
    text = "primal %0:float32[]\n%1:float32[] = f %0 steps x12 {\n    primal %0:float32[]\n    output %0\n}\noutput %1"
    assert show(parse(text)) == text and parse(text).nested[0].trips == 12


def hinted(count):
    """The loss with a hint around a compiled function that holds the loop."""

    def run(ws, x, n):
        with aot.trips(count):
            return jax.jit(loss)(ws, x, n)

    return aot.function(run).trace(WS, X, jnp.int32(3))


def test_a_loop_is_priced_by_how_often_it_is_expected_to_run():
    few, many, unknown = hinted(1), hinted(200), aot.function(loss).trace(WS, X, jnp.int32(3))
    assert [t.partition().plan.nested[0].trips for t in (few, many, unknown)] == [1, 200, None]
    assert "expected trips 200" in str(many.partition().plan)
    once = few.planner.common_seconds
    assert unknown.planner.common_seconds == pytest.approx(64 * once, rel=0.3)  # as many as a budget may give
    assert many.planner.common_seconds > 150 * once
    assert not any("trips" in row.path for row in many.partition().explain(measure=False).saved)


def test_trips_of_our_own_loops():
    def run(x, n):
        with aot.trips(7):
            return aot.fori_loop(0, n, lambda i, y: jnp.sin(y), x).sum()

    plan = aot.function(run).trace(X, jnp.int32(2)).partition().plan
    assert plan.nested[0].trips == 7
    assert (
        aot.function(lambda x: aot.scan(lambda c, _: (jnp.sin(c), None), x, length=9)[0].sum())
        .trace(X)
        .partition()
        .plan.nested[0]
        .trips
        == 9
    )


@pytest.mark.parametrize("count", [-1, 2.5, True, "many"])
def test_trips_that_are_no_number_are_refused(count):
    with pytest.raises(CallError) as caught:
        aot.trips(count)
    assert str(caught.value) == f"trips is {count!r}.\nGive a whole number, how often the loops run."


def test_an_array_that_is_filled_takes_time_in_proportion_to_its_rows():
    def filled(x, n):
        def row(i, carry):
            y, rows = carry
            return jnp.sin(y), rows.at[i].set(y)

        return (aot.fori_loop(0, n, row, (x, jnp.zeros((4096, 64))), memory=8)[1] ** 2).sum()

    program = jax.jit(jax.grad(filled)).lower(jnp.ones(64), jnp.int32(5)).compile()
    steps = program.as_text().partition("ENTRY")[0]
    assert "copy(" in steps and not [
        line for line in steps.splitlines() if "= f32[4096,64]" in line and " copy(" in line
    ]
    want = jax.grad(lambda x: sum((y**2).sum() for y in [x, jnp.sin(x), jnp.sin(jnp.sin(x))]))(jnp.ones(64))
    np.testing.assert_allclose(program(jnp.ones(64), jnp.int32(3)), want, rtol=1e-5)


def test_rows_that_were_there_before_keep_their_cotangents():
    def filled(rows, x):
        def row(i, carry):
            y, rows = carry
            return jnp.sin(y), rows.at[i].set(y)

        return (aot.fori_loop(2, jnp.int32(4), row, (x, rows), memory=2)[1] ** 2).sum()

    rows = jnp.arange(6.0)
    np.testing.assert_allclose(jax.grad(filled)(rows, jnp.float32(0.5)), [0, 2, 0, 0, 8, 10])
    many = jax.vmap(jax.grad(filled), (0, None))(jnp.stack([rows, -rows]), jnp.float32(0.5))
    np.testing.assert_allclose(many, [[0, 2, 0, 0, 8, 10], [0, -2, 0, 0, -8, -10]])


def test_branches_of_a_step_are_cut_and_share_their_space(monkeypatch):
    def branch(layers, width, x, w):
        for _ in range(layers):
            x = jnp.tanh((jnp.sin(x @ w[:, :width]) * jnp.cos(x[:, :width])) @ w[:width])
        return x

    branches = [partial(branch, 1 + k // 2, 48 + 10 * k) for k in range(5)]

    def loss(x, w, n):
        return (aot.fori_loop(0, n, lambda i, y: lax.switch(i % 5, branches, y, w), x, memory=4) ** 2).sum()

    def program():
        return jax.jit(jax.grad(lambda *xs: loss(*xs))).lower(x, w, jnp.int32(3)).compile()

    x, w = X, WS[0]
    ours = program()
    monkeypatch.setattr(cutting, "LEAST_BYTES", 2**60)
    monkeypatch.setattr(interned, "LOOPS", Table())  # the loop with the other limit
    sizes = [p.memory_analysis().temp_size_in_bytes - 5 * x.nbytes for p in (ours, program())]
    assert sizes[0] < 0.5 * sizes[1]
    want = jax.grad(lambda x: (branches[2](branches[1](branches[0](x, w), w), w) ** 2).sum())(x)
    np.testing.assert_allclose(ours(x, w, jnp.int32(3)), want, rtol=1e-4, atol=1e-6)


def test_a_loop_of_ours_stands_where_it_was_called():
    def loss(x, n):
        return aot.fori_loop(0, n, lambda i, y: jnp.sin(y), x).sum()

    plan = aot.function(loss).trace(X, jnp.int32(2)).partition().plan
    assert plan.saved and all("test_steps.py" in row.source for row in plan.saved)
