"""The functions that are compared, by family: each file has a list `CASES`, and is found by its name.

A family joins by being here. Its figures are made by `python -m benchmarks.derivatives.pytorch FAMILY`.

Files, in reading order:

- powers: Powers and roots.
- elementwise: Functions of each element: logarithms, angles, bounds, remainders.
- activations: Activations, smooth ones and those with corners.
- reductions: Functions over axes: norms, products, variances, ranks.
- cumulative: Sums, products, extremes and log-sum-exp of all elements so far.
- distances: Distances and angles between vectors.
- linalg: Inverses, systems, factors, spectra, determinants and norms of matrices.
- losses: Losses, of single elements, of classes and of sequences.
- normalisation: Normalisation from saved statistics, and dropout.
- windows: Pooling and interpolation.
- indexing: Gather, scatter and sparse products, with indices that name one place twice.
"""

from importlib import import_module
from pkgutil import iter_modules

from benchmarks.derivatives.case import Case


def families() -> tuple[str, ...]:
    """The names of all families."""
    return tuple(sorted(found.name for found in iter_modules(__path__)))


def cases(family: str) -> list[Case]:
    """The cases of one family."""
    found: list[Case] = import_module(f"{__name__}.{family}").CASES
    assert len({case.name for case in found}) == len(found), f"two cases of {family} share a name"
    return found
