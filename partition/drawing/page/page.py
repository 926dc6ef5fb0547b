"""Put data, style and scripts into one HTML file.

The data is one JSON object, which the scripts draw in the browser::

    {"format": 1, "title": "loss", "subtitle": "cut by min_cut; ...",
     "totals": [{"label": "saved", "value": "47.2 MB", "detail": "23 arrays"}, ...],
     "sections": [{"kind": "table", "id": "saved", "title": "Saved values", "lead": "...", ...}, ...]}

A section's kind says which script draws it and what else it holds: the bytes alive at each step (`timeline`), ops and
values (`graph`), plans by peak and time (`pareto`), rows (`table`), two plans side by side (`diff`). The opening
comment of each script lists the keys that it reads.

The file loads nothing else: a policy in its head forbids the browser any request.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from jointcut.partition.errors import RecordError, choices, message

FORMAT = 1
KINDS = ("timeline", "graph", "pareto", "table", "diff")
STYLES = ("page.css", "tables.css", "graph/graph.css", "frame.css")

#: The scripts in the order they run, with the kinds of sections that need them; a page carries no other scripts.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "vendor.js": ("timeline", "pareto", "graph"),
    "kit.js": KINDS,
    "shell.js": KINDS,
    "cursor.js": ("timeline",),
    "timeline.js": ("timeline",),
    "pareto.js": ("pareto",),
    "tables.js": KINDS,
    "graph/model.js": ("graph",),
    "graph/layout.js": ("graph",),
    "graph/routes.js": ("graph",),
    "graph/words.js": ("graph",),
    "graph/draw.js": ("graph",),
    "graph/graph.js": ("graph",),
}

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="jointcut">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
{styles}
</head>
<body>
<noscript>This report is drawn by scripts that stand in this file; allow them, and nothing is loaded.</noscript>
<script type="application/json" id="jointcut-data">{data}</script>
{scripts}
</body>
</html>
"""


def page(data: Mapping[str, Any]) -> str:
    """Return the text of one HTML file that shows `data`; equal data give equal text.

    The module's docstring describes the form of `data`. The file works offline and from a folder, in light and dark.
    Raises `RecordError` where the data has another format or holds an object that JSON cannot hold, where a section has
    an unknown kind or no id, or where two sections have the same id.
    """
    _check(data)
    kinds = {section["kind"] for section in data["sections"]}
    scripts = [name for name, needed_by in SCRIPTS.items() if kinds.intersection(needed_by)]
    return _PAGE.format(
        policy=_POLICY,
        title=escape(f"{data['title']} · jointcut"),
        styles="\n".join(f"<style>\n{_asset(name)}</style>" for name in STYLES),
        data=_embedded(data),
        scripts="\n".join(f"<script>\n{_asset(name)}</script>" for name in scripts),
    )


def framed(html: str, height: int = 640) -> str:
    """Return the page in a frame `height` pixels tall, for the cell of a notebook.

    The frame holds the whole page in its `srcdoc`, and runs the page's scripts apart from the notebook's. The page may
    do nothing but run scripts and save files.
    """
    title = html.partition("<title>")[2].partition("</title>")[0] or "jointcut"
    sandbox = "allow-scripts allow-downloads"
    style = f"width: 100%; height: {height}px; border: 0"
    return f'<iframe title="{title}" sandbox="{sandbox}" style="{style}" srcdoc="{escape(html)}"></iframe>'


def _check(data: Mapping[str, Any]) -> None:
    """Refuse data that the scripts could not draw."""
    cure = "Hand page the dictionary that a report writes."
    if data.get("format") != FORMAT:
        raise RecordError(message("page", f"was given format {data.get('format')!r}, and writes {FORMAT}.", cure))
    missing = [name for name in ("title", "subtitle", "totals", "sections") if name not in data]
    if missing:
        raise RecordError(message("page", f"was given data without {missing[0]!r}.", cure))
    for section in data["sections"]:
        if section.get("kind") not in KINDS:
            what = f"has the unknown kind {section.get('kind')!r}."
            raise RecordError(message(f"section {section.get('id')!r}", what, choices(section.get("kind"), KINDS)))
    for name, times in Counter(section.get("id") for section in data["sections"]).items():
        if times > 1 or not name:
            what = "has no id." if not name else f"stands {times} times."
            raise RecordError(message(f"section {name!r}", what, "Give each section an id of its own."))


def _embedded(data: Mapping[str, Any]) -> str:
    """The data as JSON that can neither close the script element around it nor open a comment there."""
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        cure = "Hand page dictionaries, lists, texts, finite numbers, booleans and None."
        raise RecordError(message("page", f"was given what JSON cannot hold: {error}.", cure)) from error
    return text.replace("<", "\\u003c")


@cache
def _asset(name: str) -> str:
    """The text of one of the files that the page carries."""
    return resources.files("jointcut.partition.drawing.page").joinpath("assets", name).read_text("utf-8")
