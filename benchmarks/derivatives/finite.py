"""Say what `derivatives="finite"` gives and costs: `python -m benchmarks.derivatives.finite [PROGRAM ...]`.

First the functions of `guards`: how many have the gradient of the double `where`, with JAX's derivatives and with
finite ones. Then those of `singular`: how many have the right gradient and tangent at their singular point, and finite
second derivatives, in each order of the two modes; and which have not, with the reason. Then the programs of the suite,
compiled with both by the default plan: peak by XLA's account, time as the median ratio of runs in turn, and whether the
gradients have the same bits. Where they have not, try it with `XLA_FLAGS=--xla_cpu_max_isa=AVX`, which leaves XLA no
instruction that multiplies and adds with one rounding.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks import programs
from benchmarks.derivatives.guards import GUARDS, Guard
from benchmarks.derivatives.singular import SINGULAR, UNKNOWN, Singular
from benchmarks.measure import time_together, wide_console
from benchmarks.report import geometric_mean
from jointcut import aot

KINDS = ("jax", "finite")


def main() -> None:
    """Print the counts, and a row for each program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.derivatives.finite", description=__doc__)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="of the suite; all when none")
    parser.add_argument("--rounds", type=int, default=12, help="timing rounds (%(default)s); none with 0")
    options = parser.parse_args()
    console = wide_console(100)
    for kind in KINDS:
        right = sum(is_right(guard, kind) for guard in GUARDS)
        console.print(f"{right} of {len(GUARDS)} functions guarded by one where have the right gradient: {kind}")
    console.print(at_singular_points())
    table = Table(title="finite over JAX's derivatives", box=box.SIMPLE_HEAD)
    for heading in ("program", "peak ÷", "time ÷", "same bits"):
        table.add_column(heading, justify="left" if heading == "program" else "right")
    peaks, times = [], []
    for name in tqdm(options.programs or list(programs.FOUND_IN), unit="program", disable=None):
        peak, ratio, is_same = beside(name, options.rounds)
        peaks.append(peak)
        times.append(ratio)
        table.add_row(name, f"{peak:.4f}", f"{ratio:.3f}" if ratio else "", "yes" if is_same else "no")
    time = f"{geometric_mean(times):.3f}" if all(times) else ""
    table.add_row("geometric mean", f"{geometric_mean(peaks):.4f}", time, "")
    console.print(table)


def is_right(guard: Guard, kind: str) -> bool:
    """Whether a guarded function has the gradient of the double `where`."""
    got = aot.function(guard.once, derivatives=kind).grad(guard.at)
    return bool(np.allclose(got, jax.grad(guard.twice)(guard.at), rtol=2e-5, atol=1e-6))


def at_singular_points() -> Table:
    """A row for each mode: at how many points the derivative is right, or finite; then the points without, and why."""
    table = Table(title=f"{len(SINGULAR)} singular points, and {len(UNKNOWN)} that are known to have none")
    for heading in ("derivative", *KINDS, "not with finite"):
        table.add_column(heading, justify="right" if heading in KINDS else "left")
    points = (*SINGULAR, *UNKNOWN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", aot.UncutWarning)  # forward mode differentiated again, with JAX's derivatives
        found = {kind: [right_modes(point, kind) for point in tqdm(points, kind, disable=None)] for kind in KINDS}
    for mode in MODES:
        counts = [f"{sum(mode in modes for modes in found[kind])}" for kind in KINDS]
        without = [point.name for point, modes in zip(points, found["finite"], strict=True) if mode not in modes]
        table.add_row(mode, *counts, "; ".join(without))
    table.add_section()
    for point in UNKNOWN:
        table.add_row(point.name, "", "", point.reason)
    return table


def right_modes(singular: Singular, kind: str) -> set[str]:
    """The modes in which a function has the right derivative at its point; a finite one, if it is the second."""
    function = aot.function(singular.function, derivatives=kind)
    along = np.cos(np.arange(singular.at.size, dtype=np.float32)).reshape(singular.at.shape)
    try:
        found = jax.jit(lambda x: {name: mode(function, x, along) for name, mode in MODES.items()})(singular.at)
    except NotImplementedError:  # JAX has no derivative
        return set()
    wanted = {"gradient": singular.gradient, "tangent": np.sum(singular.gradient * along)}
    near = {name for name, want in wanted.items() if np.allclose(found[name], want, rtol=2e-5, atol=1e-6)}
    return near | {name for name, got in found.items() if name not in wanted and np.isfinite(got).all()}


def _tangent(function: Any, x: Any, along: Any) -> Any:
    return jax.jvp(function, (x,), (along,))[1]


MODES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "gradient": lambda f, x, along: jax.grad(f)(x),
    "tangent": _tangent,
    "forward over reverse": lambda f, x, along: jax.jvp(jax.grad(f), (x,), (along,))[1],
    "reverse over reverse": lambda f, x, along: jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), along))(x),
    "reverse over forward": lambda f, x, along: jax.grad(lambda x: _tangent(f, x, along))(x),
    "forward over forward": lambda f, x, along: jax.jvp(lambda x: _tangent(f, x, along), (x,), (along,))[1],
}


def beside(name: str, rounds: int) -> tuple[float, float, bool]:
    """Peak and time of a program with finite derivatives, over those with JAX's; whether all results are the same.

    The time is 0.0 without rounds.
    """
    program = programs.load(name, "small")
    steps = {}
    for kind in KINDS:
        function = aot.function(program.loss, has_aux=program.has_aux, derivatives=kind)
        steps[kind] = function.trace(*program.arguments).partition().compile()
    calls = {kind: partial(step.value_and_grad, *program.arguments) for kind, step in steps.items()}
    results = [jax.tree.leaves(call()) for call in calls.values()]
    is_same = all(np.array_equal(numbers_of(a), numbers_of(b)) for a, b in zip(*results, strict=True))
    time = time_together(calls, "jax", rounds)["finite"].ratio.median if rounds else 0.0
    return steps["finite"].peak_bytes / steps["jax"].peak_bytes, time, is_same


def numbers_of(x: jax.Array) -> np.ndarray:
    """The numbers of an array, or of keys of random numbers."""
    return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


if __name__ == "__main__":
    main()
