"""Weigh and time the gradient of one loop, by ours and by Equinox's, at equal checkpoints.

    python -m benchmarks.loops equinox gradients

Equinox's "checkpointed" loop takes their number. Its "bounded" loop is scans in scans: with base `b`, each level keeps
`b` carries, so with 16 (its default) it is compared with 16 times as many of our checkpoints as it has levels, and with
one level of all trips it is compared with `memory="stack"`. The innermost level also keeps what the pullback of a step
reads, for which ours runs that step again.

All programs have the same body. Bytes are XLA's temporaries. Times are medians of runs that take turns; a row that is
slower than the other is measured four times more, and the median of the five counts. A callback in the body counts the
steps that ran again, also those that ran for their pullback, up to 1,000 trips. Gradients are compared in float64: in
float32 sums over many steps are rounded, in an order that differs.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.measure import Call, memory_of, time_for
from jointcut import aot
from jointcut.aot.loops.sweep.placing import placed
from jointcut.aot.loops.sweep.sweeping import swept

SIZES = (10, 1_000, 262_144)  # floats of the carry
TRIPS = (10, 100, 1_000, 10_000, 100_000)
CHECKPOINTS = (10, 100)
BASE = 16  # of Equinox's bounded loop
MOST_FLOATS = 500_000_000  # of a row: the size times the trips
MOST_COUNTED = 1_000  # trips
MOST_EXACT = 1e-11  # of gradients in float64

Loop = Callable[[Callable[[Any], Any], Callable[[Any], Any], Any], Any]


@dataclass(frozen=True)
class Pair:
    """Two ways to run a loop, at equal checkpoints: `kind` names theirs."""

    kind: str
    checkpoints: int
    ours: Loop
    theirs: Loop


@dataclass(frozen=True)
class Rivalry:
    """One comparison: seconds, bytes and repeated steps of ours and of theirs; None where steps were not counted.

    `difference` is that of the gradients in float32.
    """

    kind: str
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
    def misses(self) -> list[str]:
        """What ours takes more of."""
        more = {
            "time": self.ours_s > self.theirs_s,
            "bytes": self.ours_bytes > self.theirs_bytes,
            "steps": (self.ours_again or 0) > (self.theirs_again or 0),
        }
        return [name for name, on in more.items() if on]

    @property
    def is_reached(self) -> bool:
        """Whether ours takes no more of anything."""
        return not self.misses


@dataclass(frozen=True)
class Gradients:
    """The largest relative difference of two gradients in float64."""

    kind: str
    trips: int
    checkpoints: int
    difference: float

    @property
    def is_reached(self) -> bool:
        """Whether they are equal but for rounding."""
        return self.difference <= MOST_EXACT


def ours(memory: int | str, max_trips: int | None = None) -> Loop:
    """Our loop with so many checkpoints."""
    return partial(aot.while_loop, memory=memory, max_trips=max_trips)


def theirs(kind: str, **options: int) -> Loop:
    """Equinox's loop."""
    import equinox.internal as eqxi

    return lambda cond, body, init: eqxi.while_loop(cond, body, init, kind=kind, **options)


def loops(trips: int) -> Iterator[Pair]:
    """All pairs for a loop that makes at most so many trips."""
    for k in CHECKPOINTS:
        yield Pair("checkpointed", k, ours(k), theirs("checkpointed", checkpoints=k))
    levels = next(n for n in range(1, 100) if BASE**n >= trips)
    k = min(BASE * levels, trips)
    yield Pair(f"bounded, base {BASE}", k, ours(k), theirs("bounded", max_steps=trips, base=BASE))
    stack = ours("stack", trips)
    yield Pair("bounded, one level", trips, stack, theirs("bounded", max_steps=trips, base=trips))


def gradient(loop: Loop, told: Callable[[], None] | None = None) -> Callable[..., Any]:
    """The gradient of a loop with respect to its first carry and to what its body closes over."""

    def loss(x: Array, w: Array, trips: Array) -> Array:
        def body(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            i, y = carry
            if told is not None:
                jax.debug.callback(told)
            return i + 1, jnp.sin(y * w) + 0.1 * y

        return loop(lambda c: c[0] < trips, body, (jnp.int32(0), x))[1].sum()

    return jax.jit(jax.grad(loss, (0, 1)))


def arrays(floats: int) -> tuple[Array, Array]:
    """The first carry and what the body closes over."""
    return jnp.linspace(0.1, 1.0, floats), jnp.linspace(0.5, 1.1, floats)


def difference(first: Any, second: Any) -> float:
    """The largest difference of two trees, relative to the largest entry of each array."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return max(float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(b))), 1e-30)) for a, b in pairs)


def timed(first: Call, second: Call, seconds: float, most: float = 1.0) -> tuple[float, float]:
    """The median seconds of two calls; where the first takes more than `most` of the second, of five measurements."""
    found = [time_for((first, second), seconds)]
    if found[0][0] > most * found[0][1]:
        found += [time_for((first, second), seconds) for _ in range(4)]
    ratio = statistics.median(a / b for a, b in found)
    other = statistics.median(b for _, b in found)
    return ratio * other, other


def repeated(loop: Loop, trips: int) -> int:
    """How many steps run beside the forward, those for pullbacks among them."""
    ran: list[int] = []
    x, w = arrays(4)
    jax.block_until_ready(gradient(loop, lambda: ran.append(1))(x, w, trips))
    jax.effects_barrier()
    return len(ran) - trips


@cache
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
    return len(ran) + trips


def rivalry(pair: Pair, floats: int, trips: int, again: tuple[int | None, int | None], seconds: float) -> Rivalry:
    """Compare with Equinox for one size and number of trips."""
    arguments = (*arrays(floats), trips)
    programs = [gradient(loop).lower(*arguments).compile() for loop in (pair.ours, pair.theirs)]
    results = [jax.tree.map(np.asarray, program(*arguments)) for program in programs]
    mine, other = timed(*(partial(program, *arguments) for program in programs), seconds)
    sizes = [memory_of(program).temp for program in programs]
    return Rivalry(pair.kind, floats, trips, pair.checkpoints, mine, other, *sizes, *again, difference(*results))


def rivalries(quick: bool) -> list[Rivalry]:
    """All comparisons with Equinox."""
    wanted = [(t, pair) for t in TRIPS if t <= (MOST_COUNTED if quick else max(TRIPS)) for pair in loops(t)]
    found = []
    for trips, pair in tqdm(wanted, desc="equinox"):
        again = (None, None)
        if trips <= MOST_COUNTED:
            again = counted(pair.checkpoints, trips), repeated(pair.theirs, trips)
        sizes = [n for n in SIZES if n * trips <= MOST_FLOATS]
        found += [rivalry(pair, floats, trips, again, 0.3 if quick else 1.0) for floats in sizes]
    return sorted(found, key=lambda r: (r.kind, r.checkpoints if r.kind == "checkpointed" else 0, r.floats, r.trips))


def exact_difference(first: Loop, second: Loop, floats: int, trips: int) -> float:
    """The largest relative difference of the gradients of two loops in float64."""
    with jax.enable_x64(True):
        arguments = (*arrays(floats), trips)
        return difference(*(jax.tree.map(np.asarray, gradient(loop)(*arguments)) for loop in (first, second)))


def gradients(quick: bool) -> list[Gradients]:
    """All comparisons of gradients with Equinox."""
    wanted = [(t, pair) for t in TRIPS if t <= (MOST_COUNTED if quick else max(TRIPS)) for pair in loops(t)]
    found = [
        Gradients(pair.kind, t, pair.checkpoints, exact_difference(pair.ours, pair.theirs, SIZES[0], t))
        for t, pair in tqdm(wanted, desc="gradients")
    ]
    return sorted(found, key=lambda r: (r.kind, r.trips, r.checkpoints))


def rivalry_table(rows: list[Rivalry]) -> Table:
    """A line for each comparison with Equinox; the last column tells what ours takes more of."""
    headings = ("floats", "trips", "checkpoints", "ms", "Equinox ms", "time", "bytes", "÷ Equinox")
    table = table_of("Beside Equinox's loops", "Equinox's kind", (*headings, "steps again", "gradients", "more"))
    for r in rows:
        again = "" if r.ours_again is None else f"{r.ours_again:,} / {r.theirs_again:,}"
        cells = (
            r.kind, f"{r.floats:,}", f"{r.trips:,}", f"{r.checkpoints:,}", f"{1e3 * r.ours_s:.3f}",
            f"{1e3 * r.theirs_s:.3f}", f"{r.ours_s / r.theirs_s:.2f}x", f"{r.ours_bytes:,}",
            f"{r.ours_bytes / r.theirs_bytes:.3f}x", again, f"{r.difference:.0e}", ", ".join(r.misses),
        )  # fmt: skip
        table.add_row(*cells, style=None if r.is_reached else "red")
    return table


def gradients_table(rows: list[Gradients]) -> Table:
    """A line for each comparison of gradients."""
    table = table_of("Gradients in float64, beside Equinox's", "Equinox's kind", ("trips", "checkpoints", "differ by"))
    for r in rows:
        cells = r.kind, f"{r.trips:,}", f"{r.checkpoints:,}", f"{r.difference:.0e}"
        table.add_row(*cells, style=None if r.is_reached else "red")
    return table


def table_of(title: str, first: str, others: tuple[str, ...]) -> Table:
    """An empty table whose columns but the first are numbers."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right")
    return table
