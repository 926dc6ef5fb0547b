"""Pooling and interpolation."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.derivatives.case import Case, normal, patterns, positive

_IMAGES = patterns(1, 2, 5, 6, names="zeros, one zero, ties, all equal")


def _pool(name: str, torch: str, options: dict[str, Any], own: dict[str, Any] | None = None, **more: Any) -> Case:
    """A pooling of images; `own` are our names for the options."""
    size = options.pop("kernel_size")
    renamed = {"strides" if key == "stride" else key: value for key, value in options.items()}
    return Case(
        name,
        lambda derivatives, x: getattr(derivatives, torch)(x, size, **(own or renamed)),
        lambda library, x: getattr(library.nn.functional, f"{torch}2d")(x, size, **options),
        more.pop("draws", (normal(1, 2, 5, 6),)),
        _IMAGES,
        **more,
    )


def _adaptive(torch: str, size: tuple[int, int]) -> Case:
    return Case(
        f"{torch} {size}",
        torch,
        lambda library, x: getattr(library.nn.functional, f"{torch}2d")(x, size),
        (normal(1, 2, 5, 6),),
        _IMAGES,
        {"size": size},
    )


def _resized(method: str, torch: str, size: tuple[int, ...], align: bool | None = None, jax: Any = None) -> Case:
    shape = (1, 2, 5, 6, 3)[: 2 + len(size)]
    more = {} if align is None else {"align_corners": align}
    return Case(
        f"interpolate {torch} {size}{' corners' if align else ''}",
        "interpolate",
        lambda library, x: library.nn.functional.interpolate(x, size, mode=torch, **more),
        (normal(*shape),),
        {"zeros": (np.zeros(shape),)},
        {"size": size, "method": method, **more},
        agrees=jax is None,
    )


CASES = [
    _pool("max_pool", "max_pool", {"kernel_size": (2, 2)}),
    _pool("max_pool overlapping", "max_pool", {"kernel_size": (3, 3), "stride": (1, 2), "padding": (1, 1)}),
    _pool("max_pool dilated", "max_pool", {"kernel_size": (2, 2), "stride": (1, 1), "dilation": (2, 3)}),
    _pool("max_pool ceil", "max_pool", {"kernel_size": (3, 2), "padding": (1, 0), "ceil_mode": True}),
    _pool("avg_pool", "avg_pool", {"kernel_size": (2, 3)}),
    _pool("avg_pool padded", "avg_pool", {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1)}),
    _pool(
        "avg_pool inside",
        "avg_pool",
        {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1), "ceil_mode": True, "count_include_pad": False},
    ),
    _pool("avg_pool ceil", "avg_pool", {"kernel_size": (3, 2), "stride": (2, 2), "padding": (1, 1), "ceil_mode": True}),
    _pool("avg_pool divisor", "avg_pool", {"kernel_size": (2, 2), "divisor_override": 3}),
    *(
        Case(
            f"lp_pool {p}",
            "lp_pool",
            lambda torch, x, p=p: torch.nn.functional.lp_pool2d(x, p, (2, 2)),
            (positive(1, 2, 4, 4),),
            {
                "zeros": (np.zeros((1, 2, 4, 4)),),
                "one zero": (np.arange(32.0).reshape(1, 2, 4, 4),),
                "window of zeros": (np.kron(np.arange(8.0).reshape(1, 2, 2, 2), np.ones((2, 2))),),
            },
            {"ord": p, "window": (2, 2)},
        )
        for p in (1.0, 2.0, 3.0)
    ),
    _adaptive("adaptive_avg_pool", (2, 3)),
    _adaptive("adaptive_avg_pool", (3, 4)),
    _adaptive("adaptive_max_pool", (2, 3)),
    _adaptive("adaptive_max_pool", (3, 4)),
    _resized("nearest", "nearest", (3, 8)),
    _resized("nearest-exact", "nearest-exact", (3, 8)),
    _resized("linear", "linear", (4,), False),
    _resized("linear", "bilinear", (3, 8), False),
    _resized("linear", "bilinear", (9, 4), True),
    _resized("linear", "trilinear", (3, 7, 5), False),
    _resized("cubic", "bicubic", (3, 8), False),
    _resized("cubic", "bicubic", (9, 4), True),
    _resized("area", "area", (3, 4)),
]
