"""Number types promote in tests of loops, as users run them."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture(autouse=True)
def as_users_run():
    """As users run them: dtypes are promoted, and JAX does not check each jaxpr."""
    with jax.numpy_dtype_promotion("standard"), jax.enable_checks(False):
        yield
