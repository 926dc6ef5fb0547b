"""Gather, scatter and sparse products, with indices that name one place twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.derivatives.case import Case, Inputs, normal, whole

_INDEX = np.array([[0, 2, 0, 1], [3, 0, 3, 3], [1, 1, 2, 1]])
_ONCE = np.array([[0, 2, 3, 1], [3, 0, 1, 2], [1, 3, 2, 0]])
_PLACES = np.array([[0, 1], [2, 3], [0, 1], [1, 0], [2, 2]])
_TWICE = np.array([0, 2, 0])
_WRITER = "PyTorch gives the cotangent to all that write to a place, also to those that did not stay"


def _fixed(values: np.ndarray) -> Callable[[np.random.RandomState], np.ndarray]:
    return lambda source: values


def _pairs() -> dict[str, Inputs]:
    """What is written, and where to, with zeros and ties of each kind."""
    base, other = np.arange(1.0, 13.0).reshape(3, 4), np.arange(2.0, 14.0).reshape(3, 4) / 4
    zeroed, twice = other.copy(), other.copy()
    zeroed[0, 0], twice[0, 0], twice[0, 2] = 0, 0, 0
    none, some = base.copy(), base.copy()
    none[:], some[0, 0] = 0, 0
    return {
        "zeros": (none, _INDEX, np.zeros((3, 4))),
        "one zero": (base, _INDEX, zeroed),
        "two zeros": (base, _INDEX, twice),
        "zero there": (some, _INDEX, other),
        "zero there and one": (some, _INDEX, zeroed),
        "zero there and two": (some, _INDEX, twice),
        "ties": (np.ones((3, 4)), _INDEX, np.ones((3, 4))),
        "ties of some": (np.ones((3, 4)), _INDEX, np.floor(other)),
    }


_ABSENT = "PyTorch counts what was there among the ties, though it takes no part"
_TIED = ("zeros", "one zero", "zero there and one", "zero there and two", "ties", "ties of some")


def _reduced(reduce: str, include: bool) -> Case:
    return Case(
        f"scatter_reduce {reduce}{'' if include else ' without self'}",
        lambda derivatives, x, index, src: derivatives.scatter_reduce(x, 1, index, src, reduce, include),
        lambda torch, x, index, src: torch.scatter_reduce(x, 1, index, src, reduce, include_self=include),
        (normal(3, 4), whole(0, 4, 3, 4), normal(3, 4)),
        _pairs(),
        differs=dict.fromkeys(_TIED, _ABSENT) if reduce in ("amax", "amin") and not include else {},
    )


def _sparse(torch: Any, values: Any, b: Any) -> Any:
    places = tuple(torch.from_numpy(_PLACES.T.copy()))
    return torch.zeros(3, 4, dtype=values.dtype).index_put(places, values, accumulate=True) @ b


CASES = [
    Case(
        "take_along_axis",
        "take_along_axis",
        lambda torch, x, index: torch.gather(x, 1, index),
        (normal(3, 4), whole(0, 4, 3, 4)),
        {"one place": (np.ones((3, 4)), np.zeros((3, 4), int)), "twice": (np.ones((3, 4)), _INDEX)},
        {"axis": 1},
        jax="numpy.take_along_axis",
    ),
    Case(
        "gather",
        lambda derivatives, x, index: derivatives.gather(x, 0, index),
        lambda torch, x, index: torch.gather(x, 0, index),
        (normal(3, 4), whole(0, 3, 5, 2)),
        {"one place": (np.ones((3, 4)), np.zeros((5, 2), int))},
    ),
    Case(
        "index_select",
        lambda derivatives, x, index: derivatives.index_select(x, 1, index),
        lambda torch, x, index: torch.index_select(x, 1, index),
        (normal(3, 4), whole(0, 4, 5)),
        {"one place": (np.ones((3, 4)), np.zeros(5, int))},
    ),
    Case(
        "index_add",
        lambda derivatives, x, index, src: derivatives.index_add(x, 0, index, src, 2.0),
        lambda torch, x, index, src: torch.index_add(x, 0, index, src, alpha=2.0),
        (normal(3, 4), whole(0, 3, 5), normal(5, 4)),
        {"one place": (np.ones((3, 4)), np.zeros(5, int), np.ones((5, 4)))},
    ),
    Case(
        "index_fill",
        lambda derivatives, x, value: derivatives.index_fill(x, 1, _TWICE, value),
        lambda torch, x, value: torch.index_fill(x, 1, torch.from_numpy(_TWICE), value),
        (normal(3, 4), normal()),
        {"zeros": (np.zeros((3, 4)), np.zeros(()))},
    ),
    Case(
        "masked_fill",
        lambda derivatives, x, value: derivatives.masked_fill(x, _INDEX > 1, value),
        lambda torch, x, value: torch.masked_fill(x, torch.from_numpy(_INDEX > 1), value),
        (normal(3, 4), normal()),
        {"infinite": (np.full((3, 4), np.inf), np.zeros(()))},
    ),
    Case(
        "index_put",
        lambda derivatives, x, values: derivatives.index_put(x, tuple(_PLACES[[0, 1, 3, 4]].T), values),
        lambda torch, x, values: torch.index_put(x, tuple(torch.from_numpy(_PLACES[[0, 1, 3, 4]].T.copy())), values),
        (normal(3, 4), normal(4)),
        {"zeros": (np.zeros((3, 4)), np.zeros(4))},
    ),
    Case(
        "index_put accumulate",
        lambda derivatives, x, values: derivatives.index_put(x, tuple(_PLACES.T), values, True),
        lambda torch, x, values: torch.index_put(x, tuple(torch.from_numpy(_PLACES.T.copy())), values, accumulate=True),
        (normal(3, 4), normal(5)),
        {"zeros": (np.zeros((3, 4)), np.zeros(5))},
    ),
    Case(
        "scatter",
        lambda derivatives, x, index, src: derivatives.scatter(x, 1, index, src),
        lambda torch, x, index, src: torch.scatter(x, 1, index, src),
        (normal(3, 4), _fixed(_ONCE), normal(3, 4)),
        {"once": (np.zeros((3, 4)), _ONCE, np.ones((3, 4))), "twice": (np.zeros((3, 4)), _INDEX, np.ones((3, 4)))},
        differs={"twice": _WRITER},
    ),
    Case(
        "scatter_add",
        lambda derivatives, x, index, src: derivatives.scatter_add(x, 1, index, src),
        lambda torch, x, index, src: torch.scatter_add(x, 1, index, src),
        (normal(3, 4), whole(0, 4, 3, 3), normal(3, 3)),
        {"twice": (np.zeros((3, 4)), _INDEX, np.ones((3, 4)))},
    ),
    *(_reduced(reduce, include) for reduce in ("sum", "mean", "prod", "amax", "amin") for include in (True, False)),
    Case(
        "sparse_mask",
        lambda derivatives, x: derivatives.sparse_mask(x, _PLACES),
        lambda torch, x: x[tuple(torch.from_numpy(_PLACES.T.copy()))],
        (normal(3, 4),),
        {"zeros": (np.zeros((3, 4)),)},
    ),
    Case(
        "sampled_addmm",
        lambda derivatives, values, a, b: derivatives.sampled_addmm(values, _PLACES, a, b, 0.5, 2.0),
        lambda torch, values, a, b: 0.5 * values + 2.0 * (a @ b)[tuple(torch.from_numpy(_PLACES.T.copy()))],
        (normal(5), normal(3, 2), normal(2, 4)),
        {"zeros": (np.zeros(5), np.zeros((3, 2)), np.zeros((2, 4)))},
    ),
    Case(
        "sparse_mm",
        lambda derivatives, values, b: derivatives.sparse_mm(values, _PLACES, b, 3),
        _sparse,
        (normal(5), normal(4, 2)),
        {"zeros": (np.zeros(5), np.zeros((4, 2)))},
    ),
]
