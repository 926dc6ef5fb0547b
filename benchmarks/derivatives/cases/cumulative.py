"""Sums, products, extremes and log-sum-exp of all elements so far."""

from typing import Any

from benchmarks.derivatives.case import Case, complex_normal, normal, patterns

_X = (normal(3, 4),)
_CORNERS = patterns(3, 4, names="zeros, one zero, two zeros, zero row, ties, all equal, equal row")
_MASKED = patterns(3, 4, names="zeros, ties, one -inf, -inf row, all equal, all -inf")


def _principal(torch: Any, z: Any) -> Any:
    """Bring the imaginary part between -pi and pi, where JAX has it."""
    return z - 2j * torch.pi * torch.round(z.detach().imag / (2 * torch.pi))


CASES = [
    Case("cumsum", "cumsum", lambda torch, x: torch.cumsum(x, 1), _X, _CORNERS, {"axis": 1}, "numpy.cumsum"),
    Case("cumprod", "cumprod", lambda torch, x: torch.cumprod(x, 1), _X, _CORNERS, {"axis": 1}, "numpy.cumprod"),
    Case(
        "cumprod along 0", "cumprod", lambda torch, x: torch.cumprod(x, 0), _X, _CORNERS, {"axis": 0}, "numpy.cumprod"
    ),
    Case(
        "cumprod complex",
        "cumprod",
        lambda torch, x: torch.cumprod(x, 0),
        (complex_normal(4),),
        {},
        {"axis": 0},
        "numpy.cumprod",
    ),
    Case(
        "logcumsumexp complex",
        "logcumsumexp",
        lambda torch, x: _principal(torch, torch.logcumsumexp(x, 0)),
        (complex_normal(4),),
        {},
        {"axis": 0},
        "lax.cumlogsumexp",
    ),
    *(
        Case(
            f"logcumsumexp along {axis}",
            "logcumsumexp",
            lambda torch, x, axis=axis: torch.logcumsumexp(x, axis),
            _X,
            _MASKED,
            {"axis": axis},
            "lax.cumlogsumexp",
        )
        for axis in (0, 1)
    ),
    *(
        Case(
            f"{name} along {axis}",
            name,
            lambda torch, x, name=name, axis=axis: getattr(torch, name)(x, axis).values,
            _X,
            _CORNERS,
            {"axis": axis},
            f"lax.{name}",
            agrees=False,
        )
        for name in ("cummax", "cummin")
        for axis in (0, 1)
    ),
]
