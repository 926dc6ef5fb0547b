"""`aot.conventions` chooses the derivative at singular points, one by one, and changes nothing elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import special

from benchmarks.eagerly import evaluate
from jointcut import aot
from jointcut.aot.options.conventions import CHOICES, NAMED
from jointcut.partition.errors import TraceError

TIES = [1.0, 3.0, 3.0]
EYE = np.eye(3, dtype=np.float32)
WEIGHTS = np.arange(9.0, dtype=np.float32).reshape(3, 3)


def rotation(x):
    u, _, vh = jnp.linalg.svd(x, full_matrices=False)
    return jnp.sum(WEIGHTS * (u @ vh))


def root(x):
    values, vectors = jnp.linalg.eigh(x)
    return jnp.sum(WEIGHTS * ((vectors * jnp.sqrt(values)) @ vectors.T))


# A field, a value, a function, a point, and the gradient there: JAX's, and the chosen one.
CHOSEN = {
    "absolute value": ("abs_at_zero", "zero", lambda x: jnp.sum(jnp.abs(x)), [0.0, -2.0], [1, -1], [0, -1]),
    "clip": ("clamp_at_bound", "one", lambda x: jnp.sum(jnp.clip(x, 0, 1)), [0.0, 1, 2], [0.5, 0.5, 0], [1, 1, 0]),
    "flat clip": ("clamp_at_bound", "zero", lambda x: jnp.sum(jnp.clip(x, 0, 1)), [0.0, 1, 2], [0.5, 0.5, 0], [0] * 3),
    "clamp": ("clamp_at_bound", "one", lambda x: jnp.sum(lax.clamp(0.0, x, 1.0)), [0.0, 1, 2], [0, 0, 0], [1, 1, 0]),
    "lower bound": ("clamp_at_bound", "one", lambda x: jnp.sum(jnp.maximum(0, x)), [0.0, -1], [0.5, 0], [1, 0]),
    "upper bound": ("clamp_at_bound", "zero", lambda x: jnp.sum(jnp.minimum(x, 0)), [0.0, -1], [0.5, 1], [0, 1]),
    "no bound": ("clamp_at_bound", "one", lambda x: jnp.maximum(x[0], x[1]), [1.0, 1], [0.5, 0.5], [0.5, 0.5]),
    "largest": ("max_ties", "first", jnp.max, TIES, [0, 0.5, 0.5], [0, 1, 0]),
    "smallest": ("max_ties", "first", lambda x: jnp.min(-x), TIES, [0, -0.5, -0.5], [0, -1, 0]),
    "largest of all": ("max_ties", "first", lambda x: jnp.max(x.reshape(1, 3, 1), axis=(2, 1)).sum(), TIES,
                       [0, 0.5, 0.5], [0, 1, 0]),
    "larger of two": ("max_ties", "first", lambda x: jnp.maximum(x[0], x[1]), [1.0, 1], [0.5, 0.5], [1, 0]),
    "shared": ("max_ties", "shared", jnp.max, TIES, [0, 0.5, 0.5], [0, 0.5, 0.5]),
    "norm": ("norm_at_zero", "zero", jnp.linalg.norm, [0.0, 0], [np.nan, np.nan], [0, 0]),
    "angle": ("angle_at_origin", "zero", lambda x: jnp.arctan2(x[0], x[1]), [0.0, 0], [np.nan, np.nan], [0, 0]),
    "power": ("power_at_zero", "limit", lambda x: x[0] ** x[1], [0.0, 0], [np.nan, 0], [0, 0]),
    "rotation": ("equal_eigenvalues", "zero", rotation, EYE, EYE * np.nan + np.nan, (WEIGHTS - WEIGHTS.T) / 2),
    "known rotation": ("equal_eigenvalues", "known", rotation, EYE, EYE * np.nan + np.nan, (WEIGHTS - WEIGHTS.T) / 2),
    "root of a matrix": ("equal_eigenvalues", "known", root, EYE, EYE * np.nan + np.nan, (WEIGHTS + WEIGHTS.T) / 4),
    "arc cosine": ("arc_at_one", "zero", lambda x: jnp.sum(jnp.arccos(jnp.cos(x))), [0.0], [np.nan], [0]),
    "arc sine": ("arc_at_one", "zero", lambda x: jnp.sum(jnp.arcsin(-jnp.clip(jnp.cos(x), -1, 1))), [0.0], [np.nan],
                 [0]),
    "cube root": ("power_at_zero", "limit", lambda x: jnp.cbrt(x[0] ** 3) + jnp.cbrt(x[1] ** 4), [0.0, 0], [np.nan] * 2,
                  [1, 0]),
    "incomplete beta": ("power_at_zero", "limit", lambda x: special.betainc(1.0, 3.0, x[0]), [0.0], [np.nan], [3]),
    "its other end": ("power_at_zero", "limit", lambda x: special.betainc(2.0, 1.0, 1 - x[0]), [0.0], [np.nan], [-2]),
    "first of two": ("fmax_ties", "first", lambda x: jnp.fmax(x[0], x[1]), [1.0, 1], [0, 1], [1, 0]),
    "second of two": ("fmax_ties", "first", lambda x: jnp.fmin(x[0], x[1]), [1.0, 1], [0, 1], [1, 0]),
    "largest so far": ("cumulative_ties", "last", lambda x: lax.cummax(x)[2], TIES, [0, 0.5, 0.5], [0, 0, 1]),
    "smallest from the end": ("cumulative_ties", "last", lambda x: lax.cummin(-x, reverse=True)[0], TIES,
                              [0, -0.5, -0.5], [0, -1, 0]),
    "median": ("median_ties", "shared", jnp.median, TIES, [0, 1, 0], [0, 0.5, 0.5]),
    "median of what is known": ("median_ties", "shared", lambda x: jnp.sum(jnp.nanmedian(x.reshape(1, 3, 1), (1, 2))),
                                TIES, [0, 1, 0], [0, 0.5, 0.5]),
    "clip to arrays": ("clamp_at_bound", "one", lambda x: jnp.sum(jnp.clip(x[:2], x[2:4], x[4:])), [0.0, 1, 0, 0, 1, 1],
                       [0.5, 0.5, 0.5, 0, 0, 0.5], [1, 1, 0, 0, 0, 0]),
    "clip flat to arrays": ("clamp_at_bound", "zero", lambda x: jnp.sum(jnp.clip(x[:2], x[2:4], x[4:])),
                            [0.0, 1, 0, 0, 1, 1], [0.5, 0.5, 0.5, 0, 0, 0.5], [0, 0, 1, 0, 0, 1]),
    "a smooth sum of bounds": ("clamp_at_bound", "one", lambda x: jnp.sum(jax.nn.celu(x)), [0.0], [1], [1]),
    "left out": ("zero_cotangent", "zero", lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0)), [0.0, 1],
                 [np.nan, 0.5], [0, 0.5]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_a_choice_changes_the_gradient_at_its_point_alone(name):
    field, value, function, at, theirs, chosen = CHOSEN[name]
    x = jnp.asarray(at, jnp.float32)
    np.testing.assert_allclose(jax.grad(function)(x), theirs, atol=1e-6)
    mine = aot.function(function, derivatives=aot.conventions(**{field: value}))
    result, grad = mine.value_and_grad(x)
    assert result == function(x)
    np.testing.assert_allclose(grad, chosen, atol=1e-6)
    away = x + jnp.asarray(np.random.default_rng(1).uniform(0.2, 0.7, x.shape), jnp.float32)
    np.testing.assert_allclose(mine.grad(away), jax.grad(function)(away), rtol=1e-4, atol=1e-5)


def test_an_eigenvector_keeps_its_bits_where_no_values_are_equal_and_a_wide_svd_has_a_derivative():
    chosen = aot.conventions(equal_eigenvalues="zero")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 3)), jnp.float32)

    def vectors(x):
        return jnp.sum(WEIGHTS * jnp.linalg.eigh(x)[1] ** 2)

    def values_of(derivatives):
        """Value and gradient, one operation at a time."""
        traced = aot.function(vectors, derivatives=derivatives).trace(x)
        return evaluate(traced.joint, [*traced.consts, x, *traced.call.ones()])

    for got, want in zip(values_of(chosen), values_of("jax"), strict=True):
        np.testing.assert_array_equal(got, want)
    wide = aot.function(lambda x: jnp.sum(jnp.linalg.svd(x)[1]), derivatives=chosen)
    np.testing.assert_allclose(wide.grad(jnp.asarray(EYE[:2])), EYE[:2], atol=1e-6)


def test_every_field_has_a_choice_and_the_names_mean_sets_of_them():
    assert list(CHOICES) == list(aot.conventions().__dataclass_fields__)
    assert NAMED["jax"] == aot.conventions() and not aot.conventions().chosen
    for name, chosen in NAMED.items():
        assert aot.conventions(name) == chosen
    assert set(NAMED["finite"].chosen) < set(NAMED["pytorch"].chosen)
    x = jnp.array([0.0, 1.0])
    np.testing.assert_array_equal(
        aot.function(lambda x: jnp.sum(jnp.clip(x, 0)), derivatives="pytorch").grad(x), [1, 1]
    )


def test_conventions_are_written_with_the_options():
    options = aot.Options(derivatives=aot.conventions("finite", max_ties="first"))
    assert aot.Options.from_json(options.to_json()) == options


def test_a_program_of_other_conventions_is_another_in_the_cache(tmp_path):
    x = jnp.array([0.0, 0.5])

    def loss(x):
        return jnp.sum(jnp.clip(x, 0, 1))

    for value, slope in (("one", 1), ("zero", 0), ("one", 1)):
        chosen = aot.conventions(clamp_at_bound=value)
        np.testing.assert_array_equal(aot.function(loss, derivatives=chosen, cache=tmp_path).grad(x), [slope, 1])


NAMES = ", ".join(map(repr, sorted(CHOICES)))
WRONG = {
    "name": (
        {"max_tie": "first"},
        f"aot.conventions 'max_tie' is unknown.\nKnown names: {NAMES}. Did you mean 'max_ties'?",
    ),
    "value": (
        {"max_ties": "frist"},
        "aot.conventions: max_ties is 'frist'.\nKnown names: 'first', 'jax', 'shared'. Did you mean 'first'?",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_choice_gets_the_nearest(case):
    given, text = WRONG[case]
    with pytest.raises(TraceError) as caught:
        aot.conventions(**given)
    assert str(caught.value) == text


def test_a_wrong_base_gets_the_nearest():
    with pytest.raises(TraceError) as caught:
        aot.conventions("pytroch")
    assert str(caught.value) == (
        "aot.conventions has the unknown base 'pytroch'.\n"
        "Known names: 'finite', 'jax', 'pytorch'. Did you mean 'pytorch'?"
    )
