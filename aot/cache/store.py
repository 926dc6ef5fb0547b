"""Keep entries on disk, and forget them safely.

A store is a folder that any number of processes may use at once, and be killed in at any moment. It holds

    <key>.entry     one entry: 88 bytes, then the label in UTF-8, then the payload
    key             32 random bytes that sign every entry, made once
    lock            an empty file, locked by whoever changes which entries there are
    writing-*.tmp   an entry while it is written, locked by its writer

and the 88 bytes are, least byte first: `jointcut`, the version of the format (4 bytes), the bytes of the payload (8)
and of the label (4), SHA-256 of the payload (32), and HMAC-SHA256 (32) over the rest, the entry's key and the label.
So an entry that was changed, renamed, or written by anybody who does not have `key` is not returned.

Names of entries are given and taken away only under the lock (`folder.py` says how), and no entry is changed after it
got its name. Whoever takes away an entry that was found bad reads it again under the lock: it may by now be a good one,
and reported as written. Where there are no locks such an entry may be lost, and is made again.
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

from jointcut.aot.cache.folder import draft, flush, flush_names, locked, secret_of, sweep, trust_folder
from jointcut.partition.errors import CacheError, message

_LOG = logging.getLogger("jointcut")
_VERSION = 1
_MAGIC = b"jointcut"
_FIELDS = struct.Struct("<8sIQI32s")  # magic, version, payload's bytes, label's bytes, SHA-256 of the payload
_DIGEST_BYTES = 32
_HEAD_BYTES = _FIELDS.size + _DIGEST_BYTES
_KEY = re.compile("[0-9a-f]{64}")
_ENTRY = re.compile("([0-9a-f]{64})[.]entry")
_TOLD: set[str] = set()
_THREADS = threading.Lock()


class _Refused(Exception):
    """An entry file is not to be returned, and why."""


class _Newer(_Refused):
    """It has a format that only a newer jointcut reads."""


@dataclass(frozen=True)
class StoredEntry:
    """What one entry is, without its payload.

    Attributes:
        key: under which it is kept.
        label: what `put` was told to call it; what UTF-8 lacks is spelt out.
        nbytes: size of its file.
        last_used: when it was last written or found, in seconds since 1970.
    """

    key: str
    label: str
    nbytes: int
    last_used: float


@dataclass(frozen=True)
class Store:
    """Entries in a folder, by key; the least recently used go when there are more than `max_bytes` bytes of them.

    Made by `Store.at`. A key is the hex SHA-256 of whatever decides the payload; all else raises `CacheError`. Once a
    store is open, nothing that befalls its folder makes `get` or `put` raise: the logger `jointcut` warns of it once.
    """

    folder: Path
    max_bytes: int
    _secret: bytes = field(repr=False)

    @classmethod
    def at(cls, folder: str | Path, max_bytes: int = 10 * 2**30) -> Store:
        """Open the store in a folder, which is made (for its owner alone) if need be; sweep out what dead writers left.

        Raises `CacheError` if the folder cannot be made, written or locked, if it or its `key` belongs to somebody else
        or could have been changed by somebody else, and if `max_bytes` is not positive.
        """
        path = Path(folder).expanduser().absolute()
        if max_bytes <= 0:
            raise CacheError(message("max_bytes", f"is {max_bytes}.", "Give a positive number of bytes."))
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            trust_folder(path)
            with suppress(TimeoutError), locked(path):  # a sweep can wait
                sweep(path)
            secret = secret_of(path)
        except OSError as error:
            cure = "Give a folder that you may write to, on a file system that has locks."
            raise CacheError(message(f"cache folder {path}", f"cannot be used: {_reason(error)}.", cure)) from error
        return cls(path, max_bytes, secret)

    def get(self, key: str) -> bytes | None:
        """The payload of an entry; None where there is none, or none to be trusted, which is then removed."""
        path = self._path(key)
        try:
            payload = self._payload(path, key)
        except FileNotFoundError:
            return None
        except _Refused as refusal:
            self._refuse(path, key, refusal)
            return None
        except OSError as error:
            _tell(str(path), f"cache entry {path}", f"cannot be read: {_reason(error)}.", "It is made again.")
            return None
        with suppress(OSError):
            _touch(path)
        return payload

    def put(self, key: str, payload: bytes, label: str = "") -> bool:
        """Keep an entry, in place of one with the same key; then forget others until all fit into `max_bytes`.

        True once it is on the disk and every process finds it. False if that cannot be, as when the disk is full or the
        entry larger than `max_bytes`; then everything stays as it was.
        """
        path = self._path(key)
        head = self._head(key, payload, label.encode("utf-8", "backslashreplace"))
        num_bytes = len(head) + len(payload)
        if num_bytes > self.max_bytes:
            what = f"takes {num_bytes:,} bytes, more than the {self.max_bytes:,} that the cache may take."
            _tell(f"too large: {path}", f"cache entry {path}", what, "It is not kept. Allow the cache more.")
            return False
        try:
            self._write(path, head, payload)
        except OSError as error:
            cure = "The program runs on, and compiles again what it would have found there."
            _tell(f"unwritten: {self.folder}", f"cache entry {path}", f"cannot be written: {_reason(error)}.", cure)
            return False
        return True

    def entries(self) -> tuple[StoredEntry, ...]:
        """What is kept and bears this store's signature, the last used first. Payloads are not looked at."""
        found: list[tuple[int, StoredEntry]] = []
        for key, path, info in _files(self.folder):
            with suppress(OSError, _Refused), path.open("rb", buffering=0) as file:
                _, _, label = self._read_head(file, key)
                entry = StoredEntry(key, label.decode(), info.st_size, info.st_mtime)
                found.append((info.st_mtime_ns, entry))
        return tuple(entry for _, entry in sorted(found, key=lambda item: (-item[0], item[1].key)))

    def clear(self) -> int:
        """Remove every entry, and what dead writers left; count the entries.

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
        """Bytes of all entry files, those included that `get` would refuse."""
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
        """The payload's bytes and SHA-256, and the label, once the signature is seen to be right."""
        head, size = file.read(_HEAD_BYTES), os.fstat(file.fileno()).st_size
        if len(head) < _HEAD_BYTES:
            raise _Refused(f"is cut off after {size} bytes")
        fields, signature = head[: _FIELDS.size], head[_FIELDS.size :]
        magic, version, payload_bytes, label_bytes, digest = _FIELDS.unpack(fields)
        if magic != _MAGIC:
            raise _Refused("does not begin as an entry does")
        if version != _VERSION:
            kind = _Newer if version > _VERSION else _Refused
            raise kind(f"has format {version}, and this is format {_VERSION}")
        told = _HEAD_BYTES + label_bytes + payload_bytes
        if size != told:
            raise _Refused(f"has {size:,} bytes, and says that it has {told:,}")
        label = file.read(label_bytes)
        if not hmac.compare_digest(signature, self._sign(key, fields, label)):
            raise _Refused("is not signed with this folder's key")
        return payload_bytes, digest, label

    def _payload(self, path: Path, key: str) -> bytes:
        """Read an entry once, into the bytes that are returned."""
        with path.open("rb", buffering=0) as file:
            payload_bytes, digest, _ = self._read_head(file, key)
            payload = file.readall()
        if len(payload) != payload_bytes or not hmac.compare_digest(digest, hashlib.sha256(payload).digest()):
            raise _Refused("holds another payload than was written")
        return payload

    def _refuse(self, path: Path, key: str, refusal: _Refused) -> None:
        if isinstance(refusal, _Newer):
            _tell(str(path), f"cache entry {path}", f"{refusal}.", "It stays for the newer jointcut that wrote it.")
            return
        _tell(str(path), f"cache entry {path}", f"{refusal}.", "It is removed, and made again.")
        with suppress(OSError, _Newer), self._alone():
            try:
                self._payload(path, key)
            except _Refused as again:
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
                file.close()  # Windows gives no new name to a file that is open
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
        """Hold the lock of the folder, if it is still the folder that was opened."""
        with locked(self.folder):
            if (self.folder / "key").read_bytes() != self._secret:
                raise OSError(errno.ESTALE, "Another process has made the folder anew")
            yield


def _files(folder: Path) -> Iterator[tuple[str, Path, os.stat_result]]:
    """Key, path and status of every entry file; of those that vanish meanwhile, nothing."""
    with suppress(FileNotFoundError), os.scandir(folder) as scan:
        for item in scan:
            named = _ENTRY.fullmatch(item.name)
            with suppress(FileNotFoundError):
                if named and item.is_file(follow_symlinks=False):
                    yield named[1], folder / item.name, item.stat(follow_symlinks=False)


def _touch(path: Path) -> None:
    """Say that a file was used now; to the nanosecond, since the system's own stamps may be 4 ms apart."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _tell(once: str, where: str, what: str, cure: str) -> None:
    """Log a warning, unless `once` was told by this process before."""
    with _THREADS:
        is_new = once not in _TOLD
        _TOLD.add(once)
    if is_new:
        _LOG.warning("%s", message(where, what, cure))
