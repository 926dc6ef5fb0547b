"""Functions whose derivatives stay finite, and equal PyTorch's.

JAX differentiates a function primitive by primitive. Where a primitive has an infinite slope, the chain rule computes
`0 * inf`, and a gradient is NaN although the function has a limit there. The functions here have JAX's names, arguments
and values, bit for bit. Their derivatives are written by hand, as in PyTorch's derivatives table and
`FunctionsManual.cpp`: first and second order, forward and reverse mode, under `vmap`. Where JAX and PyTorch choose
different subgradients (ties, bounds, a norm at zero), these functions follow PyTorch 2.13. Where PyTorch gives NaN or
infinity but a limit or a sensible subgradient exists, they give the limit or subgradient.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jointcut.aot import derivatives
    >>> jax.grad(jnp.linalg.norm)(jnp.zeros(2))
    Array([nan, nan], dtype=float32)
    >>> jax.grad(derivatives.norm)(jnp.zeros(2))
    Array([0., 0.], dtype=float32)

A cotangent that is exactly zero gives exactly zero, even where a slope is infinite. So `where(x > 0, f(x), 0)` has the
right gradient without a second `where` inside. Each docstring gives the function's value and slope at its singular
points, the reason, and JAX's result there.

PyTorch's table also has entries that this room leaves out:

- `as_strided`, `_reshape_alias` and views: arrays of JAX have no strides to differentiate;
- nested and jagged tensors, layouts other than dense: arrays of JAX are rectangular and dense, and
  `jax.experimental.sparse` has derivatives of its own;
- copies in place, `_foreach` and fused optimizers, cuDNN's RNNs: JAX has none of these;
- `sum`, `nansum`, `cat`, `stack`, `split`, `unbind`, `repeat`, `where`, `flip`, `roll`, `trace`, `diag`, `block_diag`,
  `deg2rad`, convolution, products of matrices, also grouped ones (`jax.lax.ragged_dot`), and all other functions that
  are linear in each argument: JAX transposes them without a formula, and nothing is singular;
- `exp`, `sin`, `tanh`, `erf`, `lgamma`, `digamma`, `mvlgamma` and other functions that are smooth where they are
  finite: JAX's own derivative is right in every order.

The functions do not take some options of JAX's functions: `where`, `initial`, `dtype` and `out`.

Files, in reading order:

    arguments: Refuse bad arguments early, with the place, the cause and the cure.
    slopes: Multiply tangents with slopes so that zero stays zero, and declare derivatives argument by argument.
    elementwise: Functions of each element.
    reductions: Functions over axes: norms, sums and products, ranks, cumulative functions, distances.
    linalg: Matrices: factors, inverses, determinants and spectra, finite at equal and at zero values.
    losses: Losses and their second derivatives, as in `torch.nn.functional`.
    normalisation: Normalisation from saved statistics, and dropout from its mask.
    windows: Pooling and interpolation over the last axes, one for each number of the window or the size.
    indexing: Gather and scatter, also to the same place twice, and products at the places of a sparse matrix.
"""

from jointcut.aot.derivatives import linalg as linalg
from jointcut.aot.derivatives.elementwise.activations import gelu as gelu
from jointcut.aot.derivatives.elementwise.activations import glu as glu
from jointcut.aot.derivatives.elementwise.activations import log_sigmoid as log_sigmoid
from jointcut.aot.derivatives.elementwise.activations import log_softmax as log_softmax
from jointcut.aot.derivatives.elementwise.activations import mish as mish
from jointcut.aot.derivatives.elementwise.activations import sigmoid as sigmoid
from jointcut.aot.derivatives.elementwise.activations import silu as silu
from jointcut.aot.derivatives.elementwise.activations import soft_sign as soft_sign
from jointcut.aot.derivatives.elementwise.activations import softmax as softmax
from jointcut.aot.derivatives.elementwise.activations import softmin as softmin
from jointcut.aot.derivatives.elementwise.activations import softplus as softplus
from jointcut.aot.derivatives.elementwise.activations import tanhshrink as tanhshrink
from jointcut.aot.derivatives.elementwise.angles import abs as abs
from jointcut.aot.derivatives.elementwise.angles import angle as angle
from jointcut.aot.derivatives.elementwise.angles import arccos as arccos
from jointcut.aot.derivatives.elementwise.angles import arccosh as arccosh
from jointcut.aot.derivatives.elementwise.angles import arcsin as arcsin
from jointcut.aot.derivatives.elementwise.angles import arctan2 as arctan2
from jointcut.aot.derivatives.elementwise.angles import arctanh as arctanh
from jointcut.aot.derivatives.elementwise.angles import hypot as hypot
from jointcut.aot.derivatives.elementwise.angles import sign as sign
from jointcut.aot.derivatives.elementwise.angles import sinc as sinc
from jointcut.aot.derivatives.elementwise.bounds import clip as clip
from jointcut.aot.derivatives.elementwise.bounds import copysign as copysign
from jointcut.aot.derivatives.elementwise.bounds import divide as divide
from jointcut.aot.derivatives.elementwise.bounds import fmax as fmax
from jointcut.aot.derivatives.elementwise.bounds import fmin as fmin
from jointcut.aot.derivatives.elementwise.bounds import fmod as fmod
from jointcut.aot.derivatives.elementwise.bounds import lerp as lerp
from jointcut.aot.derivatives.elementwise.bounds import maximum as maximum
from jointcut.aot.derivatives.elementwise.bounds import minimum as minimum
from jointcut.aot.derivatives.elementwise.bounds import nan_to_num as nan_to_num
from jointcut.aot.derivatives.elementwise.bounds import remainder as remainder
from jointcut.aot.derivatives.elementwise.corners import celu as celu
from jointcut.aot.derivatives.elementwise.corners import elu as elu
from jointcut.aot.derivatives.elementwise.corners import hard_sigmoid as hard_sigmoid
from jointcut.aot.derivatives.elementwise.corners import hard_swish as hard_swish
from jointcut.aot.derivatives.elementwise.corners import hard_tanh as hard_tanh
from jointcut.aot.derivatives.elementwise.corners import hardshrink as hardshrink
from jointcut.aot.derivatives.elementwise.corners import leaky_relu as leaky_relu
from jointcut.aot.derivatives.elementwise.corners import prelu as prelu
from jointcut.aot.derivatives.elementwise.corners import relu as relu
from jointcut.aot.derivatives.elementwise.corners import relu6 as relu6
from jointcut.aot.derivatives.elementwise.corners import selu as selu
from jointcut.aot.derivatives.elementwise.corners import softshrink as softshrink
from jointcut.aot.derivatives.elementwise.corners import threshold as threshold
from jointcut.aot.derivatives.elementwise.logarithms import entr as entr
from jointcut.aot.derivatives.elementwise.logarithms import log as log
from jointcut.aot.derivatives.elementwise.logarithms import log1p as log1p
from jointcut.aot.derivatives.elementwise.logarithms import log2 as log2
from jointcut.aot.derivatives.elementwise.logarithms import log10 as log10
from jointcut.aot.derivatives.elementwise.logarithms import logaddexp as logaddexp
from jointcut.aot.derivatives.elementwise.logarithms import logaddexp2 as logaddexp2
from jointcut.aot.derivatives.elementwise.logarithms import logit as logit
from jointcut.aot.derivatives.elementwise.logarithms import xlog1py as xlog1py
from jointcut.aot.derivatives.elementwise.logarithms import xlogy as xlogy
from jointcut.aot.derivatives.elementwise.powers import cbrt as cbrt
from jointcut.aot.derivatives.elementwise.powers import float_power as float_power
from jointcut.aot.derivatives.elementwise.powers import power as power
from jointcut.aot.derivatives.elementwise.powers import reciprocal as reciprocal
from jointcut.aot.derivatives.elementwise.powers import rsqrt as rsqrt
from jointcut.aot.derivatives.elementwise.powers import sqrt as sqrt
from jointcut.aot.derivatives.elementwise.powers import square as square
from jointcut.aot.derivatives.indexing.scatters import gather as gather
from jointcut.aot.derivatives.indexing.scatters import index_add as index_add
from jointcut.aot.derivatives.indexing.scatters import index_fill as index_fill
from jointcut.aot.derivatives.indexing.scatters import index_put as index_put
from jointcut.aot.derivatives.indexing.scatters import index_select as index_select
from jointcut.aot.derivatives.indexing.scatters import masked_fill as masked_fill
from jointcut.aot.derivatives.indexing.scatters import scatter as scatter
from jointcut.aot.derivatives.indexing.scatters import scatter_add as scatter_add
from jointcut.aot.derivatives.indexing.scatters import scatter_reduce as scatter_reduce
from jointcut.aot.derivatives.indexing.scatters import take_along_axis as take_along_axis
from jointcut.aot.derivatives.indexing.sparse_products import sampled_addmm as sampled_addmm
from jointcut.aot.derivatives.indexing.sparse_products import sparse_mask as sparse_mask
from jointcut.aot.derivatives.indexing.sparse_products import sparse_mm as sparse_mm
from jointcut.aot.derivatives.indexing.sparse_products import sparse_sparse_mm as sparse_sparse_mm
from jointcut.aot.derivatives.losses.classes import cross_entropy as cross_entropy
from jointcut.aot.derivatives.losses.classes import nll_loss as nll_loss
from jointcut.aot.derivatives.losses.ctc import ctc_loss as ctc_loss
from jointcut.aot.derivatives.losses.linear import linear_cross_entropy as linear_cross_entropy
from jointcut.aot.derivatives.losses.margins import cosine_embedding_loss as cosine_embedding_loss
from jointcut.aot.derivatives.losses.margins import hinge_embedding_loss as hinge_embedding_loss
from jointcut.aot.derivatives.losses.margins import margin_ranking_loss as margin_ranking_loss
from jointcut.aot.derivatives.losses.margins import multi_margin_loss as multi_margin_loss
from jointcut.aot.derivatives.losses.margins import multilabel_margin_loss as multilabel_margin_loss
from jointcut.aot.derivatives.losses.margins import triplet_margin_loss as triplet_margin_loss
from jointcut.aot.derivatives.losses.pointwise import binary_cross_entropy as binary_cross_entropy
from jointcut.aot.derivatives.losses.pointwise import (
    binary_cross_entropy_with_logits as binary_cross_entropy_with_logits,
)
from jointcut.aot.derivatives.losses.pointwise import gaussian_nll_loss as gaussian_nll_loss
from jointcut.aot.derivatives.losses.pointwise import huber_loss as huber_loss
from jointcut.aot.derivatives.losses.pointwise import kl_div as kl_div
from jointcut.aot.derivatives.losses.pointwise import l1_loss as l1_loss
from jointcut.aot.derivatives.losses.pointwise import mse_loss as mse_loss
from jointcut.aot.derivatives.losses.pointwise import multilabel_soft_margin_loss as multilabel_soft_margin_loss
from jointcut.aot.derivatives.losses.pointwise import poisson_nll_loss as poisson_nll_loss
from jointcut.aot.derivatives.losses.pointwise import smooth_l1_loss as smooth_l1_loss
from jointcut.aot.derivatives.losses.pointwise import soft_margin_loss as soft_margin_loss
from jointcut.aot.derivatives.normalisation import batch_norm as batch_norm
from jointcut.aot.derivatives.normalisation import dropout as dropout
from jointcut.aot.derivatives.normalisation import group_norm as group_norm
from jointcut.aot.derivatives.normalisation import instance_norm as instance_norm
from jointcut.aot.derivatives.normalisation import layer_norm as layer_norm
from jointcut.aot.derivatives.normalisation import normalize as normalize
from jointcut.aot.derivatives.normalisation import rms_norm as rms_norm
from jointcut.aot.derivatives.reductions.cumulative import cummax as cummax
from jointcut.aot.derivatives.reductions.cumulative import cummin as cummin
from jointcut.aot.derivatives.reductions.cumulative import cumprod as cumprod
from jointcut.aot.derivatives.reductions.cumulative import cumsum as cumsum
from jointcut.aot.derivatives.reductions.cumulative import logcumsumexp as logcumsumexp
from jointcut.aot.derivatives.reductions.distances import cdist as cdist
from jointcut.aot.derivatives.reductions.distances import cosine_similarity as cosine_similarity
from jointcut.aot.derivatives.reductions.distances import dist as dist
from jointcut.aot.derivatives.reductions.distances import pairwise_distance as pairwise_distance
from jointcut.aot.derivatives.reductions.distances import pdist as pdist
from jointcut.aot.derivatives.reductions.moments import logsumexp as logsumexp
from jointcut.aot.derivatives.reductions.moments import mean as mean
from jointcut.aot.derivatives.reductions.moments import prod as prod
from jointcut.aot.derivatives.reductions.moments import std as std
from jointcut.aot.derivatives.reductions.moments import std_mean as std_mean
from jointcut.aot.derivatives.reductions.moments import var as var
from jointcut.aot.derivatives.reductions.moments import var_mean as var_mean
from jointcut.aot.derivatives.reductions.norms import norm as norm
from jointcut.aot.derivatives.reductions.norms import renorm as renorm
from jointcut.aot.derivatives.reductions.norms import vector_norm as vector_norm
from jointcut.aot.derivatives.reductions.ranks import amax as amax
from jointcut.aot.derivatives.reductions.ranks import amin as amin
from jointcut.aot.derivatives.reductions.ranks import aminmax as aminmax
from jointcut.aot.derivatives.reductions.ranks import median as median
from jointcut.aot.derivatives.reductions.ranks import nanmedian as nanmedian
from jointcut.aot.derivatives.windows.adaptive import adaptive_avg_pool as adaptive_avg_pool
from jointcut.aot.derivatives.windows.adaptive import adaptive_max_pool as adaptive_max_pool
from jointcut.aot.derivatives.windows.interpolation import interpolate as interpolate
from jointcut.aot.derivatives.windows.pooling import avg_pool as avg_pool
from jointcut.aot.derivatives.windows.pooling import lp_pool as lp_pool
from jointcut.aot.derivatives.windows.pooling import max_pool as max_pool
