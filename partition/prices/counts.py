"""Count the operations of a primitive on arrays of given shapes.

The counts are mathematical, and do not depend on a compiler. There are two for each product of a matrix product or a
convolution, but none for a product with the zeros between dilated elements or outside an array. A sort counts n log2 n
comparisons. Most other primitives count one for each element. `WEIGHTS` says how many additions take as long as one
`exp`, or as one of those comparisons.

Counts of factorisations are the leading terms in Golub and Van Loan, *Matrix Computations* (2013). The count of the
fast Fourier transform is the usual 5 n log2 n. A random number takes a block of Threefry (Salmon et al., 2011) whatever
its width, up to 64 bits: 20 rounds at five operations each, five injections of three, and the sums and the xor around
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jointcut.partition.program.primitives import ATTENTION, CUMULATIVE, MOVEMENT, OPAQUE, PRODUCTS, REDUCTIONS, WEIGHTS

Shape = tuple[int, ...]

#: Operations that make one random number.
RANDOM_NUMBER = 120.0


@dataclass(frozen=True)
class Work:
    """Numbers of operations.

    `products` are flops of matrix products and convolutions. `others` is the number of all other operations, each
    counted as one, and `weighted` is the number of additions that take as long as these others.
    """

    products: float = 0.0
    others: float = 0.0
    weighted: float = 0.0

    def times(self, number: float) -> Work:
        """The work of doing the same `number` times."""
        return Work(self.products * number, self.others * number, self.weighted * number)

    @staticmethod
    def sum(parts: Iterable[Work]) -> Work:
        """The work of all parts together."""
        products, others, weighted = 0.0, 0.0, 0.0
        for part in parts:
            products, others, weighted = products + part.products, others + part.others, weighted + part.weighted
        return Work(products, others, weighted)

    @staticmethod
    def largest(parts: Iterable[Work]) -> Work:
        """An upper bound on the work of any one part: for each kind of operation the largest count."""
        given = list(parts)
        return Work(*(max(getattr(part, kind.name) for part in given) for kind in fields(Work))) if given else Work()


def counted(
    name: str,
    reads: Sequence[Shape],
    writes: Sequence[Shape],
    params: Mapping[str, Any] | None = None,
    is_complex: bool = False,
) -> Work | None:
    """The work of a primitive without a jaxpr inside, by the shapes it reads and writes; None where it is unknown.

    Without `params`, which an op of a graph text does not have, they are inferred from the shapes: the contracted size
    of a product is the size that the shapes leave over, and a row is the last dimension. A complex operation counts as
    four real ones.
    """
    if name in OPAQUE:
        return None
    if name in MOVEMENT:
        return Work()
    arrays = Arrays(list(reads), list(writes), params or {})
    factor = 4.0 if is_complex and name != "fft" else 1.0
    count = factor * _COUNTS.get(name, _each)(arrays)
    if name in PRODUCTS and not _is_depthwise(arrays):
        return Work(products=count)
    return Work(others=count, weighted=WEIGHTS.get(name, 1.0) * count)


@dataclass(frozen=True)
class Arrays:
    """Shapes of operands and results, with the parameters that go with them."""

    reads: list[Shape]
    writes: list[Shape]
    params: Mapping[str, Any]

    @property
    def operand(self) -> Shape:
        """The first operand, or the first result where there is no operand."""
        return next(iter((*self.reads, *self.writes)), ())

    @property
    def pair(self) -> tuple[Shape, Shape]:
        """The first two operands; where only one is given, it is both."""
        return self.operand, self.reads[1] if len(self.reads) > 1 else self.operand

    @property
    def size(self) -> int:
        """Elements of the first operand."""
        return math.prod(self.operand)

    @property
    def out(self) -> Shape:
        """The first result."""
        return self.writes[0] if self.writes else ()

    @property
    def row(self) -> int:
        """Length of the dimension along which the first operand is sorted or summed up."""
        axis = self.params.get("dimension", self.params.get("axis", -1))
        return self.operand[axis] if self.operand else 1

    @property
    def matrices(self) -> tuple[int, int, int]:
        """How many matrices the first operand holds, with their rows and columns."""
        *batch, rows, columns = (1, 1, *self.operand)
        return math.prod(batch), rows, columns


def _each(arrays: Arrays) -> float:
    """One operation for each element of the results."""
    return float(sum(map(math.prod, arrays.writes)))


def _dot(arrays: Arrays) -> float:
    """Two flops for each product of batch, free and contracted sizes."""
    if "dimension_numbers" not in arrays.params:
        return 2.0 * math.prod(arrays.out) * _contracted(arrays)
    (contracted, _), _ = arrays.params["dimension_numbers"]
    return 2.0 * math.prod(arrays.out) * math.prod(arrays.operand[i] for i in contracted)


def _contracted(arrays: Arrays) -> float:
    """The contracted size of a product, from its shapes: sizes are batch*m*k, batch*k*n and batch*m*n.

    The leading dimensions of the result are batches where both operands have them too, and where one contracted
    dimension leaves room for them.
    """
    (lhs, rhs), out = arrays.pair, arrays.out
    shared = out[: max(0, len(lhs) + len(rhs) - 2 - len(out))]
    batch = math.prod(shared) if set(shared) <= set(lhs) & set(rhs) else 1
    return math.sqrt(math.prod(lhs) * math.prod(rhs) / max(1, math.prod(out) * batch))


def _ragged_dot(arrays: Arrays) -> float:
    """Two flops for each product, where each row meets only the matrix of its own group."""
    lhs, rhs = arrays.pair
    if "ragged_dot_dimension_numbers" not in arrays.params:
        return 2.0 * math.prod(lhs) * (rhs[-1] if rhs else 1)
    numbers = arrays.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    taken = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return 2.0 * math.prod(lhs) * math.prod(n for i, n in enumerate(rhs) if i not in taken)


def _convolution(arrays: Arrays) -> float:
    """Two flops for each product of an element of the input with an element of the kernel.

    A kernel holds only the channels of one feature group; with batch groups each result takes one group's batch.
    """
    lhs, rhs = arrays.pair
    if "dimension_numbers" not in arrays.params:
        features = max((n for n in rhs if n in arrays.out), default=1)
        return 2.0 * math.prod(arrays.out) * math.prod(rhs) / max(1, features)
    numbers, params = arrays.params["dimension_numbers"], arrays.params
    met = 1
    for i, (x, k, y) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)):
        steps = (params["window_strides"][i], params["lhs_dilation"][i], params["rhs_dilation"][i])
        met *= _met(lhs[x], rhs[k], arrays.out[y], params["padding"][i][0], *steps)
    batch, features = (arrays.out[i] for i in numbers.out_spec[:2])
    return 2.0 * batch * features * rhs[numbers.rhs_spec[1]] * met


def _met(length: int, taps: int, outs: int, low: int, stride: int, apart: int, step: int) -> int:
    """How many pairs of an output and a tap of the kernel meet an element of the input, along one dimension.

    Output o and tap t meet the place o*stride + t*step - low, where elements stand `apart` places from each other.
    """
    if outs < taps:  # outputs and taps may be swapped: the loop below runs over the fewer of them
        outs, taps, stride, step = taps, outs, step, stride
    period, pairs = apart // math.gcd(stride, apart), 0
    for tap in range(taps):
        place = tap * step - low
        first = next((o for o in range(period) if (o * stride + place) % apart == 0), None)
        if first is not None:
            least = max(0, -(place // stride))
            most = min(outs - 1, ((length - 1) * apart - place) // stride)
            pairs += max(0, (most - first) // period + (first - least) // period + 1)
    return pairs


def _attention(arrays: Arrays) -> float:
    """Two products in a kernel of cuDNN's: of queries with keys, and of their weights with values."""
    axis = 2 if arrays.params.get("layout") else 1  # the length's axis: (batch, heads, length, width), or heads third
    keys = arrays.pair[1]
    return 4.0 * arrays.size * (keys[axis] if len(keys) > axis else 1)


def _is_depthwise(arrays: Arrays) -> bool:
    """Whether a convolution takes each channel alone: no device then runs it as fast as a matrix product."""
    if arrays.params.get("feature_group_count", 1) == 1:
        return False
    return arrays.pair[1][arrays.params["dimension_numbers"].rhs_spec[1]] == 1


def _fft(arrays: Arrays) -> float:
    """5 n log2 n for each transform, half of it where one side is real (and so has another shape)."""
    places = max(arrays.size, math.prod(arrays.out))
    n = math.prod(arrays.params.get("fft_lengths", arrays.operand[-1:]))
    return 5.0 * places * math.log2(max(2, n)) * (1.0 if arrays.operand == arrays.out else 0.5)


def _steps(m: int, n: int, k: int) -> float:
    """Elements that k steps of elimination touch in an m by n matrix, which loses a row and a column at each step."""
    return m * n * k - (m + n) * k * k / 2 + k**3 / 3


def _eliminated(factor: float) -> Callable[[Arrays], float]:
    """Gaussian elimination or reflections of all columns, at `factor` operations for each element of each step."""

    def count(arrays: Arrays) -> float:
        number, m, n = arrays.matrices
        return factor * number * _steps(m, n, min(m, n))

    return count


def _reflected(arrays: Arrays) -> float:
    """The product of reflections as a matrix; the second operand has a factor for each of them."""
    number, m, n = arrays.matrices
    return 4.0 * number * _steps(m, n, min(m, n, arrays.pair[1][-1] if arrays.pair[1] else 1))


def _applied(arrays: Arrays) -> float:
    """Reflections applied to another matrix, which is as large as the result; each leaves one row more unchanged."""
    _, m, n = arrays.matrices
    k = min(m, n)
    return 4.0 * math.prod(arrays.out) * (k - k * k / (2 * max(m, 1)))


def _qr(arrays: Arrays) -> float:
    """Reflections of all columns, then their product, square if it is asked for in full."""
    number, m, n = arrays.matrices
    k = min(m, n)
    return 4.0 * number * (_steps(m, n, k) + _steps(m, m if arrays.params.get("full_matrices") else k, k))


def _svd(arrays: Arrays) -> float:
    """By Golub and Reinsch, or after a QR where that is less: only the values, or with vectors."""
    number, *sides = arrays.matrices
    m, n = max(sides), min(sides)
    if len(arrays.writes) == 1:
        return number * min(4.0 * m * n * n - 4 / 3 * n**3, 2.0 * m * n * n + 2 * n**3)
    if arrays.params.get("full_matrices"):
        return number * min(4.0 * m * m * n + 8 * m * n * n + 9 * n**3, 4.0 * m * m * n + 22 * n**3)
    return number * min(14.0 * m * n * n + 8 * n**3, 6.0 * m * n * n + 20 * n**3)


def _cubic(values: float, vectors: float) -> Callable[[Arrays], float]:
    """Operations for n^3, with and without vectors among the results."""

    def count(arrays: Arrays) -> float:
        number, m, n = arrays.matrices
        return (values if len(arrays.writes) == 1 else vectors) * number * m * n * n

    return count


def _solve(arrays: Arrays) -> float:
    """One product and one difference for half of the matrix, for each right-hand side."""
    return float(math.prod(arrays.out) * arrays.operand[-1]) if arrays.operand else 0.0


def _rank_k(arrays: Arrays) -> float:
    """Half of the product of a matrix with its own transpose."""
    number, m, n = arrays.matrices
    return float(number * m * m * n)


def _n_log_n(arrays: Arrays) -> float:
    """For each row n log2 n: the comparisons of merge sort, or one operation for each element in log2 n passes."""
    return arrays.size * math.log2(max(2, arrays.row))


def _top(arrays: Arrays) -> float:
    """For each row n log2 k comparisons with the k elements that are kept."""
    kept = arrays.params.get("k", arrays.row * math.prod(arrays.out) / max(1, arrays.size))
    return arrays.size * math.log2(max(2, kept))


def _reduced(arrays: Arrays) -> float:
    """One operation for each element read (exactly: one less for each element of the result)."""
    return float(arrays.size)


def _windows(arrays: Arrays) -> float:
    """One operation for each element of each window; unknown windows lie side by side."""
    window = arrays.params.get("window_dimensions")
    return float(arrays.size if window is None else math.prod(window) * math.prod(arrays.out))


def _scattered_windows(arrays: Arrays) -> float:
    """One comparison for each element of each window, to find the element that gets the window's cotangent."""
    window = arrays.params.get("window_dimensions")
    return float(math.prod(arrays.out) if window is None else math.prod(window) * arrays.size)


def _scatter(arrays: Arrays) -> float:
    """One operation for each update."""
    return float(math.prod(arrays.reads[2] if len(arrays.reads) > 2 else arrays.out))


def _random(arrays: Arrays) -> float:
    """A number for each element of the largest result."""
    return RANDOM_NUMBER * max(map(math.prod, arrays.writes), default=0)


_COUNTS: dict[str, Callable[[Arrays], float]] = {
    "approx_top_k": _top,
    "cholesky": _eliminated(1),
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "eig": _cubic(10, 25),
    "eigh": _cubic(4 / 3, 9),
    "fft": _fft,
    "geqp3": _eliminated(4),
    "geqrf": _eliminated(4),
    "hessenberg": _cubic(10 / 3, 10 / 3),
    "householder_product": _reflected,
    "lu": _eliminated(2),
    "ormqr": _applied,
    "qr": _qr,
    "ragged_dot_general": _ragged_dot,
    "reduce_window": _windows,
    "rng_bit_generator": _random,
    "scaled_dot": _dot,
    "schur": _cubic(10, 25),
    "select_and_gather_add": _windows,
    "select_and_scatter": _scattered_windows,
    "select_and_scatter_add": _scattered_windows,
    "sort": _n_log_n,
    "svd": _svd,
    "symmetric_product": _rank_k,
    "top_k": _top,
    "triangular_solve": _solve,
    "tridiagonal": _cubic(4 / 3, 4 / 3),
    "random_bits": _random,
    "threefry2x32": _random,
    **dict.fromkeys(ATTENTION, _attention),
    **dict.fromkeys(CUMULATIVE, _n_log_n),
    **{f"reduce_window_{name}": _windows for name in ("max", "min", "sum")},
    **dict.fromkeys(REDUCTIONS | {"reduce"}, _reduced),
    **{f"scatter{how}": _scatter for how in ("", "-add", "-max", "-min", "-mul", "-sub")},
}

#: Primitives counted here although they may hold a jaxpr, which defines the work on one element. If only that jaxpr
#: defines it, the primitive is in `BY_BODY`.
PER_ELEMENT = frozenset(_COUNTS)
