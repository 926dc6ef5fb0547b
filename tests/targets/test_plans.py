"""A plan for a target means what the function means, is by the target's rates, and is the same everywhere."""

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.planning import offloading
from jointcut.partition.lower import verify
from jointcut.partition.plans.backend import Backend
from jointcut.partition.program.jax.jaxprs import opened
from jointcut.wrappers.arguments.tree import Statics, bind
from oracle import assert_same, is_inexact
from programs import CORPUS, EVERY_PROGRAM

TARGETS = ("h100", "v5e-4")
SOME = CORPUS if EVERY_PROGRAM else CORPUS[::3]


def on_a_cpu(program, traced, cut):
    """Value and gradients by the halves of a cut, on this machine."""
    flat = [*traced.consts, *bind(program.args, program.kwargs, Statics()).unique]
    cotangents = [jnp.ones(v.aval.shape, v.aval.dtype) for v in opened(traced.joint)[0].invars[len(flat) :]]
    return verify.run(cut.split.halves, cut.split.graph, flat, cotangents)


def floating(args):
    """The positions of the arguments that are floating point in all their parts."""
    return tuple(i for i, x in enumerate(args) if jax.tree.leaves(x) and all(map(is_inexact, jax.tree.leaves(x))))


@pytest.mark.parametrize("program", SOME, ids=lambda program: program.name)
def test_halves_for_a_target_are_the_function_and_its_gradient(program):
    argnums, number = floating(program.args), CORPUS.index(program)
    if not argnums:
        return
    with program.precision():
        made = aot.function(program.function, argnums=argnums, has_aux=program.has_aux, target=TARGETS[number % 2])
        alone = aot.function(program.function, argnums=argnums, has_aux=program.has_aux, strategy="save_all")
        traced = made.trace(*program.args, **program.kwargs)
        plain = alone.trace(*program.args, **program.kwargs)
        got, want = (on_a_cpu(program, made, made.partition()) for made in (traced, plain))
        assert_same(got, want, program, slack=10)


def layers(ws, x):
    for w in ws:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


LAYERS = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 6, jax.ShapeDtypeStruct((65536, 1024), "float32")


def test_the_default_of_a_gpu_is_smaller_than_the_minimum_cut_and_as_fast_as_plain_jax():
    traced = aot.function(layers, target="h100").trace(*LAYERS)
    planner = traced.planner
    found, least, plain = (
        planner.candidate(planner.priced(traced.partition(strategy).plan)) for strategy in (None, "min_cut", "save_all")
    )
    assert found.peak_bytes < 0.9 * least.peak_bytes < 0.5 * plain.peak_bytes
    assert found.step_seconds <= plain.step_seconds
    assert found.step_seconds <= least.step_seconds + 0.03 * (planner.common_seconds + least.step_seconds)


DEEP = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 64, jax.ShapeDtypeStruct((262144, 1024), "float32")


def test_where_the_default_has_no_room_the_fastest_plan_that_should_fit_is_taken():
    small, large = (aot.function(layers, target=name).trace(*DEEP) for name in ("l4", "b200"))
    room = small.options.goal.memory_bytes - small.program.fixed_bytes
    wanted, fitting = large.partition().plan, small.partition().plan
    predicted = [small.planner.known(small.planner.priced(plan)).predicted_bytes for plan in (wanted, fitting)]
    assert predicted[1] <= 0.9 * room < predicted[0]


def test_where_nothing_should_fit_a_tpu_gets_plain_jax_and_a_gpu_the_smallest():
    deeper = DEEP[0], jax.ShapeDtypeStruct((1 << 24, 1024), "float32")
    tpu, gpu = (aot.function(layers, target=name, tiles=False).trace(*deeper) for name in ("v5e-1", "l4"))
    assert tpu.partition().plan.strategy == "save_all"  # XLA computes again by itself
    assert gpu.partition().plan.key == gpu.planner.ranked[-1].plan.key


def test_a_device_that_nobody_knows_is_measured_for_its_default(monkeypatch):
    asked = []
    monkeypatch.setattr(offloading, "backend_for", lambda goal: Backend("gpu"))
    monkeypatch.setattr(offloading, "rates", lambda: asked.append(1) or aot.target("h100").rates)
    traced = aot.function(layers).trace(*LAYERS)
    assert traced.partition().plan.key == aot.function(layers, target="h100").trace(*LAYERS).partition().plan.key
    assert asked == [1]
    monkeypatch.setattr(offloading, "backend_for", lambda goal: Backend("cpu"))
    assert aot.function(layers).trace(*LAYERS).problem.rates is None


def test_a_cost_of_the_users_goes_before_the_rates():
    dear = aot.target("h100").rates.__class__(1e9, 1e9, 2.8e12)
    traced = aot.function(layers, target="h100", cost=dear).trace(*LAYERS)
    assert not any(traced.graph.ops[i].name == "dot_general" for i in traced.partition().plan.recomputed)


def test_products_of_sixteen_bits_take_half_the_time_and_those_of_full_precision_longer():
    def seconds(dtype, precision=None):
        x = jax.ShapeDtypeStruct((4096, 4096), dtype)
        planner = aot.function(lambda a, b: jnp.sum(jnp.matmul(a, b, precision=precision)), target="h100").trace(x, x)
        graph = planner.graph
        op = next(op for op in graph.ops if op.name == "dot_general")
        return aot.target("h100").rates.seconds(graph, op)

    np.testing.assert_allclose(seconds("float32") / seconds("bfloat16"), 2, rtol=0.01)
    assert seconds("float32", "highest") > 5 * seconds("float32")


def test_the_backend_of_a_plan_is_that_of_its_target():
    for name, platform, several in (("h100", "cuda", False), ("v5e-4", "tpu", True)):
        wanted = replace(Backend.of((platform,)), several=several, puts_off=True)  # over several a TPU hides sums, too
        assert aot.function(layers, target=name).trace(*LAYERS).problem.backend == wanted


KEY = """
import jax, jax.numpy as jnp
from jointcut import aot
from jointcut.partition.plans import planfile
def layers(ws, x):
    for w in ws:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x**2)
args = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 6, jax.ShapeDtypeStruct((65536, 1024), "float32")
traced = aot.function(layers, target="h100").trace(*args)
print(planfile.dumps(traced.partition().plan, traced.graph))
"""


def test_a_plan_is_the_same_in_every_process(monkeypatch):
    texts = set()
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        texts.add(subprocess.run([sys.executable, "-c", KEY], capture_output=True, text=True, check=True).stdout)
    assert len(texts) == 1


def test_targets_are_kept_apart_in_a_process():
    cuts = [aot.function(layers, target=name).trace(*LAYERS).partition() for name in ("h100", "v5e-4", "h100")]
    assert cuts[0].plan.key == cuts[2].plan.key
    with aot.target("v5e-4"):
        inner = aot.function(layers).trace(*LAYERS)
        with aot.target("h100"):
            assert aot.function(layers).trace(*LAYERS).options.target == aot.target("h100")
    assert inner.options.target == aot.target("v5e-4")
    assert aot.function(layers).trace(*LAYERS).options.target is None
