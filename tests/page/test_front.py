"""Every mark of the front can be had by pointer and keyboard, wherever it stands, and no label covers one."""

from __future__ import annotations

import pytest

from jointcut.partition.figures import human_bytes, human_seconds
from page.fixtures import MEGABYTE, page_data, pareto
from page.graph_tab import STILL, Section
from page.report_tab import cells

CENTRES = """all => all.map(one => {
  const { left, top, width, height } = one.querySelector('.point-ring').getBoundingClientRect();
  return [left + width / 2, top + height / 2];
})"""
COVERED = """() => {
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const shapes = [...document.querySelectorAll('.plot .point-shape')].map(one => one.getBoundingClientRect());
  const labels = [...document.querySelectorAll('.plot .label')];
  return labels.filter(label => shapes.some(shape => meet(label.getBoundingClientRect(), shape)))
    .map(label => label.textContent);
}"""
POINT = "#budgets .point"


def crowded() -> Section:
    """Plans and policies that stand a few pixels apart, some on others."""
    section = pareto()
    lone, plans = section["points"][0], []
    for place in range(5):
        plans.append({**lone, "peak_bytes": (60 + 0.9 * place) * MEGABYTE, "seconds": 4e-3, "lines": [f"plan {place}"]})
    section["points"] += plans
    for place, mark in enumerate(section["marks"]):
        mark |= {"peak_bytes": (100 + 2.5 * place) * MEGABYTE, "seconds": (4.4 - 0.15 * place) * 1e-3}
    section["plain"] = {"peak_bytes": 109 * MEGABYTE, "seconds": 4.2e-3}
    return section


def shown(section: Section) -> list[Section]:
    """All that stands in the plot in its order: by peak, at one peak the slower first."""
    points = [
        {**p, "name": "the chosen plan" if i == section["chosen"] else f"plan {i + 1} of {len(section['points'])}"}
        for i, p in enumerate(section["points"])
    ]
    plain = {**section["plain"], "name": "plain JAX", "lines": []}
    return sorted([*points, *section["marks"], plain], key=lambda item: (item["peak_bytes"], -item["seconds"]))


def expected(item: Section) -> list[str]:
    """What the tooltip of an item says."""
    figures = f"peak {human_bytes(item['peak_bytes'])}, extra time {human_seconds(item['seconds'])}"
    if "saved_bytes" in item:
        figures += f", saves {human_bytes(item['saved_bytes'])}"
    return [item["name"], *([item["strategy"]] if "strategy" in item else []), figures, *item["lines"][:2]]


def told(tab) -> list[str]:
    return cells(tab, "#jointcut-tooltip:not([hidden]) :is(strong, .tooltip-line)")


@pytest.mark.parametrize("make", [pareto, crowded], ids=lambda make: make.__name__)
@pytest.mark.parametrize("width", [400, 1200])
def test_a_pointer_at_the_middle_of_any_item_gets_that_one_and_what_is_known_of_it(opened, make, width):
    section = make()
    tab = opened(page_data(section), width=width, height=1400, **STILL)
    centres = tab.locator(POINT).evaluate_all(CENTRES)
    items = shown(section)
    assert len(items) == len(centres)
    for item, (x, y) in zip(items, centres, strict=True):
        tab.mouse.move(x, y)
        assert told(tab) == expected(item)
        assert tab.locator(f"{POINT}.aimed").count() == 1
    tab.mouse.move(2, 2)
    assert told(tab) == [] and tab.locator(f"{POINT}.aimed").count() == 0


def test_every_item_tells_the_same_when_it_gets_the_focus(opened):
    section = pareto()
    tab = opened(page_data(section), **STILL)
    tab.locator(f"{POINT}[tabindex='0']").focus()
    tab.keyboard.press("Home")
    for item in shown(section):
        assert told(tab) == expected(item)
        tab.keyboard.press("ArrowRight")


def test_a_pointer_within_24_pixels_has_the_nearest_and_beyond_none(opened):
    section = pareto()
    section |= {"points": section["points"][:1], "chosen": None, "marks": section["marks"][3:]}
    tab = opened(page_data(section), height=1400, **STILL)
    names = [item["name"] for item in shown(section)]
    for name, (x, y) in zip(names, tab.locator(POINT).evaluate_all(CENTRES), strict=True):
        for distance, heading in ((23, [name]), (25, [])):
            tab.mouse.move(x, y - distance)
            assert told(tab)[:1] == heading


def test_a_click_shows_the_nearest_plan_and_gives_it_the_focus(opened):
    section = crowded()
    tab = opened(page_data(section), height=1400, **STILL)
    items, centres = shown(section), tab.locator(POINT).evaluate_all(CENTRES)
    for index in [i for i, item in enumerate(items) if item["lines"][:1] in (["plan 1"], ["plan 2"], ["plan 3"])]:
        x, y = centres[index]
        tab.mouse.click(x, y - 11)
        assert cells(tab, "#budgets .panel .lines li") == items[index]["lines"]
        assert tab.locator(f"{POINT}[aria-pressed=true]").count() == 1
        focused = tab.evaluate("[...document.querySelectorAll('#budgets .point')].indexOf(document.activeElement)")
        assert focused == index
        assert told(tab) == expected(items[index])
    before = cells(tab, "#budgets .panel h3")
    box = tab.locator("#budgets .plot svg").bounding_box()
    tab.mouse.click(box["x"] + 5, box["y"] + box["height"] - 5)
    assert cells(tab, "#budgets .panel h3") == before


def test_a_screen_reader_that_presses_a_button_gets_that_one(opened):
    """Its press has no place, and the corner of the window lies within the reach of another point."""
    section = crowded()
    tab = opened(page_data(section), height=500, **STILL)
    tab.locator(POINT).last.evaluate(
        "one => { const b = one.getBoundingClientRect(); scrollTo(scrollX, scrollY + b.top); "
        "document.body.style.marginLeft = `${-b.left}px`; }"
    )
    for index in (0, 5):
        tab.locator(POINT).nth(index).dispatch_event("click")
        assert cells(tab, "#budgets .panel .lines li") == shown(section)[index]["lines"]


@pytest.mark.parametrize("make", [pareto, crowded], ids=lambda make: make.__name__)
@pytest.mark.parametrize("width", [360, 700, 1000, 1200, 1600])
def test_no_label_covers_a_mark(opened, make, width):
    tab = opened(page_data(make()), width=width)
    assert tab.evaluate(COVERED) == []
    assert tab.locator("#budgets .plot .label").count() >= (1 if width == 360 else 2)


def test_the_time_of_a_step_is_told_with_its_share_of_plain_jax_and_so_is_the_axis(opened):
    section = pareto()
    times = [10e-3 + 1e-3 * place for place in range(len(section["points"]))]
    for point, seconds in zip(section["points"], times, strict=True):
        point |= {"seconds": seconds, "share": seconds / 12e-3}
    for mark in section["marks"]:
        mark |= {"seconds": 18e-3, "share": 1.5}
    section |= {"time": "time of a step", "plain": {**section["plain"], "seconds": 12e-3, "share": 1.0}}
    tab = opened(page_data(section), **STILL)
    assert "predicted time of a step (ms)" in cells(tab, "#budgets .axis-title")
    labels = tab.locator(POINT).evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
    for item, label in zip(shown(section), labels, strict=True):
        share = "" if item["name"] == "plain JAX" else f", {item['share']:.2f} of plain JAX"
        assert f"time of a step {human_seconds(item['seconds'])}{share}" in label
    assert not any("extra" in text for text in [*labels, *cells(tab, "#budgets svg text")])


def test_times_that_are_near_each_other_fill_the_picture(opened):
    section = pareto()
    for place, item in enumerate([*section["points"], *section["marks"], section["plain"]]):
        item["seconds"] = (200 + place) * 1e-3
    tab = opened(page_data(section), **STILL)
    heights = [y for _, y in tab.locator(POINT).evaluate_all(CENTRES)]
    assert max(heights) - min(heights) > 0.4 * tab.locator("#budgets .plot svg").bounding_box()["height"]
