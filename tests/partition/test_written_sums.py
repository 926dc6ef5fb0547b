"""Sums over the layers of a deep network are written to memory, and not computed again by each loop that reads them."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.lower.steps import Run, Write
from jointcut.partition.plans.backend import CPU, PORTABLE
from jointcut.partition.plans.problem import Problem
from jointcut.partition.search.mincut import min_cut
from segmented import PROGRAMS, assert_same, cut, dropout, nested, normal, results


def network(count, rows=64, width=32):
    """A residual network whose products read the stream through a norm, and its gradient through a mask."""

    def loss(x, *layers):
        for w, mask in zip(layers[:count], layers[count:], strict=True):
            centred = x - x.mean(1, keepdims=True)
            normed = centred * lax.rsqrt((centred**2).mean(1, keepdims=True) + 1e-3)
            x = x + mask * jnp.tanh(normed @ w)
        return jnp.sum(x**2)

    shapes = [(rows, width), *[(width, width)] * count, *[(rows, width)] * count]
    return loss, [normal(i, *shape) for i, shape in enumerate(shapes)]


def recurrent(count, rows=4, width=32):
    """A matrix that is used in steps which are written one after the other; its gradient is a sum over all of them."""

    def loss(matrix, h, *inputs):
        for x in inputs:
            h = jnp.tanh(h @ matrix + x)
        return jnp.sum(h**2)

    shapes = [(width, width), *[(rows, width)] * (count + 1)]
    return loss, [normal(i, *shape) for i, shape in enumerate(shapes)]


def traced(count):
    loss, arrays = network(count)
    return aot.function(loss, argnums=tuple(range(len(arrays)))).trace(*arrays)


def test_sums_that_read_more_arrays_than_the_backend_reads_again_are_written_once_they_are_there():
    problem = Problem.of(traced(12).graph, backend=CPU)
    graph, sides, plan = problem.graph, problem.sides, min_cut(problem)
    found = CPU.written_sums(graph, sides, plan.values)
    halves = {graph.values[v].maker in sides.forward for v in found}
    assert halves == {True, False} and all(len(graph.consumers[v]) > 1 for v in found)
    steps = schedule(problem, plan)
    for half, is_forward in ((steps.forward, True), (steps.backward, False)):
        mine = [v for v in sorted(found) if (graph.values[v].maker in sides.forward) == is_forward]
        for v in mine:
            at = half.index(Write(v))
            assert half[at - 1] == Run(graph.values[v].maker)
            assert not any(isinstance(s, Run) and v in graph.ops[s.op].inputs for s in half[:at])
    assert not CPU.written_sums(graph, sides, range(len(graph.values)))
    assert not PORTABLE.written_sums(graph, sides, plan.values)


def test_what_a_deep_network_reads_and_writes_grows_with_its_depth_and_not_with_the_square():
    """By XLA's own count. That of JAX's step, and ours without what is written, grows by more than six times here."""

    def bytes_accessed(count):
        (step,) = traced(count).partition().compile().programs
        return step.cost_analysis()["bytes accessed"]

    few, many = bytes_accessed(8), bytes_accessed(32)
    assert many < 4.4 * few


@pytest.mark.parametrize("program", [network, recurrent, *PROGRAMS], ids=lambda program: program.__name__)
@pytest.mark.parametrize("strategy", ["min_cut", "best"])
def test_to_write_all_sums_changes_no_bit(program, strategy):
    """Outside loops and within their steps, op by op."""
    made, flat = cut(program(5), strategy)
    without, with_all = (made.on(replace(CPU, most_read=most)) for most in (None, 1))
    fewer, more = (str(made.schedule).count("write") for made in (without, with_all))
    assert fewer < more if program in (network, recurrent, dropout, nested) else fewer <= more
    assert_same(results(with_all, with_all.halves, flat), results(without, without.halves, flat))


# ------------------------------------------------------------------------------------- one matrix, used many times


@pytest.mark.parametrize("strategy", ["min_cut", "save_all"])
def test_the_gradient_of_a_matrix_takes_no_more_memory_the_more_often_it_is_used(strategy):
    """Else XLA holds the gradient of each use until it adds all of them up."""

    def activation_bytes(count):
        loss, arrays = recurrent(count, width=256)
        return aot.function(loss).trace(*arrays).partition(strategy=strategy).compile().activation_bytes

    matrix_bytes, step_bytes = 4 * 256**2, 4 * 4 * 256
    assert activation_bytes(24) < 3 * matrix_bytes + 24 * 4 * step_bytes


def test_a_sum_of_few_cotangents_or_of_elementwise_results_is_left_to_the_compiler():
    def written(function, *arrays):
        problem = Problem.of(aot.function(function).trace(*arrays).graph, backend=CPU)
        return CPU.written_sums(problem.graph, problem.sides, min_cut(problem).values)

    few, many = recurrent(3), recurrent(6)
    assert (len(written(few[0], *few[1])), len(written(many[0], *many[1]))) == (0, 4)
    x = normal(0, 8, 8)
    assert not written(lambda x: sum(jnp.sum(jnp.sin(x * k) * normal(k, 8, 8)) for k in range(1, 7)), x)
