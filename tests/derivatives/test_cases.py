"""Every case of `benchmarks/derivatives` keeps the laws, at random inputs and at its singular points."""

import jax
import pytest

import derived
from benchmarks.derivatives.cases import cases, families

ALL = [pytest.param(family, case, id=f"{family}: {case.name}") for family in families() for case in cases(family)]
every_case = pytest.mark.parametrize(("family", "case"), ALL)


@pytest.fixture(autouse=True)
def in_double():
    """In float64, as PyTorch's figures are, and with JAX's usual promotion."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


@every_case
def test_values_and_two_orders_are_those_of_pytorch(family, case):
    derived.equals_pytorch(family, case)


@every_case
def test_both_orders_are_finite_at_the_singular_points(family, case):
    derived.is_finite_at_probes(family, case)


@every_case
def test_values_and_gradients_are_those_of_jax_where_it_is_finite(family, case):
    derived.equals_jax(family, case)


@every_case
def test_the_pullback_is_linear_and_takes_zero_to_zero(family, case):
    derived.is_linear_in_the_cotangent(family, case)


@every_case
def test_single_precision_stays(family, case):
    derived.keeps_its_type(family, case)


@every_case
def test_derivatives_are_finite_differences_in_both_modes(family, case):
    derived.equals_finite_differences(family, case)
