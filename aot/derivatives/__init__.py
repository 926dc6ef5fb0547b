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
    losses: Losses and their second derivatives, as in `torch.nn.functional`.
"""

from jointcut.aot.derivatives.losses import binary_cross_entropy as binary_cross_entropy
from jointcut.aot.derivatives.losses import binary_cross_entropy_with_logits as binary_cross_entropy_with_logits
from jointcut.aot.derivatives.losses import cosine_embedding_loss as cosine_embedding_loss
from jointcut.aot.derivatives.losses import cross_entropy as cross_entropy
from jointcut.aot.derivatives.losses import ctc_loss as ctc_loss
from jointcut.aot.derivatives.losses import gaussian_nll_loss as gaussian_nll_loss
from jointcut.aot.derivatives.losses import hinge_embedding_loss as hinge_embedding_loss
from jointcut.aot.derivatives.losses import huber_loss as huber_loss
from jointcut.aot.derivatives.losses import kl_div as kl_div
from jointcut.aot.derivatives.losses import l1_loss as l1_loss
from jointcut.aot.derivatives.losses import linear_cross_entropy as linear_cross_entropy
from jointcut.aot.derivatives.losses import margin_ranking_loss as margin_ranking_loss
from jointcut.aot.derivatives.losses import mse_loss as mse_loss
from jointcut.aot.derivatives.losses import multi_margin_loss as multi_margin_loss
from jointcut.aot.derivatives.losses import multilabel_margin_loss as multilabel_margin_loss
from jointcut.aot.derivatives.losses import multilabel_soft_margin_loss as multilabel_soft_margin_loss
from jointcut.aot.derivatives.losses import nll_loss as nll_loss
from jointcut.aot.derivatives.losses import poisson_nll_loss as poisson_nll_loss
from jointcut.aot.derivatives.losses import smooth_l1_loss as smooth_l1_loss
from jointcut.aot.derivatives.losses import soft_margin_loss as soft_margin_loss
from jointcut.aot.derivatives.losses import triplet_margin_loss as triplet_margin_loss
from jointcut.aot.derivatives.powers import cbrt as cbrt
from jointcut.aot.derivatives.powers import float_power as float_power
from jointcut.aot.derivatives.powers import power as power
from jointcut.aot.derivatives.powers import reciprocal as reciprocal
from jointcut.aot.derivatives.powers import rsqrt as rsqrt
from jointcut.aot.derivatives.powers import sqrt as sqrt
from jointcut.aot.derivatives.powers import square as square
