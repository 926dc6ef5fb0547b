"""What functions of `aot.derivatives` keep for the backward: never more than PyTorch does, for each element."""

import pytest

from benchmarks.derivatives.forms import FUNCTIONS, LOSSES, kept, per_element

STATISTICS = 0.07  # of a row or a column, in bytes for each element of it


@pytest.mark.parametrize("name", [*FUNCTIONS, *LOSSES])
def test_no_more_is_kept_than_by_pytorch(name):
    _, ours, torch = {**FUNCTIONS, **LOSSES}[name]
    assert kept(name, ours) <= torch + STATISTICS


def test_softplus_keeps_its_result_alone_where_jaxs_keeps_a_slope_as_well():
    assert per_element("softplus") == [8.0, 8.0, 4.0, 8]


def test_softmax_keeps_its_result_where_jaxs_keeps_exponentials():
    jax, cut, ours, torch = per_element("softmax")
    assert jax > 8 and cut < 4.02 and ours < 4.01 and torch == 4
