"""The functions of `benchmarks/derivatives` keep the laws, at random inputs and at their singular points.

`python -m benchmarks.derivatives` compares every case of them, and so do these tests with JOINTCUT_EVERY_PROGRAM.
"""

import jax
import pytest

import derived
from benchmarks.derivatives.cases import cases, families
from programs import EVERY_PROGRAM


def function_of(case):
    """The name of a case's function, if it has one; else the first word of its own."""
    return case.ours if isinstance(case.ours, str) else case.name.partition(" ")[0]


def first_of_each(every: bool):
    """The first case of each function, of every function or of each fourth one; all with JOINTCUT_EVERY_PROGRAM."""
    for family in families():
        of_family = cases(family)
        firsts = {function_of(case): case for case in reversed(of_family)}
        chosen = [case for case in of_family if case is firsts[function_of(case)]]
        for case in of_family if EVERY_PROGRAM else chosen if every else chosen[::4]:
            yield pytest.param(family, case, id=f"{family}: {case.name}")


every_function = pytest.mark.parametrize(("family", "case"), list(first_of_each(every=True)))
some_functions = pytest.mark.parametrize(("family", "case"), list(first_of_each(every=False)))


@pytest.fixture(autouse=True)
def in_double():
    """In float64, as PyTorch's figures are, and with JAX's usual promotion."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


@every_function
def test_values_and_two_orders_are_those_of_pytorch(family, case):
    derived.equals_pytorch(family, case)


@every_function
def test_both_orders_are_finite_at_the_singular_points(family, case):
    derived.is_finite_at_probes(family, case)


@some_functions
def test_values_and_gradients_are_those_of_jax_where_it_is_finite(family, case):
    derived.equals_jax(family, case)


@every_function
def test_the_pullback_is_linear_and_takes_zero_to_zero(family, case):
    derived.is_linear_in_the_cotangent(family, case)


@some_functions
def test_single_precision_stays(family, case):
    derived.keeps_its_type(family, case)


@some_functions
def test_derivatives_are_finite_differences_in_both_modes(family, case):
    derived.equals_finite_differences(family, case)
