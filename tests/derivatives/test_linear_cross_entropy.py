"""Linear cross entropy is the plain one in value and derivatives, and never holds the logits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import derived
from jointcut.aot.derivatives import cross_entropy, linear_cross_entropy
from jointcut.aot.derivatives.losses.linear import chunk_size
from jointcut.partition.errors import CallError


@pytest.fixture
def in_double():
    with jax.enable_x64(True):
        yield


def inputs(tokens=6, width=5, words=12, dtype=np.float64):
    source = np.random.RandomState(tokens * words + width)
    hidden, weight = source.standard_normal((tokens, width)), source.standard_normal((words, width))
    labels = source.randint(0, words, tokens)
    return (
        jnp.asarray(hidden, dtype),
        jnp.asarray(weight, dtype),
        jnp.asarray(source.standard_normal(words), dtype),
        labels,
    )


def plain(hidden, weight, bias, labels, classes=None, smooth=0.0, **options):
    return cross_entropy(hidden @ weight.T + bias, labels, classes, label_smoothing=smooth, **options)


def ours(hidden, weight, bias, labels, classes=None, smooth=0.0, **options):
    return linear_cross_entropy(
        hidden, weight, labels, bias=bias, class_weight=classes, label_smoothing=smooth, **options
    )


CHUNKS = {"mean": (13, 5), "sum": (12, None), "none": (7, 1)}


@pytest.mark.parametrize(
    ("words", "chunk", "reduction"), [*((12, 4, r) for r in CHUNKS), *((*CHUNKS[r], r) for r in CHUNKS)]
)
def test_value_and_gradients_are_those_of_the_plain_loss(words, chunk, reduction, in_double):
    hidden, weight, bias, labels = inputs(words=words)
    labels[2] = -100
    classes = np.linspace(0.5, 2, words)

    def both(function, *given):
        loss, pull = jax.vjp(function, *given)
        return loss, pull(jnp.cos(jnp.arange(loss.size, dtype=float)).reshape(loss.shape))

    @jax.jit
    def of_both(*given):
        options = {"labels": labels, "reduction": reduction}
        kinds = options, {**options, "classes": classes, "smooth": 0.1}
        return [[both(partial(f, **kind), *given) for kind in kinds] for f in (partial(ours, chunk=chunk), plain)]

    mine, other = of_both(hidden, weight, bias)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def test_all_modes_to_second_order(in_double):
    hidden, weight, bias, labels = inputs(tokens=3, width=2, words=5)
    for reduction in ("mean", "none"):
        function = partial(ours, labels=labels, chunk=2, reduction=reduction, smooth=0.1)
        derived.equals_differences(lambda *given, f=function: [f(*given)], hidden, weight, bias, tolerance=1e-6)


def test_a_batch_is_its_rows(in_double):
    hidden, weight, _, labels = inputs()
    grad = jax.jit(jax.grad(lambda h: linear_cross_entropy(h, weight, labels, chunk=4)))
    batch = jnp.stack([hidden, 2 * hidden])
    for row, one in zip(jax.vmap(grad)(batch), batch, strict=True):
        np.testing.assert_allclose(row, grad(one), rtol=1e-13)
    lead = linear_cross_entropy(batch, weight, np.stack([labels, labels]), reduction="none")
    assert lead.shape == (2, 6)


@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(
    tokens=st.integers(0, 5),
    width=st.integers(1, 4),
    words=st.integers(1, 9),
    chunk=st.none() | st.integers(1, 10),
    ignored=st.sets(st.integers(0, 4)),
)
def test_any_shape_chunk_and_ignored_tokens(tokens, width, words, chunk, ignored):
    with jax.enable_x64(True):
        hidden, weight, bias, labels = inputs(tokens, width, words)
        labels[[n for n in ignored if n < tokens]] = -100
        options = {"labels": labels, "reduction": "sum"}
        functions = [partial(ours, chunk=chunk, **options), partial(plain, **options)]
        both = jax.jit(lambda *given: [jax.value_and_grad(function, (0, 1, 2))(*given) for function in functions])
        mine, other = both(hidden, weight, bias)
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def test_a_word_that_cannot_be_has_no_gradient(in_double):
    hidden, weight, bias, labels = inputs(words=12)
    labels = np.where(labels < 4, 5, labels)
    bias = bias.at[:4].set(-jnp.inf)  # all of the first chunk
    functions = partial(ours, chunk=4), plain
    mine, other = jax.jit(lambda *given: [jax.grad(f, (0, 1))(*given, labels) for f in functions])(hidden, weight, bias)
    for a, b in zip(mine, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-14)
    assert not mine[1][:4].any()


def test_all_ignored_is_no_number_with_no_gradient(in_double):
    hidden, weight, _, labels = inputs()
    loss, grads = jax.value_and_grad(linear_cross_entropy, (0, 1))(hidden, weight, np.full_like(labels, -100))
    assert np.isnan(loss) and not any(grad.any() for grad in grads)


@pytest.mark.parametrize("wrong", [-1, 12])
def test_a_label_that_is_no_word_is_no_number(wrong, in_double):
    hidden, weight, bias, labels = inputs(words=12)
    labels[1] = wrong
    for function in (ours, plain):
        losses = function(hidden, weight, bias, labels, reduction="none")
        assert np.isnan(losses).tolist() == [False, True, False, False, False, False]


def test_short_floats_are_summed_in_single_precision():
    hidden, weight, _, labels = inputs(tokens=8, width=16, words=64, dtype=jnp.bfloat16)
    loss, grads = jax.value_and_grad(linear_cross_entropy, (0, 1))(hidden, weight, labels, chunk=16)
    exact = cross_entropy(jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32), labels)
    assert loss.dtype == jnp.float32 and [grad.dtype for grad in grads] == [jnp.bfloat16] * 2
    np.testing.assert_allclose(loss, exact, rtol=1e-5)


def peak_bytes(words, tokens=2048, width=32):
    """What XLA needs beside inputs and outputs, for loss and gradients."""
    shapes = [
        jax.ShapeDtypeStruct(s, t) for s, t in (((tokens, width), "f4"), ((words, width), "f4"), ((tokens,), "i4"))
    ]
    compiled = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_does_not_depend_on_the_vocabulary():
    small, large = peak_bytes(16_384), peak_bytes(131_072)
    assert abs(large - small) < 0.01 * small
    assert large < 4 * 2048 * 131_072 / 40  # a fortieth of the logits


def test_the_rule_of_chunks():
    assert chunk_size(2048, 256, 64_000) == 2000
    assert chunk_size(2048, 256, 65_536) == 2048
    assert chunk_size(2048, 256, 50_257) == 1733  # 29 chunks
    assert chunk_size(2048, 256, 50_261) == 2011  # a prime: 25 chunks, of which the last is padded
    assert chunk_size(1_000_000, 4096, 64_000) == 4000  # as many as there are hidden numbers
    assert chunk_size(4, 256, 100) == 100


def test_chunks_of_no_divisor_are_padded():
    hidden, weight, bias, labels = inputs(tokens=4, width=2, words=7, dtype=np.float32)
    padded = ours(hidden, weight, bias, labels, chunk=4)
    np.testing.assert_allclose(padded, plain(hidden, weight, bias, labels), rtol=1e-6)


X, W, Y = jnp.ones((2, 3)), jnp.ones((4, 3)), jnp.zeros(2, int)
BAD = {
    "hidden and weight have the shapes (2, 3) and (3, 4).\nPass hidden[..., width] and weight[vocabulary, width].": (
        lambda: linear_cross_entropy(X, W.T, Y)
    ),
    "hidden and weight have the types float32 and bfloat16.\n"
    "Convert one, so that gradients have the types that you want.": (
        lambda: linear_cross_entropy(X, W.astype(jnp.bfloat16), Y)
    ),
    "the labels have type float32, but they name classes.\nPass integers.": lambda: linear_cross_entropy(X, W, X[:, 0]),
    "the labels have shape (3,), but there are places of shape (2,).\n"
    "Pass one label for each place; the classes lie along the last axis.": (
        lambda: linear_cross_entropy(X, W, jnp.zeros(3, int))
    ),
    "bias has shape (3,), but there are 4 words.\nPass one number for each word of the vocabulary.": (
        lambda: linear_cross_entropy(X, W, Y, bias=X[0])
    ),
    "label_smoothing is 1.5.\nPass a number from 0 to 1.": lambda: linear_cross_entropy(X, W, Y, label_smoothing=1.5),
    "chunk is 0.\nPass a positive number of words, or leave it out.": lambda: linear_cross_entropy(X, W, Y, chunk=0),
    "reduction is 'men'.\nKnown names: 'mean', 'none', 'sum'. Did you mean 'mean'?": (
        lambda: linear_cross_entropy(X, W, Y, reduction="men")
    ),
    "hidden has type int32, which has no derivative.\n"
    "Convert it first, for example with `.astype(jnp.float32)`.": lambda: linear_cross_entropy(Y[:, None], W, Y),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_refused(text):
    with pytest.raises(CallError) as caught:
        BAD[text]()
    assert str(caught.value) == f"derivatives.linear_cross_entropy: {text}"
