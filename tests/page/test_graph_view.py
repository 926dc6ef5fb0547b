"""The picture of a graph says what the data say, at every level of opening."""

from __future__ import annotations

from typing import Any

import pytest

from page import graphs
from page.graph_tab import (
    MARGIN,
    RECTANGLES,
    STILL,
    STRAY_LABELS,
    Section,
    button,
    carried,
    click,
    identities,
    open_one_more,
    overlapping,
    saved_bytes,
)

MOST_AT_FIRST = 150
#: Pixels that a text in the picture has at least on a screen of 1,400.
LEGIBLE = 11
TEXTS = """() => [...document.querySelectorAll('.graph text')].map(text =>
  [text.textContent, text.getScreenCTM().a * parseFloat(getComputedStyle(text).fontSize)])"""
FILLED = """() => {
  const box = (one) => one.getBoundingClientRect();
  const sides = [...document.querySelectorAll('.side-panel rect')].map(box);
  const frame = box(document.querySelector('.graph-frame'));
  const [left, right] = [Math.min(...sides.map(b => b.left)), Math.max(...sides.map(b => b.right))];
  return { share: (right - left) / frame.width, within: frame.left <= left && right <= frame.right };
}"""
CORNERS = "e => { const b = e.getBBox(); return [b.x, b.y, b.x + b.width, b.y + b.height]; }"


@pytest.fixture(scope="module")
def sections() -> dict[str, Section]:
    """Each of the graphs, made once."""
    return {name: make() for name, make in graphs.SECTIONS.items()}


def first_pairs(section: Section, stands: Any) -> set[tuple[str, str]]:
    """For each saved value, what stands for its maker and for the first op of the backward that reads it."""
    roles, values, edges = section["nodes"]["role"], section["values"], section["edges"]
    first: dict[int, int] = {}
    for start, end, value in zip(edges["from"], edges["to"], edges["value"], strict=True):
        if roles[start] == "forward" != roles[end]:
            first[value] = min(end, first.get(value, end))
    return {(stands(values["node"][value]), stands(reader)) for value, reader in first.items()}


def test_every_op_of_a_small_graph_has_a_box_on_its_side(opened, sections):
    toy = sections["toy"]
    tab = opened(graphs.report(toy), **STILL)
    nodes = toy["nodes"]
    for side in ("forward", "backward"):
        count = sum((role == "forward") == (side == "forward") for role in nodes["role"])
        assert tab.locator(f".box.op.{side}").count() == count
    assert tab.locator(".box.op.again").count() == nodes["role"].count("recomputed")
    assert tab.locator(".box.op").filter(has_text="recomputed").count() == nodes["role"].count("recomputed")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", sorted(graphs.SECTIONS))
def test_on_a_screen_of_1400_pixels_each_text_can_be_read_without_zoom_and_the_frame_is_filled(
    opened, sections, name, theme
):
    tab = opened(graphs.report(sections[name]), width=1400, theme=theme, **STILL)
    small = [(text, size) for text, size in tab.evaluate(TEXTS) if size < LEGIBLE]
    assert small == []
    filled = tab.evaluate(FILLED)
    assert filled["within"] and filled["share"] > 0.85


def test_forward_stands_left_of_the_cut_and_backward_right_of_it(opened, sections):
    tab = opened(graphs.report(sections["transformer"]), **STILL)
    (cut,) = tab.locator(".cut-line").evaluate_all(RECTANGLES)
    assert all(right < cut[0] for _, _, right, _ in tab.locator(".box.forward").evaluate_all(RECTANGLES))
    assert all(left > cut[2] for left, _, _, _ in tab.locator(".box.backward").evaluate_all(RECTANGLES))


def test_an_op_stands_after_what_it_reads_in_its_scope_down_in_the_forward_and_up_in_the_backward(opened, sections):
    toy = sections["toy"]
    tab = opened(graphs.report(toy), **STILL)
    rectangles = tab.locator(".box.op").evaluate_all(RECTANGLES)
    tops = {identity: top for identity, (_, top, _, _) in zip(identities(tab, ".box.op"), rectangles, strict=True)}
    scopes, compared = toy["nodes"]["scope"], 0
    for start, end in zip(toy["edges"]["from"], toy["edges"]["to"], strict=True):
        for side, sign in (("forward", 1), ("backward", -1)):
            ends = [tops.get(f"{side}-n{node}") for node in (start, end)]
            if None not in ends and scopes[start] == scopes[end]:
                assert sign * ends[0] < sign * ends[1]
                compared += 1
    assert compared > 5


def test_the_heading_tells_the_bytes_saved_and_the_ops_of_each_side(opened, sections):
    large = sections["large"]
    tab = opened(graphs.report(large), **STILL)
    roles = large["nodes"]["role"]
    assert tab.locator(".cut-note").text_content() == f"{saved_bytes(large) / 1e9:.1f} GB saved"
    assert f"{roles.count('forward'):,} ops" in tab.locator(".side-panel.forward").text_content()
    assert f"{roles.count('recomputed'):,} of them recomputed" in tab.locator(".side-panel.backward").text_content()


def test_a_handle_stands_for_each_two_ops_that_a_saved_value_joins_first(opened, sections):
    toy = sections["toy"]
    tab = opened(graphs.report(toy), **STILL)
    assert tab.locator(".handle").count() == len(first_pairs(toy, str))


@pytest.mark.parametrize("name", ["transformer", "flat"])
def test_the_handles_carry_the_saved_bytes_at_every_level_of_opening(opened, sections, name):
    section = sections[name]
    tab = opened(graphs.report(section), **STILL)
    button(tab, "Collapse all")
    counts = []
    for _ in range(12):
        assert carried(tab) == saved_bytes(section)
        counts.append(tab.locator(".handle").count())
        if not open_one_more(tab):
            break
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_curves_are_wider_for_more_bytes(opened, sections):
    tab = opened(graphs.report(sections["transformer"]), **STILL)
    bytes_of = tab.locator(".handle").evaluate_all("all => all.map(handle => Number(handle.dataset.bytes))")
    path = "all => all.map(group => Number(group.querySelector('.curve').getAttribute('stroke-width')))"
    widths = [width for _, width in sorted(zip(bytes_of, tab.locator(".crossing").evaluate_all(path), strict=True))]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]


def test_a_click_on_a_scope_shows_its_children_and_a_second_hides_them(opened, sections):
    section = sections["transformer"]
    tab = opened(graphs.report(section), **STILL)
    scope = next(index for index, each in enumerate(section["scopes"]) if each["name"] == "block_2")
    children = {f"forward-s{index}" for index, each in enumerate(section["scopes"]) if each["parent"] == scope}
    before = identities(tab, ".box")
    click(tab, f"forward-s{scope}")
    shown = set(identities(tab, ".box"))
    assert children <= shown
    assert tab.locator(f"[data-id=forward-s{scope}]").get_attribute("aria-expanded") == "true"
    assert tab.locator(f"[data-id=backward-s{scope}]").get_attribute("aria-expanded") == "true"
    click(tab, f"backward-s{scope}")
    assert sorted(identities(tab, ".box")) == sorted(before)


def test_what_is_opened_stays_where_it_was(opened, sections):
    tab = opened(graphs.report(sections["transformer"]), **STILL)
    for identity in ("forward-s9", "backward-s21", "forward-s9"):
        place = tab.locator(f"[data-id={identity}] .box-shape")
        ((left, top, _, _),) = place.evaluate_all(RECTANGLES)
        click(tab, identity)
        ((after_left, after_top, _, _),) = place.evaluate_all(RECTANGLES)
        assert (after_left, after_top) == pytest.approx((left, top), abs=1)


def test_children_stand_inside_the_frame_of_their_scope(opened, sections):
    section = sections["transformer"]
    tab = opened(graphs.report(section), **STILL)
    click(tab, "forward-s3")
    for side in ("forward", "backward"):
        ((left, top, right, bottom),) = tab.locator(f"[data-id={side}-s3] .box-shape").evaluate_all(RECTANGLES)
        for scope in (4, 5, 7, 8):
            (inner,) = tab.locator(f"[data-id={side}-s{scope}] .box-shape").evaluate_all(RECTANGLES)
            assert left <= inner[0]
            assert top <= inner[1]
            assert inner[2] <= right
            assert inner[3] <= bottom


@pytest.mark.parametrize("name", ["toy", "transformer", "flat", "large"])
def test_no_edge_leaves_the_panel_of_its_side(opened, sections, name):
    tab = opened(graphs.report(sections[name]), **STILL)
    for press in (lambda: None, lambda: button(tab, "Open saved")):
        press()
        for side in ("forward", "backward"):
            panel = tab.locator(f".side-panel.{side} rect").evaluate(CORNERS)
            edges = tab.locator(f".edge.{side}").evaluate_all(f"all => all.map({CORNERS})")
            assert edges
            assert all(a >= p - 1 for corners in edges for a, p in zip(corners[:2], panel[:2], strict=True))
            assert all(a <= p + 1 for corners in edges for a, p in zip(corners[2:], panel[2:], strict=True))


@pytest.mark.parametrize("name", ["toy", "transformer", "flat"])
def test_no_two_boxes_overlap_and_no_label_leaves_its_box_at_three_levels(opened, sections, name):
    tab = opened(graphs.report(sections[name]), **STILL)
    for level in range(3):
        if level == 1:
            click(tab, identities(tab, ".box.opens")[-1])
        if level == 2:
            button(tab, "Open saved")
        leaves = tab.locator(".box:not(.open) .box-shape").evaluate_all(RECTANGLES)
        plates = tab.locator(".handle .plate").evaluate_all(RECTANGLES)
        assert overlapping([*leaves, *plates]) == []
        assert tab.evaluate(STRAY_LABELS, MARGIN) == []


def test_two_open_frames_are_apart_or_one_inside_the_other(opened, sections):
    tab = opened(graphs.report(sections["transformer"]), **STILL)
    button(tab, "Open saved")
    for first, second in overlapping(tab.locator(".box .box-shape").evaluate_all(RECTANGLES)):
        inner, outer = sorted((first, second), key=lambda box: (box[2] - box[0]) * (box[3] - box[1]))
        assert outer[0] <= inner[0] + MARGIN
        assert inner[2] <= outer[2] + MARGIN
        assert outer[1] <= inner[1] + MARGIN
        assert inner[3] <= outer[3] + MARGIN


def test_a_loop_says_how_many_steps_it_takes(opened, sections):
    tab = opened(graphs.report(sections["transformer"]), **STILL)
    assert tab.locator(".box.loop.forward").text_content().startswith("scan× 4 steps")
    assert "× 4 steps" in tab.locator(".box.loop.backward").get_attribute("aria-label")


def test_of_five_thousand_ops_few_boxes_are_shown_at_first(opened, sections):
    section = sections["large"]
    assert len(section["nodes"]["name"]) > 5000
    tab = opened(graphs.report(section), **STILL)
    assert 20 < tab.locator(".box").count() <= MOST_AT_FIRST
    assert carried(tab) == saved_bytes(section)


def test_an_argument_that_is_saved_comes_from_a_box_of_its_own(opened):
    section = graphs.toy()
    label = "params['w']"
    argument = section["values"]["label"].index(label)
    section["values"]["saved"][argument] = True
    reader = next(node for node, role in enumerate(section["nodes"]["role"]) if role == "backward")
    section["arguments"][str(reader)] = [label]
    tab = opened(graphs.report(section), **STILL)
    assert tab.locator(".box.arguments").count() == 1
    assert carried(tab) == saved_bytes(section)


def test_a_saved_value_that_no_op_of_the_backward_reads_still_has_its_handle(opened):
    section = graphs.toy()
    value = section["values"]["node"].index(3)
    section["values"]["saved"][value] = True
    tab = opened(graphs.report(section), **STILL)
    assert carried(tab) == saved_bytes(section)


def test_a_graph_without_a_plan_speaks_of_no_cut(opened, sections):
    section = sections["toy"]
    values = section["values"] | {"saved": [False] * len(section["values"]["saved"])}
    tab = opened(graphs.report(section | {"cut": False, "values": values}), **STILL)
    assert tab.locator(".cut-name").text_content() == "not yet cut"
    assert tab.locator(".cut-note").text_content() == ""
    assert tab.locator(".graph-key strong").all_text_contents() == ["forward", "backward"]
    assert tab.get_by_role("button", name="Open saved").count() == 0
    assert "saved" not in tab.locator("svg.graph").get_attribute("aria-label")
