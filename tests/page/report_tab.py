"""Explain a program of the suite for a test, and look its report up in an open page."""

from __future__ import annotations

from typing import Any

import jax

from benchmarks import pages
from benchmarks.programs import load
from jointcut import aot
from jointcut.aot.report.report import Report
from jointcut.partition.prices.cost import Roofline
from programs import undrawn

MOST_KB = 2_000
RATES = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)


def explained(name: str) -> Report:
    """The report of a looped GPT ("gpt-scan"), of that as it was compiled ("measured"), or of an unrolled one ("deep").

    Made with JAX as the programs expect it, by the least bytes saved (so that less memory is to be had), at rates that
    no machine measures.
    """
    with jax.numpy_dtype_promotion("standard"), jax.enable_checks(False):
        program = undrawn(pages.deep if name == "deep" else lambda: load("gpt-scan"))
        cut = aot.function(program.loss, strategy="min_cut", cost=RATES).trace(*program.arguments).partition()
        return cut.explain(measure=name == "measured")


def section(report: Report, name: str) -> dict[str, Any]:
    """A section of a report's page by its id."""
    return next(s for s in report.data["sections"] if s["id"] == name)


def cells(tab: Any, selector: str) -> list[str]:
    """The texts of all elements that match."""
    return tab.locator(selector).evaluate_all("all => all.map(one => one.textContent)")


def is_true_to(report: Report, tab: Any) -> None:
    """Check that a page has every section, drawn, and tells the figures and the peak of its report."""
    assert tab.locator("main > section").evaluate_all("all => all.map(one => one.id)") == [
        s["id"] for s in report.data["sections"]
    ]
    assert tab.locator(".failure").count() == 0
    assert tab.locator("h1").text_content() == report.name
    shown = dict(zip(cells(tab, ".total dt"), cells(tab, ".total-value"), strict=True))
    told = {total["label"]: total["value"] for total in report.data["totals"]}
    assert shown == told and len(told) >= len(report.compared())
    peak = max(report.totals.forward_bytes, report.totals.backward_bytes)
    assert section(report, "memory")["peak"]["bytes"] == peak
    said = tab.locator("#memory svg[role=img]").get_attribute("aria-label")
    assert f"The peak is {tab.evaluate('jointcut.bytes', peak)}" in said


def closed_makers(tab: Any) -> list[int]:
    """The saved bytes that each closed box of the forward makes."""
    return tab.evaluate(
        """() => {
        const data = JSON.parse(document.getElementById('jointcut-data').textContent);
        const model = jointcut.graphModel(data.sections.find(({ kind }) => kind === 'graph'));
        return model.visible().filter(box => !model.isOpen(box) && box.side === 'forward').map(box => box.saved);
    }"""
    )
