"""Measure the saved report: how large its file is, and how soon a browser shows it.

    python -m benchmarks.pages             # gpt-scan and a joint graph of 5,000 ops
    python -m benchmarks.pages --opened 9  # the median of so many times that each page is opened
    python -m benchmarks.pages --pictures docs/static  # measure nothing; draw the pictures of a report, and of two

The report is made without compiling the step, so `explain` is the time of the cut, the front and the rows. The page is
opened in a headless Chromium, the machine's own, driven by playwright; the first contentful paint is what the browser's
performance API tells of it, and `ready` is when the last section has been drawn, both since the navigation began.
"""

import argparse
import importlib
import io
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from rich.table import Table

from benchmarks.measure import wide_console
from benchmarks.programs import Program, gpt, load
from jointcut import aot

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LAYERS = 21  # of the deep program: its joint graph has 5,000 ops and more
PAINT_MS = 2_000  # the promise for 5,000 ops

_READY = """() => new Promise(done => {
  const root = document.documentElement;
  const tell = () => root.dataset.ready && done(performance.now());
  new MutationObserver(tell).observe(root, { attributes: true });
  tell();
})"""
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


@dataclass(frozen=True)
class Shown:
    """One page: ops of its graph, seconds to explain, kilobytes of its file, milliseconds until paint and the end."""

    name: str
    ops: int
    explain_seconds: float
    file_kb: float
    paint_ms: float
    ready_ms: float


def deep(layers: int = LAYERS) -> Program:
    """A deep unrolled GPT of width 8, whose joint graph has about 265 ops for each layer."""
    return gpt.of("deep", gpt.Config(layers=layers, width=8, heads=2, context=8, scan=False), rows=1)


def measure(browser: Any, name: str, program: Program, opened: int, folder: Path) -> Shown:
    """Explain one program, save its report, and open it so many times."""
    cut = aot.function(program.loss, has_aux=program.has_aux).trace(*program.arguments).partition()
    start = time.perf_counter()
    report = cut.explain(measure=False)
    seconds = time.perf_counter() - start
    path = report.save(folder / f"{name}.html")
    times = [_times(browser, path) for _ in range(opened)]
    paint, ready = (statistics.median(column) for column in zip(*times, strict=True))
    ops = next(len(s["nodes"]["name"]) for s in report.sections if s["kind"] == "graph")
    return Shown(name, ops, seconds, path.stat().st_size / 1e3, paint, ready)


def _times(browser: Any, path: Path) -> tuple[float, float]:
    """Milliseconds from the navigation to the first contentful paint, and until all sections are drawn."""
    tab = browser.new_page(viewport={"width": 1200, "height": 900})
    tab.goto(path.as_uri(), wait_until="commit")
    tab.wait_for_function("document.documentElement !== null")
    ready = tab.evaluate(_READY)
    tab.wait_for_function(f"() => {_PAINT.replace('.startTime', '')} !== undefined")
    paint = tab.evaluate(_PAINT)
    tab.close()
    return paint, ready


def table(pages: list[Shown]) -> Table:
    """The figures, a row for each page."""
    made = Table(title="Saved reports, opened in Chromium")
    for column in ("report", "ops", "explain s", "file kB", "first paint ms", "all drawn ms"):
        made.add_column(column, justify="left" if column == "report" else "right")
    for p in pages:
        cells = f"{p.ops:,}", f"{p.explain_seconds:.2f}", f"{p.file_kb:.0f}", f"{p.paint_ms:.0f}", f"{p.ready_ms:.0f}"
        made.add_row(p.name, *cells)
    return made


def pictures(browser: Any, folder: Path) -> None:
    """Draw sections of the report of gpt-scan, as it was compiled, and of what a budget changes, in light and dark."""
    program = load("gpt-scan")
    function = partial(aot.function, program.loss, has_aux=program.has_aux)
    with tempfile.TemporaryDirectory() as work:
        report = function().explain(*program.arguments)
        least = next(row.budget for row in reversed(report.less) if row.budget)
        smaller = function(budget=least).explain(*program.arguments).diff(report)
        shown = {"report": (report, ("memory", "graph", "less", "pareto")), "diff": (smaller, ("memory",))}
        for page, theme in itertools.product(shown, ("light", "dark")):
            told, names = shown[page]
            path = told.save(Path(work) / f"{page}.html")
            tab = browser.new_page(
                viewport={"width": 1000, "height": 1500}, color_scheme=theme, reduced_motion="reduce"
            )
            tab.goto(path.as_uri())
            tab.wait_for_selector("html[data-ready]")
            for name in names:
                tab.set_viewport_size({"width": 1400 if name == "less" else 1000, "height": 1500})  # a wide table
                _draw(tab.locator(f"#{name}"), folder / f"{page}-{name}-{theme}.png")
            tab.close()


def _draw(section: Any, path: Path) -> None:
    """Write a section as a picture of few colours, a third as large."""
    with Image.open(io.BytesIO(section.screenshot())) as drawn:
        drawn.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            path, optimize=True
        )


def programs() -> Iterator[tuple[str, Program]]:
    """What is explained, by name."""
    yield "gpt-scan", load("gpt-scan")
    yield "5,000 ops", deep()


def main() -> None:
    """Measure the pages, and print the table and the promise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--opened", type=int, default=5, help="how often each page is opened (%(default)s)")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the pages' pictures there instead")
    options = parser.parse_args()
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        parser.error("no Chromium on the PATH: install Debian's chromium")
    try:
        driver = importlib.import_module("playwright.sync_api")
    except ModuleNotFoundError:
        parser.error("needs playwright: pip install playwright")
    with driver.sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        if options.pictures:
            pictures(browser, options.pictures)
            return
        pages = [measure(browser, name, p, options.opened, Path(folder)) for name, p in programs()]
        browser.close()
    wide_console(100).print(table(pages))
    slow = [p.name for p in pages if p.paint_ms > PAINT_MS]
    print(f"First paint within {PAINT_MS / 1e3:g} s: {'no, of ' + ', '.join(slow) if slow else 'yes'}")


if __name__ == "__main__":
    main()
