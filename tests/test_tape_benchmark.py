"""`benchmarks/tape.py` counts captures and bytes, and tells which rows miss the mark."""

import jax
import optax
import pytest

from benchmarks import tape
from benchmarks.measure import wide_console


@pytest.fixture(autouse=True)
def promotion_as_optax_needs_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_two_programs_hold_all_gradients_and_a_step_of_ours_does_not():
    found = tape.peaks(128, optax.sgd(0.1))
    assert found.two - found.kept >= found.gradients
    assert found.ours - found.kept < 0.5 * found.gradients
    assert found.gradients == found.kept == 12 * 4 * (128 * 128 + 128)


def test_a_row_that_misses_is_red():
    console = wide_console(80)
    made = tape.table([("a", "1", "2", True), ("b", "1", "2", False)])
    with console.capture() as shown:
        console.print(made)
    assert [row.style for row in made.rows] == [None, "red"]
    assert ("reached" in shown.get(), "missed" in shown.get()) == (True, True)


def test_trees_are_told_apart_by_shape_alone():
    tree = ((1.0, 2.0), 3.0)
    assert tape.shape_of(tree) == ((0, 0), 0)
