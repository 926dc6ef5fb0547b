"""Differentiate adaptive ODE solves that step in a plain `lax.while_loop`, beside finite differences and Diffrax.

    python -m benchmarks.loops ode

The solver is the method of Dormand and Prince of order 5(4) (Hairer, Nørsett and Wanner, "Solving Ordinary Differential
Equations I", section II.5) in float64. JAX refuses to differentiate it; `aot.function` does, and its gradient knows how
the steps depend on the inputs. It is compared with central differences of the same program. Beside it the loop is
`aot.while_loop`, with as many checkpoints as Diffrax's default for 4,096 steps.

Diffrax solves the same problems by its method of the same name with its default adjoint, as many checkpoints, and the
same tolerances, controller, first step and end. It takes the lengths of steps for given, so the gradients may differ by
what the tolerance leaves open.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from rich import box
from rich.table import Table

from benchmarks.measure import memory_of, time_together
from jointcut import aot

TOLERANCE, FIRST_STEP = 1e-9, 1e-2
SAFETY, LEAST_FACTOR, MOST_FACTOR = 0.9, 0.2, 10.0
MOST_ERROR = 1e-6  # of a derivative, relative to finite differences
MOST_STEPS, CHECKPOINTS = 4096, 90  # of Diffrax, and of our loop beside it

# Each row has the weights of the slopes before it; by the last one the solution goes on.
WEIGHTS = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
ERRORS = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)

Field = Callable[[Array], Array]
Loop = Callable[[Callable[..., Any], Callable[..., Any], Any], Any]


class Progress(NamedTuple):
    """How far a solve has come: the time, the step that is tried next, the solution and its slope, the tries so far."""

    time: Array
    step: Array
    y: Array
    slope: Array
    tries: Array


@dataclass(frozen=True)
class Problem:
    """A loss of the solution at `end`: `field(parameters)` makes the slope, `start(parameters)` the first state."""

    name: str
    field: Callable[[Any], Field]
    start: Callable[[Any], Array]
    loss: Callable[[Array], Array]
    parameters: Any
    end: float


@dataclass(frozen=True)
class Row:
    """The figures of one problem.

    Attributes:
        name: of the problem.
        loop: that steps: "plain" or "ours".
        inputs: numbers that are differentiated with respect to.
        tries: trips of our stepping loop.
        differences_error: of our derivatives in some directions, relative to central differences.
        diffrax_difference: largest difference of our gradient from Diffrax's, relative to its largest entry; None
            without Diffrax, like what follows.
        diffrax_tries: trips of Diffrax's loop.
        temp_bytes, diffrax_temp_bytes: XLA's temporaries of value and gradient.
        seconds, diffrax_seconds: the median of runs that take turns.
        compile_s, diffrax_compile_s: from the function to the compiled program.
    """

    name: str
    loop: str
    inputs: int
    tries: int
    differences_error: float
    temp_bytes: int
    seconds: float
    compile_s: float
    diffrax_difference: float | None = None
    diffrax_tries: int | None = None
    diffrax_temp_bytes: int | None = None
    diffrax_seconds: float | None = None
    diffrax_compile_s: float | None = None

    @property
    def is_reached(self) -> bool:
        """Whether the gradient is that of finite differences."""
        return self.differences_error <= MOST_ERROR


def solved(
    field: Field, start: Array, end: float, loop: Loop = lax.while_loop, tolerance: float = TOLERANCE
) -> Progress:
    """The solution at `end`, by steps whose error stays within the tolerance, both relative and absolute."""

    def step(s: Progress) -> Progress:
        size = jnp.minimum(s.step, end - s.time)
        new, slopes = s.y, [s.slope]
        for weights in WEIGHTS:
            new = s.y + size * weighted(weights, slopes)
            slopes.append(field(new))
        scale = tolerance + tolerance * jnp.maximum(jnp.abs(s.y), jnp.abs(new))
        square = jnp.mean((size * weighted(ERRORS, slopes) / scale) ** 2)
        is_kept = square <= 1
        least = jnp.where(is_kept, 1.0, LEAST_FACTOR)
        factor = jnp.clip(SAFETY * jnp.maximum(square, 1e-30) ** -0.1, least, MOST_FACTOR)
        time, y, slope = (
            jnp.where(is_kept, a, b) for a, b in ((s.time + size, s.time), (new, s.y), (slopes[-1], s.slope))
        )
        return Progress(jnp.where(is_kept & (size < s.step), end, time), size * factor, y, slope, s.tries + 1)

    first = Progress(jnp.zeros(()), jnp.asarray(FIRST_STEP), start, field(start), jnp.int32(0))
    return loop(lambda s: s.time < end, step, first)


def weighted(weights: tuple[float, ...], slopes: list[Array]) -> Array:
    """The weighted sum of slopes."""
    return sum((w * k for w, k in zip(weights, slopes, strict=True) if w), jnp.zeros_like(slopes[0]))


def loss_of(problem: Problem, parameters: Any, loop: Loop = lax.while_loop) -> Array:
    """The loss of a problem by our solver."""
    return problem.loss(solved(problem.field(parameters), problem.start(parameters), problem.end, loop).y)


def orbit() -> Problem:
    """A body that goes round another twice, on an ellipse of eccentricity 0.5; loss: where it is in the end."""

    def field(parameters: Any) -> Field:
        def slope(y: Array) -> Array:
            place, speed = y[:2], y[2:]
            return jnp.concatenate([speed, -parameters["mass"] * place / jnp.sum(place**2) ** 1.5])

        return slope

    parameters = {"start": jnp.array([0.5, 0.0, 0.0, 3.0**0.5]), "mass": jnp.asarray(1.0)}
    return Problem(
        "two-body orbit", field, lambda p: p["start"], lambda y: y[0] + 0.5 * y[1] ** 2 + y[2] * y[3], parameters,
        4 * np.pi,
    )  # fmt: skip


def neural(width: int = 32, batch: int = 64) -> Problem:
    """A neural ODE: states that follow a network of two layers; loss: how far they end from a circle."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (2, width), (width, width), (width, 2)
    parameters = [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, shapes, strict=False)]
    start = jax.random.normal(keys[3], (batch, 2))

    def field(weights: Any) -> Field:
        return lambda y: jnp.tanh(jnp.tanh(y @ weights[0]) @ weights[1]) @ weights[2]

    def loss(y: Array) -> Array:
        return jnp.mean((jnp.sum(y**2, 1) - 1) ** 2)

    return Problem("neural ODE", field, lambda _: start, loss, parameters, 5.0)


PROBLEMS = (orbit, neural)


def differences_error(function: Callable[[Any], Array], x: Any, gradient: Any, directions: int = 5) -> float:
    """The largest relative error of derivatives in random directions, against central differences of fourth order."""
    flat, build = ravel_pytree(x)
    slope, _ = ravel_pytree(gradient)
    run = jax.jit(lambda v: function(build(v)))
    random = np.random.default_rng(0)
    errors = []
    for _ in range(directions):
        way = random.standard_normal(flat.size)
        far = 1e-5 * way / np.linalg.norm(way)
        near, farther = (float(run(flat + k * far) - run(flat - k * far)) for k in (1, 2))
        want, got = (8 * near - farther) / 12, float(slope @ far)
        errors.append(abs(got - want) / abs(want))
    return max(errors)


def by_diffrax(problem: Problem, parameters: Any) -> tuple[Array, Array]:
    """The loss of a problem by Diffrax's solver, and how many steps it tried."""
    import diffrax

    found = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: problem.field(args)(y)), diffrax.Dopri5(), 0.0, problem.end, FIRST_STEP,
        problem.start(parameters), parameters, max_steps=MOST_STEPS,
        adjoint=diffrax.RecursiveCheckpointAdjoint(checkpoints=CHECKPOINTS),
        stepsize_controller=diffrax.PIDController(
            rtol=TOLERANCE, atol=TOLERANCE, safety=SAFETY, factormin=LEAST_FACTOR, factormax=MOST_FACTOR
        ),
    )  # fmt: skip
    assert found.ys is not None
    return problem.loss(found.ys[-1]), found.stats["num_steps"]


def measure(problem: Problem, rounds: int) -> list[Row]:
    """The figures of one problem: with a plain loop, and with ours."""
    x = problem.parameters
    ours = partial(aot.while_loop, memory=CHECKPOINTS)
    losses = {"plain": partial(loss_of, problem), "ours": partial(loss_of, problem, loop=ours)}
    runs, compile_s = {}, {}
    for name, loss in losses.items():
        start = time.perf_counter()
        runs[name] = aot.function(loss).trace(x).partition().compile()
        compile_s[name] = time.perf_counter() - start
    calls: dict[str, Callable[[], Any]] = {name: partial(run.value_and_grad, x) for name, run in runs.items()}
    theirs: dict[str, Any] = {}
    if find_spec("diffrax"):
        start = time.perf_counter()
        program = jax.jit(jax.value_and_grad(partial(by_diffrax, problem), has_aux=True)).lower(x).compile()
        theirs |= {"diffrax_compile_s": time.perf_counter() - start, "diffrax_temp_bytes": memory_of(program).temp}
        calls["diffrax"] = partial(program, x)
        (_, tries), gradient = program(x)
        theirs["diffrax_tries"] = int(tries)
    seconds = {name: timing.seconds.median for name, timing in time_together(calls, "plain", rounds).items()}
    tries = int(jax.jit(lambda p: solved(problem.field(p), problem.start(p), problem.end).tries)(x))
    found = []
    for name, run in runs.items():
        got = run.value_and_grad(x)[1]
        if theirs:
            theirs |= {"diffrax_difference": relative(got, gradient), "diffrax_seconds": seconds["diffrax"]}
        error = differences_error(losses["plain"], x, got)
        figures = ravel_pytree(x)[0].size, tries, error, run.memory.step.temp_bytes, seconds[name], compile_s[name]
        found.append(Row(problem.name, name, *figures, **theirs))
    return found


def relative(tree: Any, other: Any) -> float:
    """The largest difference of two trees, relative to the largest entry of the second."""
    flat, other_flat = ravel_pytree(tree)[0], ravel_pytree(other)[0]
    return float(jnp.max(jnp.abs(flat - other_flat)) / jnp.max(jnp.abs(other_flat)))


def rows(is_quick: bool) -> list[Row]:
    """The figures of all problems, in float64."""
    with jax.enable_x64(True):
        return [row for problem in PROBLEMS for row in measure(problem(), 5 if is_quick else 25)]


def table_of(rows: list[Row]) -> Table:
    """A line for each problem and loop; a difference is relative to finite differences, and to Diffrax's gradient."""
    title = f"Dormand–Prince steps in float64, tolerance {TOLERANCE:g}; aot.while_loop has {CHECKPOINTS} checkpoints"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("problem", "loop"):
        table.add_column(heading, no_wrap=True)
    for heading in ("inputs", "tries", "off differences", "off Diffrax", "kB", "Diffrax", "ms", "Diffrax", "compile s"):
        table.add_column(heading, justify="right")
    for r in rows:
        loop = "lax.while_loop" if r.loop == "plain" else "aot.while_loop"
        ours = f"{r.tries:,}", f"{r.temp_bytes / 1e3:,.1f}", f"{1e3 * r.seconds:.2f}", f"{r.compile_s:.1f}"
        theirs = ("—",) * 5
        if r.diffrax_temp_bytes is not None and r.diffrax_seconds is not None:
            theirs = (
                f"{r.diffrax_tries:,}", f"{r.diffrax_difference:.0e}", f"{r.diffrax_temp_bytes / 1e3:,.1f}",
                f"{1e3 * r.diffrax_seconds:.2f}", f"{r.diffrax_compile_s:.1f}",
            )  # fmt: skip
        cells = (
            r.name, loop, f"{r.inputs:,}", f"{ours[0]} / {theirs[0]}", f"{r.differences_error:.0e}", theirs[1], ours[1],
            theirs[2], ours[2], theirs[3], f"{ours[3]} / {theirs[4]}",
        )  # fmt: skip
        table.add_row(*cells, style=None if r.is_reached else "red")
    return table
