"""Inverses, systems, factors, spectra, determinants and norms of matrices.

Vectors of a factorisation have free signs, so what is compared is made of products that do not depend on them: a
projector, a product of factors, a polar factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.derivatives.case import Case, Draw, Inputs, complex_normal, normal


def _definite(n: int, factor: complex = 0) -> Draw:
    """Draw a Hermitian matrix with eigenvalues above 1."""

    def draw(source: np.random.RandomState) -> np.ndarray:
        root = source.standard_normal((n, n)) + factor * source.standard_normal((n, n))
        return root @ root.conj().T + np.eye(n)

    return draw


def _shifted(n: int, factor: complex = 0) -> Draw:
    """Draw a matrix far from singular."""
    return lambda source: np.asarray(
        source.standard_normal((n, n)) + factor * source.standard_normal((n, n)) + 3 * np.eye(n)
    )


def _upper(torch: Any, x: Any) -> Any:
    return torch.triu(x)


_BASIS = np.linalg.qr(np.random.RandomState(5).standard_normal((4, 4)))[0]


def _with(*values: float, m: int = 4) -> np.ndarray:
    """A matrix of m rows with these singular values (eigenvalues, if square)."""
    n = len(values)
    left = _BASIS[:m, :m] if m <= 4 else _BASIS
    return np.ascontiguousarray(left[:, :n] * np.array(values) @ _BASIS[:n, :n].T)


_RANKS = {
    "zeros": (np.zeros((3, 3)),),
    "identity": (np.eye(3),),
    "rank 2": (np.diag([2.0, 1.0, 0.0]),),
    "rank 1": (np.diag([2.0, 0.0, 0.0]),),
    "equal": (np.diag([2.0, 2.0, 1.0]),),
    "all ones": (np.ones((3, 3)),),
    "swap": (np.array([[0.0, 1, 0], [1, 0, 0], [0, 0, 1]]),),
}
_REGULAR = {name: _RANKS[name] for name in ("identity", "equal", "swap")}
_SINGULAR = {name: _RANKS[name] for name in ("zeros", "rank 2", "rank 1", "all ones")}
_TALL = {
    "zeros": (np.zeros((4, 2)),),
    "equal": (np.eye(4)[:, :2],),
    "rank 1": (np.ones((4, 2)),),
    "zero column": (np.eye(4)[:, :2] * np.array([1.0, 0.0]),),
}


def _hermitian(library: Any, x: Any) -> Any:
    return (x + library.conj(x.swapaxes(-1, -2))) / 2


def _project(vectors: Any, count: int) -> Any:
    """The projector on the first vectors."""
    return vectors[..., :, :count] @ vectors[..., :, :count].conj().swapaxes(-1, -2)


def _transposed(x: Any) -> Any:
    return x.conj().swapaxes(-1, -2)


def _of(name: str, then: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Our function `linalg.name` and then products of what it returns."""
    return lambda derivatives, *xs: then(getattr(derivatives.linalg, name)(*xs, **options))


def _sum(count: int) -> Callable[..., Any]:
    return lambda result: (result[0], _project(result[1], count))


def _probes(names: str, source: dict[str, Inputs] = _RANKS) -> dict[str, Inputs]:
    return {name: source[name] for name in names.split(", ")}


_FREE = "vectors of equal values, or of zero, are a choice, and LAPACK's differs"
_ONES = {"all ones": _FREE}

CASES = [
    Case("inv", "linalg.inv", lambda torch, a: torch.linalg.inv(a), (_shifted(3),), _REGULAR, jax="numpy.linalg.inv"),
    Case(
        "inv complex",
        "linalg.inv",
        lambda torch, a: torch.linalg.inv(a),
        (_shifted(3, 1j),),
        jax="numpy.linalg.inv",
    ),
    Case(
        "solve",
        "linalg.solve",
        lambda torch, a, b: torch.linalg.solve(a, b),
        (_shifted(3), normal(3, 2)),
        jax="numpy.linalg.solve",
    ),
    Case(
        "solve complex",
        "linalg.solve",
        lambda torch, a, b: torch.linalg.solve(a, b),
        (_shifted(3, 1j), complex_normal(3, 2)),
        jax="numpy.linalg.solve",
    ),
    Case(
        "solve_triangular",
        "linalg.solve_triangular",
        lambda torch, a, b: torch.linalg.solve_triangular(torch.triu(a), b, upper=True),
        (_shifted(3), normal(3, 2)),
        {"identity": (np.eye(3), np.ones((3, 2)))},
        jax="scipy.linalg.solve_triangular",
    ),
    *(
        Case(
            f"pinv {m} x {n}",
            "linalg.pinv",
            lambda torch, a: torch.linalg.pinv(a),
            (normal(m, n),),
            probes,
            jax="numpy.linalg.pinv",
        )
        for m, n, probes in ((3, 3, _RANKS), (4, 2, _TALL), (2, 4, {}))
    ),
    Case(
        "pinv complex",
        "linalg.pinv",
        lambda torch, a: torch.linalg.pinv(a),
        (complex_normal(3, 2),),
        jax="numpy.linalg.pinv",
    ),
    *(
        Case(
            f"lstsq {m} x {n}",
            lambda derivatives, a, b: derivatives.linalg.lstsq(a, b)[0],
            lambda torch, a, b: torch.linalg.lstsq(a, b, driver="gelsd").solution,
            (normal(m, n), normal(m, 2)),
            {name: (a, np.arange(2.0 * m).reshape(m, 2)) for name, (a,) in probes.items()},
            jax=lambda jax, a, b: jax.numpy.linalg.lstsq(a, b)[0],
        )
        for m, n, probes in ((3, 3, _RANKS), (4, 2, _TALL), (2, 4, {}))
    ),
    Case(
        "cholesky",
        "linalg.cholesky",
        lambda torch, a: torch.linalg.cholesky(_hermitian(torch, a)),
        (_definite(3),),
        {"identity": (np.eye(3),), "diagonal": (np.diag([4.0, 1.0, 9.0]),)},
        jax="numpy.linalg.cholesky",
    ),
    Case(
        "cholesky complex",
        "linalg.cholesky",
        lambda torch, a: torch.linalg.cholesky(_hermitian(torch, a)),
        (_definite(3, 1j),),
        jax="numpy.linalg.cholesky",
    ),
    *(
        Case(
            f"qr {m} x {n}{' complex' * (draw is complex_normal)}",
            _of(
                "qr", lambda result, m=m, n=n: (_project(result[0], min(m, n) - 1), _transposed(result[1]) @ result[1])
            ),
            lambda torch, a, m=m, n=n: (lambda q, r: (_project(q, min(m, n) - 1), _transposed(r) @ r))(
                *torch.linalg.qr(a)
            ),
            (draw(m, n),),
            probes,
            differs=dict.fromkeys(("zeros", "rank 1", "all ones", "rank 2", "zero column"), _FREE),
        )
        for m, n, draw, probes in (
            (3, 3, normal, _RANKS),
            (4, 2, normal, _TALL),
            (2, 4, normal, {}),
            (3, 3, complex_normal, {}),
            (4, 2, complex_normal, {}),
        )
    ),
    *(
        Case(
            f"lu {m} x {n}{' complex' * (draw is complex_normal)}",
            "linalg.lu",
            lambda torch, a: torch.linalg.lu(a),
            (draw(m, n),),
            probes,
            jax="scipy.linalg.lu",
        )
        for m, n, draw, probes in (
            (3, 3, normal, _RANKS),
            (4, 2, normal, _TALL),
            (2, 4, normal, {}),
            (3, 3, complex_normal, {}),
        )
    ),
    *(
        Case(
            f"eigvalsh{' complex' * (draw is complex_normal)}",
            "linalg.eigvalsh",
            lambda torch, a: torch.linalg.eigvalsh(_hermitian(torch, a)),
            (draw(3, 3),),
            _RANKS if draw is normal else {},
            jax="numpy.linalg.eigvalsh",
            differs=_ONES,
        )
        for draw in (normal, complex_normal)
    ),
    *(
        Case(
            f"eigh{' complex' * (draw is complex_normal)}",
            _of("eigh", _sum(2)),
            lambda torch, a: _sum(2)(torch.linalg.eigh(_hermitian(torch, a))),
            (draw(3, 3),),
            _probes("rank 1, rank 2, all ones, swap") if draw is normal else {},
            jax=lambda jax, a: _sum(2)(jax.numpy.linalg.eigh(a)),
            differs=_ONES,
        )
        for draw in (normal, complex_normal)
    ),
    *(
        Case(
            f"eig{' complex' * (draw is complex_normal)}",
            _of("eig", lambda result: (result[0], result[1] * result[1].conj())),
            lambda torch, a: (lambda w, v: (w, v * v.conj()))(*torch.linalg.eig(a)),
            (draw(3, 3),),
            {"diagonal": (np.diag([3.0, 1.0, 2.0]),)} if draw is normal else {},
        )
        for draw in (normal, complex_normal)
    ),
    Case(
        "eigvals",
        "linalg.eigvals",
        lambda torch, a: torch.linalg.eigvals(a),
        (normal(3, 3),),
        {"equal": (np.diag([2.0, 2.0, 1.0]),)},
    ),
    *(
        Case(
            f"svdvals {m} x {n}",
            "linalg.svdvals",
            lambda torch, a: torch.linalg.svdvals(a),
            (normal(m, n),),
            probes,
            jax="numpy.linalg.svdvals",
            differs=_ONES | {"rank 1": _FREE} if m > n else _ONES,
        )
        for m, n, probes in ((3, 3, _RANKS), (4, 2, _TALL), (2, 4, {}))
    ),
    *(
        Case(
            f"svd {m} x {n}{' complex' * (draw is complex_normal)}",
            _of("svd", lambda usv: (usv[0] @ usv[2], usv[1], _project(usv[0], 1)), full_matrices=False),
            lambda torch, a: (lambda u, s, vh: (u @ vh, s, _project(u, 1)))(*torch.linalg.svd(a, full_matrices=False)),
            (draw(m, n),),
            probes,
            jax=lambda jax, a: (lambda u, s, vh: (u @ vh, s, _project(u, 1)))(
                *jax.numpy.linalg.svd(a, full_matrices=False)
            ),
        )
        for m, n, draw, probes in (
            (3, 3, normal, {}),
            (4, 2, normal, {}),
            (2, 4, normal, {}),
            (3, 3, complex_normal, {}),
            (4, 2, complex_normal, {}),
        )
    ),
    *(
        Case(
            f"polar factor {m} x {n}",
            _of("svd", lambda usv: usv[0] @ usv[2], full_matrices=False),
            lambda torch, a: (lambda u, s, vh: u @ vh)(*torch.linalg.svd(a, full_matrices=False)),
            (normal(m, n),),
            probes,
            jax=lambda jax, a: (lambda u, s, vh: u @ vh)(*jax.numpy.linalg.svd(a, full_matrices=False)),
        )
        for m, n, probes in ((3, 3, _REGULAR), (4, 2, {"equal": _TALL["equal"]}))
    ),
    Case(
        "svd full",
        _of("svd", lambda usv: (usv[1], _project(usv[0], 2)), full_matrices=True),
        lambda torch, a: (lambda u, s, vh: (s, _project(u, 2)))(*torch.linalg.svd(a, full_matrices=True)),
        (normal(4, 2),),
        {"equal": _TALL["equal"]},
    ),
    *(
        Case(
            f"det{' complex' * (draw is complex_normal)} {n}",
            "linalg.det",
            lambda torch, a: torch.linalg.det(a),
            (draw(n, n),),
            probes,
            jax="numpy.linalg.det",
        )
        for n, draw, probes in (
            (3, normal, _RANKS),
            (3, complex_normal, {}),
            (1, normal, {"zeros": (np.zeros((1, 1)),)}),
            (2, normal, {"zeros": (np.zeros((2, 2)),), "ones": (np.ones((2, 2)),)}),
        )
    ),
    *(
        Case(
            f"slogdet{' complex' * (draw is complex_normal)}",
            "linalg.slogdet",
            lambda torch, a: torch.linalg.slogdet(a),
            (draw(3, 3),),
            _RANKS if draw is normal else {},
            jax="numpy.linalg.slogdet",
        )
        for draw in (normal, complex_normal)
    ),
    *(
        Case(
            f"matrix_power {n}",
            "linalg.matrix_power",
            lambda torch, a, n=n: torch.linalg.matrix_power(a, n),
            (_shifted(3),),
            _RANKS if n >= 0 else _REGULAR,
            {"n": n},
            "numpy.linalg.matrix_power",
        )
        for n in (0, 1, 3, -2)
    ),
    Case(
        "expm",
        "linalg.expm",
        lambda torch, a: torch.linalg.matrix_exp(a),
        (normal(3, 3),),
        _RANKS,
        jax="scipy.linalg.expm",
    ),
    *(
        Case(
            f"matrix_norm {order}{' complex' * (draw is complex_normal)}",
            "linalg.matrix_norm",
            lambda torch, a, order=order: torch.linalg.matrix_norm(a, order),
            (draw(3, 2) if order == "fro" else draw(3, 3),),
            _RANKS if draw is normal else {},
            {"ord": order},
            "numpy.linalg.matrix_norm",
            agrees=False,
            differs=_ONES if order in ("nuc", -2) else {},
        )
        for order in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)
        for draw in (normal, complex_normal)
    ),
]
