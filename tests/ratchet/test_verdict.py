"""What counts as growth: any byte, and flops by half a hundredth, which ways of writing do not reach."""

from __future__ import annotations

from fractions import Fraction

import jax.numpy as jnp
import pytest

from jointcut.aot.ratchet import records
from jointcut.aot.ratchet.session import Session, Settings
from jointcut.aot.ratchet.verdict import Compared, grew
from jointcut.aot.report.compare.diff import Diff
from jointcut.aot.report.compare.snapshot import Snapshot
from jointcut.partition.errors import PeakError


def compared(name, before, after, tolerance="0"):
    old, new = (Snapshot("step", "cpu", "0.12", "XLA", {name: value}) for value in (before, after))
    return Compared(Diff(old, new), Fraction(tolerance))


@pytest.mark.parametrize(
    ("name", "after", "tolerance", "has_grown"),
    [
        ("peak_bytes", 1001, "0", True),
        ("peak_bytes", 1001, "1/1000", False),
        ("flops", 1004, "0", False),
        ("flops", 1006, "0", True),
        ("flops", 1006, "1/100", False),
        ("collective_bytes", 1000, "0", False),
    ],
)
def test_a_figure_grows_by_more_than_what_is_tolerated(name, after, tolerance, has_grown):
    assert bool(compared(name, 1000, after, tolerance).grown) == has_grown
    assert bool(compared(name, after, 1000, tolerance).shrunk) == has_grown


def test_what_was_nothing_grows_by_any_byte():
    assert compared("collective_bytes", 0, 1, "1/2").grown == ["collective_bytes"]


def test_a_lost_donation_is_told_as_arguments_and_results():
    old, new = (
        Snapshot("step", "cpu", "0.12", "XLA", {"peak_bytes": peak, "temp_bytes": temps})
        for peak, temps in ((9_000_000, 7_000_000), (10_000_000, 6_000_000))
    )
    assert grew(Compared(Diff(old, new)), "test_step", "peaks.json", "pytest --peak-record test_step") == (
        "test_step takes more than peaks.json says for JAX 0.12, cpu: peak of a step.\n"
        "  peak of a step         9.00 MB -> 10.0 MB  +1.00 MB   +11%\n"
        "  temporaries            7.00 MB -> 6.00 MB  -1.00 MB   -14%\n"
        "  arguments and results  2.00 MB -> 4.00 MB  +2.00 MB  +100%\n"
        "  arguments and results take more: larger ones, one more result, or a donation that is lost\n"
        "  XLA does not say for cpu which arrays these are: see records without a target\n"
        "\n"
        "If that is meant, accept it: pytest --peak-record test_step"
    )


def test_the_record_to_look_at_first_is_the_newest_of_the_same_backend(tmp_path):
    known = ("0.9.8", "cpu"), ("0.9.9", "cpu"), ("0.9.9", "h100")
    kept = {f"JAX {jax}, {backend}": {"a": Snapshot("sin", backend, jax, "XLA", {})} for jax, backend in known}
    records.write(tmp_path / "peaks.json", kept)
    with pytest.raises(PeakError) as error:
        Session.of(Settings(tmp_path / "peaks.json", tmp_path, "check")).weigh("a", None, None, jnp.sin, jnp.ones(3))
    assert str(error.value).splitlines()[-1] == (
        "See first what changed from there: pytest --peak-check '--peak-against=JAX 0.9.9, cpu' a"
    )
