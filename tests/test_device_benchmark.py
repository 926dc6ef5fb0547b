"""The benchmark of a device: what it weighs, and what its table says."""

from __future__ import annotations

import io

from rich.console import Console

from benchmarks import device
from benchmarks.device import Weighed, table_of, weigh


def text_of(*rows):
    console = Console(file=io.StringIO(), width=120)
    console.print(table_of([*rows]))
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_a_program_is_weighed_and_its_gradients_are_those_of_plain_jax():
    row = weigh("mlp", "tiny", is_timed=False, runs=True)
    assert row.differ is not None and row.differ <= row.tolerance
    assert 0 < row.default_bytes <= row.plain_bytes
    assert row.half_bytes is not None and 0 < row.half_bytes <= row.plain_bytes / 2
    assert text_of(row)[4][0] == "mlp"


def test_the_table_tells_shares_of_plain_and_what_does_not_fit_or_fails():
    sizes = 4 * 10**9, 2 * 10**9, 10**9  # of plain, of the default plan, and as predicted
    fits = {"plain": 2.0, "default": 1.0, "half": 3.0}
    lines = text_of(
        Weighed("timed", *sizes, half_bytes=10**9, plans=1, times=fits),
        Weighed("large", *sizes, half_bytes=10**9, plans=2, times={"default": 1.5}),
        Weighed("least", *sizes, least_bytes=3 * 10**9, differ=1e-6, tolerance=1e-5),
        Weighed("broken", failed="ValueError: no"),
    )
    assert lines[4:8] == [
        ["timed", "4.000", "0.50", "0.50", "0.50", "0.25", "1.50", "1"],
        ["large", "4.000", "0.50", "1.50", "s", "0.50", "0.25", "does", "not", "fit", "2"],
        ["least", "4.000", "0.50", "0.50", "(0.75)", "1e-06", "1e-05"],
        ["broken", "ValueError:", "no"],
    ]
    assert lines[-1] == ["default", "over", "plain", "JAX,", "geometric", "mean", "of", "3:", "0.50"]


def test_only_steps_that_fit_are_timed(monkeypatch):
    def grows():
        raise device.jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(device, "ROUNDS", 2)
    assert device.timed({"plain": grows, "default": lambda: 1.0}).keys() == {"default"}
    assert device.timed({"plain": grows}) == {}
