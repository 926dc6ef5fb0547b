"""Normalisation from saved statistics, and dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.derivatives.case import Case, normal, patterns, positive

_ROWS = patterns(2, 4, 3, names="zeros, one zero, zero row, equal row, all equal")
_HALF = np.array([True, False, True, False])


def _with(probes: dict[str, Any], *more: np.ndarray) -> dict[str, Any]:
    return {name: (*inputs, *more) for name, inputs in probes.items()}


_FOUR, _THREE = np.array([1.0, -0.5, 2.0, 0.25]), np.array([1.0, -0.5, 2.0])

CASES = [
    Case(
        "layer_norm",
        "layer_norm",
        lambda torch, x: torch.nn.functional.layer_norm(x, (3,)),
        (normal(2, 4, 3),),
        _ROWS,
    ),
    Case(
        "layer_norm scaled",
        lambda derivatives, x, w, b: derivatives.layer_norm(x, (-2, -1), w, b),
        lambda torch, x, w, b: torch.nn.functional.layer_norm(x, (4, 3), w, b),
        (normal(2, 4, 3), normal(4, 3), normal(4, 3)),
        _with(_ROWS, np.ones((4, 3)), np.zeros((4, 3))),
    ),
    Case(
        "rms_norm",
        lambda derivatives, x, w: derivatives.rms_norm(x, -1, w),
        lambda torch, x, w: torch.nn.functional.rms_norm(x, (3,), w),
        (normal(2, 4, 3), normal(3)),
        _with(_ROWS, _THREE),
    ),
    Case(
        "rms_norm 1e-3",
        "rms_norm",
        lambda torch, x: torch.nn.functional.rms_norm(x, (4, 3), eps=1e-3),
        (normal(2, 4, 3),),
        _ROWS,
        {"axis": (1, 2), "eps": 1e-3},
    ),
    Case(
        "batch_norm",
        lambda derivatives, x, w, b: derivatives.batch_norm(x, None, None, w, b),
        lambda torch, x, w, b: torch.nn.functional.batch_norm(x, None, None, w, b, training=True),
        (normal(2, 4, 3), normal(4), normal(4)),
        _with(_ROWS, _FOUR, _FOUR),
    ),
    Case(
        "batch_norm given",
        "batch_norm",
        lambda torch, x, mean, var, w, b: torch.nn.functional.batch_norm(x, mean, var, w, b),
        (normal(2, 4, 3), normal(4), positive(4), normal(4), normal(4)),
        _with(_ROWS, _FOUR, np.zeros(4), _FOUR, _FOUR),
        constant=(1, 2),
    ),
    Case(
        "instance_norm",
        "instance_norm",
        lambda torch, x, w, b: torch.nn.functional.instance_norm(x, weight=w, bias=b),
        (normal(2, 4, 3), normal(4), normal(4)),
        _with(_ROWS, _FOUR, _FOUR),
    ),
    Case(
        "group_norm",
        lambda derivatives, x, w, b: derivatives.group_norm(x, 2, w, b),
        lambda torch, x, w, b: torch.nn.functional.group_norm(x, 2, w, b),
        (normal(2, 4, 3), normal(4), normal(4)),
        _with(_ROWS, _FOUR, _FOUR),
    ),
    *(
        Case(
            f"normalize {order}",
            "normalize",
            lambda torch, x, order=order: torch.nn.functional.normalize(x, order, 1),
            (normal(2, 4, 3),),
            _ROWS,
            {"ord": order},
        )
        for order in (1.0, 2.0, 3.0)
    ),
    Case(
        "dropout",
        lambda derivatives, x: derivatives.dropout(x, _HALF, 0.5),
        lambda torch, x: x * (torch.from_numpy(_HALF).to(x.dtype) * 2.0),
        (normal(3, 4),),
        {"zeros": (np.zeros((3, 4)),)},
    ),
    Case(
        "dropout all",
        lambda derivatives, x: derivatives.dropout(x, np.zeros(4, bool), 1.0),
        lambda torch, x: torch.dropout(x, 1.0, True),
        (normal(3, 4),),
        {"zeros": (np.zeros((3, 4)),)},
    ),
]
