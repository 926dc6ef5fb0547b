"""Find the folder that keeps compiled programs."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from jointcut.aot.cache.store import Store
from jointcut.aot.options.limits import limit

FOLDER, SIZE = "JOINTCUT_CACHE_DIR", "JOINTCUT_CACHE_SIZE"
DEFAULT_FOLDER, _DEFAULT_SIZE = Path("~/.cache/jointcut/programs"), "10GiB"


def store_for(cache: str | os.PathLike[str] | bool | None) -> Store | None:
    """Return the store of an option: a folder, True for the default folder, or None for `JOINTCUT_CACHE_DIR` if set.

    `JOINTCUT_CACHE_SIZE` limits its size (default "10GiB"). Raises `CacheError` for a folder that cannot be used or
    trusted, and `BudgetError` for an invalid size.
    """
    variable = os.environ.get(FOLDER)
    if cache is False or (cache is None and not variable):
        return None
    folder = Path(cache) if isinstance(cache, str | os.PathLike) else Path(variable or DEFAULT_FOLDER)
    return _opened(folder.expanduser().absolute(), limit(os.environ.get(SIZE, _DEFAULT_SIZE)).peak_bytes or 0)


@functools.cache
def _opened(folder: Path, max_bytes: int) -> Store:
    return Store.at(folder, max_bytes)
