"""The benchmark of targets weighs a step, and says whose is the least."""

import sys

import pytest

from benchmarks import targets
from benchmarks.programs import load
from compilers import FOLDER
from jointcut import aot
from jointcut.partition.errors import TargetError


def test_a_program_is_weighed_beside_checkpoints(monkeypatch):
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    target = aot.target("h100")
    try:
        _ = target.devices
    except TargetError as error:
        pytest.skip(str(error).splitlines()[1])
    monkeypatch.setattr(targets, "POLICIES", {"nothing": targets.POLICIES["nothing"]})
    monkeypatch.setattr(targets, "BUDGETS", (0.0,))
    row = targets.weighed(load("mlp", "tiny"), target)
    assert set(row) == {"plain", "checkpoint", "default", "0"}
    assert 0 < row["default"]["temp_bytes"] <= row["plain"]["temp_bytes"]
    assert row["default"]["time"] <= 1
    console = targets.wide_console(120)
    with console.capture() as found:
        console.print(targets.table_of(target, {"mlp": row}))
    assert "mlp" in found.get() and "geometric means" in found.get()
