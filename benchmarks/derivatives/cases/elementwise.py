"""Functions of each element: logarithms, angles, bounds, remainders."""

from collections.abc import Callable
from typing import Any

from benchmarks.derivatives.case import Case, Draw, Inputs, complex_normal, normal, points, positive, uniform

_ZERO, _INF = 0.0, float("inf")
_X = (normal(2, 3),)
_TWO = (normal(2, 3), normal(3))
_POSITIVE_TWO = (positive(2, 3), positive(3))
_PLANE = points(x=[0.0, 1.0, -2.0], y=[0.0, 1.0, -2.0])
_TIES = points(x=[-1.0, 0.0, 2.0], y=[-1.0, 0.0, 2.0])
_COMPLEX = (complex_normal(4),)
_POLE = "the slope at a pole or at a steep end is infinite"
_ENDS = {"x=1": _POLE, "x=-1": _POLE}


def _one(
    name: str,
    torch: Callable[..., Any],
    draws: tuple[Draw, ...],
    *,
    probes: dict[str, Inputs] | None = None,
    jax: str | None = None,
    **more: Any,
) -> Case:
    """A function of the same name here and in JAX's numpy, of one or more arrays."""
    return Case(name, more.pop("ours", name), torch, draws, probes or {}, jax=jax or f"numpy.{name}", **more)


LOGARITHMS = [
    _one("log", lambda torch, x: torch.log(x), (positive(2, 3),), probes=points(x=[0.0, 1.0])),
    _one("log complex", lambda torch, x: torch.log(x), _COMPLEX, jax="numpy.log", ours="log"),
    _one("log1p", lambda torch, x: torch.log1p(x), (positive(2, 3),), probes=points(x=[-1.0, 0.0])),
    _one("log2", lambda torch, x: torch.log2(x), (positive(2, 3),), probes=points(x=[0.0, 1.0])),
    _one("log10", lambda torch, x: torch.log10(x), (positive(2, 3),), probes=points(x=[0.0, 1.0])),
    _one(
        "xlogy",
        lambda torch, x, y: torch.xlogy(x, y),
        _POSITIVE_TWO,
        probes=points(x=[0.0, 1.0, -2.0], y=[0.0, 1.0, 2.0]),
        jax="scipy.special.xlogy",
    ),
    _one(
        "xlog1py",
        lambda torch, x, y: torch.special.xlog1py(x, y),
        _POSITIVE_TWO,
        probes=points(x=[0.0, 1.0, -2.0], y=[-1.0, 0.0, 1.0]),
        jax="scipy.special.xlog1py",
    ),
    _one(
        "entr",
        lambda torch, x: torch.special.entr(x),
        (positive(2, 3),),
        probes=points(x=[0.0, 1.0]),
        jax="scipy.special.entr",
        undefined={"x=0": _POLE},
    ),
    _one(
        "logit",
        lambda torch, x: torch.logit(x),
        (uniform(0.1, 0.9, 2, 3),),
        probes=points(x=[0.0, 0.5, 1.0]),
        jax="scipy.special.logit",
    ),
    Case(
        "logit clipped",
        "logit",
        lambda torch, x: torch.logit(x, eps=0.25),
        (uniform(0.1, 0.9, 2, 3),),
        points(x=[-1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 2.0]),
        {"eps": 0.25},
    ),
    _one(
        "logaddexp",
        lambda torch, x, y: torch.logaddexp(x, y),
        _TWO,
        probes=points(x=[0.0, 1.0, -_INF, 1e300], y=[0.0, 1.0, -_INF, -1e300]),
    ),
    _one(
        "logaddexp2",
        lambda torch, x, y: torch.logaddexp2(x, y),
        _TWO,
        probes=points(x=[0.0, -_INF, 1e300], y=[0.0, -_INF, -1e300]),
    ),
]
ANGLES = [
    _one("hypot", lambda torch, x, y: torch.hypot(x, y), _TWO, probes=_PLANE, agrees=False),
    _one("arctan2", lambda torch, x, y: torch.atan2(x, y), _TWO, probes=_PLANE),
    _one("angle", lambda torch, z: torch.angle(z), _COMPLEX, probes=points(z=[0j, 1 + 0j, -1 + 0j, 2j])),
    _one(
        "angle real", lambda torch, x: torch.angle(x), _X, probes=points(x=[0.0, -1.0]), jax="numpy.angle", ours="angle"
    ),
    _one("abs", lambda torch, x: torch.abs(x), _X, probes=points(x=[0.0, -1.0]), agrees=False),
    _one(
        "abs complex",
        lambda torch, x: torch.abs(x),
        _COMPLEX,
        probes=points(x=[0j, 1 + 0j]),
        jax="numpy.abs",
        ours="abs",
    ),
    _one("sign", lambda torch, x: torch.sgn(x), _X, probes=points(x=[0.0, -1.0])),
    _one(
        "sign complex",
        lambda torch, x: torch.sgn(x),
        _COMPLEX,
        probes=points(x=[0j, 1j]),
        jax="numpy.sign",
        ours="sign",
        agrees=None,
    ),
    _one(
        "sinc",
        lambda torch, x: torch.sinc(x),
        _X,
        probes=points(x=[0.0, 1e-160, 1e-8, 1e-3, 0.3, 1.0, -2.0]),
        differs={"x=1e-08": "PyTorch's formula cancels near zero"},
    ),
    _one(
        "arcsin",
        lambda torch, x: torch.arcsin(x),
        (uniform(-0.9, 0.9, 2, 3),),
        probes=points(x=[-1.0, 0.0, 1.0]),
        undefined=_ENDS,
    ),
    _one(
        "arccos",
        lambda torch, x: torch.arccos(x),
        (uniform(-0.9, 0.9, 2, 3),),
        probes=points(x=[-1.0, 0.0, 1.0]),
        undefined=_ENDS,
    ),
    _one(
        "arccosh",
        lambda torch, x: torch.arccosh(x),
        (uniform(1.1, 3, 2, 3),),
        probes=points(x=[1.0, 2.0]),
        undefined=_ENDS,
    ),
    _one("arctanh", lambda torch, x: torch.arctanh(x), (uniform(-0.9, 0.9, 2, 3),), probes=points(x=[-1.0, 0.0, 1.0])),
]
BOUNDS = [
    Case(
        "clip",
        "clip",
        lambda torch, x: torch.clamp(x, -1.0, 0.5),
        _X,
        points(x=[-2.0, -1.0, 0.0, 0.5, 2.0]),
        {"min": -1.0, "max": 0.5},
        "numpy.clip",
        agrees=False,
    ),
    Case(
        "clip from below",
        "clip",
        lambda torch, x: torch.clamp(x, min=0.0),
        _X,
        points(x=[-1.0, 0.0, 1.0]),
        {"min": 0.0},
        "numpy.clip",
        agrees=False,
    ),
    Case(
        "clip from above",
        "clip",
        lambda torch, x: torch.clamp(x, max=0.0),
        _X,
        points(x=[-1.0, 0.0, 1.0]),
        {"max": 0.0},
        "numpy.clip",
        agrees=False,
    ),
    _one(
        "clip to arrays",
        lambda torch, x, low, high: torch.clamp(x, low, high),
        (normal(2, 3), normal(3), normal(2, 1)),
        probes=points(x=[-1.0, 0.0, 2.0], low=[-1.0, 0.0, 2.0], high=[0.0, 2.0]),
        jax="numpy.clip",
        ours="clip",
        agrees=False,
        differs={
            f"x={x:g}, low={b:g}, high={b:g}": "PyTorch gives no slope to two equal bounds; the lower has it here"
            for x, b in ((-1.0, 0.0), (-1.0, 2.0), (0.0, 2.0))
        },
    ),
    Case(
        "clip to a lower array",
        "clip",
        lambda torch, x, low: torch.clamp(x, low),
        _TWO,
        _TIES,
        {},
        "numpy.clip",
        agrees=False,
    ),
    _one("maximum", lambda torch, x, y: torch.maximum(x, y), _TWO, probes=_TIES),
    _one("minimum", lambda torch, x, y: torch.minimum(x, y), _TWO, probes=_TIES),
    _one("fmax", lambda torch, x, y: torch.fmax(x, y), _TWO, probes=_TIES, agrees=False),
    _one("fmin", lambda torch, x, y: torch.fmin(x, y), _TWO, probes=_TIES, agrees=False),
    _one("nan_to_num", lambda torch, x: torch.nan_to_num(x), _X, probes=points(x=[float("nan"), _INF, -_INF, 0.0])),
    _one("divide", lambda torch, x, y: torch.div(x, y), _POSITIVE_TWO, probes=points(x=[0.0, 1.0], y=[0.0, -2.0])),
    _one(
        "fmod", lambda torch, x, y: torch.fmod(x, y), _TWO, probes=points(x=[0.0, 2.0, -2.0, 3.5], y=[1.0, -1.0, 2.0])
    ),
    _one(
        "remainder",
        lambda torch, x, y: torch.remainder(x, y),
        _TWO,
        probes=points(x=[0.0, 2.0, -2.0, 3.5], y=[1.0, -1.0, 2.0]),
        agrees=False,
    ),
    _one("copysign", lambda torch, x, y: torch.copysign(x, y), _TWO, probes=_TIES, agrees=False),
    Case(
        "lerp",
        "lerp",
        lambda torch, x, y, w: torch.lerp(x, y, w),
        (normal(2, 3), normal(3), normal(2, 1)),
        points(x=[0.0, 1.0], y=[1.0], w=[0.0, 0.5, 1.0]),
    ),
]
COMPLEX = [
    *(
        _one(
            f"{name} complex",
            lambda torch, z, name=name: getattr(torch, name)(z),
            _COMPLEX,
            jax=f"numpy.{name}",
            ours=name,
            agrees=None if name == "arccosh" else True,
        )
        for name in ("log1p", "log2", "log10", "sinc", "arcsin", "arccos", "arccosh", "arctanh")
    ),
    _one("divide complex", lambda torch, x, y: torch.div(x, y), _COMPLEX * 2, jax="numpy.divide", ours="divide"),
    Case("lerp complex", "lerp", lambda torch, x, y, w: torch.lerp(x, y, w), _COMPLEX * 3),
]
CASES = [*LOGARITHMS, *ANGLES, *BOUNDS, *COMPLEX]
