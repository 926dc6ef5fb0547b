"""A call runs by programs of the cache as it runs by its own, and a cache never answers for another program."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.cache.location import store_for
from jointcut.aot.planning.budgets import searches
from jointcut.aot.stages import tracing
from jointcut.aot.stages.traced import Traced
from oracle import assert_same, called, cotangents, plain, plain_vjp, value_and_grad
from programs import CORPUS, named

ROOT = Path(__file__).parent.parent.parent
some = pytest.mark.parametrize("program", CORPUS[::20], ids=lambda program: program.name)


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, logger="jointcut")
    return caplog


def found(caplog):
    """What was loaded from the cache, and what was not kept, since the last question."""
    texts = [re.sub(r"\d+\.\d+ s", "N s", r.getMessage()) for r in caplog.records]
    caplog.clear()
    return [t for t in texts if "loaded from the cache" in t], [t for t in texts if "not kept" in t]


@some
def test_a_second_function_runs_what_the_first_compiled(program, tmp_path, told):
    with program.precision():
        for turn in range(2):
            function = aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux, cache=tmp_path)
            assert_same(function(*program.args, **program.kwargs), plain(program, called), program)
            if program.scalar and "grad" not in program.lacks:
                got = function.value_and_grad(*program.args, **program.kwargs)
                assert_same(got, plain(program, value_and_grad), program)
            if "vjp" not in program.lacks:
                out, aux, first, second = plain_vjp(program)
                got, pullback, *more = function.vjp(*program.args, **program.kwargs)
                assert_same((got, more), (out, aux), program)
                assert_same(pullback(cotangents(out, 1)), first, program)
                assert_same(pullback(cotangents(out, 2)), second, program)
            hits, refused = found(told)
            assert refused or bool(hits) is bool(turn), (hits, refused)


def test_what_is_found_is_neither_differentiated_nor_cut(tmp_path, monkeypatch):
    program = named("transformer_block")
    first = aot.function(program.function, argnums=program.argnums, cache=tmp_path)
    want = first.value_and_grad(*program.args, **program.kwargs)

    def refuse(*args, **kwargs):
        raise AssertionError("the second function traced a derivative")

    monkeypatch.setattr(tracing, "trace", refuse)
    monkeypatch.setattr(Traced, "partition", refuse)
    second = aot.function(program.function, argnums=program.argnums, cache=tmp_path)
    got = second.value_and_grad(*program.args, **program.kwargs)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


SECOND = """
import sys, logging
import jax, jax.numpy as jnp
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
logging.getLogger("jax").setLevel(logging.ERROR)
from jointcut import aot

@aot.function
def loss(params, x):
    def layer(h, w):
        return jnp.tanh(h @ w), None
    h, _ = jax.lax.scan(layer, x, params["w"])
    return jnp.mean(jax.nn.relu(h) ** 2)

params = {"w": jnp.linspace(-1, 1, 48).reshape(3, 4, 4)}
value, grads = loss.value_and_grad(params, jnp.ones((2, 4)))
print(float(value).hex(), float(jnp.sum(grads["w"])).hex())
"""


def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    def run(seed):
        environment = os.environ | {"JOINTCUT_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", SECOND], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    first, second = run("1"), run("2")
    assert re.sub(r"\d+\.\d+ s", "N s", second[1]) == "loss: loaded from the cache in N s, step"
    assert second[2:] == first[-1:]


# ------------------------------------------------------------------------------------ what must not be mixed up


def test_arrays_that_a_function_closes_over_are_those_of_this_process(tmp_path, told):
    def of(scale):
        held = jnp.full(4, scale)
        return aot.function(lambda x: jnp.sum(jnp.sin(x * held)), cache=tmp_path)

    x = jnp.arange(4.0)
    of(1.0).grad(x)
    assert found(told)[0] == []
    np.testing.assert_allclose(of(3.0).grad(x), 3 * jnp.cos(3 * x), rtol=1e-6)
    assert found(told)[0] == ["<lambda>: loaded from the cache in N s, step"]
    np.testing.assert_allclose(of(2.0).vjp(x)[1](1.0)[0], 2 * jnp.cos(2 * x), rtol=1e-6)


def with_rule(factor):
    """Twice x, with a derivative that does not show when the function alone is traced."""

    @jax.custom_vjp
    def twice(x):
        return 2 * x

    twice.defvjp(lambda x: (2 * x, None), lambda _, ct: (factor * ct,))
    return lambda x: jnp.sum(twice(x))


def test_a_derivative_rule_of_the_users_decides(tmp_path, told):
    for factor in (2.0, 5.0, 2.0, 5.0):
        got = aot.function(with_rule(factor), cache=tmp_path).grad(jnp.ones(3))
        np.testing.assert_array_equal(got, jnp.full(3, factor))
    assert found(told)[0] == ["<lambda>: loaded from the cache in N s, step"] * 2


def test_arrays_that_a_derivative_rule_closes_over_are_those_of_this_process(tmp_path):
    def of(factors):
        @jax.custom_vjp
        def same(x):
            return x

        same.defvjp(lambda x: (x, None), lambda _, ct: (factors * ct,))
        return aot.function(lambda x: jnp.sum(same(x)), cache=tmp_path)

    for factors in (jnp.arange(3.0), jnp.arange(3.0) + 1, np.arange(3.0, dtype=np.float32) + 2):
        np.testing.assert_array_equal(of(factors).grad(jnp.ones(3)), factors)


def test_every_option_that_decides_a_program_has_programs_of_its_own(tmp_path, told):
    def loss(x, y):
        return jnp.sum(jnp.tanh(jnp.sin(x) * y))

    x, y = jnp.ones(3), jnp.arange(3.0)
    options = [{}, {"argnums": 1}, {"argnums": (0, 1)}, {"strategy": "save_all"}, {"donate_argnums": 1}]
    options += [{"keep_unused": True}, {"budget": 0.5}]
    for turn in range(2):
        for chosen in options:
            aot.function(loss, cache=tmp_path, **chosen).value_and_grad(x, jnp.array(y))
            assert bool(found(told)[0]) is bool(turn), chosen


@pytest.mark.parametrize(
    "change",
    [lambda x: x.astype(jnp.bfloat16), lambda x: x[:2], lambda x: x.reshape(1, 3), lambda x: 1.0],
    ids=["dtype", "size", "rank", "weak type"],
)
def test_every_type_of_argument_has_programs_of_its_own(tmp_path, told, change):
    x = jnp.arange(3.0)
    aot.function(lambda x: jnp.sum(jnp.sin(x)), cache=tmp_path).grad(x)
    found(told)
    got = aot.function(lambda x: jnp.sum(jnp.sin(x)), cache=tmp_path).grad(change(x))
    assert found(told)[0] == []
    np.testing.assert_array_equal(got, jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(x))))(change(x)))


def test_the_setting_of_matrix_products_has_programs_of_its_own(tmp_path, told):
    def loss(x):
        return jnp.sum(x @ x)

    for precision in ("float32", "bfloat16", "float32"):
        with jax.default_matmul_precision(precision):
            aot.function(loss, cache=tmp_path).grad(jnp.ones((2, 2)))
    assert len(found(told)[0]) == 1


def test_the_plan_that_held_a_budget_is_noted(tmp_path, monkeypatch):
    program = named("scan_over_layers")

    def cut(budget):
        function = aot.function(program.function, argnums=program.argnums, cache=tmp_path)
        return function.trace(*program.args, **program.kwargs).partition(budget=budget)

    first = cut(0.6)

    def refuse(*args, **kwargs):
        raise AssertionError("a second search")

    monkeypatch.setattr(searches, "fit", refuse)
    searches.forget()
    second = cut(0.6)
    assert second.plan == first.plan
    assert second.compile().peak_bytes == first.compile().peak_bytes
    assert len(second.compile().trail) == 1
    with pytest.raises(AssertionError, match="a second search"):
        cut(0.7)


# --------------------------------------------------------------------------------------- what is not kept


def test_a_callback_is_not_kept_and_says_why(tmp_path, told):
    def loss(x):
        return jnp.sum(jax.pure_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct((3,), jnp.float32), x))

    function = aot.function(loss, cache=tmp_path)
    assert float(function(jnp.ones(3))) == 3
    (text,) = found(told)[1]
    assert text.startswith("loss (call) is not kept in the cache: ")
    assert "pure_callback" in text and "cache_key" in text


def test_a_reference_is_not_kept_and_is_written_all_the_same(tmp_path, told):
    def step(x, count):
        count[...] += 1
        return jnp.sum(x * 2)

    count = jax.new_ref(jnp.zeros((), jnp.int32))
    function = aot.function(step, cache=tmp_path)
    function.value_and_grad(jnp.ones(3), count)
    function(jnp.ones(3), count)
    assert int(count[...]) == 2
    assert found(told)[1] == [
        f"step ({kind}) is not kept in the cache: it is given a jax.Ref." for kind in ("step", "call")
    ]


def test_a_strategy_without_identity_is_not_kept_and_one_with_is(tmp_path, told):
    from jointcut.partition import Plan

    def none(graph):
        return Plan.of(graph, [])

    def loss(x):
        return jnp.sum(jnp.sin(jnp.cos(x)))

    aot.function(loss, strategy=none, cache=tmp_path).grad(jnp.ones(3))
    (text,) = found(told)[1]
    assert "cache_key" in text
    none.cache_key = "nothing saved, 1"
    for turn in range(2):
        aot.function(loss, strategy=none, cache=tmp_path).grad(jnp.ones(3))
        assert bool(found(told)[0]) is bool(turn)


def test_a_damaged_entry_is_made_again(tmp_path, told):
    function = partial(aot.function, lambda x: jnp.sum(jnp.sin(x)), cache=tmp_path)
    function().grad(jnp.ones(3))
    (entry,) = tmp_path.glob("*.entry")
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(data)
    for hits in (0, 1):
        found(told)
        np.testing.assert_array_equal(function().grad(jnp.ones(3)), jnp.cos(jnp.ones(3)))
        assert len(found(told)[0]) == hits


AMONG_EIGHT = """
import sys, jax, jax.numpy as jnp
from jointcut import aot
for device in (None, jax.devices()[0], jax.devices()[3]):
    w = jnp.arange(3.0) if device is None else jax.device_put(jnp.arange(3.0), device)
    with jax.default_device(jax.devices()[2 if device is None else 5]):
        for _ in range(2):
            function = aot.function(lambda w: jnp.sum(jnp.sin(w)), cache=sys.argv[1])
            out, pullback = function.vjp(w)
            print(function(w).devices(), function.grad(w).devices(), pullback(out)[0].devices())
"""


def test_programs_come_back_on_the_device_of_their_arrays_where_several_are_visible(tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run = [sys.executable, "-c", AMONG_EIGHT, str(tmp_path)]
    done = subprocess.run(run, env=os.environ | {"XLA_FLAGS": flags}, check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[::2] == lines[1::2] == [" ".join(["{CpuDevice(id=N)}"] * 3).replace("N", n) for n in "203"]


# ------------------------------------------------------------------------------------------------ the option


def test_the_environment_variable_switches_it_on_and_the_option_off(tmp_path, monkeypatch):
    monkeypatch.setenv("JOINTCUT_CACHE_DIR", str(tmp_path / "named"))
    aot.function(jnp.sin, cache=False)(1.0)
    assert not (tmp_path / "named").exists()
    aot.function(jnp.sin)(1.0)
    assert len(list((tmp_path / "named").glob("*.entry"))) == 1


def test_a_cache_that_is_no_folder_is_refused():
    with pytest.raises(aot.CacheError) as error:
        aot.function(jnp.sin, cache=3)
    assert str(error.value) == (
        "cache is a int, not a folder.\nGive a path, True for ~/.cache/jointcut/programs, or False for none."
    )


def test_where_the_cache_keeps_nothing_it_says_so_once(tmp_path):
    function = aot.function(lambda w: jnp.sum(w**2), cache=tmp_path)
    with pytest.warns(aot.UncachedWarning) as caught:
        for _ in range(2):
            jax.grad(lambda w: function(w))(jnp.ones(3))
            jax.jit(lambda w: function.grad(w))(jnp.ones(3))
    assert [str(warning.message) for warning in caught] == [
        "<lambda> is called inside a transformation (jax.jit, jax.grad, jax.vmap), where it is part of a program of "
        "yours: the cache does not keep that.\nCall its own value_and_grad, grad or vjp outside of it, or let JAX keep "
        "your program: jax.config.update('jax_compilation_cache_dir', folder)."
    ]
    with pytest.warns(aot.UncachedWarning) as caught:
        function.value_and_update(jnp.ones(3), (), update=lambda g, s, p: (p - g, s))
    assert [str(warning.message) for warning in caught] == [
        "<lambda> is updated by value_and_update, whose program the cache does not keep.\nUpdate after value_and_grad, "
        "or let JAX keep it: jax.config.update('jax_compilation_cache_dir', folder)."
    ]


def test_without_a_cache_nobody_asks(monkeypatch):
    monkeypatch.delenv("JOINTCUT_CACHE_DIR", raising=False)
    assert store_for(None) is None
