"""Every test runs with JAX's own checks on and its number types strict; warnings are errors by pyproject.

Rates are those of `rates.json`, here and in the processes that tests start: no plan hangs on how busy the machine is.
No test finds a plan that another searched for, and no stage is shown but where a test asks for it.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest

from jointcut.aot import searches
from jointcut.aot.progress import VARIABLE as PROGRESS
from jointcut.aot.rates import VARIABLE as RATES

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_checks", True)
os.environ[RATES] = str(Path(__file__).parent / "rates.json")
os.environ[PROGRESS] = "0"


@pytest.fixture(autouse=True)
def nothing_found_before():
    """Forget the plans that other tests searched for."""
    searches.forget()
