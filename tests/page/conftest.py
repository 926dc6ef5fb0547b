"""The tests of the page share one browser per file."""

from __future__ import annotations

from page.browser import browser as browser
from page.browser import opened as opened
