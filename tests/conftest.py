"""Every test runs with JAX's own checks on and its number types strict; warnings are errors by pyproject."""

from __future__ import annotations

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_checks", True)
