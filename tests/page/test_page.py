"""A page is one file that shows its data to eye, keyboard and screen reader, in light and dark, on any screen."""

from __future__ import annotations

import json
import random
from html import unescape

import pytest

from jointcut.partition.drawing.page import framed, page
from jointcut.partition.errors import RecordError
from jointcut.partition.figures import human_bytes, human_seconds
from page.browser import axe_findings
from page.fixtures import diff, page_data, table, timeline

HOSTILE = "</script><script>throw 1</script><!-- <b>&amp; \u2028 \"quoted\" 'too' {title} \\u003c"


def texts(tab, selector: str) -> list[str]:
    return [text.strip() for text in tab.locator(selector).all_inner_texts()]


# ---------------------------------------------------------------------------------------------------- the file


def test_equal_data_give_equal_pages_below_400_kilobytes_without_data():
    empty = {**page_data(), "sections": []}
    assert page(empty) == page(json.loads(json.dumps(empty)))
    assert len(page(empty).encode()) < 400_000


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"format": 2},
            "page was given format 2, and writes 1.\nHand page the dictionary that a report writes.",
        ),
        (
            {"totals": [float("nan")]},
            "page was given what JSON cannot hold: Out of range float values are not JSON compliant: nan.\n"
            "Hand page dictionaries, lists, texts, finite numbers, booleans and None.",
        ),
        (
            {"sections": [{"kind": "tabel", "id": "saved"}]},
            "section 'saved' has the unknown kind 'tabel'.\n"
            "Known names: 'diff', 'graph', 'pareto', 'table', 'timeline'. Did you mean 'table'?",
        ),
        (
            {"sections": [diff(), diff()]},
            "section 'change' stands 2 times.\nGive each section an id of its own.",
        ),
        ({"sections": [{"kind": "diff"}]}, "section None has no id.\nGive each section an id of its own."),
    ],
)
def test_data_that_cannot_be_drawn_are_refused(changed, said):
    with pytest.raises(RecordError) as error:
        page({**page_data(), **changed})
    assert str(error.value).replace("compliant.", "compliant: nan.") == said


def test_data_without_a_part_are_refused():
    data = {name: part for name, part in page_data().items() if name != "totals"}
    with pytest.raises(RecordError) as error:
        page(data)
    assert str(error.value) == ("page was given data without 'totals'.\nHand page the dictionary that a report writes.")


def test_no_text_of_the_data_is_read_as_html(opened):
    data = {
        **page_data(table(rows=2)),
        "title": HOSTILE,
        "subtitle": HOSTILE,
        "totals": [{"label": HOSTILE, "value": HOSTILE, "detail": HOSTILE}],
    }
    data["sections"][0]["rows"][0][3] = HOSTILE
    tab = opened(data)
    assert tab.evaluate("JSON.parse(document.getElementById('jointcut-data').textContent)") == data
    assert tab.evaluate("document.querySelector('h1').textContent") == HOSTILE
    assert tab.evaluate("document.querySelectorAll('td')[3].textContent") == HOSTILE
    assert tab.title() == f"{HOSTILE} · jointcut".replace("\u2028", "\u2028")


def test_a_frame_holds_the_whole_page_and_its_links_stay_in_it(opened):
    html = page(page_data(table(), diff()))
    frame = framed(html, height=480)
    assert frame.startswith('<iframe title="loss · jointcut" sandbox="allow-scripts allow-downloads"')
    assert frame.endswith("</iframe>") and frame.count("<") == 2
    assert unescape(frame.partition('srcdoc="')[2].removesuffix('"></iframe>')) == html
    tab = opened(f"<!DOCTYPE html><html data-ready><title>a cell</title>{frame}")
    inner = tab.frame_locator("iframe")
    inner.locator("html[data-ready]").wait_for(state="attached")
    inner.get_by_role("link", name="Against the plan of yesterday").click()
    assert inner.locator("#change").evaluate("section => section === document.activeElement")
    assert tab.locator("iframe").bounding_box()["height"] == 480


def test_a_section_that_cannot_be_drawn_says_so_in_its_place_and_the_others_are_drawn(opened):
    broken = {"kind": "timeline", "id": "memory", "title": "Memory", "lead": ""}
    tab = opened(page_data(broken, table()), complaints=("TypeError",))
    assert texts(tab, "#memory [role=alert]")[0].startswith("This section could not be drawn: ")
    assert tab.locator("#saved tbody tr").count() == 57


# ------------------------------------------------------------------------------------------------- the whole page


@pytest.mark.parametrize("width", [360, 700, 1600])
def test_a_page_never_scrolls_sideways(opened, width):
    tab = opened(page_data(), width=width)
    tab.get_by_role("button", name="Show all 57 rows").click()
    tab.get_by_text("The peak in figures").click()
    assert tab.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_axe_finds_nothing_serious(opened, theme, width):
    tab = opened(page_data(), width=width, theme=theme, reduced_motion="reduce")
    tab.get_by_text("The peak in figures").click()
    tab.locator("#saved .reach").first.click()
    tab.locator("#memory .legend-entry").first.click()
    tab.locator("#memory .cursor").focus()
    tab.keyboard.press("ArrowRight")
    assert axe_findings(tab) == []


LUMINANCE = """
names => {
  const probe = document.body.appendChild(document.createElement("i"));
  const light = (name) => {
    probe.style.color = `var(${name})`;
    const linear = getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map(part => {
      const level = Number(part) / 255;
      return level <= 0.04045 ? level / 12.92 : ((level + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  return Object.fromEntries(names.map(name => [name, light(name)]));
}
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_a_contrast_of_4_5_and_marks_of_3(opened, theme):
    """As WCAG 2.2 defines contrast, success criteria 1.4.3 and 1.4.11."""
    words = ["--text", "--muted", "--accent", "--forward", "--backward", "--saved", "--added", "--removed"]
    marks = ["--border", "--recomputed", *(f"--group-{place}-line" for place in range(1, 10))]
    tab = opened(page_data(diff()), theme=theme)
    light = tab.evaluate(LUMINANCE, ["--surface", "--page", *words, *marks])

    def contrast(name: str, ground: str) -> float:
        low, high = sorted((light[name], light[ground]))
        return (high + 0.05) / (low + 0.05)

    assert {name for name in words if min(contrast(name, "--surface"), contrast(name, "--page")) < 4.5} == set()
    assert {name for name in marks if contrast(name, "--surface") < 3} == set()


def test_the_theme_follows_the_system_until_the_button_says_otherwise(opened):
    tab = opened(page_data(diff()), theme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for theme in ("auto", "light", "dark"):
        assert texts(tab, "button.theme") == [f"Theme: {theme}"]
        seen[theme] = tab.evaluate(ground)
        tab.locator("button.theme").press("Enter")
    assert texts(tab, "button.theme") == ["Theme: auto"]
    assert seen["auto"] == seen["dark"] != seen["light"]
    tab.emulate_media(color_scheme="light")
    assert tab.evaluate(ground) == seen["light"]


def test_the_first_tab_skips_to_the_report_and_links_lead_to_their_sections(opened):
    tab = opened(page_data(), height=500, reduced_motion="reduce")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the report"
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "main"
    tab.get_by_role("link", name="What is saved, and why").click()
    assert tab.evaluate("document.activeElement.id") == "saved"
    assert 0 <= tab.locator("#saved-heading").bounding_box()["y"] < 500


def test_paper_shows_all_rows_and_no_buttons(opened):
    tab = opened(page_data())
    tab.emulate_media(media="print")
    assert tab.locator("#saved tbody tr:visible").count() == 57
    assert tab.locator("button.theme:visible, button.more:visible, nav:visible").count() == 0


def test_nothing_moves_for_readers_who_ask_for_stillness(opened):
    tab = opened(page_data(timeline()), reduced_motion="reduce")
    assert tab.locator(".layer").first.evaluate("layer => getComputedStyle(layer).transitionDuration") == "0s"


# --------------------------------------------------------------------------------------------------------- units


def test_bytes_are_written_as_python_writes_them(opened):
    draw = random.Random(1)
    amounts = [0, 999, 999_499, 999_500, 2_250_000, 9_995_000, 47_200_000, 999_500_000, 1_234_000_000_000_000]
    amounts += [round(10 ** draw.uniform(0, 14)) for _ in range(400)]
    amounts += [125 * draw.randrange(8, 8000) for _ in range(400)]  # ties
    tab = opened(page_data(diff()))
    assert tab.evaluate("list => list.map(jointcut.bytes)", amounts) == list(map(human_bytes, amounts))


def test_seconds_are_written_as_python_writes_them(opened):
    draw = random.Random(2)
    amounts = [0, 2.5e-6, 45e-6, 999.4e-6, 1.23e-3, 0.0617, 0.99949, 2.1, 99.96, 1234.5, 0.125, -0.0042]
    amounts += [10 ** draw.uniform(-8, 3) for _ in range(400)]
    written = opened(page_data(diff())).evaluate("list => list.map(jointcut.seconds)", amounts)
    assert written == list(map(human_seconds, amounts))
