"""Draw the memory over a step with matplotlib.

For papers, slides and code hosts, which cannot show the interactive page.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jointcut.aot.fitting.axes import apart, kept, shown, unit_of
from jointcut.partition.drawing.picture import JSON
from jointcut.partition.errors import JointcutError, choices, message

#: Okabe and Ito's palette for colour-blind people, and a grey for the rest.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#6a51a3")
REST = "#b8bcc2"

_SIZE = (9, 4.6)  # inches


def memory(name: str, section: JSON, axes: Any, by: str) -> Any:
    """Stack the bytes alive at each step by group, with plain JAX as a dashed line; returns the axes.

    `section` is one of the kind "timeline"; `by` is "line" or "module".
    """
    names = {"line": "source line", "module": "module"}
    if by not in names:
        raise JointcutError(message(f"by={by!r}", "is no way to group arrays.", choices(by, names)))
    groups = next(g["groups"] for g in section["groupings"] if g["name"] == names[by])
    axes = shown(_SIZE) if axes is None else axes
    peaks = [peak["bytes"] for peak in (section["peak"], (section["ghost"] or section)["peak"]) if peak]
    highest: float = max(peaks, default=0) or 1.0
    unit, unit_name = unit_of(highest)
    steps = np.arange(len(section["total"]))
    colours = [REST if g["name"] == "everything else" else COLOURS[i % len(COLOURS)] for i, g in enumerate(groups)]
    stacks = [np.asarray(g["bytes"]) / unit for g in groups]
    labels = [_middle(g["name"], 44) for g in groups]
    style = {"colors": colours, "labels": labels, "linewidth": 0, "step": "mid"}
    areas = axes.stackplot(steps, *stacks, **style) if stacks else []
    _ghost(axes, section, unit, unit_name)
    _peak(axes, section, unit, unit_name)
    axes.axvline(section["boundary"] - 0.5, color="#444444", linewidth=0.8)
    axes.set(
        title=f"{name}: memory over a step, by {names[by]}",
        xlabel="operations in the order they run: forward, then backward",
        ylabel=f"bytes alive ({unit_name})",
        xlim=(-0.5, max(len(steps), 1) - 0.5),
        ylim=(0, 1.18 * highest / unit),
    )
    for side, text in (("right", "forward "), ("left", " backward")):
        place = section["boundary"] - 0.5, 1.135 * highest / unit
        axes.text(*place, text, ha=side, va="center", fontsize=9, color="#444444")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    handles = [*reversed(areas), *[line for line in axes.get_lines() if not line.get_label().startswith("_")]]
    axes.figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    return axes


def _ghost(axes: Any, section: JSON, unit: float, unit_name: str) -> None:
    """Draw plain JAX's total, with its halves stretched to the length of ours."""
    ghost = section["ghost"]
    if ghost is None or ghost["peak"] is None:
        return
    count, total = len(section["total"]), np.asarray(ghost["total"]) / unit
    first = np.linspace(0, section["boundary"], ghost["boundary"], endpoint=False)
    second = np.linspace(section["boundary"], count, len(total) - ghost["boundary"], endpoint=False)
    peak = f"{ghost['peak']['bytes'] / unit:.1f} {unit_name}"
    label = f"{ghost['name']}, {peak} at its peak"
    axes.plot([*first, *second], total, color="#333333", linewidth=1.2, linestyle=(0, (4, 3)), label=label)


def _peak(axes: Any, section: JSON, unit: float, unit_name: str) -> None:
    if section["peak"] is None:
        return
    step, height = section["peak"]["step"], section["peak"]["bytes"] / unit
    axes.plot([step], [height], "v", color="black", markersize=5, label="_peak")
    right = step > len(section["total"]) * 0.8
    place = {"xytext": (-8 if right else 8, 4), "textcoords": "offset points", "ha": "right" if right else "left"}
    box = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1.0}  # over the dashed line of plain JAX
    axes.annotate(f"peak {height:.1f} {unit_name}", (step, height), fontsize=9, va="bottom", bbox=box, **place)


def _middle(text: str, width: int) -> str:
    """The text, with its middle left out where it is longer than `width`."""
    return text if len(text) <= width else f"{text[: width // 3]}…{text[width // 3 + 1 - width :]}"


def picture(name: str, section: JSON, format: str = "png", dpi: int = 110) -> bytes:
    """The picture by module, as the bytes of a file."""
    return kept(memory(name, section, apart(_SIZE), "module"), format, dpi)
