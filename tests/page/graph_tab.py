"""Drive the graph of an open page, and measure what it shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Section = dict[str, Any]
STILL = {"reduced_motion": "reduce"}
MARGIN = 0.75

RECTANGLES = """elements => elements.map(element => {
  const { x, y, width, height } = element.getBoundingClientRect();
  return [x, y, x + width, y + height];
})"""
STRAY_LABELS = """margin => [...document.querySelectorAll('.box, .handle')].flatMap(group => {
  const shape = group.querySelector('.plate, .box-shape').getBoundingClientRect();
  return [...group.querySelectorAll('text')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < shape.left - margin || box.right > shape.right + margin
      || box.top < shape.top - margin || box.bottom > shape.bottom + margin;
  }).map(text => text.textContent);
})"""


def saved_bytes(section: Section) -> int:
    """The bytes of all values that are kept."""
    values = section["values"]
    return sum(size for size, saved in zip(values["bytes"], values["saved"], strict=True) if saved)


def click(tab: Any, identity: str) -> None:
    """Click on a box or a handle, wherever it stands."""
    tab.locator(f"[data-id='{identity}']").dispatch_event("click")


def button(tab: Any, name: str) -> None:
    """Press a button of the graph."""
    tab.get_by_role("button", name=name, exact=True).click()


def identities(tab: Any, selector: str) -> list[str]:
    """The identities of the elements that match, in the order of the document."""
    return tab.locator(selector).evaluate_all("elements => elements.map(element => element.dataset.id)")


def carried(tab: Any) -> int:
    """The bytes that all handles together tell."""
    return sum(tab.locator(".handle").evaluate_all("all => all.map(handle => Number(handle.dataset.bytes))"))


def open_one_more(tab: Any) -> bool:
    """Open the first closed box that there is."""
    closed = identities(tab, ".box[aria-expanded='false']")
    if closed:
        click(tab, closed[0])
    return bool(closed)


def overlapping(rectangles: Iterable[list[float]]) -> list[tuple[list[float], list[float]]]:
    """Pairs of rectangles that overlap by more than the width of a line."""
    found = []
    ordered = sorted(rectangles)
    for place, (left, top, right, bottom) in enumerate(ordered):
        for other in ordered[place + 1 :]:
            if other[0] >= right - MARGIN:
                break
            if other[1] < bottom - MARGIN and top < other[3] - MARGIN:
                found.append(([left, top, right, bottom], other))
    return found
