"""A scan and the scans that read its stacks are one loop, whatever the scan is made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.bodies.read import read
from jointcut.partition.errors import GraphError
from jointcut.partition.program.graph import OPEN_LOOP, STEP, TOP
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.roles import Role, Roles, Side


def loops_of(graph):
    """(length, parent) of every loop, and for each the sides of its bodies."""
    sides = [sorted(r.origin.value for r in graph.regions if r.loop == loop.id) for loop in graph.loops[1:]]
    return [(loop.length, loop.parent) for loop in graph.loops[1:]], sides


PAIRED = {
    "scan_over_layers": [(3, TOP)],
    "scan_with_several_carries": [(4, TOP)],
    "reverse_scan": [(4, TOP)],
    "scan_of_no_steps": [(0, TOP)],
    "scan_of_one_step": [(1, TOP)],
    "scan_with_ys_used_outside": [(4, TOP)],
    "nested_scans": [(3, TOP), (4, 1)],
    "triply_nested_scans": [(2, TOP), (2, 1), (2, 2)],
}


@pytest.mark.parametrize("name", PAIRED)
def test_each_forward_scan_is_paired_with_the_backward_scan_that_reads_it(name, traced):
    shapes, sides = loops_of(traced(name).graph)
    assert shapes == PAIRED[name]
    assert sides == [["backward", "forward"]] * len(shapes)


def test_scans_that_feed_each_other_are_one_loop(traced):
    """Two forward scans of one length and their two backward scans run step by step together."""
    _, sides = loops_of(traced("scan_feeding_scan").graph)
    assert sides == [["backward", "backward", "forward", "forward"]]


@pytest.mark.parametrize("name", ["scan_of_counts_alone"])
def test_a_scan_without_a_partner_at_its_level_stays_closed(name, traced):
    graph = traced(name).graph
    assert len(graph.loops) == 1 and OPEN_LOOP not in [op.name for op in graph.ops]


def test_a_scan_in_a_branch_is_joined_with_that_of_the_same_branch(traced):
    graph = traced("scan_in_cond").graph
    assert [(loop.length, loop.rivals, loop.parent) for loop in graph.loops[1:]] == [(1, 2, 0), (1, 2, 0), (3, 0, 2)]
    assert [op.name for op in graph.ops].count(OPEN_LOOP) == 2


@pytest.mark.parametrize("name", PAIRED)
def test_what_one_body_makes_and_another_reads_is_one_value(name, traced):
    """No stack stands between: some op of a backward body reads what an op of a forward body makes."""
    graph = traced(name).graph
    handed = [
        v
        for op in graph.ops
        if graph.regions[op.region].origin is Side.BACKWARD
        for v in op.inputs
        if graph.values[v].maker is not None
        and graph.values[v].loop != TOP
        and graph.regions[graph.ops[graph.values[v].maker].region].origin is Side.FORWARD
    ]
    assert handed


@pytest.mark.parametrize("name", PAIRED)
def test_saving_counts_one_copy_per_trip(name, traced):
    graph = traced(name).graph
    for value in graph.values:
        trips, loop = 1, value.loop
        while loop != TOP:
            trips, loop = trips * graph.loops[loop].length, graph.loops[loop].parent
        assert value.copies == trips


def test_ids_are_dense_and_each_value_has_one_maker(traced):
    graph = traced("nested_scans").graph
    assert [v.id for v in graph.values] == list(range(len(graph.values)))
    assert [op.id for op in graph.ops] == list(range(len(graph.ops)))
    makers = {v: op.id for op in graph.ops for v in op.outputs}
    assert all(value.maker == makers.get(value.id) for value in graph.values)


def test_xs_that_a_body_hands_on_unchanged_are_the_input_itself():
    """JAX stacks them again as residuals; here the backward reads the slices of the argument."""

    def weighed(x, rows):
        last, same = lax.scan(lambda h, row: (jnp.sin(h * row), row), x, rows)
        return jnp.sum(last) + jnp.sum(same**2)

    cut = aot.function(weighed, argnums=(0, 1)).trace(np.ones(3, np.float32), np.ones((4, 3), np.float32)).partition()
    graph = cut.split.graph
    stacks = {graph.values[op.inputs[0]].label for op in graph.ops if op.name == STEP}
    assert "args[1]" in stacks
    assert all(s.shape != (4, 3) for s in cut.plan.saved)


# ------------------------------------------------------------------------------------ the loops run


def both_ways(function, *args):
    """Value and gradients, from the halves and from JAX."""
    numbers = tuple(range(len(args)))
    ours = aot.function(function, argnums=numbers)
    return ours.value_and_grad(*args), jax.jit(jax.value_and_grad(function, argnums=numbers))(*args)


def carries_swapped(x, y):
    (x, y), _ = lax.scan(lambda c, _: ((c[1], jnp.sin(c[0])), None), (x, y), None, length=5)
    return jnp.sum(x * y)


def constant_results(x, y):
    _, (ones, same) = lax.scan(lambda h, s: (jnp.sin(h * s), (jnp.ones(3), y)), x, jnp.stack([x, y]))
    return jnp.sum(jnp.exp(ones) * same)


def carry_reset(x, y):
    last, seen = lax.scan(lambda h, s: (jnp.zeros(3), jnp.sin(h * s)), x, jnp.stack([x, y, x]))
    return jnp.sum(last) + jnp.sum(seen**2)


def ys_of_the_carry(x, y):
    last, seen = lax.scan(lambda h, s: (jnp.sin(h + s), h), x, jnp.stack([x, y, x]), reverse=True)
    return jnp.sum(last * seen[1]) + jnp.sum(seen**3)


def inner_without_pair(x, y):
    def outer(h, s):
        count, _ = lax.scan(
            lambda n, v: (n + jnp.sum(v > 0), None), jnp.int32(0), lax.stop_gradient(s) * jnp.ones((4, 3))
        )
        return jnp.tanh(h * s) * count.astype(jnp.float32), None

    return jnp.sum(lax.scan(outer, x, jnp.stack([x, y]))[0])


def inner_of_length_zero(x, y):
    def outer(h, s):
        h, none = lax.scan(lambda g, t: (jnp.sin(g * t), g), h, jnp.zeros((0, 3)))
        return jnp.tanh(h * s) + none.sum(), None

    return jnp.sum(lax.scan(outer, x, jnp.stack([x, y]))[0])


def product_of_means(x, y):
    return jnp.log(lax.scan(lambda w, row: (w * jnp.mean(row), None), 1.0, jnp.exp(jnp.stack([x, y])))[0])


@pytest.mark.parametrize(
    "function",
    [
        carries_swapped,
        constant_results,
        carry_reset,
        ys_of_the_carry,
        inner_without_pair,
        inner_of_length_zero,
        product_of_means,
    ],
    ids=lambda function: function.__name__,
)
def test_unusual_bodies_mean_what_they_mean_in_jax(function):
    ours, theirs = both_ways(function, jnp.asarray([0.3, -0.5, 0.9]), jnp.asarray([0.7, 0.2, -0.4]))
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------ without aot


def joint(x, ct):
    y, pullback = jax.vjp(lambda x: lax.scan(lambda h, _: (jnp.sin(h), None), x, None, length=3)[0], x)
    return y, *pullback(ct)


def test_without_the_boundary_what_needs_a_cotangent_is_backward():
    graph = read(jax.make_jaxpr(joint)(1.0, 1.0), Roles.simple(1, 1, 1, 1))
    assert loops_of(graph) == ([(3, TOP)], [["backward", "forward"]])


def test_roles_that_do_not_fit_are_refused():
    closed = jax.make_jaxpr(joint)(1.0, 1.0)
    with pytest.raises(GraphError) as refusal:
        read(closed, Roles.simple(2, 1, 1, 1))
    assert str(refusal.value) == (
        "joint has 2 inputs, 2 outputs and 0 constants, but the roles name 3 inputs, 2 outputs.\n"
        "Lift constants and give every role."
    )


def test_an_input_without_a_path_is_called_by_its_number():
    graph = read(jax.make_jaxpr(joint)(1.0, 1.0), Roles.simple(1, 1, 1, 1))
    assert [graph.values[v].label for v, _ in graph.inputs] == ["input 0", "input 1"]
    assert graph.role_inputs(Role.COTANGENT) == (1,)
    assert not jaxprs.opened(jax.make_jaxpr(joint)(1.0, 1.0))[1]
