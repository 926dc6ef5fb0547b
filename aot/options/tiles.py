"""Read a user's wish for rows in blocks, and names for the sizes of arguments.

>>> read_tiles({"args[1]": 4})
(('args[1]', 4),)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jointcut.partition.errors import TraceError, message

#: Whether rows may run in blocks, or paths of arguments and names of sizes, each with a number of blocks.
GivenTiles = bool | Mapping[str, int] | tuple[tuple[str, int], ...]

#: Texts with names for sizes, by the path of an argument.
GivenShapes = Mapping[str, str] | tuple[tuple[str, str], ...]


def read_tiles(given: Any) -> bool | tuple[tuple[str, int], ...]:
    """Return the paths or names and numbers of blocks that a user gave, or whether there may be blocks.

    Raises `TraceError` for anything else.
    """
    if isinstance(given, bool):
        return given
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, tuple) or not all(map(_is_pair, pairs)):
        cure = "Give True, False, or a dict from paths or names to numbers of blocks: {'args[1]': 4}."
        raise TraceError(message("tiles", f"is {given!r}.", cure))
    for n, (path, blocks) in enumerate(pairs):
        if any(path == other for other, _ in pairs[:n]):
            raise TraceError(message("tiles", f"names {path!r} twice.", "Give one number of blocks."))
        if not isinstance(path, str):
            cure = "Give the path of an argument, 'args[1]', or the name of a size."
            raise TraceError(message("tiles", f"has the key {path!r}.", cure))
        if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
            raise TraceError(message(f"tiles[{path!r}]", f"is {blocks!r}.", "Give a number of blocks, such as 4."))
    return pairs


def read_shapes(given: Any) -> tuple[tuple[str, str], ...]:
    """Return the names for sizes that a user gave, by path; raises `TraceError` for anything else.

    >>> read_shapes({"args[1]": "b, 128"})
    (('args[1]', 'b, 128'),)
    """
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    is_read = isinstance(pairs, tuple) and all(map(_is_pair, pairs))
    if not is_read or not all(isinstance(text, str) for pair in pairs for text in pair):
        cure = "Give a dict from paths to texts of shapes: {'args[1]': 'b, 128'}."
        raise TraceError(message("shapes", f"is {given!r}.", cure))
    return pairs


def _is_pair(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2
