"""Share a folder with other processes, which may be killed at any moment.

Names are added and removed only under the folder's lock. A file is written as a draft, `writing-*.tmp`, which its
writer locks. It gets its final name once it is complete and on disk. A lock ends with its process, on any host and in
any container. Hence a draft that can be locked belongs to a dead writer; its name or age would not show that.

The file `lock` holds our mark. It is written only if no file in the folder has a name that a cache gives. So a later
file with such a name belongs to the cache, and may be removed.

Windows has no `flock`: only the threads of one process exclude each other, and an open draft is not removed.
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
from jointcut.wrappers.mark import Mark

if sys.platform != "win32":
    import fcntl

_DRAFT = re.compile("writing-[0-9a-f]+[.]tmp")
_GIVEN = re.compile(rf"{_DRAFT.pattern}|[0-9a-f]{{64}}[.]entry")
_MARK = Mark("cache")
_SECRET_BYTES = 32
_PATIENCE_S = 10.0  # a lock is held for milliseconds; if it is held longer, its process is stopped
_PAUSE_S = 0.002
_THREADS = threading.Lock()


@contextmanager
def locked(folder: Path, name: str = "lock", patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Hold the lock of a folder, a file in it, against other processes and threads.

    Raises `TimeoutError` if another process holds it for `patience_s`, or another `OSError` if it cannot be locked.
    """
    if sys.platform == "win32":
        with _THREADS:
            yield
        return
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(descriptor, patience_s)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough if the process has forked meanwhile
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


def claim(folder: Path) -> None:
    """Mark a folder as a cache, unless it is one; call this under the folder's lock.

    Raises `CacheError` if files of somebody else have names that a cache gives.
    """
    lock, key = folder / "lock", folder / "key"
    if _MARK.is_in(lock):
        return
    sizes = {path: path.lstat().st_size for path in sorted(folder.iterdir())}
    foreign = [lock] if sizes.get(lock) else []
    if not foreign and sizes.get(key) != _SECRET_BYTES:  # caches older than the marks have this key
        foreign = [path for path in sizes if path == key or _GIVEN.fullmatch(path.name)]
    if foreign:
        what = "holds a name that a cache gives, and is not of a cache of this version and user."
        raise CacheError(message(f"cache file {foreign[0]}", what, "Give a folder that does not exist yet."))
    lock.write_bytes(_MARK.line)


@contextmanager
def draft(folder: Path) -> Iterator[tuple[BufferedWriter, Path]]:
    """Make a locked file that only its owner can read; at the end, remove it unless it was renamed."""
    path = folder / f"writing-{secrets.token_hex(8)}.tmp"
    with ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        with locked(folder):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            file = stack.enter_context(os.fdopen(descriptor, "wb"))
            _lock(descriptor, 0.0)
        yield file, path


def sweep(folder: Path) -> None:
    """Remove the drafts of dead writers; call this under the folder's lock, when living writers have locked theirs."""
    for path in [path for path in folder.iterdir() if _DRAFT.fullmatch(path.name)]:
        with suppress(OSError):
            with path.open("r+b") as file:
                _lock(file.fileno(), 0.0)
            path.unlink()


def flush(file: BufferedWriter) -> None:
    """Write a file's content to the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_names(folder: Path) -> None:
    """Write new names to the disk, if the system can; other processes see them without it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------- trust


def trust_folder(folder: Path) -> None:
    """Raise `CacheError` for a folder that belongs to another user, or that others may write to."""
    _trust(folder, folder.stat(), 0o022, "so that others may write to it", "chmod go-w")


def secret_of(folder: Path) -> bytes:
    """Return the 32 bytes of the file `key`; make it if missing, the same for processes that start together.

    Raises `CacheError` if the file belongs to another user, if others may read or change it, or if it is not a key.
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
