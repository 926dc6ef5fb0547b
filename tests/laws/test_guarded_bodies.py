"""With `derivatives="finite"` guarded functions have the right slopes in bodies of all kinds, in both modes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks.derivatives.bodies import BODIES, UNCUT, drawn, wrong_in
from jointcut import aot


@pytest.mark.filterwarnings("ignore::jointcut.aot.UncutWarning")
def test_random_programs_have_the_right_slopes_at_singular_points():
    assert wrong_in([drawn(seed) for seed in range(5)]) == []


def test_so_has_every_body():
    assert wrong_in([drawn(seed, (body,), size=1) for seed, body in enumerate(BODIES)]) == []


@pytest.mark.filterwarnings("ignore::jointcut.aot.UncutWarning")
def test_so_has_a_function_on_a_mesh():
    assert wrong_in([drawn(7, tuple(UNCUT), size=2)]) == []


def test_what_a_solution_is_for_is_looked_into():
    def solved(x):
        scale = 1 + jnp.sqrt(jnp.maximum(x, 0))
        return jax.lax.custom_linear_solve(
            lambda v: scale * v, jnp.ones_like(x), lambda _, b: b / scale, symmetric=True
        )

    for x in (-1.0, 0.0):
        assert aot.function(solved, derivatives="finite").grad(jnp.float32(x)) == 0


def test_a_rule_of_the_users_own_has_the_slopes_that_it_asks_for():
    def root(x):
        return jnp.sqrt(jnp.maximum(x, 0))

    finite = aot.function(root, derivatives="finite")
    for inner, want in ((root, jnp.inf), (finite, 0.0)):
        ruled = jax.custom_jvp(root)
        ruled.defjvp(lambda primals, tangents, f=inner: jax.jvp(f, primals, tangents))
        assert aot.function(ruled, derivatives="finite").grad(jnp.float32(0)) == want
