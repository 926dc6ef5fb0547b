"""Say what `check="nonfinite"` costs: `python -m benchmarks.derivatives.checked [PROGRAM ...]`.

Each program of the suite takes steps as it is and with the check, in turn: both call `value_and_grad` as a user does,
and wait for all results. Beside them the same test is one reduction inside the step's program. The time of a failed
step is that of one call on which the first parameter is NaN: the replay, half by half, and the search for the op.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks import programs
from benchmarks.measure import Timing, time_together, wide_console
from benchmarks.report import geometric_mean
from jointcut import aot

PROGRAMS = ("mlp", "gpt-scan", "forces")


def main() -> None:
    """Print a row for each program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.derivatives.checked", description=__doc__)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", default=PROGRAMS, help="of the suite (%(default)s)")
    parser.add_argument("--size", choices=programs.SIZES, default="small", help="of the programs (%(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="timing rounds (%(default)s)")
    options = parser.parse_args()
    table = Table(title='check="nonfinite" over no check: median, and the quartiles of the rounds', box=box.SIMPLE_HEAD)
    for heading in ("program", "step", "checked ÷", "quartiles", "inside ÷", "quartiles", "failed step"):
        table.add_column(heading, justify="left" if heading == "program" else "right")
    outside, inside = [], []
    for name in tqdm(options.programs, unit="program", disable=None):
        timings, seconds = beside(programs.load(name, options.size), options.rounds)
        outside.append(timings["checked"].ratio.median)
        inside.append(timings["inside"].ratio.median)
        cells = [cell for kind in ("checked", "inside") for cell in _ratio(timings[kind])]
        table.add_row(name, f"{1e3 * timings['plain'].seconds.median:.2f} ms", *cells, f"{seconds:.1f} s")
    table.add_row("geometric mean", "", f"{geometric_mean(outside):.3f}", "", f"{geometric_mean(inside):.3f}")
    wide_console(100).print(table)


def _ratio(timing: Timing) -> tuple[str, str]:
    return f"{timing.ratio.median:.3f}", f"{timing.ratio.low:.3f}–{timing.ratio.high:.3f}"


def beside(program: programs.Program, rounds: int) -> tuple[dict[str, Timing], float]:
    """The times of a step as it is, checked, and with the reduction inside; and the seconds of a failed step."""
    plain = aot.function(program.loss, has_aux=program.has_aux)
    checked = aot.function(program.loss, has_aux=program.has_aux, check="nonfinite")

    @jax.jit
    def reduced(*arguments: Any) -> tuple[Any, jax.Array]:
        results = plain.value_and_grad(*arguments)
        floats = [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
        return results, jnp.stack([jnp.isfinite(x).all() for x in floats]).all()

    def inside() -> Any:
        results, is_finite = reduced(*program.arguments)
        assert bool(is_finite), "the program is finite"
        return results

    calls = {
        name: partial(f.value_and_grad, *program.arguments) for name, f in (("plain", plain), ("checked", checked))
    }
    timings = time_together({**calls, "inside": inside}, "plain", rounds)
    leaves, tree = jax.tree.flatten(program.arguments)
    place = next(i for i, x in enumerate(leaves) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact))
    leaves[place] = leaves[place] * jnp.nan
    start = time.perf_counter()
    try:
        checked.value_and_grad(*jax.tree.unflatten(tree, leaves))
    except aot.NonFiniteError:
        return timings, time.perf_counter() - start
    raise AssertionError("a parameter that is NaN is an error")


if __name__ == "__main__":
    main()
