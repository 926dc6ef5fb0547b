"""Sums over the layers of a deep network are written to memory, and not computed again by each loop that reads them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jointcut import aot
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.lower.steps import Run, Write
from jointcut.partition.plans.backend import CPU, PORTABLE
from jointcut.partition.plans.problem import Problem
from jointcut.partition.search.mincut import min_cut


def masked_layers(count, backend=CPU):
    """A residual network whose products read the stream through a norm and its gradient through a mask."""

    def loss(weights, masks, x):
        for w, mask in zip(weights, masks, strict=True):
            centred = x - x.mean(1, keepdims=True)
            normed = centred * lax.rsqrt((centred**2).mean(1, keepdims=True) + 1e-3)
            x = x + mask * jnp.tanh(normed @ w)
        return jnp.sum(x**2)

    shapes = [jax.ShapeDtypeStruct((32, 32), "float32")] * count, [jax.ShapeDtypeStruct((64, 32), "float32")] * count
    traced = aot.function(loss).trace(*shapes, jax.ShapeDtypeStruct((64, 32), "float32"))
    problem = Problem.of(traced.graph, backend=backend)
    return traced, problem, min_cut(problem)


def test_sums_that_read_more_arrays_than_the_backend_reads_again_are_written_once_they_are_there():
    _, problem, plan = masked_layers(12)
    graph, sides = problem.graph, problem.sides
    found = CPU.gathered(graph, sides, plan.values)
    halves = {graph.values[v].maker in sides.forward for v in found}
    assert halves == {True, False} and all(len(graph.consumers[v]) > 1 for v in found)
    steps = schedule(problem, plan)
    for half, is_forward in ((steps.forward, True), (steps.backward, False)):
        mine = [v for v in sorted(found) if (graph.values[v].maker in sides.forward) == is_forward]
        for v in mine:
            at = half.index(Write(v))
            assert half[at - 1] == Run(graph.values[v].maker)
            assert not any(isinstance(s, Run) and v in graph.ops[s.op].inputs for s in half[:at])
    assert not masked_layers(2)[1].backend.gathered(graph, sides, range(len(graph.values)))
    assert not PORTABLE.gathered(graph, sides, plan.values)


def test_what_a_deep_network_reads_and_writes_grows_with_its_depth_and_not_with_the_square():
    """By XLA's own count. That of JAX's step, and ours without what is written, grows by more than six times here."""

    def bytes_accessed(count):
        (step,) = masked_layers(count)[0].partition().compile().programs
        return step.cost_analysis()["bytes accessed"]

    few, many = bytes_accessed(8), bytes_accessed(32)
    assert many < 4.4 * few
