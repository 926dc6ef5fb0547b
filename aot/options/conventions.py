"""Choose the derivative at points where a function has none, or several.

Such points are a norm at zero, a number on the bound of a clamp, equal elements of a maximum. JAX and PyTorch choose
differently there, and JAX often gives NaN. Everywhere else derivatives are the same under all conventions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jointcut.partition.errors import TraceError, choices, message
from jointcut.wrappers.record import Record

#: The choices for each field, JAX's own first.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "zero_cotangent": ("jax", "zero", "everywhere"),
    "norm_at_zero": ("jax", "zero"),
    "angle_at_origin": ("jax", "zero"),
    "power_at_zero": ("jax", "limit"),
    "xlogy_at_zero": ("jax", "zero"),
    "empty_logsumexp": ("jax", "zero"),
    "arc_at_one": ("jax", "zero"),
    "equal_eigenvalues": ("jax", "known", "zero"),
    "no_derivative": ("jax", "formula"),
    "abs_at_zero": ("jax", "zero"),
    "clamp_at_bound": ("jax", "one", "zero"),
    "max_ties": ("jax", "shared", "first"),
    "fmax_ties": ("jax", "first"),
    "cumulative_ties": ("jax", "last"),
    "median_ties": ("jax", "shared"),
}


@dataclass(frozen=True)
class Conventions(Record):
    """Which derivative is taken at singular points, for `aot.function(derivatives=...)`; `aot.conventions` makes one.

    Each field is "jax", which leaves the derivative to JAX, or names another derivative. It holds in all code that the
    function calls: branches, loops, `jax.checkpoint`, `jax.jit`, `jax.vmap`, `jax.shard_map`, functions of a linear
    solve. But a rule of your own, `jax.custom_jvp` or `jax.custom_vjp`, is not changed: functions that the rule
    differentiates itself have JAX's slopes. Differentiate `aot.function(f, derivatives=...)` in the rule instead of f.

    Attributes:
        zero_cotangent: a product with a cotangent that is exactly zero, as behind a `jnp.where` that did not choose a
            branch: "zero", also with infinity or NaN. JAX gives NaN. Matrix products and convolutions are changed, and
            products behind them, only with "everywhere", which takes more time. But where one factor is made of
            an inverse, a solution or the factors of a matrix, a row or column of zeros in the cotangent gives zeros. So
            a singular matrix that was not chosen takes no part, also in a batch of others. A slope that is zero by a
            choice, as beyond a bound of `jnp.maximum` or `jnp.clip`, is zero for an infinite cotangent too: the
            function does not move there. A gradient that is
            differentiated again has "everywhere" in its derivative. In forward mode every elementwise product of a
            tangent is zero where the slope, or the tangent, is zero. So an infinite tangent times a slope of zero, as
            of a bound or a saturated function, agrees with the gradient.
        norm_at_zero: a root of a sum of squares, or of higher powers of sizes, where the sum is zero: a norm, a
            distance, a standard deviation, `jnp.hypot`, the absolute value of a complex number. "zero" is the middle of
            the subgradients, as in PyTorch (`linalg_vector_norm_backward`, `std_backward`). JAX gives NaN, and 1/2 for
            `hypot`. A root of a number that is bounded by zero, as `jnp.sqrt(jnp.maximum(x, 0))`, has the slope zero
            on the bound: its slope is zero on one side. Squares are products of a value with itself, also in `x @ x`
            and `einsum`. They may be moved, masked and summed, also by a `lax.scan` that starts at zero. They may be
            multiplied with factors that are seen to be positive: numbers, squares, exponentials. Squared distances may
            be written out as `x @ x + y @ y - 2 * x @ y`, also for all pairs of rows. Sums of squares are not found if
            they are multiplied by an array of weights, nor in a form `x @ a @ x`, in the diagonal or the trace of a
            product of matrices, and in `mean(x**2) - mean(x)**2`. There the slope stays JAX's NaN.
        angle_at_origin: the angle of the point (0, 0): "zero", as in PyTorch (`atan2_backward`). JAX gives NaN.
        power_at_zero: a power of zero: "limit" has the slopes of `aot.derivatives.power`, as PyTorch's `pow_backward`.
            JAX gives NaN at x = 0, y = 0. So have incomplete gamma and beta functions where they have a power of zero
            with the exponent 0, and the cube root of a whole power of 3 or more.
        xlogy_at_zero: `jax.scipy.special.xlogy` and `xlog1py` where x is 0 and the logarithm is not finite: "zero" for
            both arguments; PyTorch has it for x alone (`xlogy`). JAX gives -inf and NaN.
        empty_logsumexp: the logarithm of a sum of exponentials that are all zero, as in a row of -inf, and
            `jnp.logaddexp` of two -inf: "zero". JAX and PyTorch give NaN. A row with +inf has NaN; where that may be,
            `aot.derivatives.logsumexp` has the slope.
        arc_at_one: `arccos` and `arcsin` of a cosine or a sine that is 1 or -1: "zero", the middle of the slopes -1 and
            1. It is also "zero" on the bound for a number that was clipped there, and for `arccosh` of a number that
            is at least 1: the slope is zero on one side. JAX and PyTorch give NaN or infinity.
        equal_eigenvalues: `eigh` and `svd` where two values are equal to the last bit, or a singular value is 0, and
            `lstsq`, which JAX computes by `svd`. "known" has the derivative in first order where every use of the
            vectors is a function of the matrix: v·f(w)·v*, u·f(s)·vh, u·f(s)·u* or v·f(s)·v*, for f that works on
            each value alone. A root of a matrix and the nearest rotation are such, and least squares are too (see
            `aot.derivatives.linalg.lstsq`; under `jax.vmap` they have JAX's). All other uses of vectors keep JAX's NaN,
            since no formula is right for them: at the identity two functions f with the same f(1) have the same values
            and vectors, but different slopes. "zero" takes a quotient with zero below as zero there. That is right for
            the space that vectors of equal values span. It is wrong for functions of the values with these vectors that
            are not found; so no named set has it. Second derivatives are NaN there. JAX and PyTorch give NaN.
        no_derivative: singular values of `svd(full_matrices=True)`, the default, where the vectors are not used:
            "formula" has the derivative of `aot.derivatives.linalg.svdvals`. For a matrix that is not square JAX raises
            `NotImplementedError`, and so it does where the vectors are used, unless `equal_eigenvalues` is "zero". The
            factors of `qr` have JAX's derivative; where a column depends on those before it they have none, and there
            it is NaN. `jax.scipy.linalg.sqrtm` has none: use `aot.derivatives.linalg.sqrtm`.
        abs_at_zero: the absolute value of a real zero: "zero", as in PyTorch (`abs`). JAX gives 1.
        clamp_at_bound: a number that is equal to a bound of `jnp.clip`, `lax.clamp`, or of a `jnp.maximum` or
            `jnp.minimum` with one constant number: "one", as in PyTorch's `clamp`, or "zero", as in its `hardtanh`. JAX
            gives 1/2 for the first and the last two, and 0 for `lax.clamp`. A bound of `jnp.clip` that is an array has
            the rest of the slope.
        max_ties: equal elements in `max` and `min` over axes, and equal arguments of `jnp.maximum` and `jnp.minimum`:
            "shared" evenly, as in JAX and in PyTorch's `amax` and `maximum`, or all to the "first", as in PyTorch's
            `max` over an axis.
        fmax_ties: equal arguments of `jnp.fmax` and `jnp.fmin`: all to the "first", as in PyTorch. JAX gives all to the
            second.
        cumulative_ties: equal elements in `lax.cummax` and `lax.cummin`: all to the "last", as in PyTorch
            (`cummaxmin_backward`). JAX shares, by the order in which it compares them.
        median_ties: elements equal to the middle one, for `jnp.median` and `jnp.nanmedian`: "shared" evenly, as in
            PyTorch's median of all (`evenly_distribute_backward`). JAX gives all to one.
    """

    zero_cotangent: str = "jax"
    norm_at_zero: str = "jax"
    angle_at_origin: str = "jax"
    power_at_zero: str = "jax"
    xlogy_at_zero: str = "jax"
    empty_logsumexp: str = "jax"
    arc_at_one: str = "jax"
    equal_eigenvalues: str = "jax"
    no_derivative: str = "jax"
    abs_at_zero: str = "jax"
    clamp_at_bound: str = "jax"
    max_ties: str = "jax"
    fmax_ties: str = "jax"
    cumulative_ties: str = "jax"
    median_ties: str = "jax"

    def __post_init__(self) -> None:
        """Refuse unknown values, with the nearest known one."""
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in list(known):
                where = f"aot.conventions: {name}"
                raise TraceError(message(where, f"is {value!r}.", choices(value, known)))

    @property
    def chosen(self) -> dict[str, str]:
        """The fields that are not left to JAX."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != "jax"}


JAX = Conventions()

_WHERE_JAX_HAS_NONE = {
    "zero_cotangent": "zero",
    "norm_at_zero": "zero",
    "angle_at_origin": "zero",
    "power_at_zero": "limit",
    "xlogy_at_zero": "zero",
    "empty_logsumexp": "zero",
    "arc_at_one": "zero",
    "equal_eigenvalues": "known",
    "no_derivative": "formula",
}

_AS_PYTORCH = {
    "abs_at_zero": "zero",
    "clamp_at_bound": "one",
    "max_ties": "shared",
    "fmax_ties": "first",
    "cumulative_ties": "last",
    "median_ties": "shared",
}

#: Sets by name: JAX's derivatives; finite ones where JAX has none; and these with PyTorch's, where both are finite.
NAMED: Mapping[str, Conventions] = {
    "jax": JAX,
    "finite": Conventions(**_WHERE_JAX_HAS_NONE),
    "pytorch": Conventions(**_WHERE_JAX_HAS_NONE, **_AS_PYTORCH),
}


def conventions(base: str = "jax", /, **chosen: str) -> Conventions:
    """Choose derivatives at singular points one by one, for `aot.function(derivatives=...)`.

    Args:
        base: the set for all fields that are not chosen: `"jax"`; `"finite"`, which changes only derivatives that are
            NaN in JAX; or `"pytorch"`, which also follows PyTorch where JAX's choice is finite.
        chosen: fields of `Conventions` with their values, such as `norm_at_zero="zero"`.

    Returns:
        A frozen record.

    Raises:
        TraceError: the base, a name or a value is unknown.

    >>> conventions("finite", clamp_at_bound="one").chosen["clamp_at_bound"]
    'one'
    """
    if base not in list(NAMED):
        raise TraceError(message("aot.conventions", f"has the unknown base {base!r}.", choices(base, NAMED)))
    for name in chosen:
        if name not in CHOICES:
            raise TraceError(message("aot.conventions", f"{name!r} is unknown.", choices(name, CHOICES)))
    given: dict[str, Any] = {**NAMED[base].chosen, **chosen}
    return Conventions(**given)
