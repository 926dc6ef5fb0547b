"""On a mesh of eight devices: bytes, budgets, reports and errors are told for one device."""

from pathlib import Path

import pytest

from claims import claims_of, failures_of

SCRIPT, COMPOSITIONS, EXCHANGED, IN_JIT, LAID = (
    Path(__file__).with_name(name)
    for name in ("on_eight_devices.py", "compositions.py", "exchanged.py", "in_jit.py", "laid_over_meshes.py")
)
PARTS = 14


@pytest.fixture(scope="module")
def failures():
    """How each claim fails on eight devices of the host; empty where it holds."""
    return failures_of(SCRIPT, 8)


@pytest.mark.parametrize("claim", claims_of(SCRIPT))
def test_on_eight_devices(claim, failures):
    assert not failures[claim], failures[claim]


@pytest.fixture(scope="module")
def composed():
    """How each composition fails there; empty where it has the gradients of plain JAX."""
    return failures_of(COMPOSITIONS, 8)


@pytest.mark.parametrize("claim", claims_of(COMPOSITIONS))
def test_a_composition_has_the_gradients_of_plain_jax(claim, composed):
    assert not composed[claim], composed[claim]


@pytest.fixture(scope="module")
def exchanged():
    """How each claim on what compiled steps exchange fails there; empty where it holds."""
    return failures_of(EXCHANGED, 8)


@pytest.mark.parametrize("claim", claims_of(EXCHANGED))
def test_what_a_compiled_step_exchanges(claim, exchanged):
    assert not exchanged[claim], exchanged[claim]


@pytest.fixture(scope="module")
def in_jit():
    """How each claim on plans and budgets in a `jax.jit` of the user's fails there; empty where it holds."""
    return failures_of(IN_JIT, 8)


@pytest.mark.parametrize("claim", claims_of(IN_JIT))
def test_in_a_jit_of_the_users_it_is_known_how_arguments_lie(claim, in_jit):
    assert not in_jit[claim], in_jit[claim]


@pytest.mark.parametrize("part", range(PARTS))
def test_programs_that_lie_over_meshes_have_the_gradients_of_one_device(part):
    failures = failures_of(LAID, 8, part, PARTS)
    assert len(failures) >= 3
    assert not any(failures.values()), "".join(failures.values())
