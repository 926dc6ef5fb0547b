"""Train a GPT with jointcut and show what it saves.

    python -m benchmarks.demo

At most four minutes on two cores: a table of memory, time and gradients for plain JAX, `jax.checkpoint` and
jointcut, with who wins and why; a training run with jointcut on the sources of Python's standard library; a picture.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.alive import live_bytes
from benchmarks.measure import Timing, time_together, wide_console
from benchmarks.methods import Figures, Method, Step, build_jointcut, methods_for
from benchmarks.picture import draw
from benchmarks.programs import Program, gpt, text
from jointcut import aot
from jointcut.aot.report.liveness import Liveness

HEADINGS = (
    "activations\nMB",
    "peak\nMB",
    "÷ plain",
    "step\nms",
    "÷ plain",
    "ready in\ns",
    "gradient\ndiffers by",
    "matrix\nproducts",
    "best\nin",
)
CAPTION = (
    "activations: XLA's temp bytes, and residuals between programs; peak: arguments and results as well\n"
    "matrix products: in the program, a loop's counted once; those beyond plain's are computed twice\n"
    "+ barriers: compiled without the CPU pass that expands them away"
)
PICTURE = Path(__file__).parent / "results" / "demo.png"
ROWS = 8
DEFAULT, LEAST = "jointcut", "jointcut, budget=0.0"
WARM_UP = 20  # steps until the full learning rate
MB = 1e6


@dataclass(frozen=True)
class Plan:
    """How much the demo does."""

    config: gpt.Config
    rounds: int
    steps: int
    rate: float
    picture: Path


def main() -> None:
    """Compare, train, draw."""
    plan = parse_options()
    console = wide_console(132)
    program = gpt.of("demo", plan.config, ROWS)
    console.print(f"A byte-level GPT: {program.title}; {program.num_parameters / 1e6:.2f} M parameters.")
    shown = methods_shown(program)
    unrolled, also = unrolled_shown(plan.config)
    runs = (len(shown) + len(also)) * (plan.rounds + 2) + plan.steps
    with tqdm(total=runs, unit="run", disable=None) as bar:
        steps = build(program, shown, bar)
        table = new_table()
        timings = timed(steps, plan, bar)
        add_rows(table, steps, timings, "")
        again = build(unrolled, also, bar)
        add_rows(table, again, timed(again, plan, bar), "unrolled: ")
        bar.clear()
        console.print(table)
        times = {name: timing.ratio.median for name, timing in timings.items()}
        for line in verdict({name: step.figures for name, step in steps.items()}, times):
            console.print(line)
        losses = train(plan, bar)
    first, last = sum(losses[:5]) / 5, sum(losses[-10:]) / 10
    console.print(f"{plan.steps} steps with jointcut: loss {first:.2f} → {last:.2f} nats per byte.")
    peaks = {name: step.peak_bytes for name, step in steps.items()}
    memory = {name: replay(steps[name], name, console) for name in ("plain", best_checkpoint(peaks), DEFAULT, LEAST)}
    plan.picture.parent.mkdir(exist_ok=True)
    draw(plan.picture, losses, memory, f"Byte-level GPT: {program.title}")
    console.print(f"Picture: {plan.picture}")


def parse_options() -> Plan:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description="Train a GPT with jointcut.")
    parser.add_argument("--steps", type=int, default=200, help="training steps (%(default)s, at least 10)")
    parser.add_argument("--rounds", type=int, default=5, help="timing rounds (%(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks (%(default)s)")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where the PNG goes (%(default)s)")
    options = parser.parse_args()
    if options.steps < 10:
        parser.error("--steps must be at least 10")
    config = gpt.Config(layers=options.layers)
    return Plan(config, options.rounds, options.steps, rate=3e-3, picture=options.picture)


def methods_shown(program: Program) -> dict[str, Method]:
    """Plain, `jax.checkpoint` around each block, and jointcut, by default and with the least memory, by name."""
    methods = methods_for(program)
    shown = {
        name: build
        for name, build in methods.items()
        if name == "plain" or ("block" in name and "everything" not in name)
    }
    return shown | {DEFAULT: build_jointcut, LEAST: partial(build_jointcut, budget=0.0)}


def unrolled_shown(config: gpt.Config) -> tuple[Program, dict[str, Method]]:
    """The same model with its layers written one after the other, plain and by jointcut."""
    program = gpt.of("demo, unrolled", replace(config, scan=False), ROWS)
    return program, {"plain": methods_for(program)["plain"], DEFAULT: build_jointcut}


def build(program: Program, methods: Mapping[str, Method], bar: tqdm) -> dict[str, Step]:
    """Build the methods shown."""
    steps: dict[str, Step] = {}
    for name, method in methods.items():
        bar.set_description(f"compiling {name}")
        steps[name] = method(program)
        bar.update()
    return steps


def timed(steps: Mapping[str, Step], plan: Plan, bar: tqdm) -> dict[str, Timing]:
    """Time all methods of one program together."""
    bar.set_description("timing")
    return time_together({name: step.call for name, step in steps.items()}, "plain", plan.rounds, bar.update)


def new_table() -> Table:
    """A table of memory, time and gradients."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=CAPTION, caption_justify="left")
    table.add_column("method", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def add_rows(table: Table, steps: Mapping[str, Step], timings: Mapping[str, Timing], prefix: str) -> None:
    """Add all methods on one step of one program, each beside its plain."""
    plain = steps["plain"]
    _, reference = plain.call()
    least = min(step.peak_bytes for step in steps.values())
    fastest = min(timing.ratio.median for timing in timings.values())
    for name, step in steps.items():
        timing = timings[name]
        best = {"memory": step.peak_bytes == least, "time": timing.ratio.median == fastest}
        table.add_row(
            prefix + name,
            f"{step.activation_bytes / MB:.1f}",
            f"{step.peak_bytes / MB:.1f}",
            f"{step.peak_bytes / plain.peak_bytes:.2f}",
            f"{timing.seconds.median * 1e3:.0f}",
            f"{timing.ratio.median:.2f}",
            f"{step.ready_s:.1f}",
            f"{largest_difference(step.call()[1], reference):.1g}",
            str(step.dots),
            "both" if all(best.values()) else "".join(word for word, is_best in best.items() if is_best),
            style="bold" if any(best.values()) else None,
        )
    table.add_section()


def best_checkpoint(peaks: Mapping[str, int]) -> str:
    """The method with `jax.checkpoint` that takes the least memory."""
    return min((name for name in peaks if name.startswith("checkpoint")), key=peaks.__getitem__)


def verdict(figures: Mapping[str, Figures], times: Mapping[str, float]) -> list[str]:
    """Say who takes the least memory and who the least time, and why."""
    peaks = {name: figure.peak_bytes for name, figure in figures.items()}
    ours, theirs = (DEFAULT, LEAST), best_checkpoint(peaks)

    def told(name: str) -> str:
        return f"{name} ({peaks[name] / MB:.1f} MB, {times[name]:.2f} of plain's time)"

    least, fastest = min(peaks, key=peaks.__getitem__), min(times, key=times.__getitem__)
    others = [told(name) for name in (theirs, *ours) if name not in (least, fastest)]
    again = [f"{figures[name].dots - figures['plain'].dots} by {name}" for name in (theirs, *ours)]
    return [
        f"Least memory: {told(least)}. Least time: {told(fastest)}. Beside them: {', '.join(others) or 'nobody'}.",
        f"Why: what is computed again need not be kept. Of {figures['plain'].dots} matrix products are computed again: "
        f"{'; '.join(again)}.",
    ]


def largest_difference(gradients: Any, reference: Any) -> float:
    """The largest difference of any entry, over the largest entry of its leaf."""
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(reference), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


class Adam(NamedTuple):
    """The running moments of the gradients. Twelve lines, so that the demo needs no optimiser library."""

    count: Array
    first: Any
    second: Any


@partial(jax.jit, donate_argnums=(0, 2))
def update(parameters: Any, gradients: Any, state: Adam, rate: float) -> tuple[Any, Adam]:
    """One step of Adam."""
    count = state.count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.first, gradients)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state.second, gradients)
    scale = rate * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    step = jax.tree.map(lambda p, m, v: p - scale * m / (jnp.sqrt(v) + 1e-8), parameters, first, second)
    return step, Adam(count, first, second)


def train(plan: Plan, bar: tqdm) -> list[float]:
    """Train with jointcut as its user would; return the loss of each step."""
    loss = aot.function(partial(gpt.loss, config=plan.config))
    corpus = text.load(megabytes=4.0)
    parameters = gpt.init(jax.random.key(0), plan.config)
    zeros = partial(jax.tree.map, jnp.zeros_like)
    state = Adam(jnp.zeros(()), zeros(parameters), zeros(parameters))
    losses: list[float] = []
    for step in range(plan.steps):
        batch = text.batch(corpus, ROWS, plan.config.context, seed=step)
        value, gradients = loss.value_and_grad(parameters, batch, jax.random.key(step))
        warmth = min(1.0, (step + 1) / WARM_UP)
        parameters, state = update(parameters, gradients, state, warmth * plan.rate)
        losses.append(float(value))
        bar.set_description(f"training, loss {losses[-1]:.2f}")
        bar.update()
    return losses


def replay(step: Step, name: str, console: Console) -> list[int]:
    """The bytes alive over one step, checked against XLA's own total."""
    held = [found for program in step.programs if (found := Liveness.of(program)) is not None]
    live = [step.residual_bytes + alive for program in held for alive in live_bytes(program)]
    highest, reserved = max(live) / MB, step.activation_bytes / MB
    console.print(
        f"Replay of {name}: {len(live)} instructions, highest {highest:.1f} MB, "
        f"XLA reserves {reserved:.1f} MB ({1 - highest / reserved:.1%} apart)."
    )
    return live


if __name__ == "__main__":
    main()
