"""Say what is compared: one function with its options, random inputs, and singular points.

A case is a record of numpy alone, so that one process can read it beside PyTorch and another beside JAX. Random inputs
come from `numpy.random.RandomState`, whose numbers never change, seeded with the names of family, case and index.
Probes are made, not written: `points` combines the singular values of each argument, `patterns` plants zeros, ties and
the like in an array of a given shape.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Inputs = tuple[np.ndarray, ...]
Draw = Callable[[np.random.RandomState], np.ndarray]


@dataclass(frozen=True)
class Case:
    """One function of `jointcut.aot.derivatives` beside PyTorch's and JAX's.

    `torch` is called with the module torch and the inputs, ours with the inputs and `options`; a
    function in its place with the package first. `jax` is a dotted name
    below jax that is called like ours, or is called with the module jax and the inputs; None if JAX has no such
    function. Inputs of floats and complex numbers are differentiated, but for the places in `constant`. `agrees` says
    that JAX's conventions are the same, so that its gradient must be equal where it is finite; False, only at random
    inputs; None, nowhere. Some probes need a word:
    in `differs` (name -> reason) ours is finite and not PyTorch's on purpose; in `undefined` there is no finite
    derivative to give, in `undefined_second` none of second order. `loose` is the tolerance where PyTorch computes with
    less than double precision.
    """

    name: str
    ours: str | Callable[..., Any]
    torch: Callable[..., Any] | None
    draws: tuple[Draw, ...]
    probes: Mapping[str, Inputs] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    jax: str | Callable[..., Any] | None = None
    agrees: bool | None = True
    constant: tuple[int, ...] = ()
    differs: Mapping[str, str] = field(default_factory=dict)
    undefined: Mapping[str, str] = field(default_factory=dict)
    undefined_second: Mapping[str, str] = field(default_factory=dict)
    loose: float = 0.0

    def random(self, family: str, index: int) -> Inputs:
        """The random inputs of this index."""
        source = random_state(family, self.name, index)
        return tuple(draw(source) for draw in self.draws)

    def inputs(self, family: str, count: int) -> Iterator[tuple[str, Inputs]]:
        """Yield name and inputs: `count` random ones, "random 0" and so on, then every probe.

        Where all random arrays have one shape, probes of single numbers are filled up to it: one program takes both.
        """
        yield from ((f"random {index}", self.random(family, index)) for index in range(count))
        shapes = {x.shape for x in self.random(family, 0)}
        for name, probe in self.probes.items():
            fills = len(shapes) == 1 and all(x.shape == (1,) for x in probe)
            yield name, tuple(np.full(*shapes, x[0]) for x in probe) if fills else probe

    def places(self, inputs: Inputs) -> tuple[int, ...]:
        """The inputs that are differentiated."""
        return tuple(n for n, x in enumerate(inputs) if x.dtype.kind in "fc" and n not in self.constant)


def random_state(*names: object) -> np.random.RandomState:
    """A source of random numbers that is the same for the same names, in every version of numpy."""
    return np.random.RandomState(zlib.crc32("/".join(map(str, names)).encode()))


def direction(like: np.ndarray, *names: object) -> np.ndarray:
    """A fixed array of the shape and type of another: a cotangent, or a tangent."""
    source = random_state("direction", *names)
    drawn = source.uniform(0.5, 1.5, like.shape) * np.where(source.uniform(size=like.shape) < 0.5, -1.0, 1.0)
    if like.dtype.kind == "c":
        drawn = drawn + 1j * source.uniform(-1, 1, like.shape)
    return np.asarray(drawn, like.dtype)


# ---------------------------------------------------------------- random inputs


def normal(*shape: int) -> Draw:
    """Draw normal numbers."""
    return lambda source: np.asarray(source.standard_normal(shape))


def uniform(low: float, high: float, *shape: int) -> Draw:
    """Draw numbers between two bounds."""
    return lambda source: np.asarray(source.uniform(low, high, shape))


def positive(*shape: int) -> Draw:
    """Draw numbers between 1/4 and 3."""
    return uniform(0.25, 3.0, *shape)


def complex_normal(*shape: int) -> Draw:
    """Draw complex numbers, normal in both parts."""
    return lambda source: np.asarray(source.standard_normal(shape) + 1j * source.standard_normal(shape))


def whole(low: int, high: int, *shape: int) -> Draw:
    """Draw integers from `low` to `high`, the latter left out."""
    return lambda source: np.asarray(source.randint(low, high, shape), np.int64)


# ---------------------------------------------------------------- singular inputs


def points(**values: list[complex]) -> dict[str, Inputs]:
    """One probe for each combination of the arguments' values: "x=0, y=-1" and so on."""
    return {
        ", ".join(f"{name}={value:g}" for name, value in zip(values, combination, strict=True)): tuple(
            np.asarray([value]) * 1.0 for value in combination
        )
        for combination in itertools.product(*values.values())
    }


def patterns(*shape: int, names: str = "zeros, one zero, two zeros, ties, all equal, huge, tiny") -> dict[str, Inputs]:
    """One probe for each named pattern in an array of this shape: see `_PATTERNS`."""
    return {name: (_PATTERNS[name](_base(shape)),) for name in names.split(", ")}


def _base(shape: tuple[int, ...]) -> np.ndarray:
    """Distinct numbers, some of them negative, none of them small."""
    return np.asarray(random_state("base", shape).permutation(int(np.prod(shape))).reshape(shape) * 0.75 - 1.6)


def _planted(*values: float) -> Callable[[np.ndarray], np.ndarray]:
    """Put these at the first places of the last axis."""

    def plant(base: np.ndarray) -> np.ndarray:
        planted = base.copy()
        planted[..., : len(values)] = values[: base.shape[-1]]
        return planted

    return plant


def _row(value: float) -> Callable[[np.ndarray], np.ndarray]:
    """Fill the first row."""

    def plant(base: np.ndarray) -> np.ndarray:
        planted = base.copy()
        planted[0] = value
        return planted

    return plant


_PATTERNS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "zeros": np.zeros_like,
    "one zero": _planted(0.0),
    "two zeros": _planted(0.0, 0.0),
    "zero row": _row(0.0),
    "equal row": _row(1.5),
    "ties": _planted(9.0, 9.0, -9.0, -9.0),
    "all equal": lambda base: np.full_like(base, 1.5),
    "huge": lambda base: base * 1e150,
    "tiny": lambda base: base * 1e-160,
    "one -inf": _planted(-np.inf),
    "-inf row": _row(-np.inf),
    "all -inf": lambda base: np.full_like(base, -np.inf),
    "one inf": _planted(np.inf),
    "two inf": _planted(np.inf, np.inf),
}
