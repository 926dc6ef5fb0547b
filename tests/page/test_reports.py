"""Reports of a real program, saved and opened in a real browser: what the page shows is what the report says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jointcut.aot.options.limits import limit
from jointcut.aot.report.report import Report
from jointcut.partition.figures import human_bytes
from page.browser import axe_findings
from page.graph_tab import STILL, carried
from page.report_tab import MOST_KB, cells, closed_makers, explained, is_true_to, section


@pytest.fixture(scope="module")
def report() -> Callable[[str], Report]:
    """`report(name)` explains a program once."""
    known: dict[str, Report] = {}

    def of(name: str) -> Report:
        if name not in known:
            known[name] = explained(name)
        return known[name]

    return of


@pytest.mark.parametrize("name", ["gpt-scan", "measured"])
def test_a_saved_report_opens_with_every_section_and_tells_the_figures_of_the_report(name, report, opened, tmp_path):
    told = report(name)
    text = told.save(tmp_path / "report.html").read_text("utf-8")
    tab = opened(text, **STILL)  # which fails at the end on a console error or a request
    is_true_to(told, tab)
    assert len(text.encode()) <= 1e3 * MOST_KB
    assert carried(tab) == told.totals.saved_bytes
    assert 0 < max(closed_makers(tab)) <= 0.6 * told.totals.saved_bytes


@pytest.mark.parametrize("place", [0, 5])
def test_a_row_leads_to_its_value_in_the_graph_with_the_reason_that_the_report_gives(place, report, opened):
    told = report("gpt-scan")
    value = section(told, "graph")["values"]["id"][section(told, "saved")["values"][place][0]]
    row = next(row for row in told.saved if row.value == value)
    tab = opened(told.html, height=700, **STILL)
    tab.locator("#saved tbody tr").nth(place).locator("button").click()
    assert 0 <= tab.locator("#graph h2").bounding_box()["y"] < 700
    said = tab.locator(".graph-picked").text_content()
    assert tab.evaluate("jointcut.bytes", row.bytes) in said and row.reason in said
    assert f"made by {row.op}" in said
    chosen = tab.locator(".handle.chosen")
    assert chosen.count() == 1
    label = chosen.get_attribute("aria-label")
    assert row.type in label or "values" in label
    maker = tab.locator(".box.op.chosen")
    assert maker.count() == 1
    maker.hover()
    assert row.reason in tab.get_by_role("tooltip").text_content()


def test_a_handle_marks_its_row_and_the_page_stays_until_the_row_is_asked_for(report, opened):
    told = report("gpt-scan")
    tab = opened(told.html, height=700, **STILL)
    tab.locator("#graph").scroll_into_view_if_needed()
    handle = tab.locator(".handle").first
    handle.focus()
    before = tab.evaluate("scrollY")
    handle.press("Enter")
    marked = tab.locator("#saved tr.marked")
    assert marked.count() == 1
    assert tab.evaluate("scrollY") == before
    tab.get_by_role("button", name="Its row in the table").click()
    assert 0 <= marked.bounding_box()["y"] < 700
    reason = cells(tab, "#saved tr.marked td:last-child")[0].removeprefix("for the first: ")
    assert reason in tab.locator(".graph-picked").text_content()


def test_a_point_of_the_curve_shows_what_that_plan_saves(report, opened):
    told = report("gpt-scan")
    points = section(told, "pareto")["points"]
    tab = opened(told.html)
    buttons = tab.locator("#pareto .point:is([data-kind=plan], [data-kind=chosen])")
    assert buttons.count() == len(points)
    order = sorted(points, key=lambda p: (p["peak_bytes"], -p["seconds"]))
    for place in (0, len(points) // 2, len(points) - 1):
        buttons.nth(place).dispatch_event("click")
        sizes = [s.bytes for s in front_plan(told, order[place]).saved]
        shown = [cell.rpartition(" × ")[::2] for cell in cells(tab, "#pareto .front-table td:first-child")]
        told_of = [size for times, size in shown for _ in range(int(times or 1))]
        assert sorted(told_of) == sorted(map(human_bytes, sizes))


def front_plan(told: Report, point: dict[str, Any]) -> Any:
    """The plan that a point of the page stands for."""
    shown = (*told.front.points, told.front.chosen)
    place = {name: point[name] for name in ("peak_bytes", "seconds", "share")}
    return next(p.plan for p in shown if told.front.place(p) == place)


def test_the_page_says_what_less_memory_costs_and_the_budget_to_type_for_it(report, opened):
    told = report("measured")
    row = told.less[0]
    assert row.peak_bytes is not None and row.peak_bytes <= (limit(row.budget).peak_bytes or 0) < told.peak_bytes
    tab = opened(told.html)
    shown = cells(tab, "#less tbody tr:first-child td")
    assert shown[0].startswith(f"{row.budget} (−") and human_bytes(row.peak_bytes) in shown[1]
    assert shown[3] == "−" + human_bytes(row.freed_bytes - row.kept_bytes)
    assert all(cell for cell in shown)
    assert (
        f'Each budget was tried and holds: aot.function(budget="{row.budget}").'
        in tab.locator("#less .lead").inner_text()
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_a_report(theme, report, opened):
    assert axe_findings(opened(report("measured").html, theme=theme, **STILL)) == []


def test_dark_mode_changes_the_ground_and_nothing_of_what_is_said(report, opened):
    html = report("gpt-scan").html
    light, dark = (opened(html, theme=theme) for theme in ("light", "dark"))
    ground = "getComputedStyle(document.body).backgroundColor"
    assert light.evaluate(ground) != dark.evaluate(ground)
    assert light.locator("main").inner_text() == dark.locator("main").inner_text()


def test_the_keyboard_alone_gets_from_the_top_to_a_value_its_reason_and_its_row(report, opened):
    told = report("gpt-scan")
    tab = opened(told.html, **STILL)
    for key, goal in (("Tab", "closest('.graph') !== null"), ("PageDown", "classList.contains('handle')")):
        presses = 0
        while not tab.evaluate(f"document.activeElement.{goal}"):
            tab.keyboard.press(key)
            presses += 1
            assert presses < 100
    tab.keyboard.press("Enter")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    values = tab.evaluate("document.activeElement.closest('tr').dataset.values")
    row = section(told, "saved")["values"].index([int(v) for v in values.split()])
    reason = section(told, "saved")["rows"][row][-1].removeprefix("for the first: ")
    assert reason in tab.locator(".graph-picked").text_content()


@pytest.mark.parametrize("width", [400, 700])
def test_no_report_is_wider_than_its_window(width, report, opened):
    tab = opened(report("measured").html, width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


CLIPPED = """() => [...document.querySelectorAll('nav, .scroll, .total, .view')]
  .filter(one => one.scrollWidth > one.clientWidth + 1).map(one => `${one.tagName} ${one.className}`)"""


@pytest.mark.parametrize("name", ["gpt-scan", "measured"])
def test_at_the_width_of_a_laptop_no_column_and_no_link_is_clipped(name, report, opened):
    assert opened(report(name).html, width=1200).evaluate(CLIPPED) == []


def test_peak_and_time_are_the_largest_figures_and_say_what_they_are(report, opened):
    told = report("measured")
    tab = opened(told.html)
    assert cells(tab, ".totals-first dt") == ["peak of a step", "time of a step, by the model"]
    peak, time = cells(tab, ".totals-first .total-value")
    assert (peak, time) == (human_bytes(told.account.peak_bytes), f"{told.time_share:.2f} × plain JAX")
    plain = f"plain JAX: {human_bytes(told.plain_peak_bytes)}, ratio {told.peak_bytes / told.plain_peak_bytes:.2f}"
    assert cells(tab, ".totals-first .total-detail") == [
        f"{plain}; of the compiled step, as XLA tells it",
        "predicted times were 0.55 to 1.25 of the measured ones, 0.95 in the middle",
    ]
    sizes = "all => all.map(one => parseFloat(getComputedStyle(one).fontSize))"
    first, rest = (tab.locator(f".{row} .total-value").evaluate_all(sizes) for row in ("totals-first", "totals-rest"))
    assert len(rest) == 6 and min(first) >= 1.5 * max(rest)


def test_a_report_says_the_same_in_its_page_and_in_its_record(report):
    told = report("measured")
    record = json.loads(json.dumps(told.to_dict()))
    table = section(told, "saved")
    ids = section(told, "graph")["values"]["id"]
    recorded = {row["value"]: row for row in record["saved"]}
    for keys, own in zip(table["keys"], table["values"], strict=True):
        rows = [recorded.pop(ids[at]) for at in own]
        assert keys[0] == sum(row["bytes"] for row in rows)
        assert keys[-1].removeprefix("for the first: ") == rows[0]["reason"]
    assert recorded == {}


# ------------------------------------------------------------------------------------------------ on several devices

MESHED = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jointcut import aot
from jointcut.partition.prices.cost import Roofline

mesh = jax.make_mesh((4,), ("d",))  # its axis is in the types, and no `jax.set_mesh` is asked for

def laid(shape, spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

def loss(ws, x):
    for w in ws:
        x = jnp.tanh(jnp.sin(x @ w))
    return jnp.mean(x**2)

rates = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
args = [laid((128, 128), P())] * 6, laid((4096, 128), P("d"))
report = aot.function(loss, cost=rates).explain(*args)
report.save(f"{sys.argv[1]}/report.html")
report.diff(aot.function(loss, strategy="save_all").explain(*args)).save(f"{sys.argv[1]}/diff.html")
"""

#: Texts with a figure in bytes that neither themselves nor in their heading say "per device".
UNTOLD = r"""() => {
  const [figure, per, found] = [/\d (B|kB|MB|GB|bytes)\b/, "per device", []];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const own = walker.currentNode.parentElement;
    if (!figure.test(walker.currentNode.data) || own.closest("script, style, details:not([open])")) continue;
    const cell = own.closest("td");
    const heading = cell ? cell.closest("table").tHead.rows[0].cells[cell.cellIndex]
      : own.closest(".handle") ? document.querySelector("#graph .cut-note")
      : own.closest(".total, p, li, text");
    const legend = own.closest("#memory .legend")?.previousElementSibling;
    if (![own, heading, legend].some((each) => each?.textContent.includes(per))) found.push(walker.currentNode.data);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def meshed(tmp_path_factory) -> Path:
    """A folder with the pages of a step on four devices: a report, and it beside itself."""
    folder = tmp_path_factory.mktemp("meshed")
    flags = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    subprocess.run([sys.executable, "-c", MESHED, folder], env={**os.environ, **flags}, check=True, timeout=300)
    return folder


@pytest.mark.parametrize("name", ["report", "diff"])
def test_each_figure_of_a_step_on_several_devices_is_told_per_device(name, meshed, opened):
    tab = opened((meshed / f"{name}.html").read_text("utf-8"), **STILL)
    tab.locator("details").evaluate_all("all => all.forEach((one) => { one.open = true; })")
    assert tab.evaluate(UNTOLD) == []
    assert tab.evaluate(UNTOLD.replace('"per device"', '"per planet"')), "the texts with figures are found"
    assert "bytes alive per device (MB)" in cells(tab, ".axis-title")
    said = tab.locator("#memory svg[role=img]").get_attribute("aria-label")
    assert "MB per device, in the " in said
    if name == "report":
        assert "predicted peak of the step per device (MB)" in cells(tab, ".axis-title")
        labels = [each for each in cells(tab, ".total dt") if not each.startswith(("time", "computed"))]
        assert len(labels) >= 6 and all(each.endswith(" per device") for each in labels)
        handle = tab.locator("#graph .handle").first
        assert " per device, from " in handle.get_attribute("aria-label")
        handle.hover()
        assert "per device" in tab.locator(".tooltip").text_content()
    tab.locator("#memory .cursor").focus()
    assert re.search(r"alive in all\S*\d (kB|MB) per device", tab.locator(".tooltip").text_content())


def test_a_step_on_one_device_is_told_without_devices(report, opened):
    tab = opened(report("gpt-scan").html, **STILL)
    assert "per device" not in tab.locator("main").text_content()
