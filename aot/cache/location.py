"""Say where compiled programs are kept."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from jointcut.aot.cache.store import Store
from jointcut.aot.limits import limit

FOLDER, SIZE = "JOINTCUT_CACHE_DIR", "JOINTCUT_CACHE_SIZE"
DEFAULT_FOLDER, _DEFAULT_SIZE = Path("~/.cache/jointcut/programs"), "10GiB"


def store_for(cache: str | os.PathLike[str] | bool | None) -> Store | None:
    """The store that an option names: a folder, True for the usual one, None for that of `JOINTCUT_CACHE_DIR` if set.

    It holds at most what `JOINTCUT_CACHE_SIZE` says ("10GiB"). Raises `CacheError` for a folder that cannot be used or
    trusted, `BudgetError` for a size that is none.
    """
    named = os.environ.get(FOLDER)
    if cache is False or (cache is None and not named):
        return None
    folder = Path(cache) if isinstance(cache, str | os.PathLike) else Path(named or DEFAULT_FOLDER)
    return _opened(folder.expanduser().absolute(), limit(os.environ.get(SIZE, _DEFAULT_SIZE)).peak_bytes or 0)


@functools.cache
def _opened(folder: Path, max_bytes: int) -> Store:
    return Store.at(folder, max_bytes)
