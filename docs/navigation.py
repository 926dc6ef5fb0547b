"""Make the navigation beside a page once for all pages of sources, which do not stand in it.

Sphinx resolves the whole tree of contents for each page. On these pages it differs in nothing but the way to the top of
the site, so one for each folder is enough.
"""

from __future__ import annotations

from posixpath import dirname
from typing import Any

from sphinx.application import Sphinx

_BEFORE_THE_THEME = 400  # the theme reads the tree at 500


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    trees: dict[Any, str] = {}

    def share(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
        del app, template, doctree
        whole, is_outside = context.get("toctree"), page.startswith("_modules/")

        def shared(**options: Any) -> str:
            key = dirname(page), *sorted(options.items())
            if key not in trees:
                trees[key] = whole(**options) if whole is not None else ""
            return trees[key]

        if whole is not None and is_outside:
            context["toctree"] = shared

    app.connect("html-page-context", share, _BEFORE_THE_THEME)
    return {"parallel_read_safe": True}
