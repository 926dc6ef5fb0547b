"""Rows that lie on several devices run in blocks on each of them; the sum over devices happens once for each step."""

from __future__ import annotations

from pathlib import Path

import pytest

from claims import claims_of, failures_of

SCRIPT = Path(__file__).with_name("on_eight_devices.py")


@pytest.mark.parametrize("claim", claims_of(SCRIPT))
def test_on_eight_devices(claim):
    assert not failures_of(SCRIPT, 8)[claim], failures_of(SCRIPT, 8)[claim]
