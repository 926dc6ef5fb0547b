"""Let a class show itself in a notebook, drawn by a file that comes after it.

`Graph` and `Plan` come early in the reading order, and `displays`, which draws them, comes late. A class that is
`Shown` asks `told` for its text and its page, and the file that draws the class registers a function for it with
`@told.register`.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from jointcut.partition.page.page import framed, page

Told = tuple[str, dict[str, Any]]  # text, and the data of a page


@singledispatch
def told(shown: Any) -> Told:
    """The text of the object that is shown, and the data of its page."""
    raise TypeError(f"nobody has registered how to show {type(shown).__name__}: see partition/displays.py")


class Shown:
    """A class whose objects a notebook shows as a page, and everything else as text."""

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The text and the page, in a frame of its own."""
        text, data = told(self)
        return {"text/plain": text, "text/html": framed(page(data))}
