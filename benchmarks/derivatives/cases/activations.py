"""Activations, smooth ones and those with corners."""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.derivatives.case import Case, complex_normal, normal, patterns, points

_X = (normal(2, 3),)
_AT = [0.0, 1.0, -1.0, 50.0, -50.0, 1e200, -1e200]
_MASKED = patterns(3, 4, names="zeros, ties, all equal, one -inf, huge")
_FUNCTIONS = {
    "sigmoid": lambda torch, z: torch.sigmoid(z),
    "tanhshrink": lambda torch, z: torch.nn.functional.tanhshrink(z),
}
_SINGLE = {f"single: {name}": inputs for name, inputs in patterns(3, 1, names="zeros, all equal").items()}


def _one(
    name: str,
    torch: Callable[..., Any],
    at: Sequence[float] = (),
    *,
    options: dict[str, Any] | None = None,
    jax: str | None = "",
    **more: Any,
) -> Case:
    """An activation of one array; `jax` is its name in `jax.nn` if that is another, and None if there is none."""
    probes = points(x=sorted({*_AT, *at}))
    dotted = None if jax is None else f"nn.{jax or name.split(' ')[0]}"
    return Case(name, name.split(" ")[0], torch, _X, probes, options or {}, dotted, **more)


COMPLEX = [
    Case(
        f"{name} complex",
        name,
        lambda torch, z, name=name: _FUNCTIONS[name](torch, z),
        (complex_normal(4),),
        {},
        {},
        jax,
    )
    for name, jax in (("sigmoid", "nn.sigmoid"), ("tanhshrink", None))
]
SMOOTH = [
    _one("sigmoid", lambda torch, x: torch.sigmoid(x)),
    _one("softplus", lambda torch, x: torch.nn.functional.softplus(x)),
    _one("log_sigmoid", lambda torch, x: torch.nn.functional.logsigmoid(x)),
    _one("silu", lambda torch, x: torch.nn.functional.silu(x)),
    _one("mish", lambda torch, x: torch.nn.functional.mish(x)),
    _one("gelu", lambda torch, x: torch.nn.functional.gelu(x, approximate="tanh")),
    _one("gelu exact", lambda torch, x: torch.nn.functional.gelu(x), options={"approximate": False}),
    _one("soft_sign", lambda torch, x: torch.nn.functional.softsign(x)),
    _one("tanhshrink", lambda torch, x: torch.nn.functional.tanhshrink(x), jax=None),
]
OVER_AXES = [
    Case(
        "glu",
        "glu",
        lambda torch, x: torch.nn.functional.glu(x),
        (normal(3, 4),),
        patterns(3, 4, names="zeros, huge"),
        {},
        "nn.glu",
    ),
    *(
        Case(
            f"{name} along {axis}",
            name,
            lambda torch, x, name=name, axis=axis: getattr(torch.nn.functional, name)(x, dim=axis),
            (normal(3, 4),),
            _MASKED | _SINGLE,
            {"axis": axis},
            f"nn.{name}" if name != "softmin" else None,
        )
        for name in ("softmax", "log_softmax", "softmin")
        for axis in (0, 1)
    ),
]
CORNERS = [
    _one("relu", lambda torch, x: torch.nn.functional.relu(x)),
    _one("relu6", lambda torch, x: torch.nn.functional.relu6(x), [6.0], agrees=False),
    _one("hard_tanh", lambda torch, x: torch.nn.functional.hardtanh(x), agrees=False),
    _one(
        "hard_sigmoid",
        lambda torch, x: torch.nn.functional.hardsigmoid(x),
        [3.0, -3.0],
        agrees=False,
        loose=1e-8,  # PyTorch's 1/6 is one of single precision
    ),
    _one("hard_swish", lambda torch, x: torch.nn.functional.hardswish(x), [3.0, -3.0], agrees=False),
    _one("hardshrink", lambda torch, x: torch.nn.functional.hardshrink(x), [0.5, -0.5], jax=None),
    _one("softshrink", lambda torch, x: torch.nn.functional.softshrink(x), [0.5, -0.5], jax=None),
    _one(
        "threshold",
        lambda torch, x: torch.nn.functional.threshold(x, 0.25, 2.0),
        [0.25],
        options={"threshold": 0.25, "value": 2.0},
        jax=None,
    ),
    _one("leaky_relu", lambda torch, x: torch.nn.functional.leaky_relu(x), agrees=False),
    _one("elu", lambda torch, x: torch.nn.functional.elu(x, 0.5), options={"alpha": 0.5}),
    _one("celu", lambda torch, x: torch.nn.functional.celu(x, 0.5), options={"alpha": 0.5}),
    _one("selu", lambda torch, x: torch.nn.functional.selu(x)),
    Case(
        "prelu",
        "prelu",
        lambda torch, x, weight: torch.nn.functional.prelu(x, weight),
        (normal(2, 3), normal(3)),
        points(x=[0.0, 1.0, -1.0], weight=[0.25, 0.0]),
    ),
]
CASES = [*COMPLEX, *SMOOTH, *OVER_AXES, *CORNERS]
