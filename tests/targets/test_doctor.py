"""`aot.doctor` reads what a GPU holds from the order of its program, and finds weight gradients that wait."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.alive import live_bytes
from jointcut import aot
from jointcut.aot.call.doctor.scheduled import scheduled
from jointcut.aot.run.compile import ProgramMemory, compiled
from targeted import installed


def told(found):
    """A text without the numbers of its lines."""
    return re.sub(r"\.py:\d+", ".py", str(found))


def block(x, pair):
    return x + jax.nn.gelu(x @ pair[0]) @ pair[1]


def fenced(x, pair):
    x, up = jax.lax.optimization_barrier((x, pair[0]))
    h = jax.nn.gelu(x @ up)
    h, down = jax.lax.optimization_barrier((h, pair[1]))
    return x + h @ down


def step_of(block, sharding):
    """A step of six blocks that are computed again, whose products are divided among the devices."""

    def loss(pairs, x):
        for pair in pairs:
            x = jax.lax.with_sharding_constraint(jax.checkpoint(block)(x, pair), sharding)
        return jnp.mean(x**2)

    def step(pairs, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, pairs, jax.grad(loss)(pairs, x))

    return jax.jit(step, donate_argnums=0)


def call(target, width=512, rows=16384):
    """Whole rows, and the arguments: products divided by columns, then by rows, as tensors are in parallel."""
    mesh = target.mesh((target.count,), ("d",))

    def struct(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    pairs = [(struct((width, 4 * width), None, "d"), struct((4 * width, width), "d"))] * 6
    return NamedSharding(mesh, PartitionSpec()), (pairs, struct((rows, width)))


RESIDUALS = """\
layers does not fit: it takes 83.9 MB of 45.0 MB, by XLA's account.
  arguments 12.6 MB, results 4.19 MB, temporaries 67.1 MB
  at the peak of the temporaries, in the backward:
     25.2 MB  3 arrays of dot_general at targets/test_doctor.py (layers)
     25.2 MB  3 arrays of mul at targets/test_doctor.py (layers)
     8.39 MB  1 array of add_any at targets/test_doctor.py (layers)
     8.39 MB  1 array of transpose at targets/test_doctor.py (layers)
residuals: 50.3 MB at the peak wait from the forward of layers for its backward.
  layers = aot.function(layers, budget="45.0 MB")
  compiled with it: 37.7 MB, which fits
  rows in blocks: float32[4096,512] of mul at targets/test_doctor.py (layers): 4 blocks along axis 0, \
each forward with its backward"""


def layers(ws, x):
    for w in ws:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def scanned(ws, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(jax.nn.gelu(x @ w)), None), x, ws)[0] ** 2)


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


LAYERS = [struct(512, 512)] * 4, struct(4096, 512)


@pytest.mark.parametrize("name", ["h100", "h100x8"])
@pytest.mark.parametrize(("function", "args"), [(scanned, (struct(6, 512, 512), LAYERS[1])), (layers, LAYERS)])
def test_the_schedule_of_a_gpu_holds_what_xla_accounts_for(name, function, args):
    target = installed(name)
    args = jax.tree.map(target.placed, args)
    made = compiled(jax.jit(jax.value_and_grad(function)).lower(*args), target)
    found = scheduled(made)
    assert found is not None
    assert max(live_bytes(found)) == pytest.approx(ProgramMemory.of(made).temp_bytes, rel=0.15)


def test_the_arrays_at_the_peak_of_a_gpu_are_told_with_a_budget_that_was_compiled():
    target = installed("h100")
    found = aot.doctor("45MB", target=target).check(jax.grad(layers), *LAYERS)
    assert told(found) == RESIDUALS


LATE = """\
late weight gradients: 109.1 MB at the peak wait for 5 weight gradients of targets/test_doctor.py (block), \
which XLA computes late: what they read is there.
  x, w = jax.lax.optimization_barrier((x, w))  # before each product x @ w there
  compiled with it: 162.8 MB, still too much"""


def test_weight_gradients_that_wait_are_told_with_a_barrier_that_was_compiled():
    target = installed("h100x8")
    sharding, args = call(target)
    found = aot.doctor("40MB", target=target).check(step_of(block, sharding), *args)
    (cause,) = [cause for cause in found.causes if cause.name == "late weight gradients"]
    assert told("\n".join(cause.told(found.memory_bytes))) == LATE
    typed = step_of(fenced, sharding).lower(*args)
    assert cause.peak_bytes == ProgramMemory.of(compiled(typed, target)).peak_bytes


def test_weight_gradients_that_do_not_wait_are_not_told():
    alone, many = installed("h100"), installed("h100x8")
    sharding, args = call(alone)
    in_turn = aot.doctor("40MB", target=alone).check(step_of(block, sharding), *args)
    sharding, args = call(many)
    with_barriers = aot.doctor("40MB", target=many).check(step_of(fenced, sharding), *args)
    for found in (in_turn, with_barriers):
        assert not found.fits
        assert "late weight gradients" not in [cause.name for cause in found.causes]
