"""Run a compiled step, and put what it took beside what was predicted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.aot.options.options import Options
from jointcut.aot.planning.budgets.rates import feed
from jointcut.partition.errors import CallError, message
from jointcut.partition.figures import counted, human_bytes, human_seconds
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.search.budget import Planner
from jointcut.wrappers.record import Record

_LEAST_S = 1e-3  # of a step that tells rates; calling a program takes a tenth of that


@dataclass(frozen=True)
class Measured(Record):
    """What a step was predicted to take, and what it took; `print` shows both side by side.

    Attributes:
        name: of the function.
        backend: the kind of device that it ran on.
        predicted_bytes: the peak of the step by the model, before anything was compiled.
        peak_bytes: the peak by XLA's account of the compiled step.
        device_bytes: the most bytes that the device had in use since the process began; None where it does not count.
        predicted_seconds: the time of the step by the model.
        run_seconds: the time of each run, in order.
        fed: what became of the rates that plans rest on, if the step was to correct them.
    """

    name: str
    backend: str
    predicted_bytes: int
    peak_bytes: int
    device_bytes: int | None
    predicted_seconds: float
    run_seconds: tuple[float, ...]
    fed: str = ""

    @property
    def seconds(self) -> float:
        """The time in the middle of the runs."""
        return statistics.median(self.run_seconds)

    def __str__(self) -> str:
        """Return a table with a row for bytes and one for seconds, and what the rows rest on."""
        runs, least, most = len(self.run_seconds), min(self.run_seconds), max(self.run_seconds)
        peaks, times = (self.peak_bytes, self.predicted_bytes), (self.seconds, self.predicted_seconds)
        rows = [
            ("", "predicted", "measured", "ratio"),
            ("peak of a step", human_bytes(self.predicted_bytes), human_bytes(self.peak_bytes), _ratio(*peaks)),
            ("time of a step", human_seconds(self.predicted_seconds), human_seconds(self.seconds), _ratio(*times)),
        ]
        lines = [
            f"  {name:<14}  {predicted:>9}  {measured:>9}  {ratio:>5}" for name, predicted, measured, ratio in rows
        ]
        spread = f"{human_seconds(least)} to {human_seconds(most)}"
        notes = [f"  bytes by XLA's account; seconds in the middle of {counted(runs, 'run')}, {spread}"]
        if self.device_bytes is not None:
            notes.append(f"  the device had at most {human_bytes(self.device_bytes)} in use since the process began")
        if self.fed:
            notes.append(f"  {self.fed}")
        return "\n".join([f"{self.name}, on {self.backend}", *(line.rstrip() for line in lines), *notes])


@dataclass(frozen=True)
class MeasuredPlans(Record):
    """What several plans of a step were predicted to take, and what each took; `print` shows a row for each.

    Attributes:
        plans: how each was chosen, in order: by the options, as plain JAX, or from the front.
        saved_bytes: what each hands to the backward.
        steps: each measured.
    """

    plans: tuple[str, ...]
    saved_bytes: tuple[int, ...]
    steps: tuple[Measured, ...]

    def __str__(self) -> str:
        """Return a table with the peak and the time of each plan, predicted, measured, and divided."""
        first, *_ = self.steps
        rows: list[tuple[str, ...]] = [
            ("plan", "saves", "peak predicted", "measured", "ratio", "time predicted", "measured", "ratio")
        ]
        for plan, saved, step in zip(self.plans, self.saved_bytes, self.steps, strict=True):
            peaks, times = (step.peak_bytes, step.predicted_bytes), (step.seconds, step.predicted_seconds)
            sizes = (*map(human_bytes, reversed(peaks)), _ratio(*peaks))
            rows.append((plan, human_bytes(saved), *sizes, *map(human_seconds, reversed(times)), _ratio(*times)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for plan, *cells in rows:
            aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join(["", plan.ljust(widths[0]), *aligned]))
        note = f"  bytes by XLA's account; seconds in the middle of {counted(len(first.run_seconds), 'run')}"
        return "\n".join([f"{first.name}, on {first.backend}", *lines, note])


def evenly(count: int, most: int) -> list[int]:
    """Return the positions of at most so many of some things, the first and the last among them.

    >>> evenly(9, 3), evenly(2, 3), evenly(9, 1)
    ([0, 4, 8], [0, 1], [0])
    """
    steps = min(count, most) - 1
    return [round(i * (count - 1) / max(1, steps)) for i in range(steps + 1)]


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f}" if predicted else ""


def refuse_to_feed(options: Options) -> None:
    """Raise `CallError` where a step was not planned by the rates of the device."""
    if options.cost is not None or options.goal is not None:
        what = "has no rates to correct: the step was planned for a target, or by a cost of yours."
        raise CallError(message("feed", what, "Correct these yourself, or leave `target` and `cost` away."))


def fed(planner: Planner, found: Measured) -> Measured:
    """Let a measured step correct the rates of the device, and say so in it.

    Raises `CallError` where the step is too short to tell of them.
    """
    least, model = min(found.run_seconds), planner.model
    if least < _LEAST_S:
        what = f"cannot tell rates by a step of {human_seconds(least)}: much of that is the call itself."
        raise CallError(message("feed", what, "Measure one that takes a millisecond or more."))
    assert isinstance(model, Roofline), "without a cost the model is a roofline"
    return replace(found, fed=feed(model, found.predicted_seconds, least, found.name))


def timed(call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], rounds: int) -> tuple[float, ...]:
    """Return the seconds of each of some runs of a call on copies of its arrays; one run before them warms up.

    Raises `CallError` for a number of rounds that is no whole number from 1 on.
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise CallError(message("rounds", f"is {rounds!r}.", "Give a whole number from 1 on, such as 5."))
    found: list[float] = []
    for _ in range(rounds + 1):
        given, named = jax.block_until_ready(_copied((tuple(args), kwargs)))
        start = time.perf_counter()
        jax.block_until_ready(call(*given, **named))
        found.append(time.perf_counter() - start)
    return tuple(found[1:])


def device_bytes() -> int | None:
    """Return the most bytes that the first device had in use; None where it does not count."""
    found = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return None if found is None else int(found)


def _copied(tree: Any) -> Any:
    """Return a tree with copies of its arrays; an array that stands in several places is one there, too."""
    copies = {id(leaf): jnp.copy(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)}
    return jax.tree.map(lambda leaf: copies.get(id(leaf), leaf), tree)
