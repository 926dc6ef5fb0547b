"""Nothing is compiled twice: what was compiled to weigh a plan, or to tell of it, is what runs."""

from __future__ import annotations

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest

from jointcut import aot
from jointcut.aot.planning.budgets.searches import forget
from jointcut.partition.prices.cost import Roofline

EVENT = "/jax/core/compile/backend_compile_duration"
ROOFLINE = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
ARGS = jnp.eye(16), jnp.ones((32, 16))
_compiled: list[str] = []
_listens: list[bool] = []


def _heard(event: str, seconds: float, **_: object) -> None:
    del seconds
    if event == EVENT:
        _compiled.append(event)


@pytest.fixture
def compilations():
    """A context that counts the programs that XLA compiles in it."""
    if not _listens:
        jax.monitoring.register_event_duration_secs_listener(_heard)
        _listens.append(True)
    forget()

    @contextmanager
    def counted():
        start, count = len(_compiled), []
        yield count
        count.append(len(_compiled) - start)

    return counted


def layers(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w) * jnp.sin(x)
    return jnp.mean(x**2)


def made(**options):
    """A fresh function, of which nothing is compiled yet; JAX's own small programs are."""

    def loss(w, x):
        return layers(w, x)

    jax.block_until_ready(jax.value_and_grad(layers)(*ARGS))
    return aot.function(loss, cost=ROOFLINE, **options)


def test_a_budget_that_the_first_plan_holds_compiles_one_program_before_the_first_result(compilations):
    function = made(budget="1GiB")
    with compilations() as count:
        function.value_and_grad(*ARGS)
    assert count == [1]
    with compilations() as count:
        function.value_and_grad(*ARGS)
        function.trace(*ARGS)
    assert count == [0]


def test_a_search_compiles_each_plan_that_it_tries_once_and_runs_the_last(compilations):
    traced = made().trace(*ARGS)
    with compilations() as count:
        cut = traced.partition(budget="1GiB")
        run = cut.compile()
        run.value_and_grad(*ARGS)
    assert count == [len(cut.fitted.trail)]
    assert run.peak_bytes == cut.fitted.measured.peak_bytes


@pytest.mark.parametrize("name", ["__call__", "value_and_grad"])
def test_a_first_call_compiles_one_program_and_a_second_none(compilations, name):
    function = made()
    with compilations() as count:
        getattr(function, name)(*ARGS)
    assert count == [1]
    with compilations() as count:
        getattr(function, name)(*ARGS)
    assert count == [0]


def test_a_pullback_compiles_each_half_once(compilations):
    function, one = made(), jnp.float32(1)
    with compilations() as count:
        _, pullback = function.vjp(*ARGS)
        pullback(one)
    assert count == [2]
    with compilations() as count:
        _, pullback = function.vjp(*ARGS)
        pullback(one)
        pullback(one)
    assert count == [0]


def test_what_was_explained_is_compiled_already(compilations):
    cut = made().trace(*ARGS).partition()
    cut.explain()
    with compilations() as count:
        run = cut.compile()
        run.value_and_grad(*ARGS)
        assert run.peak_bytes > 0
    assert count == [0]


def test_a_cut_is_compiled_once_however_often_it_is_asked_to(compilations):
    cut = made().trace(*ARGS).partition()
    with compilations() as count:
        for _ in range(2):
            cut.compile().value_and_grad(*ARGS)
    assert count == [1]
    with compilations() as count:
        for _ in range(2):
            out, pullback = cut.compile(2).vjp(*ARGS)
            pullback(out)
            cut.compile(2).value_and_grad(*ARGS)
    assert count == [2]


def test_what_a_function_explains_is_what_it_runs(compilations):
    function = made()
    with compilations() as count:
        function.explain(*ARGS)
    assert count[0] > 0
    with compilations() as count:
        function.value_and_grad(*ARGS)
    assert count == [0]


def test_debug_mode_compiles_each_half_once(compilations):
    function = made()
    with aot.debug():
        function.value_and_grad(*ARGS)
        with compilations() as count:
            function.value_and_grad(*ARGS)
    assert count == [0]


def test_a_program_from_the_cache_is_not_compiled(compilations, tmp_path):
    made(cache=tmp_path).value_and_grad(*ARGS)
    with compilations() as count:
        made(cache=tmp_path).value_and_grad(*ARGS)
    assert count == [0]
