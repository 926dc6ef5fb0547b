"""Losses, of single elements, of classes and of sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.derivatives.case import Case, Inputs, normal, points, positive, uniform, whole


def _pair(name: str, torch: str, draws: Any, probes: Any, jax: Any = None, **more: Any) -> Case:
    """A loss of a prediction and a target."""
    return Case(
        name,
        torch,
        lambda library, *inputs: getattr(library.nn.functional, torch)(*inputs, **more.get("options", {})),
        draws,
        probes,
        jax=jax,
        **more,
    )


def _signs(*shape: int) -> Callable[[np.random.RandomState], np.ndarray]:
    return lambda source: np.asarray(np.where(source.uniform(size=shape) < 0.5, -1.0, 1.0))


_DIFFERENCES = points(x=[0.0, 1.0, -1.0, 2.0, 0.5], y=[0.0])
_LOGITS = {
    "zeros": (np.zeros((3, 4)), np.array([0, 1, 2])),
    "ties": (np.full((3, 4), 7.0), np.array([0, 1, 2])),
    "huge": (np.array([[1e3, 0, -1e3, 5], [0, 1e4, 1, 2], [0, -1e4, 3, 1]]), np.array([2, 0, 1])),
    "one -inf": (np.array([[-np.inf, 0, 1, 5], [0, -np.inf, 1, 2], [0, 2, 3, -np.inf]]), np.array([2, 0, 1])),
    "two -inf": (np.array([[-np.inf, 0, -np.inf, 5.0], [0, 1, 1, 2], [0, 2, 3, 4]]), np.array([1, 0, 1])),
    "one class left": (np.array([[-np.inf, 0, -np.inf, -np.inf], [0, 1, 1, 2], [0, 2, 3, 4]]), np.array([1, 0, 1])),
    "one ignored": (np.array([[0, 1.0, 2, 3], [0, 1, 1, 2], [0, 2, 3, 4]]), np.array([1, -100, 3])),
    "ignored -inf": (np.array([[0, 1.0, 2, 3], [-np.inf, 1, 1, 2], [0, 2, 3, 4]]), np.array([1, -100, 3])),
}
_SHARES = {
    "hard": (np.array([[0.0, 1, 2, 3]]), np.array([[0.0, 1, 0, 0]])),
    "-inf with no share": (np.array([[-np.inf, 1, 2, 3]]), np.array([[0.0, 0.5, 0.5, 0]])),
    "all zero": (np.array([[0.0, 1, 2, 3]]), np.zeros((1, 4))),
}
_LABELS = whole(0, 4, 3)
_WEIGHT = np.array([0.5, 1.0, 2.0, 0.25])


def _cross(
    name: str, more: dict[str, Any] | None = None, weighted: bool = False, probes: Any = _LOGITS, **rest: Any
) -> Case:
    options = dict(more or {})
    given = {**options, "weight": _WEIGHT} if weighted else options

    def torch(library: Any, *inputs: Any) -> Any:
        own = {**options, "weight": library.from_numpy(_WEIGHT)} if weighted else options
        return library.nn.functional.cross_entropy(*inputs, **own)

    return Case(name, "cross_entropy", torch, (normal(3, 4), _LABELS), probes, given, **rest)


def _bce_probes() -> dict[str, Inputs]:
    return points(p=[0.0, 1.0, 0.5, 1e-13], y=[0.0, 1.0, 0.5])


def _ctc(library: Any, logits: Any, labels: Any, times: Any, places: Any) -> Any:
    logp = library.nn.functional.log_softmax(logits, -1)
    return library.nn.functional.ctc_loss(logp, labels, times, places, reduction="sum", zero_infinity=True)


def _log_softmax(logits: Any) -> Any:
    import jax

    return jax.nn.log_softmax(logits)


def _ctc_ours(derivatives: Any, logits: Any, labels: Any, times: Any, places: Any) -> Any:
    logp = _log_softmax(logits)
    return derivatives.ctc_loss(logp, labels, times, places, reduction="sum", zero_infinity=True)


def _constant(*values: int) -> Callable[[np.random.RandomState], np.ndarray]:
    return lambda source: np.array(values)


_TRIPLET = {
    "all equal": tuple(np.ones((2, 3)) for _ in range(3)),
    "zeros": tuple(np.zeros((2, 3)) for _ in range(3)),
    "difference of -eps": (np.zeros((1, 3)), np.full((1, 3), 1e-6), np.ones((1, 3))),
    "negative at -eps": (np.zeros((1, 3)), np.ones((1, 3)), np.full((1, 3), 1e-6)),
}
_COSINE = {
    "zeros": (np.zeros((2, 3)), np.zeros((2, 3)), np.array([1.0, -1.0])),
    "one zero": (np.zeros((2, 3)), np.ones((2, 3)), np.array([1.0, -1.0])),
    "equal": (np.ones((2, 3)), np.ones((2, 3)), np.array([1.0, -1.0])),
    "at right angles": (np.eye(3)[:2], np.eye(3)[1:], np.array([1.0, -1.0])),
}
_AT_MARGIN = np.array([[0.0, 1.0, 2.0], [1.0, 1.0, 1.0]])

CASES = [
    _pair("mse_loss", "mse_loss", (normal(3, 4), normal(3, 4)), _DIFFERENCES),
    _pair("l1_loss", "l1_loss", (normal(3, 4), normal(3, 4)), _DIFFERENCES),
    _pair("huber_loss", "huber_loss", (normal(3, 4), normal(3, 4)), _DIFFERENCES),
    _pair(
        "huber_loss 0.5 sum",
        "huber_loss",
        (normal(3, 4), normal(3, 4)),
        _DIFFERENCES,
        options={"delta": 0.5, "reduction": "sum"},
    ),
    _pair(
        "smooth_l1_loss", "smooth_l1_loss", (normal(3, 4), normal(3, 4)), _DIFFERENCES, options={"reduction": "none"}
    ),
    _pair("smooth_l1_loss 2", "smooth_l1_loss", (normal(3, 4), normal(3, 4)), _DIFFERENCES, options={"beta": 2.0}),
    _pair("smooth_l1_loss 0", "smooth_l1_loss", (normal(3, 4), normal(3, 4)), _DIFFERENCES, options={"beta": 0.0}),
    _pair(
        "binary_cross_entropy",
        "binary_cross_entropy",
        (uniform(0.2, 0.8, 3, 4), uniform(0.0, 1.0, 3, 4)),
        _bce_probes(),
    ),
    _pair(
        "binary_cross_entropy_with_logits",
        "binary_cross_entropy_with_logits",
        (normal(3, 4), uniform(0.0, 1.0, 3, 4)),
        points(x=[0.0, 1e3, -1e3, 40.0, -800.0], y=[0.0, 1.0]),
    ),
    Case(
        "binary_cross_entropy_with_logits pos_weight",
        "binary_cross_entropy_with_logits",
        lambda torch, x, y: torch.nn.functional.binary_cross_entropy_with_logits(
            x, y, pos_weight=torch.from_numpy(_WEIGHT), weight=torch.from_numpy(_WEIGHT)
        ),
        (normal(3, 4), uniform(0.0, 1.0, 3, 4)),
        {"zeros": (np.zeros((3, 4)), np.ones((3, 4))), "huge": (np.full((3, 4), -900.0), np.ones((3, 4)))},
        {"pos_weight": _WEIGHT, "weight": _WEIGHT},
    ),
    _pair(
        "soft_margin_loss",
        "soft_margin_loss",
        (normal(3, 4), _signs(3, 4)),
        points(x=[0.0, 30.0, 1e3, -1e3], y=[1.0, -1.0]),
        constant=(1,),
        differs=dict.fromkeys(("x=1000, y=-1", "x=-1000, y=1"), "PyTorch's exponential overflows"),
    ),
    _pair(
        "multilabel_soft_margin_loss",
        "multilabel_soft_margin_loss",
        (normal(3, 4), uniform(0.0, 1.0, 3, 4)),
        {"zeros": (np.zeros((2, 3)), np.ones((2, 3))), "huge": (np.full((2, 3), -900.0), np.ones((2, 3)))},
    ),
    _pair("kl_div", "kl_div", (normal(3, 4), positive(3, 4)), points(x=[0.0, -1.0, -700.0], y=[0.0, 0.5, 1.0])),
    _pair(
        "kl_div log_target",
        "kl_div",
        (normal(3, 4), normal(3, 4)),
        points(x=[0.0, -1.0], y=[0.0, -1.0, -np.inf]),
        options={"log_target": True, "reduction": "sum"},
        differs={f"x={x}, y=-inf": "PyTorch multiplies probability 0 with -inf" for x in (0, -1)},
    ),
    Case(
        "poisson_nll_loss",
        "poisson_nll_loss",
        lambda torch, x, y: torch.nn.functional.poisson_nll_loss(x, y),
        (normal(3, 4), positive(3, 4)),
        points(x=[0.0, -700.0], y=[0.0, 1.0, 3.0]),
    ),
    Case(
        "poisson_nll_loss full",
        "poisson_nll_loss",
        lambda torch, x, y: torch.nn.functional.poisson_nll_loss(x, y, log_input=False, full=True),
        (positive(3, 4), positive(3, 4)),
        points(x=[0.0, 1.0], y=[0.0, 1.0, 3.0]),
        {"log_input": False, "full": True},
    ),
    Case(
        "gaussian_nll_loss",
        "gaussian_nll_loss",
        lambda torch, x, y, v: torch.nn.functional.gaussian_nll_loss(x, y, v),
        (normal(3, 4), normal(3, 4), positive(3, 4)),
        points(x=[0.0, 1.0], y=[0.0], v=[0.0, 1e-6, 1e-3, 1.0]),
    ),
    _pair(
        "hinge_embedding_loss",
        "hinge_embedding_loss",
        (normal(3, 4), _signs(3, 4)),
        points(x=[0.0, 1.0, 2.0], y=[1.0, -1.0]),
        constant=(1,),
    ),
    Case(
        "margin_ranking_loss",
        "margin_ranking_loss",
        lambda torch, a, b, y: torch.nn.functional.margin_ranking_loss(a, b, y, margin=0.5),
        (normal(5), normal(5), _signs(5)),
        points(a=[0.0, 0.5, 1.0], b=[0.0], y=[1.0, -1.0]),
        {"margin": 0.5},
        constant=(2,),
    ),
    *(
        Case(
            f"multi_margin_loss {p}",
            "multi_margin_loss",
            lambda torch, x, y, p=p: torch.nn.functional.multi_margin_loss(
                x, y, p=p, weight=torch.from_numpy(_WEIGHT[:3])
            ),
            (normal(2, 3), whole(0, 3, 2)),
            {"at the margin": (_AT_MARGIN, np.array([1, 0])), "zeros": (np.zeros((2, 3)), np.array([1, 0]))},
            {"p": p, "weight": _WEIGHT[:3]},
        )
        for p in (1, 2)
    ),
    _pair(
        "multilabel_margin_loss",
        "multilabel_margin_loss",
        (normal(2, 3), lambda source: np.array([[2, 0, -1], [1, -1, 0]])),
        {
            "at the margin": (_AT_MARGIN, np.array([[1, -1, 0], [0, 1, -1]])),
            "no label": (_AT_MARGIN, np.full((2, 3), -1)),
            "all labels": (_AT_MARGIN, np.array([[0, 1, 2], [2, 1, 0]])),
        },
    ),
    *(
        Case(
            f"triplet_margin_loss {p}{' swap' * swap}",
            "triplet_margin_loss",
            lambda torch, a, b, c, p=p, swap=swap: torch.nn.functional.triplet_margin_loss(a, b, c, p=p, swap=swap),
            (normal(2, 3), normal(2, 3), normal(2, 3)),
            _TRIPLET,
            {"p": p, "swap": swap},
        )
        for p in (1.0, 2.0, 3.0)
        for swap in (False, True)
    ),
    Case(
        "cosine_embedding_loss",
        "cosine_embedding_loss",
        lambda torch, a, b, y: torch.nn.functional.cosine_embedding_loss(a, b, y),
        (normal(4, 3), normal(4, 3), _signs(4)),
        _COSINE,
        constant=(2,),
    ),
    _cross("cross_entropy"),
    _cross("cross_entropy sum weighted", {"reduction": "sum"}, weighted=True),
    _cross("cross_entropy weighted", weighted=True),
    _cross("cross_entropy none", {"reduction": "none"}),
    _cross("cross_entropy smooth", {"label_smoothing": 0.1}, weighted=True),
    Case(
        "cross_entropy shares",
        "cross_entropy",
        lambda torch, x, y: torch.nn.functional.cross_entropy(
            x, y, weight=torch.from_numpy(_WEIGHT), label_smoothing=0.2
        ),
        (normal(3, 4), uniform(0.0, 1.0, 3, 4)),
        {"hard": _SHARES["hard"], "all zero": _SHARES["all zero"]},
        {"weight": _WEIGHT, "label_smoothing": 0.2},
    ),
    Case(
        "cross_entropy shares plain",
        "cross_entropy",
        lambda torch, x, y: torch.nn.functional.cross_entropy(x, y),
        (normal(3, 4), uniform(0.0, 1.0, 3, 4)),
        _SHARES,
        differs={"-inf with no share": "PyTorch multiplies share 0 with -inf"},
    ),
    Case(
        "nll_loss",
        "nll_loss",
        lambda torch, x, y: torch.nn.functional.nll_loss(x, y, weight=torch.from_numpy(_WEIGHT)),
        (normal(3, 4), _LABELS),
        _LOGITS,
        {"weight": _WEIGHT},
    ),
    Case(
        "linear_cross_entropy",
        "linear_cross_entropy",
        lambda torch, x, w, y: torch.nn.functional.linear_cross_entropy(x, w, y),
        (normal(3, 5), normal(4, 5), _LABELS),
        {
            "zeros": (np.zeros((3, 5)), np.zeros((4, 5)), np.array([0, 1, 2])),
            "one ignored": (np.ones((3, 5)), np.eye(5)[:4], np.array([0, -100, 2])),
            "huge": (np.full((3, 5), 1e3), np.eye(5)[:4], np.array([0, 1, 2])),
        },
        {"chunk": 2},
    ),
    Case(
        "linear_cross_entropy smooth",
        "linear_cross_entropy",
        lambda torch, x, w, y: torch.nn.functional.linear_cross_entropy(
            x,
            w,
            y,
            label_smoothing=0.1,
            weight=torch.from_numpy(_WEIGHT),
            linear_bias=torch.from_numpy(_WEIGHT),
            reduction="sum",
        ),
        (normal(3, 5), normal(4, 5), _LABELS),
        {"one ignored": (np.ones((3, 5)), np.eye(5)[:4], np.array([0, -100, 2]))},
        {"chunk": 3, "label_smoothing": 0.1, "class_weight": _WEIGHT, "bias": _WEIGHT, "reduction": "sum"},
    ),
    Case(
        "ctc_loss",
        _ctc_ours,
        _ctc,
        (normal(6, 2, 4), whole(1, 4, 2, 2), _constant(6, 5), _constant(2, 1)),
        {
            "zeros": (np.zeros((6, 2, 4)), np.array([[1, 2], [1, 1]]), np.array([6, 6]), np.array([2, 2])),
            "does not fit": (np.zeros((3, 2, 4)), np.array([[1, 2], [1, 1]]), np.array([3, 2]), np.array([2, 2])),
            "no label": (np.zeros((3, 2, 4)), np.array([[1, 2], [1, 1]]), np.array([3, 2]), np.array([0, 1])),
            "huge": (
                np.eye(4)[[0, 1, 2, 1]][:, None].repeat(2, 1) * 500,
                np.array([[3, 2], [1, 2]]),
                np.array([4, 4]),
                np.array([2, 2]),
            ),
        },
    ),
]
