"""Keep what was measured of devices in a small file, which processes may share.

`rates` says which file that is. It is replaced as a whole. Who measures locks a file beside it, so that processes that
start at once measure once, and no entry is lost.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from jointcut.aot.cache.folder import locked

_LOG = logging.getLogger("jointcut")

#: The environment variable that names the file, and the entry in it that holds for any device.
VARIABLE, ANY = "JOINTCUT_RATES", "*"

_PATIENCE_S = 60.0  # a process waits this long for another one that measures


def file() -> Path:
    """The file; raises `RuntimeError` where it lies in a home that is unknown."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    return cache_folder() / "rates.json"


def cache_folder() -> Path:
    """The folder of what is kept for later runs; raises `RuntimeError` where it lies in a home that is unknown."""
    if folder := os.environ.get("JOINTCUT_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jointcut"


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let other processes that share the file wait, where its folder can be locked."""
    with ExitStack() as stack:
        with suppress(OSError, RuntimeError):
            path = file()
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.with_name(f"{path.name}.lock")
            stack.enter_context(locked(lock.parent, lock.name, _PATIENCE_S))
            stack.callback(lock.unlink, missing_ok=True)
        yield


def read() -> dict[str, Any]:
    """Return the entries of the file by name; none where there is no file, or it cannot be read."""
    try:
        return dict(json.loads(file().read_text("utf-8") or "{}"))
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        what = (
            f"the file that should hold them cannot be read: {error}. It is left as it is: remove it, or name another"
        )
        _LOG.warning("Rates are measured anew, since %s file by %s.", what, VARIABLE)
        return {}


def noted(name: str) -> Any:
    """Return the file's entry under a name; None where there is none."""
    return read().get(name)


def note(name: str, entry: Any) -> None:
    """Write an entry to the file, unless somebody wrote one there for any device."""
    if ANY not in read():
        with undisturbed():
            write(name, entry)


def there() -> dict[str, Any] | None:
    """Return the entries beside which another may be written: none of a missing or empty file, None for other texts."""
    try:
        entries = json.loads(file().read_text("utf-8") or "{}")
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, ValueError):
        return None
    return entries if isinstance(entries, dict) else None


def write(name: str, entry: Any) -> None:
    """Write an entry beside those that are in the file, atomically, where that is allowed."""
    if (entries := there()) is None:
        return
    try:
        path = file()
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            draft.write_text(json.dumps({**entries, name: entry}, indent=2), "utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        _LOG.info("Rates are not kept for the next process: %s", error)
