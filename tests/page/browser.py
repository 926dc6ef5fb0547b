"""Open pages in a real Chromium, and see that they complain of nothing and ask for nothing.

The browser is the machine's own, driven by playwright's Python package; where one of them is missing the tests are
skipped, and the reason says what to install.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jointcut.partition.drawing.page import page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS_TO_DRAW = 20


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The tabs of a headless Chromium, for one file: playwright occupies the thread's event loop while it runs."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium on the PATH: install Debian's chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield Tabs(chromium)
        chromium.close()


class Tabs:
    """The tabs of one browser: a new tab is a new process, so that one which a test has left is taken again."""

    def __init__(self, chromium: Any):
        self._chromium = chromium
        self._left: list[Any] = []

    def taken(self, width: int, height: int, theme: str, reduced_motion: str) -> Any:
        """A tab of this size that shows nothing, without anything of the test that had it before."""
        tab = self._left.pop() if self._left else self._chromium.new_page()
        tab.set_viewport_size({"width": width, "height": height})
        tab.emulate_media(media="null", color_scheme=theme, reduced_motion=reduced_motion)
        return tab

    def leave(self, tab: Any) -> None:
        """Let another test take a tab: its page goes with all that it stored, and the mouse leaves it."""
        tab.mouse.move(-1, -1)
        tab.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
        tab.goto("about:blank")
        self._left.append(tab)


@pytest.fixture
def opened(browser, tmp_path) -> Iterator[Callable[..., Any]]:
    """`opened(data, width=1200, theme="light")` opens the page of `data` as a file, and waits until it is drawn.

    `data` may also be a finished page's text. At the end no page may have written an error or a warning to its console,
    failed, or asked for anything but its file; `complaints=("...",)` are parts of the errors that a page is meant to
    write.
    """
    pages: list[tuple[Any, Watch]] = []

    def open_page(
        data: Mapping[str, Any] | str,
        width: int = 1200,
        height: int = 900,
        theme: str = "light",
        complaints: tuple[str, ...] = (),
        reduced_motion: str = "no-preference",
    ) -> Any:
        path = tmp_path / f"page-{len(pages)}.html"
        path.write_text(data if isinstance(data, str) else page(data), encoding="utf-8")
        tab = browser.taken(width, height, theme, reduced_motion)
        watch = Watch(tab, path.as_uri(), complaints)
        pages.append((tab, watch))
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready]", state="attached", timeout=1000 * SECONDS_TO_DRAW)
        return tab

    yield open_page
    for tab, watch in pages:
        browser.leave(tab)
        watch.judge(tab)


class Watch:
    """What one page wrote to its console and asked of the network."""

    def __init__(self, tab: Any, address: str, complaints: tuple[str, ...]):
        self.address, self.expected = address, complaints
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._listeners = {"console": self._said, "pageerror": self._failed, "request": self._asked}
        for event, listener in self._listeners.items():
            tab.on(event, listener)

    def _said(self, said: Any) -> None:
        if said.type in ("error", "warning"):
            self.errors.append(said.text)

    def _failed(self, error: Any) -> None:
        self.errors.append(str(error))

    def _asked(self, request: Any) -> None:
        self.requests.append(request.url)

    def judge(self, tab: Any) -> None:
        """Fail where the page said what it should not, kept from saying what it should, or asked for anything."""
        for event, listener in self._listeners.items():
            tab.remove_listener(event, listener)
        unexpected = [error for error in self.errors if not any(part in error for part in self.expected)]
        assert unexpected == []
        assert all(any(part in error for error in self.errors) for part in self.expected), self.errors
        assert [url for url in self.requests if url.partition("#")[0] != self.address] == []


def axe_findings(tab: Any) -> list[str]:
    """What axe-core finds against a page: the rule, how many elements, and the first of them."""
    spec = importlib.util.find_spec("axe_playwright_python")
    if spec is None or spec.origin is None:
        pytest.skip("no axe-core: pip install axe-playwright-python")
    tab.evaluate(Path(spec.origin).with_name("axe.min.js").read_text("utf-8"))
    found = tab.evaluate("async () => (await axe.run()).violations")
    return [f"{each['id']}, {len(each['nodes'])} times: {each['nodes'][0]['html'][:200]}" for each in found]
