"""Run on eight devices of the host: what `test_mesh` claims, one function for each claim, told as JSON.

Warnings are errors here as they are in the tests.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from claims import tell
from jointcut import aot
from jointcut.aot.report.gradient_error import relative_error
from jointcut.partition.plans import planfile

LINE = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
TYPED = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
DRAWS = np.random.default_rng(0)
W = [DRAWS.normal(size=(64, 64)).astype("f") / 8 for _ in range(4)]
X = DRAWS.normal(size=(256, 64)).astype("f")


def laid(mesh, weights, rows):
    return [jax.device_put(w, NamedSharding(mesh, weights)) for w in W], jax.device_put(X, NamedSharding(mesh, rows))


def layer(x, w):
    return jnp.sin(jnp.tanh(x @ w) + x)


def loss(ws, x):
    for w in ws:
        x = layer(x, w)
    return jnp.mean(x**2)


def gathering(ws, x):
    """The loss, where each device gathers the weights of a layer."""

    def on_each(ws, x):
        for w in ws:
            x = layer(x, lax.all_gather(w, "d", axis=1, tiled=True))
        return lax.pmean(jnp.mean(x**2), "d")

    return jax.shard_map(on_each, mesh=LINE, in_specs=([P(None, "d")] * 4, P("d")), out_specs=P())(ws, x)


PLACED = {
    "data": (loss, laid(LINE, P(), P("d"))),
    "FSDP": (loss, laid(LINE, P(None, "d"), P("d"))),
    "explicit": (loss, laid(TYPED, P(), P("d"))),
    "manual": (gathering, laid(LINE, P(None, "d"), P("d"))),
    "manual, arrays of one device": (gathering, (W, X)),
}


def bytes_are_those_of_one_device():
    for name, (function, args) in PLACED.items():
        traced = aot.function(function).trace(*args)
        cut, kept = traced.partition(), traced.partition("save_all")
        (step,) = cut.compile() and cut.made.programs(1)
        memory = step.memory_analysis()
        ends = memory.argument_size_in_bytes + memory.output_size_in_bytes
        assert abs(traced.program.fixed_bytes - ends) < 256, (name, traced.program.fixed_bytes, ends)
        for each in (cut, kept):
            assert each.plan.bytes_saved == each.split.residual_bytes, (name, each.plan.bytes_saved)
            assert each.plan.bytes_saved <= 16 * X.nbytes // 8 + 4 * W[0].nbytes, (name, each.plan.bytes_saved)
        assert cut.plan.remarks[-1:] == ["all bytes are those of one of 8 devices"], cut.plan.remarks
        peak_bytes = cut.made.peak_bytes(1)
        assert 0.8 < traced.pareto().points[0].peak_bytes / peak_bytes < 1.6, (name, traced.pareto(), peak_bytes)
        assert max(buffer.bytes for buffer in cut.explain(measure=False).life.buffers) <= W[0].nbytes, name


def halves_that_run_apart_keep_as_many_bytes_as_the_plan_says():
    for function, args in PLACED.values():
        traced = aot.function(function).trace(*args)
        made = traced.partition("save_all").compile()
        memory = made.memory
        kept = memory.forward.output_bytes - 4
        assert abs(kept - memory.residual_bytes) < 256, (function, kept, memory.residual_bytes)


def a_plan_is_read_back_on_the_mesh_and_followed_elsewhere():
    _, args = PLACED["FSDP"]
    cut = aot.function(loss).trace(*args).partition()
    text = planfile.dumps(cut.plan, cut.split.graph)
    again = aot.function(loss, plan=text)
    assert again.trace(*args).partition().plan.bytes_saved == cut.plan.bytes_saved
    assert again.trace(W, X).partition().plan.bytes_saved == 8 * cut.plan.bytes_saved
    want = jax.grad(loss)(W, X)
    assert relative_error(jax.jit(jax.grad(lambda ws, x: again(ws, x)))(*args), want) < 1e-5


CLAIMS = [
    bytes_are_those_of_one_device,
    halves_that_run_apart_keep_as_many_bytes_as_the_plan_says,
    a_plan_is_read_back_on_the_mesh_and_followed_elsewhere,
]


if __name__ == "__main__":
    tell(CLAIMS)
