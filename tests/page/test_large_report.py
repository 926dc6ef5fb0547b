"""The report of a program of five thousand ops, saved and opened in a real browser."""

from __future__ import annotations

import pytest

from page.browser import axe_findings
from page.graph_tab import MARGIN, STILL, STRAY_LABELS, carried
from page.report_tab import MOST_KB, closed_makers, explained, is_true_to, section


@pytest.fixture(scope="module")
def report():
    """The report, made once."""
    return explained("deep")


def test_the_page_opens_with_every_section_and_tells_the_figures_of_the_report(report, opened, tmp_path):
    text = report.save(tmp_path / "report.html").read_text("utf-8")
    tab = opened(text, **STILL)  # which fails at the end on a console error or a request
    is_true_to(report, tab)
    assert len(section(report, "graph")["nodes"]["name"]) >= 5_000
    assert len(text.encode()) <= 1e3 * MOST_KB
    assert carried(tab) == report.totals.saved_bytes


def test_few_boxes_are_shown_at_first_and_among_them_are_those_that_make_what_is_saved(report, opened):
    tab = opened(report.html, theme="dark", **STILL)
    assert 20 < tab.locator(".box").count() <= 150
    assert tab.evaluate(STRAY_LABELS, MARGIN) == []
    assert 0 < max(closed_makers(tab)) <= report.totals.saved_bytes / 2
    assert axe_findings(tab) == []
