"""Read a user's wish for rows in blocks.

>>> read_tiles({"args[1]": 4})
(('args[1]', 4),)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jointcut.partition.errors import TraceError, message

#: Whether rows may run in blocks, or paths of arguments with numbers of blocks; canonical options hold pairs.
GivenTiles = bool | Mapping[str, int] | tuple[tuple[str, int], ...]


def read_tiles(given: Any) -> bool | tuple[tuple[str, int], ...]:
    """Return the paths and numbers of blocks that a user gave, or whether there may be blocks.

    Raises `TraceError` for anything else.
    """
    if isinstance(given, bool):
        return given
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, tuple):
        cure = "Give True, False, or a dict from paths to numbers of blocks: {'args[1]': 4}."
        raise TraceError(message("tiles", f"is {given!r}.", cure))
    for path, blocks in pairs:
        if not isinstance(path, str):
            raise TraceError(message("tiles", f"has the key {path!r}.", "Give the path of an argument: 'args[1]'."))
        if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
            raise TraceError(message(f"tiles[{path!r}]", f"is {blocks!r}.", "Give a number of blocks, such as 4."))
    return pairs
