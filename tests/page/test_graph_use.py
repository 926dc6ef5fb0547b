"""A graph can be hovered, walked by keyboard, searched, zoomed and linked with the other views."""

from __future__ import annotations

from itertools import pairwise

import pytest

from page import graphs
from page.browser import axe_findings
from page.graph_tab import RECTANGLES, STILL, Section, button, click, identities

SCROLLED = """Promise.race([
  new Promise(done => addEventListener('scroll', () => done(scrollY), { once: true })),
  new Promise(done => setTimeout(done, 5000, 0)),
])"""
UNREACHED = """() => {
  const all = [...document.querySelectorAll('.graph [data-id]')].map(each => each.dataset.id);
  const seen = new Set([document.querySelector('.graph [tabindex="0"]').dataset.id]);
  for (const id of seen) {
    for (const key of ['ArrowUp', 'ArrowDown', 'ArrowLeft', 'ArrowRight']) {
      const from = document.querySelector(`[data-id="${id}"]`);
      from.focus();
      from.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
      seen.add(document.activeElement.dataset.id);
    }
  }
  return all.filter(id => !seen.has(id));
}"""


@pytest.fixture(scope="module")
def sections() -> dict[str, Section]:
    """Each of the graphs, made once."""
    return {name: make() for name, make in graphs.SECTIONS.items()}


def test_hovering_a_handle_tells_type_bytes_op_source_and_reason(opened, sections):
    toy = sections["toy"]
    tab = opened(graphs.report(toy), **STILL)
    tab.locator(".handle .plate").hover()
    said = tab.get_by_role("tooltip").text_content()
    value = toy["values"]["saved"].index(True)
    source = toy["sources"][toy["values"]["source"][value]]
    reason = toy["texts"][toy["values"]["reason"][value]]
    for part in ("65.5 kB saved", toy["values"]["type"][value], "dot_general", source, reason):
        assert part in said


def test_hovering_a_handle_of_many_lists_the_largest(opened, sections):
    tab = opened(graphs.report(sections["transformer"]), **STILL)
    tab.locator(".handle[data-count='7'] .plate").first.hover()
    said = tab.get_by_role("tooltip").text_content()
    assert "7 values saved, 6.82 MB in all" in said
    assert "float32[4,128,1024] of dot_general" in said
    assert "a matrix product" in said


def test_hovering_a_recomputed_op_says_that_it_runs_twice(opened, sections):
    tab = opened(graphs.report(sections["toy"]), **STILL)
    tab.locator(".box.again").first.hover()
    said = tab.get_by_role("tooltip").text_content()
    assert "runs a second time" in said
    assert "toy.py:8 (loss)" in said
    assert "float32[64,256]" in said


def test_hovering_lights_the_lines_of_a_box_and_no_others(opened, sections):
    tab = opened(graphs.report(sections["toy"]), **STILL)
    tab.locator("[data-id=forward-n3]").hover()
    lit = tab.locator(".edge.lit").count()
    edges = sections["toy"]["edges"]
    assert lit == sum(3 in ends for ends in zip(edges["from"], edges["to"], strict=True))
    assert tab.locator(".crossing.lit").count() == 0


def test_one_tab_stop_leads_in_and_arrows_reach_every_box_and_handle(opened, sections):
    tab = opened(graphs.report(sections["transformer"]), **STILL)
    click(tab, "forward-s3")
    assert tab.locator(".graph [tabindex='0']").count() == 1
    assert tab.evaluate(UNREACHED) == []


def test_page_down_walks_through_all_in_the_order_of_the_run(opened, sections):
    tab = opened(graphs.report(sections["toy"]), **STILL)
    tab.locator(".graph [tabindex='0']").focus()
    walked = []
    for _ in range(tab.locator(".graph [data-id]").count()):
        walked.append(tab.evaluate("document.activeElement.dataset.id"))
        tab.keyboard.press("PageDown")
    assert sorted(walked) == sorted(identities(tab, ".graph [data-id]"))
    for side in ("forward", "backward"):
        nodes = [int(each.partition("-n")[2]) for each in walked if each.startswith(f"{side}-n")]
        scoped = [sections["toy"]["nodes"]["scope"][node] for node in nodes]
        assert all(a < b for (a, b), (x, y) in zip(pairwise(nodes), pairwise(scoped), strict=True) if x == y)
    tab.keyboard.press("Home")
    assert tab.evaluate("document.activeElement.dataset.id") == walked[0]


def test_enter_opens_the_focused_scope_which_keeps_the_focus(opened, sections):
    tab = opened(graphs.report(sections["transformer"]), **STILL)
    tab.locator("[data-id=forward-s9]").focus()
    tab.keyboard.press("Enter")
    focused = tab.locator("[data-id=forward-s9]")
    assert focused.get_attribute("aria-expanded") == "true"
    assert tab.evaluate("document.activeElement.dataset.id") == "forward-s9"
    tab.keyboard.press("Enter")
    assert focused.get_attribute("aria-expanded") == "false"


def test_escape_closes_the_tooltip_of_what_has_the_focus(opened, sections):
    tab = opened(graphs.report(sections["toy"]), **STILL)
    tab.locator(".graph [tabindex='0']").focus()
    tab.keyboard.press("ArrowDown")
    assert tab.get_by_role("tooltip").is_visible()
    tab.keyboard.press("Escape")
    assert not tab.get_by_role("tooltip").is_visible()


def test_what_gets_the_focus_comes_into_view(opened, sections):
    tab = opened(graphs.report(sections["transformer"]), width=700, **STILL)
    for _ in range(4):
        button(tab, "Zoom in")
    tab.locator(".graph [tabindex='0']").focus()
    for key in ("End", "Home", "PageDown"):
        tab.keyboard.press(key)
        place = tab.evaluate("document.activeElement.getBoundingClientRect().toJSON()")
        frame = tab.evaluate("document.querySelector('.graph-frame').getBoundingClientRect().toJSON()")
        assert frame["left"] <= place["left"] < frame["right"]
        assert frame["top"] <= place["top"] < frame["bottom"]
        assert 0 <= place["top"] < 900


def test_search_counts_its_hits_and_enter_walks_through_them_opening_what_hides_them(opened, sections):
    section = sections["large"]
    tab = opened(graphs.report(section), **STILL)
    field = tab.get_by_role("searchbox")
    field.fill("tanh")
    hits = [node for node, name in enumerate(section["nodes"]["name"]) if name == "tanh"]
    assert tab.locator(".graph-found").text_content() == f"{len(hits)} hits"
    for place in (1, 2):
        field.press("Enter")
        assert tab.locator(".graph-found").text_content() == f"{place} of {len(hits)}"
        assert identities(tab, ".box.chosen") == [f"forward-n{hits[place - 1]}"]
    frame, hit = (
        tab.locator(selector).evaluate_all(RECTANGLES)[0] for selector in (".graph-frame", ".box.chosen .box-shape")
    )
    assert sum(hit[::2]) / 2 == pytest.approx(sum(frame[::2]) / 2, abs=3)


def test_a_value_named_by_another_view_is_opened_and_marked_with_its_handle(opened, sections):
    section = sections["large"]
    value = max(value for value, saved in enumerate(section["values"]["saved"]) if saved)
    node = section["values"]["node"][value]
    columns = [{"name": "type", "align": "left", "sort": False}]
    table = {"kind": "table", "id": "saved", "title": "Saved", "lead": "", "columns": columns, "keys": None}
    table |= {"rows": [[section["values"]["type"][value]]], "values": [[value]], "shown": 5}
    tab = opened(graphs.report(section) | {"sections": [section, table]}, **STILL)
    tab.locator("#saved tbody tr").click()
    assert identities(tab, ".box.chosen") == [f"forward-n{node}"]
    assert tab.locator(".handle.chosen").count() == 1


def test_a_click_on_a_handle_marks_its_row_in_a_table(opened, sections):
    toy = sections["toy"]
    value = toy["values"]["saved"].index(True)
    columns = [{"name": "type", "align": "left", "sort": False}]
    table = {"kind": "table", "id": "saved", "title": "Saved", "lead": "", "columns": columns, "keys": None}
    table |= {"rows": [["other"], [toy["values"]["type"][value]]], "values": [None, [99, value]], "shown": 5}
    tab = opened(graphs.report(toy) | {"sections": [toy, table]}, **STILL)
    assert tab.locator("#saved tr.marked").count() == 0
    tab.locator(".handle .plate").click()
    assert toy["values"]["type"][value] in tab.locator("#saved tr.marked").text_content()


def test_open_saved_shows_the_makers_of_the_ten_largest_saved_values(opened, sections):
    section = sections["large"]
    values = section["values"]
    saved = [value for value, kept in enumerate(values["saved"]) if kept]
    tab = opened(graphs.report(section), **STILL)
    button(tab, "Open saved")
    marked = [int(each.removeprefix("forward-n")) for each in identities(tab, ".box.chosen")]
    sizes = {values["node"][value]: values["bytes"][value] for value in saved}
    assert sorted(sizes[node] for node in marked) == sorted(sizes.values())[-10:]


def test_reset_goes_back_to_the_first_view_after_anything(opened, sections):
    tab = opened(graphs.report(sections["transformer"]), **STILL)
    first = tab.locator(".graph-world").get_attribute("transform"), identities(tab, ".box")
    button(tab, "Open saved")
    button(tab, "Zoom out")
    assert (tab.locator(".graph-world").get_attribute("transform"), identities(tab, ".box")) != first
    button(tab, "Reset")
    assert (tab.locator(".graph-world").get_attribute("transform"), identities(tab, ".box")) == first


def test_the_wheel_scrolls_the_page_and_zooms_only_with_control(opened, sections):
    tab = opened(graphs.report(sections["transformer"]), **STILL)
    before = tab.locator(".graph-world").get_attribute("transform")
    tab.locator(".graph").hover(position={"x": 20, "y": 100})
    tab.evaluate(f"() => void (globalThis.moved = {SCROLLED})")
    tab.mouse.wheel(0, 120)
    assert tab.evaluate("globalThis.moved") > 0
    assert tab.locator(".graph-world").get_attribute("transform") == before
    tab.keyboard.down("Control")
    tab.mouse.wheel(0, -120)
    tab.locator(f".graph-world:not([transform='{before}'])").wait_for(state="attached")
    tab.keyboard.up("Control")


def test_dragging_moves_the_picture_and_opens_nothing(opened, sections):
    tab = opened(graphs.report(sections["transformer"]), **STILL)
    before, boxes = tab.locator(".graph-world").get_attribute("transform"), identities(tab, ".box")
    place = tab.locator("[data-id=forward-s9]").bounding_box()
    tab.mouse.move(place["x"] + 10, place["y"] + 10)
    tab.mouse.down()
    tab.mouse.move(place["x"] + 70, place["y"] + 40, steps=4)
    tab.mouse.up()
    assert tab.locator(".graph-world").get_attribute("transform") != before
    assert identities(tab, ".box") == boxes


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_closed_or_open(opened, sections, theme):
    tab = opened(graphs.report(sections["transformer"]), theme=theme, **STILL)
    assert axe_findings(tab) == []
    click(tab, "forward-s3")
    assert axe_findings(tab) == []
