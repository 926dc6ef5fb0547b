"""On a mesh of eight devices: bytes, budgets, reports and errors are told for one device."""

from pathlib import Path

import pytest

from claims import claims_of, failures_of

SCRIPT = Path(__file__).with_name("on_eight_devices.py")


@pytest.fixture(scope="module")
def failures():
    """How each claim fails on eight devices of the host; empty where it holds."""
    return failures_of(SCRIPT, 8)


@pytest.mark.parametrize("claim", claims_of(SCRIPT))
def test_on_eight_devices(claim, failures):
    assert not failures[claim], failures[claim]
