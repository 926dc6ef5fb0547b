"""Draw the loss and the memory of a training run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # a file is written; no display is needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

COLOURS = {"plain": "#8a8f98", "jointcut": "#1f6feb"}
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
        colour = COLOURS[name]
        axes.plot(share, megabytes, color=colour, linewidth=1.2, label=f"{name}: highest {peak:.0f} MB")
        axes.fill_between(share, megabytes, color=colour, alpha=0.15)
        highest = max(highest, peak)
    axes.set_ylim(0, 1.25 * highest)  # the legend stands above the curves
    axes.set_title("Activation memory over one step", fontsize=11)
    axes.set_xlabel("% of the step's instructions (XLA's scheduled program, replayed)")
    axes.set_ylabel("bytes alive, MB")
    axes.legend(frameon=False, loc="upper left", ncols=2)
