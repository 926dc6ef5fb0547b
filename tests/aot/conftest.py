"""What tests of progress share: a display that nothing has touched."""

from __future__ import annotations

from importlib import import_module

import pytest

from jointcut.aot.progress.progress import VARIABLE

DISPLAY = import_module("jointcut.aot.progress.progress")._DISPLAY


@pytest.fixture
def untouched(monkeypatch):
    """Nothing runs before a test and nothing after it, and the switch stands where it stood."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not DISPLAY.running
    yield
    assert not DISPLAY.running and DISPLAY.screen is None and DISPLAY.quiet_count == 0
    DISPLAY.switch(None)
