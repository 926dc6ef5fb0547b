"""Keep entries on disk, and remove them safely.

A store is a folder that any number of processes may use at once. Each may be killed at any moment. The folder holds

    <key>.entry     one entry: 88 bytes, then the label in UTF-8, then the payload
    key             32 random bytes that sign every entry, made once
    lock            our mark, locked while entries are added or removed
    writing-*.tmp   an entry while it is written, locked by its writer

The 88 bytes are, in little-endian order: `jointcut`, the version of the format (4 bytes), the sizes of the payload (8)
and of the label (4), SHA-256 of the payload (32), and HMAC-SHA256 (32) over these fields, the entry's key and the
label. An entry that was changed, renamed, or written without the secret `key` is not returned.

Entries are added and removed only under the lock (see `folder`), and never changed. A bad entry is read again under the
lock before it is removed, since another process may have replaced it by a good entry. Without locks, the good entry may
be removed too; it is then made again.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from jointcut.aot.cache.folder import claim, draft, flush, flush_names, locked, secret_of, sweep, trust_folder
from jointcut.partition.errors import CacheError, message

_LOG = logging.getLogger("jointcut")
_VERSION = 1
_MAGIC = b"jointcut"
_FIELDS = struct.Struct("<8sIQI32s")  # magic, version, payload's bytes, label's bytes, SHA-256 of the payload
_DIGEST_BYTES = 32
_HEAD_BYTES = _FIELDS.size + _DIGEST_BYTES
_KEY = re.compile("[0-9a-f]{64}")
_ENTRY = re.compile("([0-9a-f]{64})[.]entry")
_WARNED: set[str] = set()
_THREADS = threading.Lock()


class _Unusable(Exception):
    """An entry file cannot be used; the text says why."""


class _Newer(_Unusable):
    """The format needs a newer jointcut."""


@dataclass(frozen=True)
class StoredEntry:
    """One entry, without its payload.

    Attributes:
        key: the key of the entry.
        label: the label given to `put`; characters that UTF-8 lacks are escaped.
        nbytes: size of its file.
        last_used: when it was last written or read, in seconds since 1970.
    """

    key: str
    label: str
    nbytes: int
    last_used: float


@dataclass(frozen=True)
class Store:
    """Entries in a folder, by key; beyond `max_bytes` bytes, the least recently used are removed.

    `Store.at` opens a store. A key is a SHA-256 in hex; any other key raises `CacheError`. `get` and `put` of an open
    store do not raise if its folder fails: the logger `jointcut` warns once instead.
    """

    folder: Path
    max_bytes: int
    _secret: bytes = field(repr=False)

    @classmethod
    def at(cls, folder: str | Path, max_bytes: int = 10 * 2**30) -> Store:
        """Open the store in a folder, and remove drafts of dead writers.

        A missing folder is made, for its owner alone. Raises `CacheError` if the folder cannot be made, written or
        locked; if it or its `key` belongs to another user or could have been changed by one; if it holds files of
        somebody else under names that a cache gives; or if `max_bytes` is not positive.
        """
        path = Path(folder).expanduser().absolute()
        if max_bytes <= 0:
            raise CacheError(message("max_bytes", f"is {max_bytes}.", "Give a positive number of bytes."))
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            trust_folder(path)
            with suppress(TimeoutError), locked(path):  # a sweep can wait
                claim(path)
                sweep(path)
            secret = secret_of(path)
        except OSError as error:
            cure = "Give a folder that you may write to, on a file system that has locks."
            raise CacheError(message(f"cache folder {path}", f"cannot be used: {_reason(error)}.", cure)) from error
        return cls(path, max_bytes, secret)

    def get(self, key: str) -> bytes | None:
        """Return the payload of an entry, or None if there is none; remove an entry that cannot be trusted."""
        path = self._path(key)
        try:
            payload = self._payload(path, key)
        except FileNotFoundError:
            return None
        except _Unusable as refusal:
            self._refuse(path, key, refusal)
            return None
        except OSError as error:
            _warn(str(path), f"cache entry {path}", f"cannot be read: {_reason(error)}.", "It is made again.")
            return None
        with suppress(OSError):
            _touch(path)
        return payload

    def put(self, key: str, payload: bytes, label: str = "") -> bool:
        """Write an entry, replacing an entry with the same key; then remove others until all fit into `max_bytes`.

        Returns True once it is on disk and visible to every process. Returns False if it cannot be written, as when the
        disk is full or the entry is larger than `max_bytes`; then nothing changes.
        """
        path = self._path(key)
        head = self._head(key, payload, label.encode("utf-8", "backslashreplace"))
        num_bytes = len(head) + len(payload)
        if num_bytes > self.max_bytes:
            what = f"takes {num_bytes:,} bytes, more than the {self.max_bytes:,} that the cache may take."
            _warn(f"too large: {path}", f"cache entry {path}", what, "It is not kept. Allow the cache more.")
            return False
        try:
            self._write(path, head, payload)
        except OSError as error:
            cure = "The program runs on, and compiles again what it would have found there."
            _warn(f"unwritten: {self.folder}", f"cache entry {path}", f"cannot be written: {_reason(error)}.", cure)
            return False
        return True

    def entries(self) -> tuple[StoredEntry, ...]:
        """Return the entries signed by this store, last used first; payloads are not read."""
        timed: list[tuple[int, StoredEntry]] = []
        for key, path, info in _files(self.folder):
            with suppress(OSError, _Unusable), path.open("rb", buffering=0) as file:
                _, _, label = self._read_head(file, key)
                entry = StoredEntry(key, label.decode(), info.st_size, info.st_mtime)
                timed.append((info.st_mtime_ns, entry))
        return tuple(entry for _, entry in sorted(timed, key=lambda item: (-item[0], item[1].key)))

    def clear(self) -> int:
        """Remove every entry, and the drafts of dead writers; return the number of entries.

        Raises `CacheError` if the folder cannot be read or locked.
        """
        removed = 0
        try:
            with locked(self.folder):
                sweep(self.folder)
                for _, path, _ in _files(self.folder):
                    with suppress(OSError):
                        path.unlink()
                        removed += 1
        except OSError as error:
            cure = "Remove the folder yourself."
            where = f"cache folder {self.folder}"
            raise CacheError(message(where, f"cannot be cleared: {_reason(error)}.", cure)) from error
        return removed

    @property
    def total_bytes(self) -> int:
        """Bytes of all entry files, including those that `get` would refuse."""
        return sum(info.st_size for _, _, info in _files(self.folder))

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            what = f"is {key!r}, not 64 digits of lower-case hexadecimal."
            raise CacheError(message("key", what, "Give hashlib.sha256(...).hexdigest()."))
        return self.folder / f"{key}.entry"

    def _sign(self, key: str, fields: bytes, label: bytes) -> bytes:
        return hmac.digest(self._secret, fields + key.encode() + label, "sha256")

    def _head(self, key: str, payload: bytes, label: bytes) -> bytes:
        digest = hashlib.sha256(payload).digest()
        fields = _FIELDS.pack(_MAGIC, _VERSION, len(payload), len(label), digest)
        return fields + self._sign(key, fields, label) + label

    def _read_head(self, file: FileIO, key: str) -> tuple[int, bytes, bytes]:
        """Return the payload's size and SHA-256, and the label; raises `_Unusable` for a wrong head or signature."""
        head, size = file.read(_HEAD_BYTES), os.fstat(file.fileno()).st_size
        if len(head) < _HEAD_BYTES:
            raise _Unusable(f"is cut off after {size} bytes")
        fields, signature = head[: _FIELDS.size], head[_FIELDS.size :]
        magic, version, payload_bytes, label_bytes, digest = _FIELDS.unpack(fields)
        if magic != _MAGIC:
            raise _Unusable("does not begin as an entry does")
        if version != _VERSION:
            kind = _Newer if version > _VERSION else _Unusable
            raise kind(f"has format {version}, and this is format {_VERSION}")
        stated_size = _HEAD_BYTES + label_bytes + payload_bytes
        if size != stated_size:
            raise _Unusable(f"has {size:,} bytes, and says that it has {stated_size:,}")
        label = file.read(label_bytes)
        if not hmac.compare_digest(signature, self._sign(key, fields, label)):
            raise _Unusable("is not signed with this folder's key")
        return payload_bytes, digest, label

    def _payload(self, path: Path, key: str) -> bytes:
        """Read and verify an entry's payload."""
        with path.open("rb", buffering=0) as file:
            payload_bytes, digest, _ = self._read_head(file, key)
            payload = file.readall()
        if len(payload) != payload_bytes or not hmac.compare_digest(digest, hashlib.sha256(payload).digest()):
            raise _Unusable("holds another payload than was written")
        return payload

    def _refuse(self, path: Path, key: str, refusal: _Unusable) -> None:
        if isinstance(refusal, _Newer):
            _warn(str(path), f"cache entry {path}", f"{refusal}.", "It stays for the newer jointcut that wrote it.")
            return
        _warn(str(path), f"cache entry {path}", f"{refusal}.", "It is removed, and made again.")
        with suppress(OSError, _Newer), self._alone():
            try:
                self._payload(path, key)
            except _Unusable as again:
                if isinstance(again, _Newer):
                    raise
                path.unlink()

    def _write(self, path: Path, head: bytes, payload: bytes) -> None:
        with draft(self.folder) as (file, name):
            file.write(head)
            file.write(payload)
            flush(file)
            with self._alone():
                _touch(name)
                file.close()  # Windows cannot rename an open file
                name.replace(path)
                with suppress(OSError):
                    self._evict(path)
        flush_names(self.folder)

    def _evict(self, spared: Path) -> None:
        files = list(_files(self.folder))
        total = sum(info.st_size for _, _, info in files)
        for _, path, info in sorted(files, key=lambda file: (file[2].st_mtime_ns, file[0])):
            if total <= self.max_bytes:
                break
            if path != spared:
                with suppress(OSError):
                    path.unlink()
                    total -= info.st_size

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of the folder; raises `OSError` if the folder was replaced since it was opened."""
        with locked(self.folder):
            if (self.folder / "key").read_bytes() != self._secret:
                raise OSError(errno.ESTALE, "Another process has made the folder anew")
            yield


def _files(folder: Path) -> Iterator[tuple[str, Path, os.stat_result]]:
    """Yield key, path and status of every entry file; skip files that vanish meanwhile."""
    with suppress(FileNotFoundError), os.scandir(folder) as scan:
        for item in scan:
            match = _ENTRY.fullmatch(item.name)
            with suppress(FileNotFoundError):
                if match and item.is_file(follow_symlinks=False):
                    yield match[1], folder / item.name, item.stat(follow_symlinks=False)


def _touch(path: Path) -> None:
    """Set a file's time to now, in nanoseconds, since the system's own stamps may be 4 ms apart."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _warn(once: str, where: str, what: str, cure: str) -> None:
    """Log a warning, unless this process has logged a warning with the same `once`."""
    with _THREADS:
        is_new = once not in _WARNED
        _WARNED.add(once)
    if is_new:
        _LOG.warning("%s", message(where, what, cure))
