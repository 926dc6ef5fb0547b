"""On a mesh of eight devices: bytes, budgets, reports and errors are told for one device, and gradients are JAX's."""

from pathlib import Path

import pytest

from claims import claims_of, failures_of

SCRIPTS = [
    Path(__file__).with_name(name) for name in ("on_eight_devices.py", "compositions.py", "exchanged.py", "in_jit.py")
]
CLAIMS = [pytest.param(script, claim, id=f"{script.stem}-{claim}") for script in SCRIPTS for claim in claims_of(script)]
LAID = Path(__file__).with_name("laid_over_meshes.py")
PARTS = 14


@pytest.mark.parametrize("script, claim", CLAIMS)
def test_on_eight_devices(script, claim):
    assert not failures_of(script, 8)[claim], failures_of(script, 8)[claim]


@pytest.mark.parametrize("part", range(PARTS))
def test_programs_that_lie_over_meshes_have_the_gradients_of_one_device(part):
    failures = failures_of(LAID, 8, part, PARTS)
    assert len(failures) >= 3
    assert not any(failures.values()), "".join(failures.values())
