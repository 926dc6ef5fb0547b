"""Name a target whose compiler is installed, or skip the test."""

import sys

import pytest

from compilers import FOLDER
from jointcut import aot
from jointcut.partition.errors import TargetError


def installed(name):
    """A target whose compiler is installed; the test is skipped where none is."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    target = aot.target(name)
    try:
        _ = target.devices
    except TargetError as error:
        pytest.skip(str(error).splitlines()[1])
    return target
