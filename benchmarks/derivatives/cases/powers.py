"""Powers and roots."""

from benchmarks.derivatives.case import Case, complex_normal, points, positive, whole

_ROOT = "the slope of a root at zero is infinite"
_NEGATIVE = "a power of a negative number has no slope for the exponent"

CASES = [
    Case(
        "power",
        "power",
        lambda torch, x, y: torch.pow(x, y),
        (positive(2, 3), positive(3)),
        points(x=[0.0, 1.0, 2.0, -2.0], y=[0.0, 1.0, 2.0, 3.0, -1.0, 0.5, 1.5]),
        jax="numpy.power",
        differs={
            f"x={x:g}, y=0": "the mixed second derivative is 1/x, and PyTorch masks it to 0" for x in (1.0, 2.0, -2.0)
        },
        undefined={f"x=-2, y={y:g}": _NEGATIVE for y in (0, 1, 2, 3, -1)},
        undefined_second={f"x=0, y={y:g}": _ROOT for y in (0.5, 1.5)},
    ),
    *(
        Case(
            f"power {y!r}",
            "power",
            lambda torch, x, y=y: torch.pow(x, y),
            (positive(2, 3),),
            points(x=[0.0, 1.0, -2.0]),
            {"x2": y},
            lambda jax, x, y=y: jax.numpy.power(x, y),
        )
        for y in (0, 1, 2, 3, -1, 0.5, 1.5, 2.5, -0.5, 0.0)
    ),
    Case(
        "power of whole",
        "power",
        lambda torch, x, y: torch.pow(x, y),
        (positive(2, 3), whole(-2, 4, 2, 3)),
        jax="numpy.power",
    ),
    Case(
        "power complex",
        "power",
        lambda torch, x, y: torch.pow(x, y),
        (complex_normal(4), complex_normal(4)),
        jax="numpy.power",
    ),
    Case("sqrt", "sqrt", lambda torch, x: torch.sqrt(x), (positive(2, 3),), points(x=[0.0, 1.0]), jax="numpy.sqrt"),
    *(
        Case(
            f"power {y!r} complex",
            "power",
            lambda torch, x, y=y: torch.pow(x, y),
            (complex_normal(4),),
            points(x=[0j, 1 + 0j]),
            {"x2": y},
            lambda jax, x, y=y: jax.numpy.power(x, y),
            undefined={"x=0+0j": _ROOT} if y == 0.5 else {},
        )
        for y in (2, 3, -1, 0.5)
    ),
    *(
        Case(
            f"{name} complex",
            name,
            lambda torch, x, name=name: getattr(torch, name)(x),
            (complex_normal(4),),
            {},
            {},
            jax,
        )
        for name, jax in (("rsqrt", "lax.rsqrt"), ("reciprocal", "numpy.reciprocal"), ("square", "numpy.square"))
    ),
    Case("sqrt complex", "sqrt", lambda torch, x: torch.sqrt(x), (complex_normal(4),), jax="numpy.sqrt"),
    Case("rsqrt", "rsqrt", lambda torch, x: torch.rsqrt(x), (positive(2, 3),), points(x=[0.0, 1.0]), jax="lax.rsqrt"),
    Case(
        "cbrt", "cbrt", None, (positive(2, 3),), points(x=[0.0, 1.0, -8.0]), jax="numpy.cbrt", undefined={"x=0": _ROOT}
    ),
    Case(
        "reciprocal",
        "reciprocal",
        lambda torch, x: torch.reciprocal(x),
        (positive(2, 3),),
        points(x=[0.0, -2.0]),
        jax="numpy.reciprocal",
    ),
    Case(
        "square",
        "square",
        lambda torch, x: torch.square(x),
        (positive(2, 3),),
        points(x=[0.0, -2.0]),
        jax="numpy.square",
    ),
    Case(
        "float_power",
        "float_power",
        lambda torch, x, y: torch.float_power(x, y),
        (positive(2, 3), positive(3)),
        points(x=[0.0, 2.0], y=[0.5, 1.0, 2.0]),
        jax="numpy.float_power",
        undefined_second={"x=0, y=0.5": _ROOT},
    ),
]
