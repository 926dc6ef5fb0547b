"""What a budget says, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jointcut.aot import limits
from jointcut.aot.limits import Limit, limit
from jointcut.partition.errors import BudgetError

CURE = (
    "Give a fraction of plain JAX's activation memory (a float from 0.0 to 1.0), peak bytes of the whole step (an int, "
    "or a text such as '1.5GiB' or '800 MB'), or 'device'."
)
UNITS = "Known names: 'B', 'GB', 'GiB', 'KB', 'KiB', 'MB', 'MiB', 'TB', 'TiB', 'kB'."


@pytest.mark.parametrize(
    ("budget", "bytes_meant"),
    [
        (1, 1),
        (np.int64(2**40), 2**40),
        ("12B", 12),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("800 MB", 800_000_000),
        (" 1.5GiB ", 3 * 2**29),
        ("1e-1 TB", 10**11),
        (".5TiB", 2**39),
    ],
)
def test_integers_and_texts_are_bytes_of_the_whole_step(budget, bytes_meant):
    assert limit(budget) == Limit(peak_bytes=bytes_meant)


@pytest.mark.parametrize("budget", [0.0, 1.0, np.float32(0.5)])
def test_floats_are_fractions(budget):
    assert limit(budget) == Limit(fraction=float(budget))


def test_the_device_is_asked_later():
    assert limit("device") == Limit(of_device=True)


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (True, f"budget is True.\n{CURE}"),
        (None, f"budget is None.\n{CURE}"),
        ([1], f"budget is [1].\n{CURE}"),
        (1 + 0j, f"budget is (1+0j).\n{CURE}"),
        (0, f"budget is 0 bytes.\n{CURE}"),
        (-5, f"budget is -5 bytes.\n{CURE}"),
        (1.5, f"budget is 1.5, no fraction from 0.0 to 1.0.\n{CURE}"),
        (-0.1, f"budget is -0.1, no fraction from 0.0 to 1.0.\n{CURE}"),
        (float("nan"), f"budget is nan, no fraction from 0.0 to 1.0.\n{CURE}"),
        (float("inf"), f"budget is inf, no fraction from 0.0 to 1.0.\n{CURE}"),
        ("", f"budget is ''.\n{CURE}"),
        ("12", f"budget is '12'.\n{CURE}"),
        ("GiB", f"budget is 'GiB'.\n{CURE}"),
        ("1.5.2GiB", f"budget is '1.5.2GiB'.\n{CURE}"),
        ("1.5Gib", f"budget is '1.5Gib', whose unit 'Gib' is unknown.\n{UNITS} Did you mean 'GiB'?"),
        ("2 apples", f"budget is '2 apples', whose unit 'apples' is unknown.\n{UNITS}"),
        ("-1GiB", "budget is '-1GiB'.\nGive a positive number of bytes."),
        ("0.5B", "budget is '0.5B'.\nGive a positive number of bytes."),
        ("1e999GB", "budget is '1e999GB'.\nGive a positive number of bytes."),
    ],
)
def test_what_says_nothing_is_refused(budget, text):
    with pytest.raises(BudgetError) as refusal:
        limit(budget)
    assert str(refusal.value) == text


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text):
    try:
        found = limit(text)
    except BudgetError:
        return
    assert found.of_device or (found.peak_bytes or 0) > 0


def test_a_limit_prints_what_it_means():
    shown = [str(limit(b)) for b in (0.25, "2kB", "device")]
    assert shown == ["25% of plain JAX's activations", "2,000 bytes", "what the device has free"]


def test_a_device_that_does_not_say_what_it_has_free_is_named(monkeypatch):
    device = SimpleNamespace(memory_stats=lambda: None, device_kind="cpu")
    monkeypatch.setattr(limits.jax, "local_devices", lambda: [device])
    with pytest.raises(BudgetError) as refusal:
        limits.free_bytes([])
    assert str(refusal.value) == (
        "budget='device' asks what the device has free, and cpu does not say.\nGive a number of bytes, such as '8GiB'."
    )


def test_what_the_arrays_of_the_call_take_counts_as_free(monkeypatch):
    x = jnp.ones(100)
    (here,) = x.devices()

    class Device:
        device_kind = "gpu"

        def __eq__(self, other):
            return other == here

        def __hash__(self):
            return hash(here)

        def memory_stats(self):
            return {"bytes_limit": 10_000, "bytes_in_use": 4_000}

    monkeypatch.setattr(limits.jax, "local_devices", lambda: [Device()])
    assert limits.free_bytes([x, 1.0, jax.ShapeDtypeStruct((5,), "float32")]) == 6_400
