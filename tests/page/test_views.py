"""Each view shows what its data says: on hover, by keys, by clicks, and in labels that never touch."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import pytest

from jointcut.partition.figures import human_bytes
from page.fixtures import LINES, STEPS, diff, page_data, pareto, table, timeline, without_folders
from page.graphs import toy


def texts(tab, selector: str) -> list[str]:
    return [text.strip() for text in tab.locator(selector).all_inner_texts()]


# ------------------------------------------------------------------------------------------------------ the timeline


def spoken(section: dict, groups: list[dict], step: int) -> list[str]:
    """What the tooltip must say of a step: its op and its place, and all bytes, the largest group first."""
    told, side = section["steps"][step], "forward" if step < section["boundary"] else "backward"
    alive = sorted(groups, key=lambda group: -group["bytes"][step])
    figures = [
        (without_folders(group["name"]), human_bytes(group["bytes"][step]))
        for group in alive
        if group["bytes"][step] > 0
    ]
    lines = [told["op"], told["source"], told["scope"], told["loop"], f"operation {step + 1} of {STEPS}, {side}"]
    figures.insert(0, ("alive in all", human_bytes(section["total"][step])))
    return [line for line in lines if line] + [part for figure in figures for part in figure]


def tooltip(tab) -> list[str]:
    parts = "#jointcut-tooltip:not([hidden]) :is(strong, .tooltip-line, .tooltip-name, .figure)"
    return tab.locator(parts).evaluate_all("nodes => nodes.map(node => node.textContent)")


def test_hovering_over_a_step_tells_its_op_and_bytes_in_both_groupings(opened):
    section = timeline()
    tab = opened(page_data(section))
    box = tab.locator("#memory .cursor").bounding_box()
    for grouping in section["groupings"]:
        tab.get_by_label(grouping["name"], exact=True).check()
        for step in (0, 57, 209, 210, 399):
            tab.mouse.move(box["x"] + (step + 0.5) / STEPS * box["width"], box["y"] + 40)
            assert tooltip(tab) == spoken(section, grouping["groups"], step)
    tab.mouse.move(2, 2)
    assert tooltip(tab) == []


def test_keys_move_along_the_steps_and_escape_closes_the_tooltip(opened):
    section = timeline()
    tab = opened(page_data(section))
    cursor = tab.locator("#memory .cursor")
    step = section["peak"]["step"]
    cursor.focus()
    for key, at in [("Home", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("ArrowLeft", 0), ("PageUp", 20), ("End", 399)]:
        tab.keyboard.press(key)
        assert tooltip(tab) == spoken(section, section["groupings"][0]["groups"], at)
        assert cursor.get_attribute("aria-valuenow") == str(at + 1)
    tab.keyboard.press("p")
    told = section["steps"][step]
    said = f"{told['op']}, {told['source']}: {human_bytes(section['peak']['bytes'])} alive"
    assert cursor.get_attribute("aria-valuetext") == said
    assert cursor.get_attribute("aria-describedby") == tab.locator("[role=tooltip]").get_attribute("id")
    tab.keyboard.press("Escape")
    assert tooltip(tab) == []


def test_the_areas_stand_on_each_other_and_the_uppermost_ends_at_the_total(opened):
    """The upper edge of each area is the lower edge of the next, and the last one's peak is where the dot is."""
    tab = opened(page_data(timeline()))
    edges = tab.locator("#memory .layer > path[style*='fill: none']").evaluate_all(
        "paths => paths.map(path => path.getAttribute('d').match(/[0-9.]+/g).map(Number))"
    )
    heights = [dict(zip(edge[0::2], edge[1::2], strict=True)) for edge in edges]
    assert len(heights) == len(LINES)
    for lower, upper in pairwise(heights):
        assert lower.keys() == upper.keys() and all(upper[x] <= lower[x] + 1e-6 for x in lower)
    dot = tab.locator("#memory .peak-dot").first
    assert float(dot.get_attribute("cy")) == pytest.approx(min(heights[-1].values()), abs=0.01)


def test_a_group_is_brought_forward_by_hover_and_focus_and_kept_by_a_press(opened):
    tab = opened(page_data(timeline()))
    dimmed = tab.locator("#memory .layer.dimmed > path[style*='fill: none']")
    entries = tab.locator("#memory button.legend-entry")
    assert dimmed.count() == 0
    entries.nth(2).hover()
    assert dimmed.count() == len(LINES) - 1
    tab.mouse.move(2, 2)
    assert dimmed.count() == 0
    entries.nth(1).press("Enter")
    entries.nth(1).blur()
    assert dimmed.count() == len(LINES) - 1
    assert entries.nth(1).get_attribute("aria-pressed") == "true"
    assert tab.locator("#memory g.layer:not(.dimmed)").first.get_attribute("data-group") == LINES[1]


def test_the_picture_is_told_in_words_and_figures(opened):
    section = timeline()
    tab = opened(page_data(section))
    said = tab.locator("#memory svg[role=img]").get_attribute("aria-label")
    peak, ghost = human_bytes(section["peak"]["bytes"]), human_bytes(section["ghost"]["peak"]["bytes"])
    assert f"The peak is {peak}" in said and f"plain JAX peaks at {ghost}." in said
    tab.get_by_text("The peak in figures").click()
    step, groups = section["peak"]["step"], section["groupings"][0]["groups"]
    figures = [human_bytes(group["bytes"][step]) for group in groups]
    assert texts(tab, "#memory details tbody td:nth-child(2)") == figures


def test_without_its_ghost_a_timeline_grows_into_the_room(opened):
    tab = opened(page_data(timeline()))
    dot = tab.locator("#memory .peak-dot").first
    before = float(dot.get_attribute("cy"))
    tab.get_by_label("with plain JAX").uncheck()
    assert tab.locator("#memory .plot .ghost").count() == 0
    assert float(dot.get_attribute("cy")) < before - 100


def crowded() -> dict:
    """Levels at the same height and with long names, a ghost with our very peak, and a backward of three steps."""
    section = timeline()
    peak = section["peak"]
    name = "an account of the compiled step that has far more to say than there is room for in the picture of a phone"
    return {
        **section,
        "boundary": STEPS - 3,
        "ghost": {"name": name, "total": section["total"], "boundary": 390, "peak": peak},
        "lines": [{"name": f"{name}, {place}", "bytes": peak["bytes"] * (1 - 0.004 * place)} for place in range(3)],
    }


def short() -> dict:
    """Two steps, one group, nothing else."""
    section = timeline()
    return {
        **section,
        "steps": section["steps"][:2],
        "boundary": 1,
        "groupings": [{"name": "source line", "groups": [{"name": "a.py:1", "bytes": [3, 0]}]}],
        "total": [3, 0],
        "peak": {"step": 0, "bytes": 3},
        "ghost": None,
        "lines": [],
    }


def outside_or_touching(tab, selector: str) -> list[str]:
    """Texts of a picture that leave it or touch one another."""
    boxes = """nodes => nodes.map(node => {
        const { left, top, right, bottom } = node.getBoundingClientRect();
        return [node.textContent, left, top, right, bottom];
    })"""
    found = tab.locator(f"{selector} text").evaluate_all(boxes)
    _, left, top, right, bottom = tab.locator(selector).evaluate_all(boxes)[0]
    outside = [t for t, *box in found if box[0] < left or box[1] < top or box[2] > right or box[3] > bottom]
    touching = [
        f"{a[0]} | {b[0]}"
        for a, b in combinations(found, 2)
        if a[1] < b[3] and b[1] < a[3] and a[2] + 2 < b[4] and b[2] + 2 < a[4]
    ]
    assert len(found) > 8
    return outside + touching


@pytest.mark.parametrize("width", [360, 700, 1200])
@pytest.mark.parametrize("section", [timeline, crowded, short, pareto], ids=lambda made: made.__name__)
def test_no_label_leaves_its_picture_or_touches_another(opened, section, width):
    tab = opened(page_data(section()), width=width)
    assert outside_or_touching(tab, ".plot svg") == []
    if section is timeline:
        tab.get_by_label("module", exact=True).check()
        tab.get_by_label("with plain JAX").uncheck()
        assert outside_or_touching(tab, ".plot svg") == []


def test_a_step_without_operations_is_said_to_be_empty(opened):
    empty = {**short(), "steps": [], "total": [], "boundary": 0}
    assert texts(opened(page_data(empty)), "#memory .empty") == ["No operation runs here."]


# ----------------------------------------------------------------------------------------------------- the front


def test_a_click_or_enter_on_a_point_shows_its_plan(opened):
    section = pareto()
    tab = opened(page_data(section))
    points = tab.locator("#budgets .point[data-kind=plan]")
    lines = "#budgets .panel .lines li"
    assert texts(tab, lines) == section["points"][section["chosen"]]["lines"]
    points.first.click()  # the smallest stands first, and the data have it last
    assert texts(tab, lines) == section["points"][-1]["lines"]
    assert texts(tab, "#budgets .front-table td:first-child") == [
        row[0] for row in section["points"][-1]["saved"]["rows"]
    ]
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    assert texts(tab, lines) == section["points"][-2]["lines"]
    assert texts(tab, "#budgets .panel h3") == ["Plan 23 of 24"]
    assert tab.locator("#budgets .point[aria-pressed=true]").count() == 1


def test_every_point_and_mark_is_a_button_that_arrow_keys_reach(opened):
    section = pareto()
    tab = opened(page_data(section))
    points = tab.locator("#budgets .point")
    assert points.count() == len(section["points"]) + len(section["marks"]) + 1
    assert tab.locator("#budgets .point[tabindex='0']").count() == 1
    tab.locator("#budgets .point[tabindex='0']").focus()
    tab.keyboard.press("Home")
    reached = []
    for _ in range(points.count()):
        reached.append(tab.evaluate("document.activeElement.getAttribute('aria-label')"))
        tab.keyboard.press("ArrowRight")
    assert sorted(reached) == sorted(points.evaluate_all("all => all.map(one => one.getAttribute('aria-label'))"))
    assert len(set(reached)) == len(reached)


def test_the_step_line_gives_the_fastest_plan_within_each_peak(opened):
    """No point lies below it, and each corner is a point: also where a plan is larger and slower than another."""
    section = pareto()
    section["points"].append({**section["points"][3], "seconds": 0.004})
    tab = opened(page_data(section))
    path = tab.locator("#budgets .front-line").get_attribute("d")
    corners = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+),([\d.]+)", path)]
    places = tab.locator("#budgets .point:is([data-kind=plan], [data-kind=chosen])").evaluate_all(
        "all => all.map(one => one.getAttribute('transform').match(/[0-9.]+/g).map(Number))"
    )
    assert [y for _, y in corners] == sorted(y for _, y in corners)  # more memory never takes more time
    for x, y in places:
        below = max(height for at, height in corners if at <= x + 0.01)
        assert y <= below + 0.01
    for x, y in corners[0:-1:2]:  # between these stand the bends, and the last is where the plot ends
        assert min(abs(x - at) + abs(y - height) for at, height in places) < 0.01


def test_a_front_without_points_says_so(opened):
    empty = {**pareto(), "points": [], "chosen": None, "marks": [], "plain": None}
    assert texts(opened(page_data(empty)), "#budgets .empty") == ["There are no plans to choose from."]


# ---------------------------------------------------------------------------------------------------- the tables


def test_a_header_sorts_by_its_keys_and_sorts_back(opened):
    section = table()
    tab = opened(page_data(section))
    header = tab.locator("#saved thead th")
    for column, name in [(0, "bytes"), (3, "at")]:
        found = []
        for direction in (["descending", "ascending"], ["ascending", "descending"])[column > 0]:
            tab.get_by_role("button", name=name, exact=True).click()
            assert header.nth(column).get_attribute("aria-sort") == direction
            found.append(
                (direction, tab.locator("#saved tbody tr").evaluate_all("rows => rows.map(r => r.dataset.values)"))
            )
        keys = {str(*own): key[column] for own, key in zip(section["values"], section["keys"], strict=True) if own}
        for direction, order in found:
            sizes = [keys[value] for value in order if value is not None]
            if column == 0:
                assert sizes == sorted(sizes, reverse=direction == "descending")
            else:
                assert len(set(sizes)) == 1 + sum(a != b for a, b in pairwise(sizes))
    assert header.nth(0).get_attribute("aria-sort") is None
    assert header.nth(4).locator("button").count() == 0


def test_a_button_shows_all_rows_and_again_the_first(opened):
    tab = opened(page_data(table()))
    visible = tab.locator("#saved tbody tr:visible")
    assert visible.count() == 12
    tab.get_by_role("button", name="Show all 57 rows").click()
    assert visible.count() == 57
    tab.get_by_role("button", name="Show the first 12").click()
    assert visible.count() == 12
    assert opened(page_data(table(rows=12))).locator("button.more").count() == 0


def test_following_a_row_marks_its_value_and_other_views_show_the_row(opened):
    """The front's table has a value whose row in the other table is far down and hidden; it is shown and marked."""
    section = table(shown=1)
    tab = opened(page_data(pareto(), section), height=500, reduced_motion="reduce")
    row = tab.locator("#saved tr[data-values='2']")
    assert row.is_hidden()
    tab.locator("#budgets .front-table tr[data-values='2'] button").click()
    for each in (row, tab.locator("#budgets .front-table tr[data-values='2']")):
        assert each.get_attribute("aria-current") == "true"
    assert tab.locator("tr.marked").count() == 2
    assert 0 <= row.bounding_box()["y"] < 500
    tab.locator("#saved tr[data-values='4'] td").nth(3).click()
    assert tab.locator("#saved tr.marked").get_attribute("data-values") == "4"


def test_a_row_leads_to_the_graph_and_the_graph_to_the_row(opened):
    graph = toy()
    tab = opened(page_data(table(shown=1), graph), height=500, reduced_motion="reduce")
    tab.locator("#saved .reach").first.click()
    assert 0 <= tab.locator(f"#{graph['id']} h2").bounding_box()["y"] < 500
    before = tab.locator("#saved tr.marked").get_attribute("data-values")
    handle = tab.locator(".handle").first
    handle.focus()
    place = handle.bounding_box()["y"]
    handle.press("Enter")
    marked = tab.locator("#saved tr.marked")
    assert marked.get_attribute("data-values") != before
    assert handle.bounding_box()["y"] == pytest.approx(place, abs=2)
    tab.get_by_role("button", name="Its row in the table").click()
    assert 0 <= marked.bounding_box()["y"] < 500


def test_a_row_without_a_value_cannot_be_followed(opened):
    tab = opened(page_data(table()))
    assert tab.locator("#saved tbody tr:not([data-values]) button").count() == 0
    assert tab.locator("#saved tbody tr:not([data-values])").count() == 57 // 7


def test_the_rows_of_a_diff_are_signed_in_words(opened):
    section = diff()
    tab = opened(page_data(section))
    said = tab.locator("#change tbody .sign .unseen").evaluate_all("all => all.map(one => one.textContent)")
    assert said == ["removed", "removed", "added"]
    assert texts(tab, "#change .side:first-child li") == section["before"]["lines"]
    assert texts(tab, "#change .side:last-child li") == section["after"]["lines"]
