"""Matrices: factors, inverses, determinants and spectra, finite at equal and at zero values.

The functions have the names, arguments and values of `jax.numpy.linalg` and `jax.scipy.linalg`. Matrices lie along the
last two axes. The factorisation chooses its vectors (eigenvectors, singular vectors). Where values are equal, their
vectors could be rotated into each other, so no derivative of a single vector exists. The derivatives here count such a
rotation as zero. That is right for every function that does not depend on the choice, such as the projector on the
whole space of an eigenvalue. PyTorch and JAX divide by the difference of the values, and give NaN.

Not here: `householder_product`, `ormqr`, `ldl_factor` and similar steps of a factorisation, and `schur`, for which
neither library has a derivative.

Files, in reading order:

    solves: Inverses, linear systems, least squares, powers, the exponential and the square root.
    factors: Cholesky, QR and LU factors, of matrices of any shape and rank.
    eigen: Eigenvalues and eigenvectors, with equal eigenvalues too.
    singular: Singular values and vectors, with equal and zero values too, and the norms made of them.
    determinants: Determinants, of singular matrices too.
"""

from jointcut.aot.derivatives.linalg.determinants import det as det
from jointcut.aot.derivatives.linalg.determinants import slogdet as slogdet
from jointcut.aot.derivatives.linalg.eigen import eig as eig
from jointcut.aot.derivatives.linalg.eigen import eigh as eigh
from jointcut.aot.derivatives.linalg.eigen import eigvals as eigvals
from jointcut.aot.derivatives.linalg.eigen import eigvalsh as eigvalsh
from jointcut.aot.derivatives.linalg.factors import cholesky as cholesky
from jointcut.aot.derivatives.linalg.factors import cholesky_inverse as cholesky_inverse
from jointcut.aot.derivatives.linalg.factors import lu as lu
from jointcut.aot.derivatives.linalg.factors import qr as qr
from jointcut.aot.derivatives.linalg.singular import matrix_norm as matrix_norm
from jointcut.aot.derivatives.linalg.singular import svd as svd
from jointcut.aot.derivatives.linalg.singular import svdvals as svdvals
from jointcut.aot.derivatives.linalg.solves import expm as expm
from jointcut.aot.derivatives.linalg.solves import inv as inv
from jointcut.aot.derivatives.linalg.solves import lstsq as lstsq
from jointcut.aot.derivatives.linalg.solves import matrix_power as matrix_power
from jointcut.aot.derivatives.linalg.solves import pinv as pinv
from jointcut.aot.derivatives.linalg.solves import solve as solve
from jointcut.aot.derivatives.linalg.solves import solve_triangular as solve_triangular
from jointcut.aot.derivatives.linalg.solves import sqrtm as sqrtm
