"""Draw how much memory is alive over a step, as an SVG that reads on light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 60, 34
COLOURS = {"plain": "#8a8f98", "checkpoint": "#d9822b", "jointcut": "#2f81f7", "jointcut, budget=0.0": "#8957e5"}
NAMES = {"plain": "plain JAX", "checkpoint": "best jax.checkpoint", "jointcut": "jointcut, default"}
STEP_MB = 50  # between two lines of the grid


def svg(alive: Mapping[str, Sequence[int]]) -> str:
    """The picture: a curve for each way to take the step, with the highest point of each beside its name."""
    highest = max(map(max, alive.values())) / 1e6
    top = (int(highest / STEP_MB) + 1) * STEP_MB
    lines = [_line(y_mb, top) for y_mb in range(0, top + 1, STEP_MB)]
    curves = [_curve(_colour(way), sizes, top) for way, sizes in alive.items()]
    names = [_name(place, way, max(sizes) / 1e6) for place, (way, sizes) in enumerate(alive.items())]
    foot = _text(LEFT, HEIGHT - 10, "MB of temporaries in use over one training step: forward, then backward →")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    style = ' font-family="system-ui, sans-serif" font-size="13" fill="#7d8590">'
    return "\n".join([head + style, *lines, *curves, *names, foot, "</svg>", ""])


def _kind(way: str) -> str:
    return "checkpoint" if way.startswith("checkpoint") else way


def _colour(way: str) -> str:
    return COLOURS[_kind(way)]


def _y(y_mb: float, top: int) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y_mb / top


def _line(y_mb: int, top: int) -> str:
    y = _y(y_mb, top)
    rule = f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#7d8590" stroke-opacity="0.25"/>'
    return rule + _text(LEFT - 6, y + 4, str(y_mb), "end")


def _curve(colour: str, sizes: Sequence[int], top: int) -> str:
    across = (WIDTH - LEFT - RIGHT) / (len(sizes) - 1)
    points = " ".join(f"{LEFT + i * across:.1f},{_y(size / 1e6, top):.1f}" for i, size in enumerate(sizes))
    ground = f"{LEFT},{_y(0, top):.1f} {points} {WIDTH - RIGHT},{_y(0, top):.1f}"
    return (
        f'<polygon points="{ground}" fill="{colour}" fill-opacity="0.10"/>'
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
    )


def _name(place: int, way: str, highest_mb: float) -> str:
    x, y = LEFT + (place % 2) * (WIDTH - LEFT) // 2, 18 + 22 * (place // 2)
    mark = f'<path d="M{x} {y - 4}h18" stroke="{_colour(way)}" stroke-width="3"/>'
    return mark + _text(x + 26, y, f"{NAMES.get(_kind(way), way)}: {highest_mb:.0f} MB at most")


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'
