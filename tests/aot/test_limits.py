"""What a budget says, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jointcut import aot
from jointcut.aot.options import limits
from jointcut.aot.options.limits import Limit, limit
from jointcut.partition.errors import BudgetError

CURE = (
    "Give a fraction of plain JAX's activation memory (a float from 0.0 to 1.0, or a text such as '60%'), peak bytes "
    "of the whole step (an int, or a text such as '1.5GiB' or '800 MB'), or 'device'."
)
NOTHING = ", which is less than a byte or no finite number.\n"
UNITS = "Known names: '%', 'B', 'GB', 'GiB', 'KB', 'KiB', 'MB', 'MiB', 'TB', 'TiB', 'kB'."


@pytest.mark.parametrize(
    ("budget", "bytes_meant"),
    [
        (2, 2),
        (np.int64(2**40), 2**40),
        ("12B", 12),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("800 MB", 800_000_000),
        (" 1.5GiB ", 3 * 2**29),
        ("1e-1 TB", 10**11),
        (".5TiB", 2**39),
        ("129.17 TB", 129_170_000_000_000),
        ("1e308 TB", 10**320),
        ("1." + 5000 * "0" + "kB", 1000),
    ],
)
def test_integers_and_texts_are_bytes_of_the_whole_step(budget, bytes_meant):
    assert limit(budget) == Limit(peak_bytes=bytes_meant)


@pytest.mark.parametrize("budget", [0.0, 1.0, 5e-324, np.float32(0.5), np.float16(0.25), Fraction(1, 3)])
def test_floats_are_fractions(budget):
    assert limit(budget) == Limit(fraction=float(budget))


@pytest.mark.parametrize(
    ("text", "fraction"), [("60%", 0.6), (" 33.3 %", 0.333), ("100%", 1.0), ("0%", 0.0), ("1e-3%", 1e-5)]
)
def test_a_text_in_percent_is_the_same_fraction(text, fraction):
    assert limit(text) == Limit(fraction=fraction)


def test_the_device_is_asked_later():
    assert limit("device") == Limit(of_device=True)


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (True, f"budget is True, of type bool.\n{CURE}"),
        (None, f"budget is None, of type NoneType.\n{CURE}"),
        ([1], f"budget is [1], of type list.\n{CURE}"),
        (1 + 0j, f"budget is (1+0j), of type complex.\n{CURE}"),
        (0, f"budget is 0 bytes.\n{CURE}"),
        (
            1,
            "budget is 1 byte.\nWrite 1.0 for what plain JAX's activations take; an int is peak bytes of the step.",
        ),
        (-5, f"budget is -5 bytes.\n{CURE}"),
        (1.5, f"budget is 1.5, no fraction from 0.0 to 1.0.\n{CURE}"),
        (-0.1, f"budget is -0.1, no fraction from 0.0 to 1.0.\n{CURE}"),
        (float("nan"), f"budget is nan, no fraction from 0.0 to 1.0.\n{CURE}"),
        (float("inf"), f"budget is inf, no fraction from 0.0 to 1.0.\n{CURE}"),
        ("", f"budget is '', not a number and its unit.\n{CURE}"),
        ("12", f"budget is '12', a number without a unit.\n{CURE}"),
        ("160%", f"budget is '160%', no share from 0% to 100%.\n{CURE}"),
        ("-5%", f"budget is '-5%', no share from 0% to 100%.\n{CURE}"),
        ("GiB", f"budget is 'GiB', not a number and its unit.\n{CURE}"),
        ("1.5.2GiB", f"budget is '1.5.2GiB', not a number and its unit.\n{CURE}"),
        ("1.5Gib", f"budget is '1.5Gib', whose unit 'Gib' is unknown.\n{UNITS} Did you mean 'GiB'?"),
        ("2 apples", f"budget is '2 apples', whose unit 'apples' is unknown.\n{UNITS}"),
        ("-1GiB", f"budget is '-1GiB'{NOTHING}Give a positive number of bytes."),
        ("0.5B", f"budget is '0.5B'{NOTHING}Give a positive number of bytes."),
        ("1e999GB", f"budget is '1e999GB'{NOTHING}Give a positive number of bytes."),
        ("0 GiB", f"budget is '0 GiB'{NOTHING}Give a positive number of bytes."),
        ("1e-99999 GiB", f"budget is '1e-99999 GiB'{NOTHING}Give a positive number of bytes."),
        ("1.5gb", f"budget is '1.5gb', whose unit 'gb' is unknown.\n{UNITS} Did you mean 'GB'?"),
        ("1,5 GB", f"budget is '1,5 GB', not a number and its unit.\n{CURE}"),
        ("nan GB", f"budget is 'nan GB', not a number and its unit.\n{CURE}"),
        (np.True_, f"budget is np.True_, of type bool.\n{CURE}"),
        (np.float32(2.5), f"budget is 2.5, no fraction from 0.0 to 1.0.\n{CURE}"),
        (np.int8(-3), f"budget is -3 bytes.\n{CURE}"),
        (Fraction(10**400), f"budget is {10**400}, no fraction from 0.0 to 1.0.\n{CURE}"),
    ],
)
def test_what_says_nothing_is_refused(budget, text):
    with pytest.raises(BudgetError) as refusal:
        limit(budget)
    assert str(refusal.value) == text


def test_a_text_means_its_number_of_units_to_the_byte():
    for unit, size in limits._UNITS.items():
        for hundredths in range(100, 2000, 7):
            text = f"{hundredths // 100}.{hundredths % 100:02}{unit}"
            assert limit(text).peak_bytes == hundredths * size // 100, text


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
    monkeypatch.setattr(limits, "default_device", lambda: device)
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

    monkeypatch.setattr(limits, "default_device", Device)
    assert limits.free_bytes([x, 1.0, jax.ShapeDtypeStruct((5,), "float32")]) == limits.free_bytes([x, x]) == 6_400
    x.delete()  # as a call does that was given it to use up
    assert limits.free_bytes([x]) == 6_000


def test_the_default_device_is_the_users_where_there_is_one(monkeypatch):
    (here,) = jnp.ones(1).devices()
    monkeypatch.setattr(limits.jax, "local_devices", lambda backend: [f"the first, {backend}"])
    assert limits.default_device() == "the first, None"
    with jax.default_device("cpu"):
        assert limits.default_device() == "the first, cpu"
    with jax.default_device(here):
        assert limits.default_device() is here


@pytest.mark.parametrize("devices", [0, -1, True, 2.0, "4"])
def test_a_number_of_devices_is_a_positive_integer(devices):
    with pytest.raises(BudgetError) as error:
        aot.function(jnp.sum, budget="1MB", devices=devices)
    assert str(error.value) == f"devices is {devices!r}.\nGive how many devices share a batch, such as 8."
