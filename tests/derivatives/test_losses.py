"""Losses are the formulas of their docstrings, of any shape and reduction, and refuse bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jointcut.aot import derivatives as d
from jointcut.partition.errors import CallError


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


PAIRS = {
    "mse_loss": lambda x, y: (x - y) ** 2,
    "l1_loss": lambda x, y: jnp.abs(x - y),
    "huber_loss": lambda x, y: jnp.where(jnp.abs(x - y) < 1, (x - y) ** 2 / 2, jnp.abs(x - y) - 0.5),
    "smooth_l1_loss": lambda x, y: jnp.where(jnp.abs(x - y) < 1, (x - y) ** 2 / 2, jnp.abs(x - y) - 0.5),
    "binary_cross_entropy_with_logits": lambda x, y: jnp.log1p(jnp.exp(x)) - x * y,
    "soft_margin_loss": lambda x, y: jnp.log1p(jnp.exp(-x * y)),
    "kl_div": lambda x, y: y * (jnp.log(y) - x),
    "poisson_nll_loss": lambda x, y: jnp.exp(x) - x * y,
}
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(shape=shapes, reduction=st.sampled_from(["mean", "sum", "none"]))
@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_of_any_shape(name, shape, reduction):
    source = np.random.RandomState(3)
    x, y = source.standard_normal(shape), source.uniform(0.2, 0.8, shape)
    reduced = {"mean": jnp.mean, "sum": jnp.sum, "none": jnp.asarray}[reduction]

    def ours(x, y):
        return getattr(d, name)(x, y, reduction=reduction)

    @jax.jit
    def of_both(*given):
        pulled = (jax.vjp(function, *given) for function in (ours, lambda x, y: reduced(PAIRS[name](x, y))))
        return [(value, *pull(jnp.ones_like(value))) for value, pull in pulled]

    for a, b in zip(*of_both(x, y), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(0, 4),
    classes=st.integers(1, 4),
    smoothing=st.sampled_from([0.0, 0.3]),
    ignored=st.sets(st.integers(0, 3)),
)
def test_cross_entropy_of_any_number_of_classes(rows, classes, smoothing, ignored):
    source = np.random.RandomState(rows)
    logits, labels = source.standard_normal((rows, classes)), source.randint(0, classes, rows)
    labels[[n for n in ignored if n < rows]] = -100

    def plain(z):
        kept = (labels != -100)[:, None]
        q = (1 - smoothing) * jax.nn.one_hot(labels, classes) + smoothing / classes
        return -(kept * q * jax.nn.log_softmax(z)).sum() / kept.sum()

    def ours(z):
        return d.cross_entropy(z, labels, label_smoothing=smoothing)

    mine, (value, grad) = jax.jit(lambda z: [jax.value_and_grad(f)(z) for f in (ours, plain)])(logits)
    np.testing.assert_allclose(mine[0], value, rtol=1e-12)
    np.testing.assert_allclose(mine[1], np.nan_to_num(grad), rtol=1e-12, atol=1e-15)


def test_labels_and_their_probabilities_have_one_loss():
    logits, labels = np.random.RandomState(0).standard_normal((2, 3, 4)), np.array([[0, 1, 2], [3, 0, 1]])
    shares = jax.nn.one_hot(labels, 4, dtype=float)
    np.testing.assert_allclose(d.cross_entropy(logits, labels), d.cross_entropy(logits, shares), rtol=1e-14)
    logp = jax.nn.log_softmax(logits)
    np.testing.assert_allclose(d.cross_entropy(logits, labels), d.nll_loss(logp, labels), rtol=1e-14)


def test_ctc_is_the_sum_over_all_alignments():
    logp = np.asarray(jax.nn.log_softmax(np.random.RandomState(1).standard_normal((4, 3))))

    def alignments(label):
        paths = np.stack(np.meshgrid(*[range(3)] * 4, indexing="ij"), -1).reshape(-1, 4)
        for path in paths:
            merged = [c for n, c in enumerate(path) if c and (n == 0 or path[n - 1] != c)]
            if merged == label:
                yield logp[range(4), path].sum()

    labels = [[1, 2], [1, 1], [2], []]
    padded = np.array([label + [0] * (2 - len(label)) for label in labels])
    batch = np.repeat(logp[:, None], len(labels), 1)
    losses = jax.jit(lambda *given: d.ctc_loss(*given, reduction="none"))(
        batch, padded, np.full(len(labels), 4), np.array([len(label) for label in labels])
    )
    for loss, label in zip(losses, labels, strict=True):
        np.testing.assert_allclose(loss, -np.logaddexp.reduce(list(alignments(label))), rtol=1e-12)


def test_ctc_has_no_gradient_where_labels_do_not_fit():
    def loss(logp, **options):
        return d.ctc_loss(logp, np.array([[1, 1]]), np.array([2]), np.array([2]), reduction="sum", **options)

    logp = np.log(np.full((2, 1, 3), 1 / 3))
    (value, grad), zero = jax.jit(lambda x: (jax.value_and_grad(loss)(x), loss(x, zero_infinity=True)))(logp)
    assert value == np.inf and zero == 0 and not grad.any()


def test_a_forbidden_class_has_no_gradient_in_ctc():
    logp = np.log([[0.5, 0.5, 1.0]] * 2)[:, None]
    logp[..., 2] = -np.inf
    loss = jax.jit(jax.grad(lambda x: d.ctc_loss(x, np.array([[1]]), np.array([2]), np.array([1]), reduction="sum")))
    grad = np.asarray(loss(logp))
    assert np.isfinite(grad).all() and not grad[..., 2].any()


X, Y, F = np.ones((2, 3)), np.zeros((2,), int), np.ones((2, 3), np.int32)
_CONVERT = "Convert it first, for example with `.astype(jnp.float32)`."
BAD = {
    "mse_loss: reduction is 'avg'.\nKnown names: 'mean', 'none', 'sum'.": lambda: d.mse_loss(X, X, "avg"),
    "mse_loss: prediction has type int32, which has no derivative.\n" + _CONVERT: lambda: d.mse_loss(F, X),
    "l1_loss: the inputs have the shapes (2, 3) and (2,), which do not broadcast.\nPass arrays of one shape.": (
        lambda: d.l1_loss(X, X[:, 0])
    ),
    "mse_loss: target has type complex128, but the function is defined for real numbers only.\n"
    "Pass its real part, or its absolute value.": lambda: d.mse_loss(X, X + 1j),
    "huber_loss: delta is 0, but it must be positive.\nPass a number above zero.": lambda: d.huber_loss(X, X, delta=0),
    "smooth_l1_loss: beta is -1, but it must not be negative.\nPass zero or a positive number.": (
        lambda: d.smooth_l1_loss(X, X, beta=-1)
    ),
    "gaussian_nll_loss: eps is 0, but it must be positive.\nPass a number above zero.": (
        lambda: d.gaussian_nll_loss(X, X, X, eps=0)
    ),
    "cross_entropy: the labels have shape (3,), but there are places of shape (2,).\n"
    "Pass one label for each place; the classes lie along the last axis.": (
        lambda: d.cross_entropy(X, np.zeros(3, int))
    ),
    "cross_entropy: the targets are probabilities of shape (2, 2), but the logits have shape (2, 3).\n"
    "Pass as many probabilities as logits, or integer labels.": lambda: d.cross_entropy(X, X[:, :2]),
    "cross_entropy: label_smoothing is 2.\nPass a number from 0 to 1.": lambda: d.cross_entropy(
        X, Y, label_smoothing=2
    ),
    "cross_entropy: weight has shape (2,), but there are 3 classes.\nPass one weight for each class.": (
        lambda: d.cross_entropy(X, Y, weight=X[:, 0])
    ),
    "nll_loss: the first argument is a scalar, and has no axis of classes.\nPass an array, classes last.": (
        lambda: d.nll_loss(1.0, 0)
    ),
    "nll_loss: the labels have type float64, but they name classes.\nPass integers.": lambda: d.nll_loss(X, X[:, 0]),
    "multi_margin_loss: p is 3.\nPass 1 or 2.": lambda: d.multi_margin_loss(X, Y, p=3),
    "ctc_loss: the inputs have the shapes (2, 3), (2, 3), (2,) and (2,).\n"
    "Pass log_probs[time, batch, classes], labels[batch, places], and a length of each for each of the batch.": (
        lambda: d.ctc_loss(X, F, Y, Y)
    ),
    "ctc_loss: labels and lengths have the types float64, int64, int64.\nPass integers.": (
        lambda: d.ctc_loss(np.ones((4, 2, 3)), X, Y, Y)
    ),
    "ctc_loss: blank is 3, but there are 3 classes.\nPass one of the classes.": (
        lambda: d.ctc_loss(np.ones((4, 2, 3)), F, Y, Y, blank=3)
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_refused(text):
    with pytest.raises(CallError) as caught:
        BAD[text]()
    assert str(caught.value) == f"derivatives.{text}"
