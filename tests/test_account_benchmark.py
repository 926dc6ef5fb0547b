"""The benchmark of accounts without a device: what it compares, and what its table says."""

from __future__ import annotations

import io

import jax
import numpy as np
import pytest
from rich.console import Console

from benchmarks import account
from benchmarks.account import Compared, alone, device_bytes, read, shaped, table_of, write

ROWS = [
    Compared("equal", 10**9, 2 * 10**9, 10**9, 5 * 10**8),
    Compared("more", 3 * 10**9, None, 2 * 10**9),
    Compared("broken", 10**9, None, failed="ValueError: no"),
]


def test_the_table_tells_what_the_device_took_over_the_account_without_it():
    console = Console(file=io.StringIO(), width=110)
    console.print(table_of("h200", ROWS))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["equal", "1.000", "1.000", "1.0000", "2.0000", "0.5000"] in lines
    assert ["more", "3.000", "2.000", "1.5000"] in lines
    assert ["broken", "1.000", "ValueError:", "no"] in lines
    assert lines[-1] == ["1.0000", "to", "1.5000", "over", "2", "programs"]


def test_figures_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "account.json"
    assert read(path) == {}
    write(path, "h200", ROWS)
    assert list(read(path).values()) == ROWS


def test_what_a_device_weighed_is_known_by_program():
    assert device_bytes("h200", "")["mlp"] == 39990591760
    assert set(device_bytes("h200", "-timed")) == {"gpt-scan", "gru"}
    assert device_bytes("l4", "") == {}


@pytest.mark.parametrize("name", ["mlp", "forces"])  # the second looks at its arguments while it makes them
def test_a_program_is_known_by_types_alone(monkeypatch, name):
    monkeypatch.setattr(account, "SIZE", "tiny")
    program, types = shaped(name)
    made = account.load(name, "tiny").arguments
    assert jax.tree.map(np.shape, made) == jax.tree.map(lambda x: x.shape, types)
    assert jax.eval_shape(program.loss, *types) is not None


def test_a_program_that_fails_says_why():
    assert alone(device_bytes, "h200") == {
        "failed": "TypeError: device_bytes() missing 1 required positional argument: 'how'"
    }
