"""Say what `derivatives="finite"` gives and costs: `python -m benchmarks.derivatives.finite [PROGRAM ...]`.

First the functions of `guards`: how many have the gradient of the double `where`, with JAX's derivatives and with
finite ones. Then those of `singular`: how many have the right gradient at their singular point, and which have not.
Then the programs of the suite, compiled with both by the default plan: peak by XLA's account, time as the median ratio
of runs in turn, and whether the gradients have the same bits. Where they have not, try it with
`XLA_FLAGS=--xla_cpu_max_isa=AVX`, which leaves XLA no instruction that multiplies and adds with one rounding.
"""

from __future__ import annotations

import argparse
from functools import partial

import jax
import numpy as np
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks import programs
from benchmarks.derivatives.guards import GUARDS, Guard
from benchmarks.derivatives.singular import SINGULAR, Singular
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
    for kind in KINDS:
        wrong = [singular.name for singular in SINGULAR if not is_right_at(singular, kind)]
        names = f"; not: {', '.join(wrong)}" if kind == "finite" else ""
        console.print(f"{len(SINGULAR) - len(wrong)} of {len(SINGULAR)} singular points have it: {kind}{names}")
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


def is_right_at(singular: Singular, kind: str) -> bool:
    """Whether a function has the right gradient at its singular point."""
    try:
        got = aot.function(singular.function, derivatives=kind).grad(singular.at)
    except NotImplementedError:  # JAX has no derivative
        return False
    return bool(np.allclose(got, singular.gradient, rtol=2e-5, atol=1e-6))


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
