"""`make bench SUITE=loops` tells which rows miss the mark, leaves out what is not installed, and keeps parts apart."""

import json
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from rich.table import Table

from benchmarks import loops, loops_libraries
from benchmarks.loops_plain import Flat, Forward
from benchmarks.loops_rivals import Gradients, Rivalry
from benchmarks.measure import wide_console


@dataclass(frozen=True)
class Row:
    is_reached: bool


GOOD = Rivalry("checkpointed", 10, 10, 10, 1.0, 1.0, 8, 8, 0, 0, 0.0)
PART = loops.Part(lambda _: [Row(True), Row(False)], lambda _: Table(), "a mark", needs=("equinox",), uses=("optax",))


@pytest.mark.parametrize(
    ("row", "misses"),
    [
        (GOOD, []),
        (replace(GOOD, ours_s=1.1), ["time"]),
        (replace(GOOD, ours_bytes=9, ours_again=1), ["bytes", "steps"]),
        (replace(GOOD, ours_again=None, theirs_again=None), []),
    ],
)
def test_a_row_tells_what_ours_takes_more_of(row, misses):
    assert (row.misses, row.is_reached) == (misses, not misses)


def test_gradients_that_are_no_number_are_not_equal():
    assert [Gradients("checkpointed", 10, 10, d).is_reached for d in (0.0, 1e-9, float("nan"))] == [True, False, False]


def test_bytes_are_flat_if_all_are_equal():
    assert Flat(10, 10, {10: 5, 100: 5}).is_reached
    assert not Flat(10, 10, {10: 5, 100: 6}).is_reached


def test_a_forward_is_as_fast_or_the_same_program():
    assert [Forward(10, 10, s, 1.0, same).is_reached for s, same in ((1.02, False), (1.03, False), (1.03, True))] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("absent", "says", "rows"),
    [
        ((), "name: 1 of 2 rows reach the mark (a mark)", 2),
        (("optax",), "name lacks some rows or columns: optax is not installed. The extra `bench` brings it.", 2),
        (("equinox",), "name is left out: equinox is not installed. The extra `bench` brings it.", 0),
    ],
)
def test_a_part_says_what_is_not_installed(absent, says, rows, monkeypatch, capsys):
    monkeypatch.setattr(loops, "find_spec", lambda name: None if name in absent else name)
    assert len(loops.measured("name", PART, True, wide_console(150))) == rows
    assert says in capsys.readouterr().out


def test_parts_are_kept_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(loops, "RESULTS", tmp_path / "loops.json")
    loops.keep("flat", [Row(True)])
    loops.keep("equinox", [Row(False)])
    kept = json.loads(loops.RESULTS.read_text())
    assert {name: part["rows"] for name, part in kept.items()} == {
        "equinox": [{"is_reached": False}],
        "flat": [{"is_reached": True}],
    }


def test_an_unknown_part_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["loops", "flatt"])
    with pytest.raises(SystemExit):
        loops.main()
    assert "there is no part 'flatt'; the parts are equinox, gradients, scan, flat" in capsys.readouterr().err


def halved(x):
    return lax.while_loop(lambda y: jnp.sum(y) > 1, lambda y: jnp.sin(y) / 2, x)[0] * x[1]


@pytest.mark.parametrize(("loss", "is_refused"), [(halved, True), (lambda x: x[0] * x[1], False)])
def test_a_function_counts_if_jax_refuses_it(loss, is_refused):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        row = loops_libraries.measure(loops_libraries.Program("jax", "lax.while_loop", loss))
    assert (row.is_reached, bool(row.refusal)) == (is_refused, is_refused)
    assert max(row.error, row.value_error) < loops_libraries.MOST_ERROR
