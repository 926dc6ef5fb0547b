"""Functions over axes: norms, products, variances, ranks."""

import math

from benchmarks.derivatives.case import Case, complex_normal, normal, patterns

_X = (normal(3, 4),)
_CORNERS = patterns(3, 4, names="zeros, one zero, two zeros, zero row, ties, all equal, equal row")
_ROW = patterns(1, 4, names="zeros, one zero, two zeros, ties, all equal")
_ORDERS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, math.inf, -math.inf, -1.0)
_ONES = patterns(3, 1, names="zeros, all equal")
_MASKED = patterns(3, 4, names="zeros, ties, one -inf, -inf row, all equal, one inf, all -inf")
_INNER = "|x| to a power below 2 bends infinitely at zero; ours is 0 there"

NORMS = [
    *(
        Case(
            f"vector_norm of order {p:g}",
            "vector_norm",
            lambda torch, x, p=p: torch.linalg.vector_norm(x, p, dim=-1),
            _X,
            _CORNERS | {f"single: {name}": inputs for name, inputs in _ONES.items()},
            {"ord": p, "axis": -1},
            "numpy.linalg.vector_norm",
            agrees=p not in (1.0, math.inf, -math.inf),
        )
        for p in _ORDERS
    ),
    Case("norm", "norm", lambda torch, x: torch.linalg.norm(x), _X, _CORNERS, jax="numpy.linalg.norm"),
    Case(
        "norm kept",
        "norm",
        lambda torch, x: torch.linalg.vector_norm(x, 3.0, dim=0, keepdim=True),
        _X,
        _CORNERS,
        {"ord": 3, "axis": 0, "keepdims": True},
        "numpy.linalg.norm",
    ),
    *(
        Case(
            f"norm of a matrix, order {p}",
            "norm",
            lambda torch, x, p=p: torch.linalg.matrix_norm(x, p),
            _X,
            _CORNERS,
            {"ord": p},
            "numpy.linalg.norm",
            agrees=p == "fro",
        )
        for p in ("fro", 1, -1, math.inf, -math.inf)
    ),
    *(
        Case(
            f"vector_norm of order {p:g}, complex",
            "vector_norm",
            lambda torch, x, p=p: torch.linalg.vector_norm(x, p),
            (complex_normal(4),),
            {name: (inputs[0][0] + 0j,) for name, inputs in _ROW.items()},
            {"ord": p},
            "numpy.linalg.vector_norm",
        )
        for p in (1.0, 2.0, 3.0, math.inf)
    ),
    *(
        Case(
            f"renorm of order {p:g}",
            "renorm",
            lambda torch, x, p=p: torch.renorm(x, p, 0, 1.5),
            _X,
            _CORNERS,
            {"p": p, "axis": 0, "maxnorm": 1.5},
        )
        for p in (1.0, 2.0, 3.0, math.inf)
    ),
]
MOMENTS = [
    Case("mean", "mean", lambda torch, x: torch.mean(x, 0), _X, _CORNERS, {"axis": 0}, "numpy.mean"),
    Case("prod", "prod", lambda torch, x: torch.prod(x, 1), _X, _CORNERS, {"axis": 1}, "numpy.prod"),
    Case("prod of all", "prod", lambda torch, x: torch.prod(x), _X, _CORNERS, {}, "numpy.prod"),
    Case("prod complex", "prod", lambda torch, x: torch.prod(x), (complex_normal(4),), {}, {}, "numpy.prod"),
    Case("var", "var", lambda torch, x: torch.var(x, 1, correction=0), _X, _CORNERS, {"axis": 1}, "numpy.var"),
    Case("var unbiased", "var", lambda torch, x: torch.var(x), _X, _CORNERS, {"ddof": 1}, "numpy.var"),
    Case(
        "var complex",
        "var",
        lambda torch, x: torch.var(x, 0),
        (complex_normal(4, 1),),
        {},
        {"axis": 0, "ddof": 1},
        "numpy.var",
    ),
    Case("std complex", "std", lambda torch, x: torch.std(x), (complex_normal(4),), {}, {"ddof": 1}, "numpy.std"),
    Case(
        "logsumexp complex",
        "logsumexp",
        lambda torch, x: torch.logsumexp(x, 0),
        (complex_normal(4),),
        {},
        {},
        "scipy.special.logsumexp",
    ),
    Case("mean complex", "mean", lambda torch, x: torch.mean(x), (complex_normal(4),), {}, {}, "numpy.mean"),
    Case(
        "std",
        "std",
        lambda torch, x: torch.std(x, 1, correction=0),
        _X,
        _CORNERS | {f"single: {name}": inputs for name, inputs in _ONES.items()},
        {"axis": 1},
        "numpy.std",
    ),
    Case("std unbiased", "std", lambda torch, x: torch.std(x), _X, _CORNERS, {"ddof": 1}, "numpy.std"),
    Case(
        "logsumexp",
        "logsumexp",
        lambda torch, x: torch.logsumexp(x, 1),
        _X,
        _MASKED,
        {"axis": 1},
        "scipy.special.logsumexp",
    ),
    Case(
        "logsumexp of all",
        "logsumexp",
        lambda torch, x: torch.logsumexp(x, (0, 1)),
        _X,
        _MASKED,
        {},
        "scipy.special.logsumexp",
    ),
]
RANKS = [
    *(
        Case(
            name + (" of all" if axis is None else ""),
            name,
            lambda torch, x, name=name, axis=axis: getattr(torch, name)(x, () if axis is None else axis),
            _X,
            _CORNERS,
            {"axis": axis},
            f"numpy.{name}",
        )
        for name in ("amax", "amin")
        for axis in (None, 1)
    ),
    Case("aminmax", "aminmax", lambda torch, x: tuple(torch.aminmax(x, dim=1)), _X, _CORNERS, {"axis": 1}),
    Case(
        "median",
        "median",
        lambda torch, x: torch.median(x),
        (normal(5),),
        patterns(5, names="zeros, two zeros, ties, all equal"),
        {},
        "numpy.median",
        agrees=False,
    ),
    Case(
        "median over an axis",
        "median",
        lambda torch, x: torch.median(x, 1).values,
        (normal(2, 3),),
        {},
        {"axis": 1},
        "numpy.median",
    ),
    Case(
        "median of an even number", "median", None, (normal(3, 4),), _CORNERS, {"axis": 1}, "numpy.median", agrees=False
    ),
    Case(
        "nanmedian",
        "nanmedian",
        lambda torch, x: torch.nanmedian(x),
        (normal(5),),
        patterns(5, names="zeros, two zeros, ties, all equal"),
        {},
        "numpy.nanmedian",
        agrees=False,
    ),
]
CASES = [*NORMS, *MOMENTS, *RANKS]
