"""Take the cross entropy of hidden states against a vocabulary, without ever holding the logits.

The plain loss makes one logit for each token and each word of the vocabulary, and saves them all for its backward:
2,048 tokens and 64,000 words are 524 MB in float32, held twice. Here the vocabulary is walked in chunks. The forward
carries the logarithm of the sum of exponentials along. The backward computes the logits of a chunk again, and turns
them at once into the gradients of the hidden states and of the chunk's weights. So memory holds one chunk of logits at
a time, for any number of words. The cost is one more product of matrices than in the plain loss.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jointcut.aot.derivatives.arguments import inexact, one_of, refused
from jointcut.aot.derivatives.losses.reduced import REDUCTIONS, labels_for, loud, mean

CHUNK_NUMBERS = 2**22  # logits held at a time: 16 MiB in float32, little beside XLA's memory for a matrix product


def linear_cross_entropy(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any = None,
    class_weight: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Array:
    """Cross entropy of `hidden @ weight.T + bias` against `labels`; the logits are never held.

    Shapes are `hidden[..., width]`, `weight[vocabulary, width]`, `labels[...]` (integers), `bias[vocabulary]` and
    `class_weight[vocabulary]`. Tokens labelled `ignore_index` count for nothing: their loss and gradients are exactly
    zero, and the mean leaves them out. If all are ignored the mean is 0 / 0, NaN, as in PyTorch, and the gradient 0.
    A label that is no word has the loss NaN; PyTorch raises.

    `chunk` is the number of words held at a time. The default is the largest divisor of the vocabulary with at most 4
    million logits, or at most as many logits as hidden numbers, if that is more. A vocabulary without a good divisor is
    padded, which costs one copy of `weight`. Sums are taken in float32 where the inputs are shorter.

    Formula: loss = sum(q) * logsumexp(z) - sum(q * z) over the words, with q the smoothed and weighted target; its
    tangent is sum((sum(q) * softmax(z) - q) * dz). Source: PyTorch's `linear_cross_entropy`, whose chunked form has no
    forward mode and no second derivative; this function has both. A logit of -inf has probability 0 and gradient 0.
    """
    name = "linear_cross_entropy"
    one_of(name, "reduction", reduction, REDUCTIONS)
    hidden, weight = inexact(name, "hidden", hidden, real=True), inexact(name, "weight", weight, real=True)
    _check(hidden, weight, bias, class_weight, label_smoothing, chunk)
    labels = labels_for(name, labels, hidden.shape[:-1])
    tokens, words = labels.size, weight.shape[0]
    x, y = hidden.reshape(tokens, hidden.shape[-1]), labels.reshape(tokens)
    target = _target(y, y != ignore_index, words, class_weight, _wide(x))
    bias = None if bias is None else jnp.asarray(bias).astype(_wide(x))
    size = chunk_size(tokens, x.shape[1], words) if chunk is None else min(chunk, words)
    lse, picked = _rows(size, label_smoothing / words, x, *_padded(weight, bias, -words % size), target)
    total = (1 - label_smoothing) * target.scale + label_smoothing / words * target.classes.sum()
    losses = loud(jnp.where(target.labels < 0, 0, total * lse - picked), y, ignore_index, words)
    if reduction == "none":
        return losses.reshape(labels.shape)
    return losses.sum() if reduction == "sum" else mean(losses.sum(), target.scale.sum())


def chunk_size(tokens: int, width: int, words: int) -> int:
    """Return the number of words of the vocabulary to hold at a time.

    >>> chunk_size(tokens=2048, width=256, words=64000)
    2000
    """
    most = min(words, max(CHUNK_NUMBERS // max(tokens, 1), width, 1))
    divisor = next(size for size in range(most, 0, -1) if words % size == 0)
    chunks = -(-words // most)
    return divisor if 4 * divisor >= most else -(-words // chunks)


def _wide(x: Array) -> Any:
    """The type in which sums are taken: float32 for shorter floats."""
    return x.dtype if x.dtype.itemsize > 4 else jnp.dtype(jnp.float32)


class _Target(NamedTuple):
    """The targets: a label for each token (-1 for none), a weight for each token, and a weight for each word."""

    labels: Array
    scale: Array
    classes: Array


def _target(y: Array, kept: Array, words: int, class_weight: Any, dtype: Any) -> _Target:
    classes = jnp.ones(words, dtype) if class_weight is None else jnp.asarray(class_weight).astype(dtype)
    scale = jnp.where(kept, classes[jnp.clip(y, 0, words - 1)], 0)
    return _Target(jnp.where(kept, y, -1), lax.stop_gradient(scale), lax.stop_gradient(classes))


def _padded(weight: Array, bias: Any, more: int) -> tuple[Array, Array | None]:
    """Add words of probability 0, so that all chunks have one size."""
    if more == 0:
        return weight, bias
    given = jnp.zeros(weight.shape[0], _wide(weight)) if bias is None else bias
    return jnp.pad(weight, ((0, more), (0, 0))), jnp.pad(given, (0, more), constant_values=-jnp.inf)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _rows(
    size: int, smooth: float, x: Array, weight: Array, bias: Array | None, target: _Target
) -> tuple[Array, Array]:
    """Return, for each token, the logsumexp of its logits and the sum of its logits times the target."""
    nothing = jnp.zeros_like(target.scale)

    def step(carry: tuple[Array, Array, Array], part: _Chunk) -> tuple[tuple[Array, Array, Array], None]:
        top, total, picked = carry
        z = _logits(x, part)
        higher = jnp.maximum(top, z.max(1))
        safe = jnp.where(jnp.isfinite(higher), higher, 0)
        total = total * jnp.exp(top - safe) + jnp.exp(z - safe[:, None]).sum(1)
        place = target.labels - part.start
        at_label = jnp.take_along_axis(z, jnp.clip(place, 0, size - 1)[:, None], 1)[:, 0]
        picked = picked + jnp.where((place >= 0) & (place < size), _sharp(smooth, target) * at_label, 0)
        if smooth:
            picked = picked + smooth * jnp.where(part.classes == 0, 0, part.classes * z).sum(1)
        return (higher, total, picked), None

    start = (jnp.full_like(nothing, -jnp.inf), nothing, nothing)
    (top, total, picked), _ = lax.scan(step, start, _parts(size, weight, bias, target.classes))
    return jnp.where(jnp.isfinite(top), top, 0) + jnp.log(total), picked


@_rows.defjvp
def _rows_rule(
    size: int, smooth: float, primals: Any, tangents: Any
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    x, weight, bias, target = primals
    dx, dweight, dbias, _ = tangents
    lse, picked = _rows(size, smooth, x, weight, bias, target)

    @jax.checkpoint
    def step(carry: tuple[Array, Array], both: tuple[_Chunk, _Chunk]) -> tuple[tuple[Array, Array], None]:
        part, change = both
        softmax = jnp.exp(_logits(x, part) - jnp.where(jnp.isfinite(lse), lse, 0)[:, None])
        dz = _product(dx, part.weight, lse.dtype) + _logits(x, change)
        hit = (target.labels[:, None] - part.start) == jnp.arange(size)
        q = jnp.where(hit, _sharp(smooth, target)[:, None], 0)
        q = q + smooth * part.classes if smooth else q
        return (carry[0] + (softmax * dz).sum(1), carry[1] + (q * dz).sum(1)), None

    parts = _parts(size, weight, bias, target.classes)
    changes = _parts(size, dweight, dbias, target.classes)
    out, _ = lax.scan(step, (jnp.zeros_like(lse), jnp.zeros_like(lse)), (parts, changes))
    return (lse, picked), out


class _Chunk(NamedTuple):
    """One chunk of the vocabulary: its weights, its biases, its classes' weights, and where it starts."""

    weight: Array
    bias: Array | None
    classes: Array
    start: Array


def _parts(size: int, weight: Array, bias: Array | None, classes: Array) -> _Chunk:
    chunks = weight.shape[0] // size
    biases = None if bias is None else bias.reshape(chunks, size)
    classes = jnp.pad(classes, (0, chunks * size - classes.size))
    starts = jnp.arange(chunks) * size
    return _Chunk(weight.reshape(chunks, size, weight.shape[1]), biases, classes.reshape(chunks, size), starts)


def _sharp(smooth: float, target: _Target) -> Array:
    """Return the target's share for the label of each token, without the share that all words get."""
    return (1 - smooth * target.classes.size) * target.scale


def _logits(x: Array, part: _Chunk) -> Array:
    z = _product(x, part.weight, jnp.dtype(part.classes.dtype))
    return z if part.bias is None else z + part.bias


def _product(x: Array, weight: Array, dtype: Any) -> Array:
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _check(x: Array, weight: Array, bias: Any, classes: Any, smooth: float, chunk: Any) -> None:
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[-1]:
        what = f"have the shapes {x.shape} and {weight.shape}."
        raise refused(
            "linear_cross_entropy: hidden and weight", what, "Pass hidden[..., width] and weight[vocabulary, width]."
        )
    if x.dtype != weight.dtype:
        what = f"have the types {x.dtype} and {weight.dtype}."
        raise refused(
            "linear_cross_entropy: hidden and weight",
            what,
            "Convert one, so that gradients have the types that you want.",
        )
    for name, given in (("bias", bias), ("class_weight", classes)):
        if given is not None and jnp.shape(given) != weight.shape[:1]:
            what = f"has shape {jnp.shape(given)}, but there are {weight.shape[0]} words."
            raise refused(f"linear_cross_entropy: {name}", what, "Pass one number for each word of the vocabulary.")
    if not 0 <= smooth <= 1:
        raise refused("linear_cross_entropy: label_smoothing", f"is {smooth}.", "Pass a number from 0 to 1.")
    if chunk is not None and chunk < 1:
        raise refused(
            "linear_cross_entropy: chunk", f"is {chunk}.", "Pass a positive number of words, or leave it out."
        )
