"""Losses and their second derivatives, as in `torch.nn.functional`.

All take the prediction first, the target second, and `reduction`: "mean", "sum" or "none". Targets, weights and
variances are differentiated too, unless they are whole numbers. Classes lie along the last axis, as in JAX, where
PyTorch has them along the second.

Files, in reading order:

    reduced: Reduce the losses of single elements, and check their arguments.
    pointwise: Losses of one element each: squares, distances, likelihoods, and cross entropies of two classes.
    classes: Cross entropy and negative log-likelihood of classes.
    margins: Losses that are zero beyond a margin.
    ctc: Sum the likelihood of a label sequence over all its alignments.
    linear: Take the cross entropy of hidden states against a vocabulary, without ever holding the logits.
"""

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
