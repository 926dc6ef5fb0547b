"""Weigh and time our loop beside what people write today: a masked scan, and a loop that is not differentiated.

    python -m benchmarks.loops scan flat forward

- `scan`: a `lax.scan` over as many steps as the loop may make, whose later steps are masked.
- `flat`: our bytes for more and more trips, which the program knows.
- `forward`: our loop beside `lax.while_loop` where nothing is differentiated.

The body is that of `loops_rivals`, and so are bytes and times.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.stages import Compiled
from rich.table import Table

from benchmarks.loops_rivals import (
    CHECKPOINTS,
    MOST_EXACT,
    SIZES,
    TRIPS,
    Loop,
    arrays,
    exact_difference,
    gradient,
    ours,
    table_of,
    timed,
)
from benchmarks.measure import memory_of, time_for

MOST_FORWARD = 1.02
SCAN_LENGTH = 10_000


@dataclass(frozen=True)
class Masked:
    """Our loop beside a masked scan, and one whose body is under `jax.checkpoint`: seconds and bytes of each.

    `difference` is that of the gradients in float64.
    """

    floats: int
    length: int
    trips: int
    seconds: dict[str, float]
    temp_bytes: dict[str, int]
    difference: float

    @property
    def is_reached(self) -> bool:
        """Whether the gradients are equal; for time and bytes nothing is asked."""
        return self.difference <= MOST_EXACT


@dataclass(frozen=True)
class Flat:
    """Our bytes with so many checkpoints, by trips."""

    floats: int
    checkpoints: int
    temp_bytes: dict[int, int]

    @property
    def is_reached(self) -> bool:
        """Whether they do not depend on the trips."""
        return len(set(self.temp_bytes.values())) == 1


@dataclass(frozen=True)
class Forward:
    """Seconds where nothing is differentiated, and whether XLA compiled the same instructions."""

    floats: int
    trips: int
    ours_s: float
    plain_s: float
    is_same_program: bool

    @property
    def is_reached(self) -> bool:
        """Whether the program is the same, or takes at most 2 % more."""
        return self.is_same_program or self.ours_s <= MOST_FORWARD * self.plain_s


def masked_scan(length: int, is_again: bool) -> Loop:
    """A loop of a fixed number of steps, of which those behind the last trip change nothing."""

    def loop(cond: Callable[[Any], Any], body: Callable[[Any], Any], init: Any) -> Any:
        def step(carry: Any, _: None) -> tuple[Any, None]:
            lives = cond(carry)
            return jax.tree.map(lambda new, old: jnp.where(lives, new, old), body(carry), carry), None

        return lax.scan(jax.checkpoint(step) if is_again else step, init, length=length)[0]

    return loop


def masked(floats: int, trips: int, seconds: float) -> Masked:
    """Compare with masked scans for one size and number of trips."""
    named = {
        "ours": ours(100), "scan": masked_scan(SCAN_LENGTH, False), "checkpointed scan": masked_scan(SCAN_LENGTH, True)
    }  # fmt: skip
    arguments = (*arrays(floats), trips)
    programs = {name: gradient(loop).lower(*arguments).compile() for name, loop in named.items()}
    times = time_for([partial(program, *arguments) for program in programs.values()], seconds)
    return Masked(
        floats, SCAN_LENGTH, trips, dict(zip(programs, times, strict=True)),
        {name: memory_of(program).temp for name, program in programs.items()},
        exact_difference(named["ours"], named["scan"], floats, trips),
    )  # fmt: skip


def scans(quick: bool) -> list[Masked]:
    """All comparisons with masked scans."""
    return [masked(n, t, 0.3 if quick else 2.0) for n in SIZES[:2] for t in (10, 100, 1_000, SCAN_LENGTH)]


def flats(quick: bool) -> list[Flat]:
    """Our bytes by trips that the program knows, for each number of checkpoints."""

    def size(floats: int, checkpoints: int, trips: int) -> int:
        known = jax.jit(partial(gradient(ours(checkpoints)), trips=trips))
        return memory_of(known.lower(*arrays(floats)).compile()).temp

    longer = TRIPS[1:3] if quick else TRIPS[1:]
    return [Flat(n, k, {t: size(n, k, t) for t in longer}) for n in SIZES for k in CHECKPOINTS]


def forward(floats: int, trips: int, seconds: float) -> Forward:
    """Compare with `lax.while_loop`."""
    x, _ = arrays(floats)

    def compiled(loop: Loop) -> Compiled:
        def run(x: Array, trips: Array) -> Array:
            return loop(lambda c: c[0] < trips, lambda c: (c[0] + 1, jnp.sin(c[1])), (jnp.int32(0), x))[1]

        return jax.jit(run).lower(x, trips).compile()

    mine, plain = compiled(ours("stack", trips)), compiled(lax.while_loop)
    times = timed(partial(mine, x, trips), partial(plain, x, trips), seconds, MOST_FORWARD)
    return Forward(floats, trips, *times, instructions(mine) == instructions(plain))


def instructions(program: Compiled) -> str:
    """The text of a compiled program without where its instructions come from."""
    text = re.sub(r",? *metadata=\{[^}]*\}", "", program.as_text())
    return "\n".join(line for line in text.splitlines() if line.startswith((" ", "%", "ENTRY", "}")))


def forwards(quick: bool) -> list[Forward]:
    """All comparisons with `lax.while_loop`."""
    cases = [(10, 10_000), (1_000, 1_000), (262_144, 10)]
    return [forward(*case, 0.5 if quick else 5.0) for case in cases]


def masked_table(rows: list[Masked]) -> Table:
    """A line for each comparison with masked scans."""
    names = list(rows[0].seconds) if rows else []
    headings = [f"{name} {unit}" for unit in ("ms", "kB") for name in names]
    table = table_of(f"Beside a masked lax.scan of {SCAN_LENGTH:,} steps", "floats", ("trips", *headings, "gradients"))
    for r in rows:
        times = (f"{1e3 * s:.3f}" for s in r.seconds.values())
        sizes = (f"{b / 1e3:,.1f}" for b in r.temp_bytes.values())
        cells = (f"{r.floats:,}", f"{r.trips:,}", *times, *sizes, f"{r.difference:.0e}")
        table.add_row(*cells, style=None if r.is_reached else "red")
    return table


def flat_table(rows: list[Flat]) -> Table:
    """A line for each number of checkpoints."""
    longer = list(rows[0].temp_bytes) if rows else []
    table = table_of("Temporary bytes by trips", "floats", ("checkpoints", *(f"{t:,} trips" for t in longer)))
    for r in rows:
        sizes = (f"{b:,}" for b in r.temp_bytes.values())
        table.add_row(f"{r.floats:,}", f"{r.checkpoints}", *sizes, style=None if r.is_reached else "red")
    return table


def forward_table(rows: list[Forward]) -> Table:
    """A line for each comparison with `lax.while_loop`."""
    headings = ("trips", "ms", "lax.while_loop ms", "time", "same instructions")
    table = table_of('memory="stack", nothing differentiated', "floats", headings)
    for r in rows:
        cells = (
            f"{r.floats:,}", f"{r.trips:,}", f"{1e3 * r.ours_s:.3f}", f"{1e3 * r.plain_s:.3f}",
            f"{r.ours_s / r.plain_s:.3f}x", "yes" if r.is_same_program else "no",
        )  # fmt: skip
        table.add_row(*cells, style=None if r.is_reached else "red")
    return table
