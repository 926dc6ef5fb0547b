"""A loop that writes a stack slice by slice hands its slices to what else reads the stack in a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jointcut.partition.nesting.kinds import inside
from jointcut.partition.nesting.taken import taken
from jointcut.partition.program import jaxprs

STACK = jnp.ones((3, 4))


def found(write, numbers=lambda: lax.iota("uint32", 3)):
    """How many stacks a loop is found to write slice by slice."""

    def step(carried, i):
        row = lax.squeeze(lax.dynamic_slice(carried, [i, jnp.uint32(0)], (1, 4)), [0])
        (row,) = jaxprs.held([row])
        return write(carried, row, i), None

    jaxpr, _ = jaxprs.opened(jax.make_jaxpr(lambda stack: lax.scan(step, stack, numbers())[0])(STACK))
    return len(taken(inside(jaxpr.eqns[-1]), jaxpr.eqns))


def put(stack, row, i):
    return lax.dynamic_update_slice(stack, lax.expand_dims(row, [0]), [i, jnp.uint32(0)])


WRITES = {
    "its own slice": (lambda stack, row, i: put(stack, 2 * row, i), 1),
    "its own slice, twice, with a barrier between": (
        lambda stack, row, i: put(jaxprs.held([put(stack, 2 * row, i)])[0], row, i),
        1,
    ),
    "the next slice": (lambda stack, row, i: put(stack, 2 * row, i + jnp.uint32(1)), 0),
    "all slices": (lambda stack, row, i: 2 * put(stack, row, i), 0),
    "nothing": (lambda stack, row, i: stack, 0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_slice_is_that_of_the_stack_if_each_step_writes_its_own_alone(name):
    write, count = WRITES[name]
    assert found(write) == count


def test_steps_in_another_order_are_not_numbered():
    assert found(WRITES["its own slice"][0], lambda: jnp.array([2, 0, 1], "uint32")) == 0
