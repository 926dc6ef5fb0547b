"""On a narrow screen nothing is cut off unseen: tables show that they go on, words stay whole, the bar follows."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from page.fixtures import diff, page_data, pareto, table, timeline
from page.graph_tab import STILL

BROKEN = r"""selector => [...document.querySelectorAll(selector)].flatMap(cell => {
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  const broken = [];
  while (walker.nextNode()) {
    const text = walker.currentNode;
    for (const word of text.data.matchAll(/[^\s/]+/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
      if (tops.size > 1) broken.push(word[0]);
    }
  }
  return broken;
})"""
LIGHT = """async ([picture, points]) => {
  const image = new Image();
  image.src = `data:image/png;base64,${picture}`;
  await image.decode();
  const canvas = Object.assign(document.createElement('canvas'), { width: image.width, height: image.height });
  const pen = canvas.getContext('2d', { willReadFrequently: true });
  pen.drawImage(image, 0, 0);
  return points.map(([x, y]) => pen.getImageData(x, y, 1, 1).data.slice(0, 3).reduce((a, b) => a + b) / 3);
}"""
INSET = 6  # pixels from the edge: beside the bar of a marked row, within the shadow


# ---------------------------------------------------------------------------------------------------- the tables


def shadows(tab, selector: str) -> list[tuple[bool, bool]]:
    """For each of these rows whether it is darker at the left and at the right edge of its box than in the middle."""
    frame = tab.locator("#saved .scroll").bounding_box()
    picture = base64.b64encode(tab.screenshot(clip=frame)).decode()
    tops = [box["y"] - frame["y"] for box in (row.bounding_box() for row in tab.locator(selector).all())]
    across = (INSET, frame["width"] / 2, frame["width"] - INSET)
    points = [[round(x), round(top) + 3] for top in tops for x in across]
    light = tab.evaluate(LIGHT, [picture, points])
    rows = list(zip(light[0::3], light[1::3], light[2::3], strict=True))
    for left, middle, right in rows:
        assert all(abs(edge - middle) < 1 or middle - edge > 4 for edge in (left, right)), rows
    return [(middle - left > 4, middle - right > 4) for left, middle, right in rows]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_table_has_a_shadow_at_each_edge_behind_which_there_is_more(opened, theme):
    """In its head and in its rows, also in one that is marked and in one below the pointer."""
    tab = opened(page_data(table(rows=6)), width=520, height=2000, theme=theme, **STILL)
    box = tab.locator("#saved .scroll")
    tab.locator("#saved .reach").first.click()
    tab.locator("#saved tbody tr").nth(2).hover()
    assert tab.locator("#saved tr.marked").count() == 1
    most = box.evaluate("box => box.scrollWidth - box.clientWidth")
    assert most > 120
    for left in (0, 100, most):
        box.evaluate("(box, left) => { box.scrollLeft = left; }", left)
        assert shadows(tab, "#saved tr") == [(left > 0, left < most)] * 7


def test_a_table_that_fits_has_no_shadow(opened):
    tab = opened(page_data(table(rows=3)), width=1600, height=1400, **STILL)
    assert tab.locator("#saved .scroll").evaluate("box => box.scrollWidth - box.clientWidth") == 0
    assert shadows(tab, "#saved tr") == [(False, False)] * 4


@pytest.mark.parametrize("width", [360, 700, 900])
def test_no_word_of_a_table_is_broken_on_a_narrow_screen(opened, width):
    """A path may be broken after its slashes, and a source line never within its file or its number."""
    section = table()
    for place, row in enumerate(section["rows"]):
        row[2] = f"dot_general_with_a_long_name at programs/equinox_model.py:{60 + place} (Block.__call__)"
    tab = opened(page_data(section, diff()), width=width)
    assert tab.locator("td.long").count() > 20
    assert tab.evaluate(BROKEN, "td.long") == []


@pytest.mark.parametrize("more", [0, 1, 2, 3, 20])
def test_up_to_two_rows_beyond_the_first_are_shown_with_them_and_need_no_button(opened, more):
    tab = opened(page_data(table(rows=7 + more, shown=7)))
    visible, button = tab.locator("#saved tbody tr:visible"), tab.locator("#saved button.more")
    if more <= 2:
        assert (visible.count(), button.count()) == (7 + more, 0)
    else:
        assert (visible.count(), button.text_content()) == (7, f"Show all {7 + more} rows")


# ------------------------------------------------------------------------------------------------------- the bar

SEEN = """link => {
  const nav = link.closest('nav');
  const [room, own, style] = [nav.getBoundingClientRect(), link.getBoundingClientRect(), getComputedStyle(nav)];
  const rem = (name) => 16 * parseFloat(style.getPropertyValue(name));
  const [left, right] = [room.left + rem('--before'), room.right - rem('--after')];
  const shown = Math.min(own.right, right) - Math.max(own.left, left);
  return shown >= Math.min(own.width, right - left) - 1;  // the whole link, or all that there is room for
}"""
FADES = "nav => ['--before', '--after'].map(name => parseFloat(getComputedStyle(nav).getPropertyValue(name)) > 0)"


def six() -> dict[str, Any]:
    """A page of six sections, the last of them tall."""
    tables = [table(id=f"table-{place}", title=f"Table number {place}") for place in range(3)]
    return page_data(timeline(), diff(), *tables, pareto())


@pytest.mark.parametrize("width", [400, 700])
def test_the_bar_shows_the_link_of_the_section_that_is_read(opened, width):
    data = six()
    tab = opened(data, width=width, height=700, **STILL)
    nav = tab.locator(".bar nav")
    assert nav.evaluate("nav => nav.scrollWidth > nav.clientWidth + 50")
    for section in [*data["sections"], *reversed(data["sections"])]:
        tab.locator(f"#{section['id']}").evaluate("one => one.scrollIntoView()")
        link = tab.locator(f".bar a[href='#{section['id']}'][aria-current]")
        link.wait_for(state="attached")
        assert tab.locator(".bar a[aria-current]").count() == 1
        tab.wait_for_function(f"() => ({SEEN})(document.querySelector('.bar a[aria-current]'))")


READ = """async () => {
  const read = [];
  for (let top = 0; top <= document.documentElement.scrollHeight; top += 25) {
    scrollTo(0, top);
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    const here = document.querySelector('.bar a[aria-current]')?.getAttribute('href');
    if (here && here !== read.at(-1)) read.push(here);
  }
  return read;
}"""


def test_from_the_top_to_the_end_every_section_has_its_turn_also_short_ones_at_the_end(opened):
    data = page_data(table(rows=8), *({**diff(), "id": f"change-{place}", "rows": []} for place in range(3)))
    tab = opened(data, height=1000, **STILL)
    assert tab.evaluate(READ) == [f"#{section['id']}" for section in data["sections"]]


def test_in_a_page_that_fits_its_window_the_bar_marks_what_stands_at_the_top(opened):
    tab = opened(page_data(*({**diff(), "id": f"change-{place}", "rows": []} for place in range(2))), height=1800)
    assert tab.evaluate("document.documentElement.scrollHeight <= innerHeight")
    assert tab.locator(".bar a[aria-current]").evaluate("link => link.getAttribute('href')") == "#change-0"


def test_the_bar_fades_at_those_ends_alone_where_it_has_more(opened):
    tab = opened(six(), width=500, **STILL)
    nav = tab.locator(".bar nav")
    most = nav.evaluate("nav => nav.scrollWidth - nav.clientWidth")
    for left in (0, most // 2, most):
        nav.evaluate("(nav, left) => { nav.scrollLeft = left; }", left)
        wanted = [left > 0, left < most]
        tab.wait_for_function(
            f"wanted => String(({FADES})(document.querySelector('.bar nav'))) === wanted",
            arg=",".join(str(one).lower() for one in wanted),
            timeout=5000,
        )
    tab.set_viewport_size({"width": 1600, "height": 900})
    tab.wait_for_function(f"() => String(({FADES})(document.querySelector('.bar nav'))) === 'false,false'")


def test_the_tab_key_leads_through_the_bar_and_each_link_comes_into_view(opened):
    data = six()
    tab = opened(data, width=400, height=700, **STILL)
    tab.keyboard.press("Tab")
    orders = (("Tab", data["sections"]), ("Shift+Tab", list(reversed(data["sections"][:-1]))))
    for key, sections in orders:
        for section in sections:
            tab.keyboard.press(key)
            assert tab.evaluate("document.activeElement.getAttribute('href')") == f"#{section['id']}"
            tab.wait_for_function(f"() => ({SEEN})(document.activeElement)", timeout=5000)
    for _ in range(3):
        tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == data["sections"][3]["id"]
