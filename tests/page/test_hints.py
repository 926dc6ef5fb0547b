"""What a reader is told in passing: names that fit, what stands at the peak, and tooltips of the graph."""

from __future__ import annotations

import re

import pytest

from jointcut.partition.figures import human_bytes, human_seconds
from page import graphs
from page.fixtures import page_data, timeline, without_folders
from page.graph_tab import STILL, Section
from page.report_tab import cells

PLACES = (
    *(f"programs/equinox_model.py:{line} (VisionTransformer.__call__)" for line in (89, 90, 94)),
    "programs/equinox_model.py:63 (Block.__call__)",
    "/home/someone/with/many/folders/above/the/file/of/a/model.py:1204 (scaled_dot_product)",
    "experiments/resnet.py:7 (a_long_function)",
    "resnet.py:8 (f)",
    "In[3]:7 (loss)",
)
ENTRY = """entry => {
  const corners = one => { const b = one.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const name = entry.querySelector('.named');
  return { said: name.innerText, title: name.title, cut: getComputedStyle(name).textOverflow !== 'clip'
    || name.scrollWidth > name.clientWidth + 1 && getComputedStyle(name).overflow !== 'visible',
    entry: corners(entry), name: corners(name), figure: corners(entry.querySelector('.figure')) };
}"""


def of_places() -> Section:
    """A timeline with a group for each of the places, and one for a file whose name alone is too long."""
    section = timeline()
    groups = section["groupings"][0]["groups"][: len(PLACES)]
    named = [{**group, "name": name} for group, name in zip(groups, PLACES, strict=True)]
    return {**section, "groupings": [{"name": "source line", "groups": named}]}


# ------------------------------------------------------------------------------------------------------ the timeline


def apart(told) -> bool:
    """Whether name and figure of an entry lie within it, and not over each other."""
    (left, _, right, _), (start, top, end, foot), figure = told["entry"], told["name"], told["figure"]
    within = left <= start and end <= right and figure[2] <= right
    return within and (end <= figure[0] or foot <= figure[1] or figure[3] <= top)


@pytest.mark.parametrize("width", [360, 700, 1200, 1400])
def test_an_entry_of_the_legend_shows_file_line_and_function_whole_and_its_title_has_the_folders(opened, width):
    tab = opened(page_data(of_places()), width=width)
    entries = tab.locator("#memory button.legend-entry")
    found = [entries.nth(place).evaluate(ENTRY) for place in range(entries.count())]
    for name, told in zip(PLACES, found, strict=True):
        assert told["said"] == without_folders(name) and not told["cut"]
        assert told["title"] == (name if told["said"] != name else "")
        assert apart(told)
    assert len({told["said"] for told in found}) == len(PLACES)


def test_places_that_read_the_same_without_folders_have_them(opened):
    section = of_places()
    twins = ("encoder/block.py:7 (f)", "decoder/block.py:7 (f)")
    for group, name in zip(section["groupings"][0]["groups"], twins, strict=False):
        group["name"] = name
    said = cells(opened(page_data(section)), "#memory button.legend-entry .named")
    assert said[:3] == [*twins, without_folders(PLACES[2])]


def test_a_name_too_long_for_a_line_wraps(opened):
    section = of_places()
    name = f"folder/{'a_module_with_a_long_name_' * 3}.py:1204 (f)"
    section["groupings"][0]["groups"][0]["name"] = name
    told = opened(page_data(section), width=360).locator("#memory button.legend-entry").first.evaluate(ENTRY)
    assert apart(told) and not told["cut"]
    assert told["said"].endswith(".py:1204 (f)") and told["title"] == name


def test_the_tooltip_of_a_step_names_its_groups_as_the_legend_does(opened):
    tab = opened(page_data(of_places()))
    tab.locator("#memory .cursor").focus()
    tab.keyboard.press("p")
    names = cells(tab, "#jointcut-tooltip .tooltip-name")[1:]
    assert sorted(names) == sorted(cells(tab, "#memory button.legend-entry .named"))


def test_above_the_legend_stands_the_operation_at_the_peak(opened):
    section = timeline()
    section["steps"] *= 3
    section["peak"] = {"step": 625, "bytes": section["total"][225]}
    for by in ("total",):
        section[by] *= 3
    for grouping in section["groupings"]:
        for group in grouping["groups"]:
            group["bytes"] = group["bytes"] * 3
    step = section["steps"][625]
    for source, said in ((PLACES[0], ", equinox_model.py:89"), ("no line", ", no line"), ("", "")):
        section["steps"][625] = {**step, "op": "add_any", "source": source}
        line = opened(page_data(section)).locator("#memory .legend-title")
        assert line.text_content() == f"Alive at the peak: add_any{said} (operation 626 of 1,200)"
        assert source in line.get_attribute("title")


def arrays(types: list[str]) -> list[Section]:
    """Arrays of these types, the largest first."""
    return [
        {"bytes": 4_792_320 - 500_000 * place, "type": type_, "op": f"op_{place}", "source": PLACES[place]}
        for place, type_ in enumerate(types)
    ]


@pytest.mark.parametrize("types", [["float32[24,65,768]", "", "int8[4]"], ["", "", ""]])
def test_the_largest_arrays_at_the_peak_are_listed_with_their_types_where_any_is_known(opened, types):
    section = timeline()
    section["peak"]["arrays"] = arrays(types)
    tab = opened(page_data(section))
    tab.get_by_text("The peak in figures").click()
    typed = any(types)
    heads = ["bytes", "array", "made by", "source line"]
    assert cells(tab, "#memory .peak-arrays th button") == [head for head in heads if typed or head != "array"]
    rows = [[human_bytes(a["bytes"]), a["type"], a["op"], a["source"]] for a in section["peak"]["arrays"]]
    told = [cell for row in rows for place, cell in enumerate(row) if typed or place != 1]
    assert cells(tab, "#memory .peak-arrays td") == told
    assert tab.locator("#memory .peak-arrays").is_visible()
    tab.locator("#memory .peak-arrays th button").first.press("Enter")  # the largest first, which they are
    assert cells(tab, "#memory .peak-arrays td") == told
    tab.locator("#memory .peak-arrays th button").first.press("Enter")
    assert cells(tab, "#memory .peak-arrays tr td:first-child") == [row[0] for row in reversed(rows)]


@pytest.mark.parametrize("known", [{}, {"arrays": []}])
def test_where_no_arrays_are_known_the_figures_are_those_of_the_groups(opened, known):
    section = timeline()
    section["peak"].update(known)
    tab = opened(page_data(section))
    assert tab.locator("#memory .peak-arrays").count() == 0
    assert tab.locator("#memory details table").count() == 1


# ------------------------------------------------------------------------------------------------------- the graph


def lines(tab, selector: str) -> dict[str, list[str]]:
    """What the tooltips of all elements that match say, line by line, by the elements' identities."""
    return tab.locator(selector).evaluate_all(
        """all => Object.fromEntries(all.map(one => {
        one.dispatchEvent(new PointerEvent('pointerenter', { clientX: 9, clientY: 9 }));
        const said = [...document.querySelectorAll('#jointcut-tooltip .tooltip-line')];
        return [one.dataset.id, said.map(line => line.textContent)];
    }))"""
    )


def again_seconds(section: Section, inside: int) -> float:
    """The seconds of all ops in a scope, or in one below it, that run for the second time."""
    nodes, found = section["nodes"], 0.0
    for scope, role, seconds in zip(nodes["scope"], nodes["role"], nodes["seconds"], strict=True):
        above: int | None = scope
        while above is not None and above != inside:
            above = section["scopes"][above]["parent"]
        found += seconds if above is not None and role == "recomputed" else 0.0
    return found


def test_a_box_of_the_backward_tells_the_time_of_what_runs_twice_and_nothing_of_the_rest(opened):
    section = graphs.transformer()
    tab = opened(graphs.report(section), **STILL)
    told = lines(tab, ".box.backward[data-kind=scope][aria-expanded=false]")
    with_time = 0
    for identity, said in told.items():
        seconds = again_seconds(section, int(identity.partition("-s")[2]))
        times = [line for line in said if "as predicted" in line]
        whole = any(line.startswith("recomputed:") for line in said)
        part = "" if whole else " of it for the second time"
        assert times == ([f"{human_seconds(seconds)}{part}, as predicted"] if seconds else [])
        with_time += bool(seconds) and not whole
    assert with_time > 3


def test_an_op_tells_its_time_in_the_forward_and_where_it_runs_twice(opened):
    section = graphs.toy()
    nodes = section["nodes"]
    told = lines(opened(graphs.report(section), **STILL), ".box.op")
    assert len(told) == len(nodes["role"])
    assert len(set(nodes["role"])) == 3
    for identity, said in told.items():
        node = int(identity.partition("-n")[2])
        priced = nodes["role"][node] != "backward"
        times = [line for line in said if "predicted" in line]
        assert times == ([f"{human_seconds(nodes['seconds'][node])}, as predicted"] if priced else [])


def test_every_reason_in_a_tooltip_stands_on_a_line_of_its_own_that_says_what_it_is(opened):
    section = graphs.transformer()
    values, reasons = section["values"], section["texts"]
    tab = opened(graphs.report(section), **STILL)
    tab.get_by_role("button", name="Open saved").click()
    makers = {
        f"forward-n{node}": reasons[reason]
        for node, reason, saved in zip(values["node"], values["reason"], values["saved"], strict=True)
        if saved
    }
    told = lines(tab, ".box.op.forward")
    found = {identity: said for identity, said in told.items() if identity in makers}
    assert len(found) >= 10
    for identity, said in found.items():
        assert "saved for the backward" in said
        assert said[-1] == f"Why it is saved: {makers[identity]}"
    handles = lines(tab, ".handle")
    assert {said[-1] for said in handles.values()} == {f"Why it is saved: {reason}" for reason in reasons}
    for said in [*told.values(), *handles.values()]:
        assert sum("Why it is saved" in line for line in said) <= 1
        assert not any(re.search(r"\. [a-z]", line) for line in said)


def test_a_saved_value_without_a_reason_says_nothing_of_one(opened):
    section = graphs.toy()
    section["values"]["reason"] = [-1] * len(section["values"]["reason"])
    tab = opened(graphs.report(section), **STILL)
    for said in lines(tab, ".handle, .box.op").values():
        assert not any("Why" in line for line in said)
    tab.locator(".handle").first.dispatch_event("click")
    assert "Why" not in tab.locator(".graph-picked").text_content()
