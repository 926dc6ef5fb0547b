"""`benchmarks/below_floor.py` tells which steps miss their marks, and splits by hand as a user would."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from benchmarks import below_floor
from benchmarks.below_floor import Row, accumulated, by_optax, chunked, cross_entropy, head_case, measured, run, table
from benchmarks.measure import wide_console

ROW = Row(
    "head", "a layer", "budget 0.3", 10, 0.3, 0.5, tiles=("float32[8,4] of exp at a.py:1: 4 blocks along axis 0",)
)
CASE = head_case(16, 2048, 512)


@pytest.mark.parametrize(
    ("row", "verdicts"),
    [
        (ROW, (True, True)),
        (replace(ROW, most=0.3, time=1.2, most_time=1.2), (True, True)),
        (replace(ROW, most=0.2, time=1.3, most_time=1.2), (False, False)),
        (replace(ROW, is_held=False), (False, True)),
    ],
)
def test_a_row_tells_whether_it_keeps_its_marks(row, verdicts):
    assert (row.is_small, row.is_fast) == verdicts


def test_a_refused_budget_stands_with_the_least_that_was_found(capsys):
    wide_console(220).print(table([ROW, replace(measured("head", CASE, None, budget=0.001))]))
    held, refused = capsys.readouterr().out.splitlines()[3:5]
    assert "4 blocks along axis 0 of float32[8,4]" in held
    assert "budget 0.001" in refused and refused.rstrip().endswith("refused")


def test_a_held_budget_has_its_blocks_its_time_and_an_equal_gradient(monkeypatch):
    monkeypatch.setattr(below_floor, "ROUNDS", 2)
    row = measured("head", replace(CASE, is_run=True), None, budget=0.25)
    assert row.is_held and row.share <= 0.25 and "blocks along axis 0" in row.tiles[0]
    assert row.time is not None and row.error is not None and row.error < 1e-5


def test_splits_by_hand_have_the_gradients_of_the_whole():
    w, *data = CASE.drawn()
    value, gradient = jax.value_and_grad(cross_entropy)(w, *data)
    for step in (accumulated, by_optax):
        made = step(cross_entropy, 4, w, *data)
        assert jnp.allclose(made[0], value, rtol=1e-5) and jnp.allclose(made[1], gradient, rtol=1e-4, atol=1e-7)
    assert jnp.allclose(jax.grad(chunked, 1)(4, w, *data), gradient, rtol=1e-4, atol=1e-7)


def test_the_steps_of_one_case_are_timed_together(monkeypatch):
    monkeypatch.setattr(below_floor, "ROUNDS", 2)
    wrong = jax.jit(lambda *a: jax.tree.map(lambda g: 2 * g, jax.value_and_grad(cross_entropy, (0, 1))(*a)))
    right, other = run([ROW, replace(ROW, way="wrong")], CASE, [below_floor.plain_step(CASE), wrong])
    assert right.error == 0.0 and other.error is not None and other.error > 0.5
    assert right.time is not None and other.time is not None
