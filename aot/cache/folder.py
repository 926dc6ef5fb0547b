"""Share a folder with other processes, each of which may be killed at any moment.

Whoever changes which names there are does so under the lock of the folder, and a file is written under a name of its
own, `writing-*.tmp`, and gets its lasting name when it is whole and on the disk. A lock ends with the process that
holds it. Hence a draft that can be locked is a dead writer's, on whichever host or in whichever container that writer
ran; its name or its age would not tell as much.

Windows has no `flock`: there only the threads of a process are kept apart, and no draft is removed while it is open.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shlex
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedWriter
from pathlib import Path

from jointcut.partition.errors import CacheError, message

if sys.platform != "win32":
    import fcntl

_DRAFT = re.compile("writing-[0-9a-f]+[.]tmp")
_SECRET_BYTES = 32
_PATIENCE_S = 10.0  # a lock is held for milliseconds; one held longer is a stopped process's, and no reason to stop too
_PAUSE_S = 0.002
_THREADS = threading.Lock()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder against other processes and threads.

    Raises `TimeoutError` when somebody has held it for ten seconds, and any other `OSError` if it cannot be locked.
    """
    if sys.platform == "win32":
        with _THREADS:
            yield
        return
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(descriptor, _PATIENCE_S)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing would not do, if the process was forked meanwhile
    finally:
        os.close(descriptor)


def _lock(descriptor: int, patience_s: float) -> None:
    if sys.platform == "win32":
        return
    end = time.monotonic() + patience_s
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() >= end:
            raise TimeoutError(errno.ETIMEDOUT, "Another process holds the lock and does not go on")
        time.sleep(_PAUSE_S)


@contextmanager
def draft(folder: Path) -> Iterator[tuple[BufferedWriter, Path]]:
    """A new file for its owner's eyes, which no sweep takes, and which is gone in the end unless it was renamed."""
    path = folder / f"writing-{secrets.token_hex(8)}.tmp"
    with ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        with locked(folder):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            file = stack.enter_context(os.fdopen(descriptor, "wb"))
            _lock(descriptor, 0.0)
        yield file, path


def sweep(folder: Path) -> None:
    """Remove the drafts of dead writers. Call it under the lock, where nobody has a draft that is not locked yet."""
    for path in [path for path in folder.iterdir() if _DRAFT.fullmatch(path.name)]:
        with suppress(OSError):
            with path.open("r+b") as file:
                _lock(file.fileno(), 0.0)
            path.unlink()


def flush(file: BufferedWriter) -> None:
    """Put what was written to a file on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_names(folder: Path) -> None:
    """Put new names on the disk too, where folders can be synchronised; they are visible without it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------- trust


def trust_folder(folder: Path) -> None:
    """Raise `CacheError` for a folder that is somebody else's, or that others may write to."""
    _trust(folder, folder.stat(), 0o022, "so that others may write to it", "chmod go-w")


def secret_of(folder: Path) -> bytes:
    """The 32 bytes in the file `key`; when several processes make them at once, one makes them for all.

    Raises `CacheError` if the file is somebody else's, if others may read or change it, or if it is no key.
    """
    path = folder / "key"
    if not path.exists():
        with draft(folder) as (file, name):
            file.write(secrets.token_bytes(_SECRET_BYTES))
            flush(file)
            with suppress(FileExistsError):
                os.link(name, path)
        flush_names(folder)
    with path.open("rb", buffering=0) as file:
        _trust(path, os.fstat(file.fileno()), 0o077, "so that others may read or change it", "chmod 600")
        secret = file.read(_SECRET_BYTES + 1)
    if len(secret) != _SECRET_BYTES:
        what = f"is no key: it does not have {_SECRET_BYTES} bytes."
        raise CacheError(message(f"cache file {path}", what, "Remove it; the entries are then made again."))
    return secret


def _trust(path: Path, info: os.stat_result, forbidden: int, danger: str, mend: str) -> None:
    if sys.platform == "win32" or not hasattr(os, "getuid"):
        return
    where = f"cache {'folder' if stat.S_ISDIR(info.st_mode) else 'file'} {path}"
    if info.st_uid != os.getuid():
        what = f"belongs to user {info.st_uid}, and you are user {os.getuid()}."
        raise CacheError(message(where, what, "Give a folder of your own."))
    if info.st_mode & forbidden:
        what = f"has mode {stat.S_IMODE(info.st_mode):04o}, {danger}."
        cure = f"If nobody has done so: {mend} {shlex.quote(str(path))}"
        raise CacheError(message(where, what, cure))
