"""Draw a training run, and the suite."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # a file is written; no display is needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchmarks.methods import MIN_CUT
from benchmarks.report import Result

COLOURS = {"plain": "#8a8f98", "checkpoint": "#d9822b", "jointcut": "#1f6feb", "jointcut, budget=0.0": "#0b3d91"}
MB = 1e6


def draw(path: Path, losses: Sequence[float], memory: Mapping[str, Sequence[int]], model: str) -> None:
    """Write a PNG: the loss on the left, the bytes alive over one step on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    draw_loss(left, losses)
    draw_memory(right, memory)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.margins(x=0)
    figure.suptitle(model, fontsize=10, color="#555555")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_loss(axes: Axes, losses: Sequence[float]) -> None:
    """The loss of each step, and its running mean."""
    window = max(1, len(losses) // 20)
    mean = np.convolve(losses, np.ones(window) / window, mode="valid")
    axes.plot(range(1, len(losses) + 1), losses, color=COLOURS["jointcut"], alpha=0.3, linewidth=1)
    axes.plot(range(window, len(losses) + 1), mean, color=COLOURS["jointcut"], linewidth=2)
    axes.set_title(f"Loss, trained with jointcut (bold: mean of {window} steps)", fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, nats per byte")


def draw_memory(axes: Axes, memory: Mapping[str, Sequence[int]]) -> None:
    """The bytes alive at each instruction of one step, and the highest point of each method."""
    highest = 0.0
    for name, live in memory.items():
        megabytes = np.asarray(live) / MB
        share = np.linspace(0, 100, len(megabytes))
        peak = float(megabytes.max())
        colour = COLOURS["checkpoint" if name.startswith("checkpoint") else name]
        axes.plot(share, megabytes, color=colour, linewidth=1.2, label=f"{name}: {peak:.0f} MB")
        axes.fill_between(share, megabytes, color=colour, alpha=0.15)
        highest = max(highest, peak)
    axes.set_ylim(0, 1.3 * highest)  # the legend stands above the curves
    axes.set_title("Activation memory over one step, and its highest point", fontsize=11)
    axes.set_xlabel("% of the step's instructions (XLA's scheduled program, replayed)")
    axes.set_ylabel("bytes alive, MB")
    axes.legend(frameon=False, loc="upper left", ncols=2, fontsize=8)


FAMILIES = {"plain": "#8a8f98", "checkpoint": "#d9822b", "jointcut": "#1f6feb"}
COLUMNS = 4


def scatter(path: Path, results: Sequence[Result]) -> None:
    """Write a PNG: peak against time over plain's, one panel for each program, one point for each method."""
    rows = -(-len(results) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(3.4 * COLUMNS, 2.7 * rows), layout="constrained", squeeze=False)
    for panel, result in zip(axes.flat, results, strict=False):
        draw_panel(panel, result)
    for panel in list(axes.flat)[len(results) :]:
        panel.set_visible(False)
    figure.supxlabel("time ÷ plain", fontsize=11)
    figure.supylabel("peak memory ÷ plain (arguments and results included)", fontsize=11)
    handles = [plt.Line2D([], [], marker="o", linestyle="", color=c, label=name) for name, c in FAMILIES.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_panel(axes: Axes, result: Result) -> None:
    """One program: grey is plain, orange is `jax.checkpoint`, blue jointcut, a ring its min-cut in somebody's jit."""
    axes.axhline(1.0, color="#cccccc", linewidth=0.8, zorder=0)
    axes.axvline(1.0, color="#cccccc", linewidth=0.8, zorder=0)
    for name in result.rows:
        family = name.split()[0]
        hollow = name.endswith("in jax.jit")
        face = "none" if hollow else FAMILIES[family]
        size = 46 if family == "jointcut" else 26
        axes.scatter(result.time(name), result.peak(name), size, face, edgecolors=FAMILIES[family], alpha=0.85)
    if MIN_CUT in result.rows:
        at = (result.time(MIN_CUT), result.peak(MIN_CUT))
        axes.annotate("min_cut", at, (5, -9), textcoords="offset points", fontsize=8, color=FAMILIES["jointcut"])
    axes.set_title(result.name, fontsize=10)
    axes.set_ylim(0, 1.3)
    axes.set_xlim(0.6, max(1.3, 1.05 * max(map(result.time, result.rows))))  # one scale, unless something is slower yet
    axes.spines[["top", "right"]].set_visible(False)
