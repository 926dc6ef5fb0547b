"""Compare `aot.while_loop` with Equinox's checkpointed loop, and with `lax.while_loop` where nothing is differentiated.

    python -m benchmarks.loops             # all rows, a quarter of an hour on two cores
    python -m benchmarks.loops --quick     # at most 1,000 trips, two minutes

All programs have the same body, the same number of checkpoints and the same trips, which they get as an argument. A row
has the time of a gradient (the median of pairs that take turns), XLA's temporary bytes, the largest difference of the
gradients, and how many steps ran again, which a callback in the body counts up to 1,000 trips. The figures go to
`benchmarks/results/loops.json`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.measure import machine, wide_console
from jointcut import aot
from jointcut.aot.loops.sweep.placing import placed
from jointcut.aot.loops.sweep.sweeping import swept

RESULTS = Path(__file__).parent / "results" / "loops.json"
SIZES = (10, 1_000, 262_144)  # floats of the carry
TRIPS = (10, 100, 1_000, 10_000, 100_000)
CHECKPOINTS = (10, 100)
MOST_FLOATS = 500_000_000  # of a row: the size times the trips
MOST_COUNTED = 1_000  # trips

Loop = Callable[[Callable[[Any], Any], Callable[[Any], Any], Any, int], Any]


@dataclass(frozen=True)
class Row:
    """One comparison: seconds, bytes and repeated steps of ours and of theirs; None where steps were not counted."""

    floats: int
    trips: int
    checkpoints: int
    ours_s: float
    theirs_s: float
    ours_bytes: int
    theirs_bytes: int
    ours_again: int | None
    theirs_again: int | None
    difference: float

    @property
    def is_reached(self) -> bool:
        """Whether ours takes no more of anything."""
        again = self.ours_again is None or self.theirs_again is None or self.ours_again <= self.theirs_again
        return again and self.ours_s <= self.theirs_s and self.ours_bytes <= self.theirs_bytes


def ours(cond: Callable[[Any], Any], body: Callable[[Any], Any], init: Any, checkpoints: int) -> Any:
    """Our loop."""
    return aot.while_loop(cond, body, init, memory=checkpoints)


def theirs(cond: Callable[[Any], Any], body: Callable[[Any], Any], init: Any, checkpoints: int) -> Any:
    """Equinox's loop."""
    return eqxi.while_loop(cond, body, init, kind="checkpointed", checkpoints=checkpoints)


def gradient(loop: Loop, checkpoints: int, told: Callable[[], None] | None = None) -> Callable[..., Any]:
    """The gradient of a loop with respect to its first carry and to what its body closes over."""

    def loss(x: Array, w: Array, trips: Array) -> Array:
        def body(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            i, y = carry
            if told is not None:
                jax.debug.callback(told)
            return i + 1, jnp.sin(y * w) + 0.1 * y

        return loop(lambda c: c[0] < trips, body, (jnp.int32(0), x), checkpoints)[1].sum()

    return jax.jit(jax.grad(loss, (0, 1)))


def pairs(first: Callable[[], Any], second: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """The median times of two calls that take turns for so many seconds, three turns at least."""
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for call, into in zip((first, second), times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            into.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def repeated(loop: Loop, checkpoints: int, trips: int) -> int:
    """How many steps run again, beside the forward and one for each step that is pulled back."""
    ran: list[int] = []
    x = jnp.linspace(0.1, 1.0, 4)
    jax.block_until_ready(gradient(loop, checkpoints, lambda: ran.append(1))(x, x, trips))
    jax.effects_barrier()
    return len(ran) - 2 * trips


def counted(checkpoints: int, trips: int) -> int:
    """As `repeated` for our loop, whose body is silent where it runs again: the steps of the sweep are counted."""
    ran: list[int] = []

    def step(_: Any, kept: list[Any]) -> list[Any]:
        jax.debug.callback(lambda: ran.append(1))
        return [kept[0] + 1]

    def run(trips: Array) -> Array:
        _, points = placed(lambda c: c[0] < trips, lambda c: [c[0] + 1], [jnp.int32(0)], [0], checkpoints)
        return swept(step, lambda _, kept, total: total + kept[0], points, jnp.int32(0))

    jax.block_until_ready(jax.jit(run)(jnp.int32(trips)))
    jax.effects_barrier()
    return len(ran)


def row(floats: int, trips: int, checkpoints: int, seconds: float) -> Row:
    """Measure one row."""
    x, w = jnp.linspace(0.1, 1.0, floats), jnp.linspace(0.5, 1.1, floats)
    programs = [gradient(loop, checkpoints).lower(x, w, trips).compile() for loop in (ours, theirs)]
    results = [jax.tree.map(np.asarray, program(x, w, trips)) for program in programs]
    difference = max(
        float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(b))), 1e-30)) for a, b in zip(*results, strict=True)
    )
    mine, other = pairs(lambda: programs[0](x, w, trips), lambda: programs[1](x, w, trips), seconds)
    sizes = [program.memory_analysis().temp_size_in_bytes for program in programs]
    again = (
        (counted(checkpoints, trips), repeated(theirs, checkpoints, trips)) if trips <= MOST_COUNTED else (None, None)
    )
    return Row(floats, trips, checkpoints, mine, other, *sizes, *again, difference)


def forward(trips: int, seconds: float) -> tuple[float, float]:
    """Times of our loop and of `lax.while_loop` where nothing is differentiated."""
    x = jnp.linspace(0.1, 1.0, 1_000)

    def program(loop: Callable[..., Any]) -> Callable[[], Any]:
        def run(x: Array, trips: Array) -> Array:
            return loop(lambda c: c[0] < trips, lambda c: (c[0] + 1, jnp.sin(c[1])), (jnp.int32(0), x))[1]

        compiled = jax.jit(run).lower(x, trips).compile()
        return lambda: compiled(x, trips)

    return pairs(program(aot.while_loop), program(jax.lax.while_loop), seconds)


def table(rows: list[Row]) -> Table:
    """The rows for a terminal."""
    made = Table(box=box.SIMPLE_HEAD)
    for name in ("floats", "trips", "checkpoints", "ms", "Equinox ms", "time", "temporaries", "again", "gradients"):
        made.add_column(name, justify="right")
    for r in rows:
        again = "" if r.ours_again is None else f"{r.ours_again:,} / {r.theirs_again:,}"
        cells = (
            f"{r.floats:,}", f"{r.trips:,}", f"{r.checkpoints}", f"{1e3 * r.ours_s:.3f}", f"{1e3 * r.theirs_s:.3f}",
            f"{r.ours_s / r.theirs_s:.2f}x", f"{r.ours_bytes / r.theirs_bytes:.3f}x", again, f"{r.difference:.0e}",
        )  # fmt: skip
        made.add_row(*cells, style=None if r.is_reached else "red")
    return made


def main() -> None:
    """Measure all rows, print them and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most 1,000 trips")
    quick = parser.parse_args().quick
    most, seconds = (1_000, 0.3) if quick else (max(TRIPS), 1.5)
    wanted = [
        (floats, trips, checkpoints)
        for floats in SIZES
        for trips in TRIPS
        for checkpoints in CHECKPOINTS
        if trips <= most and floats * trips <= MOST_FLOATS
    ]
    rows = [row(*case, seconds) for case in tqdm(wanted)]
    console = wide_console(120)
    console.print(table(rows))
    mine, plain = forward(10_000, 4 * seconds)
    console.print(f"nothing differentiated: {mine / plain:.3f}x of lax.while_loop")
    reached = sum(r.is_reached for r in rows)
    console.print(f"{reached} of {len(rows)} rows take no more time, bytes and steps than Equinox")
    for k in CHECKPOINTS:
        flat = sorted({(r.trips, r.ours_bytes) for r in rows if r.floats == SIZES[0] and r.checkpoints == k})
        console.print(f"{k} checkpoints of {SIZES[0]} floats: " + ", ".join(f"{b:,} B at {t:,} trips" for t, b in flat))
    if not quick:
        found = {"machine": machine(), "forward": mine / plain, "rows": [asdict(r) for r in rows]}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
