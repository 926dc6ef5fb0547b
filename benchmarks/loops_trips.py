"""Weigh and time what loops keep by default, beside other numbers of checkpoints.

    python -m benchmarks.loops trips

The solver is conjugate gradients on a grid of 56 x 56 points: a carry of 37.6 kB, of which a checkpoint has 25 kB. It
is differentiated as `lax.while_loop`, with `max_trips=2000` as solvers give it, and with `aot.trips`. Beside it is the
same program with `budget=0.0`. Loops of ten trips are compared with `memory=10`, one with the trips that
`aot.count_trips` found. Bytes are XLA's temporaries; times are ratios of interleaved pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from rich import box
from rich.table import Table

from benchmarks.measure import memory_of, time_together
from jointcut import aot

GRID, MOST_BYTES, MOST_RATIO = 56, 4_000_000, 70 / 63  # of the time with `budget=0.0`, when the issue was written
SIZES = (100, 1_000, 9_400, 65_536, 262_144)  # floats of a carry, of loops of ten trips
TEN, LITTLE_BYTES = 10, 50_000  # carries of few bytes have more checkpoints than trips may be, in so many bytes

Loop = Callable[[Callable[[Any], Any], Callable[[Any], Any], Any], Any]
Loss = Callable[..., Array]


@dataclass(frozen=True)
class Kept:
    """One comparison: bytes and time of the default, or with what `name` says, and of the other program.

    `most_bytes` and `most_ratio`, of the other's time, are the marks; None where time is not compared.
    """

    name: str
    trips: int
    temp_bytes: int
    other_bytes: int
    ratio: float
    most_bytes: int
    most_ratio: float | None

    @property
    def is_reached(self) -> bool:
        """Whether it takes no more than the marks."""
        return self.temp_bytes <= self.most_bytes and (self.most_ratio is None or self.ratio <= self.most_ratio)


def solver(loop: Loop) -> Loss:
    """The sum of the solution of a heat equation on a grid, whose conductivity is the argument."""

    def laplace(u: Array) -> Array:
        p = jnp.pad(u, 1)
        return 4 * u - p[2:, 1:-1] - p[:-2, 1:-1] - p[1:-1, 2:] - p[1:-1, :-2]

    def loss(k: Array, b: Array) -> Array:
        def step(state: Any) -> Any:
            x, r, p, rest, i = state
            along = k * laplace(p) + 1e-3 * p
            far = rest / jnp.sum(p * along)
            r = r - far * along
            after = jnp.sum(r * r)
            return x + far * p, r, r + after / rest * p, after, i + 1

        start = (jnp.zeros_like(b), b, b, jnp.sum(b * b), jnp.int32(0))
        return loop(lambda s: s[3] > 1e-13 * jnp.sum(b * b), step, start)[0].sum()

    return loss


def repeated(loop: Loop) -> Loss:
    """The sum of a carry after so many steps."""

    def loss(x: Array, trips: Array) -> Array:
        return loop(lambda s: s[0] < trips, lambda s: (s[0] + 1, jnp.sin(s[1]) * 1.1), (jnp.int32(0), x))[1].sum()

    return loss


def program(loss: Loss, arguments: Any, **options: Any) -> Any:
    """The compiled gradient."""
    cut = aot.function(loss, **options)
    return jax.jit(jax.grad(lambda *a: cut(*a))).lower(*arguments).compile()


def compared(name: str, trips: int, runs: tuple[Any, Any], arguments: Any, rounds: int, most: int | None) -> Kept:
    """Compare two programs; with `most` bytes the other's time is the mark, else its bytes are."""
    timed = time_together({n: partial(run, *arguments) for n, run in zip("ab", runs, strict=True)}, "b", rounds)
    mine, other = (memory_of(run).temp for run in runs)
    ratio = timed["a"].ratio.median
    return Kept(name, trips, mine, other, ratio, most or max(other, LITTLE_BYTES), MOST_RATIO if most else None)


def rows(quick: bool) -> list[Kept]:
    """All rows."""
    rounds = 3 if quick else 15
    arguments = jnp.float32(1.0), jax.random.normal(jax.random.key(0), (GRID, GRID))
    trips = max(aot.count_trips(solver(lax.while_loop), *arguments).values())

    def told(loss: Loss, count: int, *a: Any) -> Array:
        with aot.trips(count):
            return loss(*a)

    solvers = {
        "solver": solver(lax.while_loop),
        "solver, max_trips=2000": solver(partial(aot.while_loop, max_trips=2000)),
        "solver, aot.trips": partial(told, solver(lax.while_loop), trips),
    }
    least = program(solver(lax.while_loop), arguments, budget=0.0)
    found = [
        compared(name, trips, (program(loss, arguments), least), arguments, rounds, MOST_BYTES)
        for name, loss in solvers.items()
    ]
    for size in SIZES[: 2 if quick else None]:
        given = jnp.linspace(0.1, 1.0, size), jnp.int32(TEN)
        other = program(repeated(partial(aot.while_loop, memory=TEN)), given)
        forms = {"": repeated(lax.while_loop), ", aot.trips": partial(told, repeated(lax.while_loop), TEN)}
        for name, loss in forms.items():
            runs = program(loss, given), other
            found.append(compared(f"ten trips of {4 * size / 1e3:.0f} kB{name}", TEN, runs, given, rounds, None))
    return found


def table_of(found: list[Kept]) -> Table:
    """A line for each comparison."""
    table = Table(title="What loops keep by default", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("", "trips", "MB", "beside", "time ÷ beside"):
        table.add_column(heading, justify="right" if heading else "left")
    for r in found:
        sizes = f"{r.temp_bytes / 1e6:.3f}", f"{r.other_bytes / 1e6:.3f}"
        table.add_row(r.name, str(r.trips), *sizes, f"{r.ratio:.2f}", style=None if r.is_reached else "red")
    return table
