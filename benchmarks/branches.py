"""Weigh what the branches of a `lax.switch` keep for the backward, beside JAX and beside the largest branch alone.

    python -m benchmarks.branches

Eight branches of unequal depth and width, once and in a scan whose steps take one each. Then a scan of blocks that each
run or are skipped by a `lax.cond`, by default and within budgets: its temporaries over those of plain JAX. Bytes are
the same on every machine; times are ratios of interleaved paired runs.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from rich import box
from rich.table import Table

from benchmarks.measure import machine, memory_of, time_together, wide_console
from jointcut import aot
from jointcut.partition import Plan, save_all
from jointcut.partition.bodies.read import read

RESULT = Path(__file__).parent / "results" / "branches.json"
WIDTH, ROWS, STEPS = 256, 128, 8
ROUNDS = 15
MOST = 1.05  # of what the largest branch keeps alone


@dataclass(frozen=True)
class Row:
    """One program.

    Attributes:
        name: of the program.
        largest_bytes: residuals of its largest branch alone, cut by us; of all steps where there are several.
        branch_bytes: what all branches keep in our plan.
        jax_branch_bytes: the same in plain JAX.
        temp_bytes, jax_temp_bytes: XLA's temporaries of the whole step.
        time_ratio: seconds of our step over those of plain JAX's, the median of paired runs.
        error: largest difference of the gradients, relative to the largest gradient.
    """

    name: str
    largest_bytes: int
    branch_bytes: int
    jax_branch_bytes: int
    temp_bytes: int
    jax_temp_bytes: int
    time_ratio: float
    error: float

    @property
    def is_reached(self) -> bool:
        """Whether all branches keep about as much as the largest one alone."""
        return self.branch_bytes <= MOST * self.largest_bytes


def branch(layers: int, width: int, x: Array, w: Array) -> Array:
    """So many layers, each with hidden arrays of a width of its own."""
    for _ in range(layers):
        hidden = jnp.sin(x @ w[:, :width]) * jnp.cos(x[:, :width])
        x = jnp.tanh(hidden @ w[:width])
    return x


BRANCHES = tuple(partial(branch, 1 + k // 2, 96 + 20 * k) for k in range(8))


def once(w: Array, x: Array, index: Array) -> Array:
    """One of the branches."""
    return jnp.sum(lax.switch(index, BRANCHES, x, w) ** 2)


def in_a_scan(w: Array, x: Array, indices: Array) -> Array:
    """One of the branches in each step."""

    def step(h: Array, index: Array) -> tuple[Array, None]:
        return lax.switch(index, BRANCHES, h, w), None

    return jnp.sum(lax.scan(step, x, indices)[0] ** 2)


def skipping(weights: tuple[Array, Array], x: Array, flags: Array) -> Array:
    """Blocks of an MLP in a scan, of which those without a flag do something cheap instead."""

    def block(h: Array, up: Array, down: Array) -> Array:
        return h + jnp.tanh(jax.nn.gelu(h @ up) @ down)

    def step(h: Array, each: Any) -> tuple[Array, None]:
        (up, down), flag = each
        return lax.cond(flag, lambda h: block(h, up, down), lambda h: h * jnp.sin(h) + jnp.exp(-h * h), h), None

    return jnp.mean(lax.scan(step, x, (weights, flags))[0] ** 2)


def within_budgets() -> dict[str, float]:
    """Temporaries of `skipping` over plain JAX's: by default, within a quarter, and the least."""
    key = jax.random.key(0)
    shapes = (STEPS, WIDTH, 4 * WIDTH), (STEPS, 4 * WIDTH, WIDTH)
    weights = tuple(0.05 * jax.random.normal(key, shape) for shape in shapes)
    arguments = weights, jax.random.normal(key, (WIDTH, WIDTH)), jnp.arange(STEPS) % 2 == 0
    plain = memory_of(jax.jit(jax.value_and_grad(skipping)).lower(*arguments).compile()).temp
    options: dict[str, dict[str, Any]] = {"default": {}, "budget=0.25": {"budget": 0.25}, "budget=0.0": {"budget": 0.0}}
    steps = {name: aot.function(skipping, **given).trace(*arguments).partition() for name, given in options.items()}
    return {name: cut.compile().activation_bytes / plain for name, cut in steps.items()}


def main() -> None:
    """Measure all programs, print two tables, and keep the figures."""
    found, budgets = rows(), within_budgets()
    figures = {"machine": machine(), "rows": [asdict(row) for row in found], "budgets": budgets}
    RESULT.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    console = wide_console(110)
    console.print(table_of(found))
    console.print("A scan of blocks with a lax.cond in each, temporaries over plain JAX's:")
    console.print("".join(f"  {name}: {share:.2f}\n" for name, share in budgets.items()))


def rows(is_quick: bool = False) -> list[Row]:
    """The figures of both programs."""
    w = 0.05 * jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    rounds = 3 if is_quick else ROUNDS
    return [
        measure("one switch", once, (w, x, jnp.int32(7)), 1, rounds),
        measure(f"a scan of {STEPS} switches", in_a_scan, (w, x, jnp.arange(STEPS, dtype=jnp.int32)), STEPS, rounds),
    ]


def measure(name: str, program: Callable[..., Array], arguments: Sequence[Any], steps: int, rounds: int) -> Row:
    """The figures of one program."""
    traced = aot.function(program).trace(*arguments)
    cut = traced.partition(strategy="min_cut")
    plain_plan = save_all(read(traced.joint, traced.program.roles, opens_once=False))
    run, plain = cut.compile(), jax.jit(jax.value_and_grad(program)).lower(*arguments).compile()
    calls = {"plain": partial(plain, *arguments), "jointcut": partial(run.value_and_grad, *arguments)}
    timed = time_together(calls, "plain", rounds)
    got, want = run.value_and_grad(*arguments)[1], plain(*arguments)[1]
    return Row(
        name,
        steps * max(alone(f, *arguments[:2]) for f in BRANCHES),
        kept_by_branches(cut.plan),
        kept_by_branches(plain_plan),
        run.memory.step.temp_bytes,
        memory_of(plain).temp,
        timed["jointcut"].ratio.median,
        float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want))),
    )


def alone(function: Callable[..., Array], w: Array, x: Array) -> int:
    """The bytes that one branch keeps when it is the whole program."""
    loss = aot.function(lambda w, x: jnp.sum(function(x, w) ** 2))
    return loss.trace(w, x).partition(strategy="min_cut").plan.bytes_saved


def kept_by_branches(plan: Plan) -> int:
    """The bytes that a plan keeps of branches, or of the results of conditionals where these are not opened."""
    assert plan.problem is not None, "the plan of a problem"
    graph = plan.problem.graph
    return sum(s.bytes for s in plan.saved if s.op == "cond" or graph.rivals[graph.values[s.value].loop] > 1)


def table_of(rows: Sequence[Row]) -> Table:
    """A line for each program."""
    table = Table(title="What eight unequal branches keep", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("program")
    for heading in ("largest alone", "jointcut", "÷ largest", "plain JAX", "÷ largest", "temp ÷ plain", "time ÷ plain"):
        table.add_column(heading, justify="right")
    for row in rows:
        ours, theirs = row.branch_bytes / row.largest_bytes, row.jax_branch_bytes / row.largest_bytes
        figures = f"{row.temp_bytes / row.jax_temp_bytes:.2f}", f"{row.time_ratio:.2f}"
        sizes = [f"{b / 1e6:.2f} MB" for b in (row.largest_bytes, row.branch_bytes, row.jax_branch_bytes)]
        style = None if row.is_reached else "red"
        table.add_row(row.name, sizes[0], sizes[1], f"{ours:.2f}", sizes[2], f"{theirs:.2f}", *figures, style=style)
    return table


if __name__ == "__main__":
    main()
