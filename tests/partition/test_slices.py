"""A loop that writes a stack slice by slice tells so, and hands its slices to what else reads the stack in a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jointcut.partition.bodies.kinds import inside
from jointcut.partition.program.jax import barriers, jaxprs
from jointcut.partition.rewrite.simplify import inlined

STACKS = jnp.ones((3, 4)), jnp.ones((3, 2, 2))


def written(stacks, are_slices=True):
    """Each step doubles its own slice of two stacks, of which it says so, and counts."""

    def step(carried, i):
        count, *stacks = carried
        at = [(i, *[jnp.uint32(0)] * (stack.ndim - 1)) for stack in stacks]
        rows = [lax.dynamic_slice(s, k, (1, *s.shape[1:])) for s, k in zip(stacks, at, strict=True)]
        rows = barriers.held([lax.squeeze(row, [0]) for row in rows], are_slices)
        wide = [lax.expand_dims(2 * row, [0]) for row in rows]
        news = [lax.dynamic_update_slice(*each) for each in zip(stacks, wide, at, strict=True)]
        return (count + 1, *news), None

    return lax.scan(step, (jnp.int32(0), *stacks), lax.iota("uint32", 3))[0]


def carries(function):
    """What the last equation of a function carries, as its kind reads it, with calls opened."""
    jaxpr, _ = jaxprs.opened(inlined(jax.make_jaxpr(jax.jit(function))(STACKS)))
    return jaxpr.eqns[-1], inside(jaxpr.eqns[-1]).carries


def test_a_carry_knows_the_own_slice_that_its_loop_holds():
    eqn, (count, *stacks) = carries(written)
    body = jaxprs.scan_layout(eqn).body
    (barrier,) = (each for each in body.eqns if each.primitive.name == "optimization_barrier")
    assert count.slice is None
    assert [stack.slice for stack in stacks] == barrier.outvars


def test_a_barrier_that_does_not_say_so_holds_no_slices():
    _, found = carries(lambda stacks: written(stacks, are_slices=False))
    assert [carry.slice for carry in found] == [None, None, None]


def test_what_it_says_changes_no_number():
    got, want = (jax.jit(written, static_argnums=1)(STACKS, on) for on in (True, False))
    assert all(map(jnp.array_equal, got, want))


def test_it_stays_where_a_program_is_differentiated_or_mapped():
    doubled = lambda stacks: sum(jnp.sum(x) for x in written(stacks)[1:])  # noqa: E731
    assert jnp.array_equal(jax.grad(doubled)(STACKS)[0], jnp.full((3, 4), 2.0))
    several = jax.vmap(written)(tuple(jnp.stack([x, 2 * x]) for x in STACKS))
    assert jnp.array_equal(several[1][1], 4 * STACKS[0])
