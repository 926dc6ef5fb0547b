"""Distances and angles between vectors."""

import math
from typing import Any

import numpy as np

from benchmarks.derivatives.case import Case, Inputs, normal, patterns

_ORDERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf)
_LARGEST = "PyTorch gives every largest difference the whole slope, where they share it here"


def _meeting(*shape: int) -> dict[str, Inputs]:
    """Two arrays that are equal, equal in a row, share elements, or are zero."""
    base = patterns(*shape, names="zeros, one zero, zero row, ties")
    other = np.arange(math.prod(shape)).reshape(shape) * 0.5 - 0.7
    probes = {"equal": (other, other.copy()), "both zero": (np.zeros(shape), np.zeros(shape))}
    one_row = other.copy()
    one_row[0] += 1.5
    probes["equal rows but one"] = (other, one_row)
    return probes | {f"first has {name}": (inputs[0], other) for name, inputs in base.items()}


_MEETING = _meeting(3, 2)
_ROWS = patterns(4, 3, names="zeros, one zero, zero row, ties, all equal, equal row")


def _norm(jax: Any, x: Any, p: float, **more: Any) -> Any:
    """The same formula in plain JAX."""
    return jax.numpy.linalg.norm(x, ord=p, axis=-1, **more)


CASES = [
    *(
        Case(
            f"cdist of order {p:g}",
            "cdist",
            lambda torch, x, y, p=p: torch.cdist(x, y, p, compute_mode="donot_use_mm_for_euclid_dist"),
            (normal(3, 2), normal(2, 2)),
            {name: (x, y[:2]) for name, (x, y) in _MEETING.items()},
            {"p": p},
            lambda jax, x, y, p=p: _norm(jax, x[:, None] - y[None], p),
            agrees=p not in (0.5, 1.0, math.inf),
            differs=dict.fromkeys(_MEETING, _LARGEST) if p == math.inf else {},
        )
        for p in _ORDERS
    ),
    *(
        Case(
            f"pdist of order {p:g}",
            "pdist",
            lambda torch, x, p=p: torch.nn.functional.pdist(x, p),
            (normal(4, 3),),
            _ROWS,
            {"p": p},
            lambda jax, x, p=p: _norm(jax, x[np.triu_indices(4, 1)[0]] - x[np.triu_indices(4, 1)[1]], p),
            agrees=p not in (0.5, 1.0, math.inf),
            differs=dict.fromkeys(_ROWS, _LARGEST) if p == math.inf else {},
        )
        for p in _ORDERS
    ),
    *(
        Case(
            f"dist of order {p:g}",
            "dist",
            lambda torch, x, y, p=p: torch.dist(x, y, p),
            (normal(3, 2), normal(2)),
            _MEETING,
            {"p": p},
            lambda jax, x, y, p=p: _norm(jax, (x - y).ravel(), p),
            agrees=p not in (0.5, 1.0, math.inf),
        )
        for p in (1.0, 2.0, math.inf)
    ),
    *(
        Case(
            f"pairwise_distance of order {p:g}, eps {eps:g}",
            "pairwise_distance",
            lambda torch, x, y, p=p, eps=eps: torch.nn.functional.pairwise_distance(x, y, p, eps),
            (normal(3, 2), normal(3, 2)),
            _MEETING,
            {"p": p, "eps": eps},
            lambda jax, x, y, p=p, eps=eps: _norm(jax, x - y + eps, p),
            agrees=p not in (0.5, 1.0, math.inf),
        )
        for p in (1.0, 2.0)
        for eps in (0.0, 1e-6)
    ),
    Case(
        "cosine_similarity",
        "cosine_similarity",
        lambda torch, x, y: torch.nn.functional.cosine_similarity(x, y),
        (normal(3, 2), normal(3, 2)),
        _MEETING,
        {},
        lambda jax, x, y: (
            (x / jax.numpy.maximum(_norm(jax, x, 2, keepdims=True), 1e-8))
            * (y / jax.numpy.maximum(_norm(jax, y, 2, keepdims=True), 1e-8))
        ).sum(1),
    ),
]
