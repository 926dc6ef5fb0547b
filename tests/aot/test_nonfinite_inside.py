"""Who made the NaN, where the op stands inside a transformation or a loop of the user's: its line, step and cure."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot

INFINITE = "div made an infinity out of float32[] = 0.5 and "
OPTION = 'aot.function(derivatives="finite") makes this call finite (checked by a run).'
LOOK = (
    "Look at that line with these numbers; jax.numpy.where on an operand, not on the result, keeps a gradient finite."
)
NORM = (
    "aot.derivatives.norm(x) in place of the root of a sum of squares at that line makes this call finite "
    "(checked by a run)."
)


def norm(x):
    return jnp.sqrt(jnp.sum(x**2))  # norm


def root(y):
    return jnp.sqrt(y * y)  # root


def add(total, y):
    return total + root(y), None


def rows(total, row):
    return lax.scan(add, total, row)[0], None


def branch(total, y):
    return total + lax.cond(y > 5, lambda y: y, root, y), None


def fall(state):
    i, y = state
    return i + 1, jnp.log(y)  # fall


def mapped_in_jit(total, row):
    return total + jnp.sum(jax.jit(jax.vmap(norm))(row[None])), None


def sum_of_slopes(x):
    return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.where(x > 0, x**1.5, 0.0)))(x))  # slopes


MATRIX = np.array([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]], np.float32)
# name -> (function, argument, op and operands, function and marker of its line, steps of the loops, has cures)
INSIDE = {
    "jit": (lambda x: jax.jit(norm)(x), np.zeros(3, np.float32), f"{INFINITE}float32[] = 0", norm, (), True),
    "vmap": (lambda x: jnp.sum(jax.vmap(norm)(x)), MATRIX, f"{INFINITE}float32[3] in [0, 5]", norm, (), True),
    "checkpoint": (jax.checkpoint(norm), np.zeros(3, np.float32), f"{INFINITE}float32[] = 0", norm, (), True),
    "cond": (lambda x: lax.cond(x[0] > 5, jnp.sum, norm, x), 0 * MATRIX[0], f"{INFINITE}float32[] = 0", norm, (), True),
    "scan in scan": (
        *(lambda x: lax.scan(rows, 0.0, x)[0], MATRIX + [[0, -2], [1, 1], [0, 0]], f"{INFINITE}float32[] = 0"),
        *(root, (0, 1), True),
    ),
    "cond in scan": (
        *(lambda x: lax.scan(branch, 0.0, x)[0], np.array([6, 0, 1], np.float32), f"{INFINITE}float32[] = 0"),
        *(root, (1,), True),
    ),
    "vmap of scan": (
        *(lambda x: jnp.sum(jax.vmap(lambda row: lax.scan(add, 0.0, row)[0])(x)), MATRIX[:1] * [1, 0]),
        *(f"{INFINITE}float32[1] in [0, 0]", root, (1,), True),
    ),
    "jit of vmap in scan": (
        *(lambda x: lax.scan(mapped_in_jit, 0.0, x)[0], MATRIX, f"{INFINITE}float32[1] in [0, 0]", norm, (1,), True),
    ),
    "while_loop": (
        *(lambda x: lax.while_loop(lambda state: state[0] < 4, fall, (0, x))[1], np.float32(1.5)),
        *("log made a NaN out of float32[] = -0.9027", fall, (2,), False),
    ),
}


def line_of(function):
    """The place of the line that ends with the function's name as a comment, as texts tell it."""
    lines, start = inspect.getsourcelines(function)
    (place,) = [start + i for i, line in enumerate(lines) if line.rstrip().endswith("# " + function.__name__)]
    return f"{__file__}:{place} ({function.__name__})"


@pytest.mark.parametrize("name", INSIDE)
def test_the_op_its_line_its_steps_and_the_cure_are_told(name):
    function, x, made, culprit, steps, has_cures = INSIDE[name]
    with pytest.raises(aot.NonFiniteError) as caught:
        aot.function(function, check="nonfinite").value_and_grad(jnp.asarray(x, jnp.float32))
    found = caught.value.found
    assert f"is not finite: {made} at {line_of(culprit)}, scope " in str(found)
    assert found.culprit.steps == steps
    assert str(found).splitlines()[1:][: 2 * has_cures] == [OPTION, NORM][: 2 * has_cures]
    assert bool(found.cures) == has_cures


def test_the_second_derivative_of_a_guarded_power_is_cured():
    found = aot.first_nonfinite(sum_of_slopes, jnp.array([0.0, 1.0]))
    assert found.half == "backward" and "(sum_of_slopes.<locals>.<lambda>), scope jvp(jvp())." in str(found)
    assert str(found).splitlines()[1:] == [
        OPTION,
        "aot.derivatives.power(x, y) in place of x ** y at that line makes this call finite (checked by a run).",
    ]


def test_a_derivative_that_the_function_takes_itself_is_told_as_such():
    """The program has its equations, and no option reaches them; the inner function is where to say it."""

    def slope(inner):
        return lambda x: jnp.sum(jax.grad(inner)(x))

    found = aot.first_nonfinite(slope(norm), jnp.zeros(3))
    assert (found.half, found.culprit.primitive, found.cures) == ("forward", "div", ())
    assert str(found).splitlines()[1:] == [
        "No option and no function of aot.derivatives is known to make this call finite.",
        "If it is of a derivative that the function takes itself, differentiate "
        'aot.function(..., derivatives="finite") there, or a function of aot.derivatives.',
        LOOK,
    ]
    for inner in (aot.function(norm, derivatives="finite"), aot.derivatives.norm):
        assert aot.first_nonfinite(slope(inner), jnp.zeros(3)) is None
