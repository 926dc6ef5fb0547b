"""Functions whose derivatives stay finite, and equal PyTorch's.

JAX differentiates a function primitive by primitive. Where one of them has an infinite slope the chain rule makes
`0 * inf`, and a gradient is NaN although the function has a limit there. The functions here have JAX's names, arguments
and values, bit for bit, and derivatives written by hand, as PyTorch has them in its derivatives table and
`FunctionsManual.cpp`: first and second order, forward and reverse mode, under `vmap`. Where JAX and PyTorch choose different subgradients (ties, bounds, a norm at zero) these follow
PyTorch 2.13. Where PyTorch gives NaN or infinity but a limit or a sensible subgradient exists, these give that.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jointcut.aot import derivatives
    >>> jax.grad(jnp.linalg.norm)(jnp.zeros(2))
    Array([nan, nan], dtype=float32)
    >>> jax.grad(derivatives.norm)(jnp.zeros(2))
    Array([0., 0.], dtype=float32)

A cotangent that is exactly zero gives exactly zero, even where a slope is infinite. So `where(x > 0, f(x), 0)` has the
right gradient without a second `where` inside. Each docstring says what the function gives at its singular points, why,
and what JAX gives there.

Files, in reading order:

    checks: Refuse bad arguments early, with the place, the cause and the cure.
    slopes: Multiply tangents with slopes so that zero stays zero, and declare derivatives argument by argument.
    powers: Powers and roots, with finite slopes where a power is smooth.
"""

from jointcut.aot.derivatives.powers import cbrt as cbrt
from jointcut.aot.derivatives.powers import float_power as float_power
from jointcut.aot.derivatives.powers import power as power
from jointcut.aot.derivatives.powers import reciprocal as reciprocal
from jointcut.aot.derivatives.powers import rsqrt as rsqrt
from jointcut.aot.derivatives.powers import sqrt as sqrt
from jointcut.aot.derivatives.powers import square as square
