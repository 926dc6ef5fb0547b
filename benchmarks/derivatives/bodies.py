"""Draw functions that are guarded at singular points, in bodies of all kinds, and check their slopes.

    python -m benchmarks.derivatives.bodies                        # 100 programs: some minutes
    python -m benchmarks.derivatives.bodies --count 1 --seed 1234  # one that failed, alone

A program is a smooth function of a weighed sum of guarded forms, each of a number of its own that stands at a point
where the form is singular, or beyond its guard, or smooth. A form runs in bodies that hold one another: a branch, a
step of a loop, a checkpoint, a map. So the right gradient is known. With `derivatives="finite"` reverse and forward
mode must have it.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special
from jax.sharding import AxisType, PartitionSpec

from jointcut import aot

Function = Callable[[Any], Any]

#: Functions of one number, and points with the slopes there.
FORMS: dict[str, tuple[Function, dict[float, float]]] = {
    "guarded root": (lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0), {-1: 0, 0: 0, 4: 0.25}),
    "guarded logarithm": (lambda x: jnp.where(x > 0, jnp.log(x), 0.0), {-1: 0, 0: 0, 2: 0.5}),
    "guarded quotient": (lambda x: jnp.where(x != 0, jnp.sin(x) / x, 1.0), {0: 0}),
    "guarded power": (lambda x: jnp.where(x > 0, x**x, 1.0), {-1: 0, 0: 0, 1: 1}),
    "root of a maximum": (lambda x: jnp.sqrt(jnp.maximum(x, 0)), {-1: 0, 0: 0, 4: 0.25}),
    "root of a ramp": (lambda x: jnp.sqrt(jax.nn.relu(x)), {-1: 0, 0: 0, 4: 0.25}),
    "power of a hinge": (lambda x: jnp.maximum(1 - x, 0) ** 0.5, {2: 0, 1: 0, 0: -0.5}),
    "smooth power": (lambda x: jnp.power(jnp.clip(x, 0), 1.5), {-1: 0, 0: 0, 4: 3}),
    "arc of a clip": (lambda x: jnp.arccos(jnp.clip(x, -1, 1)), {-2: 0, -1: 0, 0: -1, 1: 0, 2: 0}),
    "logarithm beyond": (lambda x: jnp.maximum(jnp.log(jnp.maximum(x, 0)), -9.0), {-1: 0, 2: 0.5}),
    "norm": (lambda x: jnp.linalg.norm(jnp.stack([x, 2 * x])), {0: 0, 1: 5**0.5}),
    "product with itself": (lambda x: jnp.sqrt(jnp.stack([x, x]) @ jnp.stack([x, x])), {0: 0, 1: 2**0.5}),
    "distance written out": (lambda x: jnp.sqrt(x * x + (3 * x) * (3 * x) - 2 * x * (3 * x)), {0: 0, 1: 2}),
    "hypotenuse": (lambda x: jnp.hypot(3 * x, 4 * x), {0: 0, 1: 5}),
    "logsumexp": (lambda x: special.logsumexp(jnp.stack([x, -jnp.inf * jnp.ones_like(x)])), {0: 1, 2: 1}),
    "bounded quotient": (lambda x: jnp.minimum(1 / x, 5.0), {0: 0, 1: -1}),
    "xlogy": (lambda x: special.xlogy(x, x), {1: 1, 0: 0}),
}


def _scanned(f: Function) -> Function:
    return lambda x: lax.scan(lambda c, y: (c + f(y * x), None), 0.0 * x, jnp.ones(1, x.dtype))[0]


def _carried(f: Function) -> Function:
    return lambda x: lax.scan(lambda c, y: (c, f(c + y)), x, jnp.zeros(1, x.dtype))[1][0]


def _sharded(f: Function) -> Function:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    return lambda x: jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())(x)


def _solved(f: Function) -> Function:
    return lambda x: lax.custom_linear_solve(lambda v: 2 * v, 2 * f(x), lambda _, b: b / 2, symmetric=True)


#: What puts a function of a number into a body, and is the same function.
BODIES: dict[str, Callable[[Function], Function]] = {
    "none": lambda f: f,
    "branch": lambda f: lambda x: lax.cond(x < 99, f, jnp.sin, x),
    "switch": lambda f: lambda x: lax.switch((x < 99).astype(np.int32), [jnp.sin, f], x),
    "scan": _scanned,
    "scan that carries": _carried,
    "counted loop": lambda f: lambda x: lax.fori_loop(0, 1, lambda _, c: c + f(x), 0.0 * x),
    "checkpoint": jax.checkpoint,
    "jit": lambda f: jax.jit(jax.jit(f)),
    "map": lambda f: lambda x: lax.map(f, x[None])[0],
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "associative scan": lambda f: lambda x: lax.associative_scan(jnp.add, jnp.stack([0 * x, f(x)]))[-1],
    "solve": _solved,
}

#: Bodies in which a function cannot be cut, so that it warns.
UNCUT = {"shard_map": _sharded}


@dataclass(frozen=True)
class Bodied:
    """A program with its point and its gradient there; `words` say what it is made of."""

    words: tuple[str, ...]
    function: Function
    at: np.ndarray
    gradient: np.ndarray


def drawn(seed: int, bodies: Sequence[str] = tuple(BODIES), size: int = 4) -> Bodied:
    """A random program of so many forms."""
    rng = random.Random(seed)
    names = [rng.choice(list(FORMS)) for _ in range(size)]
    around = [rng.sample(list(bodies), min(rng.randint(1, 2), len(bodies))) for _ in names]
    weights = np.array([rng.uniform(0.1, 0.9) for _ in names], np.float32)
    at = np.array([rng.choice(list(FORMS[name][1])) for name in names], np.float32)
    forms = [FORMS[name][0] for name in names]
    for i, body in ((i, body) for i, held in enumerate(around) for body in held):
        forms[i] = ({**BODIES, **UNCUT})[body](forms[i])

    def inside(x: Any) -> Any:
        return sum(weight * form(x[i]) for i, (weight, form) in enumerate(zip(weights, forms, strict=True)))

    slopes = np.array([FORMS[name][1][float(point)] for name, point in zip(names, at, strict=True)], np.float32)
    words = tuple(f"{name} at {x:g} in {' in '.join(held)}" for name, x, held in zip(names, at, around, strict=True))
    gradient = np.cos(np.asarray(inside(at))) * weights * slopes
    return Bodied(words, lambda x: jnp.sin(inside(x)), at, gradient)


def wrong_in(programs: Sequence[Bodied]) -> list[str]:
    """What reverse and forward mode have that is not the gradient, with the words for it."""

    def both(program: Bodied) -> tuple[Any, Any]:
        finite, at = aot.function(program.function, derivatives="finite"), jnp.asarray(program.at)
        along = jax.vmap(lambda way: jax.jvp(finite, (at,), (way,))[1])
        return jax.grad(finite)(at), along(jnp.eye(at.size, dtype=at.dtype))

    found = jax.jit(lambda: [both(program) for program in programs])()
    return [
        f"{mode} has {got[i]} for {program.gradient[i]}: {program.words[i]}"
        for program, results in zip(programs, found, strict=True)
        for mode, got in zip(("reverse mode", "forward mode"), results, strict=True)
        for i in range(program.at.size)
        if not np.isclose(got[i], program.gradient[i], rtol=1e-4, atol=1e-6)
    ]


def main() -> None:
    """Draw programs, and print what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.derivatives.bodies", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="programs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (%(default)s)")
    options = parser.parse_args()
    failed = 0
    for seed in range(options.seed, options.seed + options.count):
        wrong = wrong_in([drawn(seed, (*BODIES, *UNCUT))])
        failed += bool(wrong)
        for line in wrong:
            print(f"seed {seed}: {line}", flush=True)
    print(f"{options.count - failed} of {options.count} programs have the right slopes in both modes")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
