"""Let a class show itself in a notebook, drawn by a file that comes after it.

`Graph` and `Plan` come early in the reading order, and `displays`, which draws them, comes late. A class that is
`Shown` asks `told` for its texts, and the file that draws the class registers a function for it with `@told.register`.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

Bundle = dict[str, str]  # a text for each MIME type


@singledispatch
def told(shown: Any) -> Bundle:
    """The texts of the object that is shown."""
    raise TypeError(f"nobody has registered how to show {type(shown).__name__}: see partition/drawing/displays.py")


class Shown:
    """A class whose objects are shown as a page by a notebook, and as text elsewhere."""

    def _repr_mimebundle_(self, **_: Any) -> Bundle:
        """The text, and the page in a frame of its own."""
        return told(self)
