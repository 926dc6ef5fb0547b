"""Let those who use a keyboard or a screen reader reach all of a page: mend what the theme and Sphinx write.

What scrolls sideways can have the focus, the two columns beside a page have names, captions in the navigation say at
which level they stand, and a head of a column without words is a plain cell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

_MENDED = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="All pages">',
    '<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="This page">',
    '<aside class="toc-drawer no-toc">': '<aside class="toc-drawer no-toc" aria-label="This page">',
    "<pre>": '<pre tabindex="0">',
    '<div class="table-wrapper ': '<div tabindex="0" class="table-wrapper ',
    '<th class="head"><p></p></th>': '<td class="head"></td>',
}


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("build-finished", _mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _mend(app: Sphinx, exception: Exception | None) -> None:
    if exception is None:
        for path in Path(app.outdir).rglob("*.html"):
            path.write_text(mended(path.read_text("utf-8")), "utf-8")


def mended(html: str) -> str:
    """A page with what is told above.

    >>> mended("<pre>x</pre>")
    '<pre tabindex="0">x</pre>'
    """
    for before, after in _MENDED.items():
        html = html.replace(before, after)
    return html
