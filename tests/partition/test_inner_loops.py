"""A loop inside a loop may run again in the backward, a step of the outer one at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.lower.verify import run, verify_structure
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.prices.rules import rerunnable
from jointcut.partition.program.graph import OPEN_LOOP, TOP
from jointcut.partition.program.jax import runtime
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.front import spread
from jointcut.partition.search.mincut import min_cut

RATES = Roofline(1e11, 1e10, 1e10)


def normal(seed, *shape):
    return jnp.asarray(0.5 * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def layers_in_time(w, x):
    """Each layer's new state is stacked within the step, and is the carry of the loop around."""

    def layer(x, own):
        weight, h = own
        h = jnp.tanh((x + h) @ weight)
        return jnp.sin(h), h

    def step(hs, x):
        x, hs = lax.scan(layer, x, (w, hs))
        return hs, x

    hs, ys = lax.scan(step, jnp.zeros((3, 2, 4)), x)
    return jnp.sum(hs**2) + jnp.sum(jnp.sin(ys))


def steps_in_steps(w, x):
    """The inner loop carries two values and counts; constants of it are computed in the outer step."""

    def outer(carry, x):
        drive = jnp.tanh(x @ w[0])

        def inner(carry, _):
            p, v, n = carry
            v = v - jnp.sin(p @ w[1]) + drive
            return (p + 0.1 * v, v, n + 1), None

        (p, v, n), _ = lax.scan(inner, (*carry, jnp.int32(0)), None, length=4)
        return (p, v), jnp.sum(p * v) / n.astype(p.dtype)

    (p, v), ys = lax.scan(outer, (x[0], x[1]), x)
    return jnp.sum(p * v) + jnp.sum(ys)


def three_deep(w, x):
    """A loop that runs again holds a loop that runs again."""

    def outer(h, x):
        def middle(h, weight):
            h, seen = lax.scan(lambda g, _: (jnp.sin(g @ weight), jnp.cos(g)), h, None, length=2)
            return jnp.tanh(h + jnp.sum(seen, 0)), None

        return lax.scan(middle, h + x, w)[0], None

    return jnp.sum(lax.scan(outer, x[0], x)[0] ** 2)


PROGRAMS = [layers_in_time, steps_in_steps, three_deep]
programs = pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)


def traced(function):
    return aot.function(function).trace(normal(0, 3, 4, 4), normal(1, 5, 2, 4))


def plans(found):
    planner = Planner(Problem.of(found.graph, RATES))
    return [planner.plan(choice, "front") for choice in spread(planner.front.choices, 5)]


@pytest.mark.parametrize("function", [steps_in_steps, three_deep], ids=lambda f: f.__name__)
def test_the_smallest_plan_runs_an_inner_loop_again(function):
    found = traced(function)
    least = plans(found)[0]
    again = [found.graph.ops[i] for i in least.recomputed if found.graph.ops[i].name == OPEN_LOOP]
    assert again and all(found.graph.loop_of(op) != TOP for op in again)
    assert least.bytes_saved < min_cut(found.graph).bytes_saved


@programs
def test_every_plan_of_the_front_means_what_the_joint_program_means(function):
    found = traced(function)
    w, x = normal(0, 3, 4, 4), normal(1, 5, 2, 4)
    wanted = runtime.evaluate(found.joint, w, x, jnp.float32(1))
    for plan in plans(found):
        made = found.partition(plan=plan).split
        verify_structure(made.graph, made.halves)
        outputs, gradients = run(made.halves, made.graph, [w, x], [jnp.float32(1)])
        for got, want in zip([*outputs, *gradients], wanted, strict=True):
            largest = float(np.max(np.abs(want), initial=1))  # XLA compiles each scan, and may reassociate in it
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=2e-6 * largest)


@programs
def test_the_compiled_step_is_that_of_jax(function):
    w, x = normal(0, 3, 4, 4), normal(1, 5, 2, 4)
    found = traced(function)
    compiled = found.partition(plan=plans(found)[0]).compile()
    for got, want in zip(
        jax.tree.leaves(compiled.value_and_grad(w, x)),
        jax.tree.leaves(jax.value_and_grad(function)(w, x)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_default_cut_runs_no_loop_again():
    for function in PROGRAMS:
        graph = traced(function).graph
        assert OPEN_LOOP not in [graph.ops[i].name for i in min_cut(graph).recomputed]


def test_outermost_loops_and_loops_with_effects_do_not_run_again():
    def noisy(w, x):
        def outer(h, x):
            def inner(h, _):
                jax.debug.callback(lambda h: None, jnp.sum(h))
                return jnp.sin(h @ w[0]), None

            return lax.scan(inner, h + x, None, length=2)[0], None

        return jnp.sum(lax.scan(outer, x[0], x)[0])

    for function in (*PROGRAMS, noisy):
        graph = traced(function).graph
        forward = [op for op in graph.ops if op.name == OPEN_LOOP and op.origin.value == "forward"]
        allowed = [op.id in rerunnable(graph) for op in forward]
        assert allowed == [graph.loop_of(op) != TOP and function is not noisy for op in forward]
