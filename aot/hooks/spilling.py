"""Keep residuals in files: written as soon as they are made, memory-mapped where they are read.

A `Spill` is a form of saved values, like a user's functions (see `saved_arrays`). Its two functions are called back by
the running halves, in loops at each step: no stack is ever whole in memory. An array waits as its number, four bytes.

Each run of a forward has a file of its own. All its blocks are reserved before the run starts: a full disk is an error
then, and not a crash later. Files lie in a folder of this process, `jointcut-*`, in the folder that the user gave. Its
file `lock` holds our mark, and the process locks it for as long as it lives. So a folder with the mark whose lock is
free was left by a process that crashed, and the next process that spills removes it. Without `fcntl`, on Windows,
nothing tells the two apart, and such a folder stays.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jointcut.partition.errors import SpillError, TraceError, message
from jointcut.partition.figures import human_bytes
from jointcut.partition.program.jax import abstract
from jointcut.wrappers.mark import Mark, remove
from jointcut.wrappers.record import Record

if sys.platform != "win32":
    import fcntl

#: Arrays of fewer bytes (in a loop, of one step) stay in memory: a file would take as much.
LEAST_BYTES = 4096

_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT} if sys.platform != "win32" else {errno.ENOSPC, errno.EFBIG}

_NUMBER = jax.ShapeDtypeStruct((), "int32")
_PREFIX, _LOCK, _FILE = "jointcut-", "lock", "spilled-"  # how names of folders begin, and of the files in them
_MARK = Mark("spill")


@dataclass(frozen=True)
class Spill(Record):
    """The folder of `aot.function(spill=...)`, and the functions that write to it and read from it."""

    folder: str

    @cached_property
    def packing(self) -> SpillPacking:
        """The folder as a form of saved values."""
        return SpillPacking(Disk(self.folder))


def read_spill(spill: Any) -> Spill | None:
    """Return the folder of the option; raises `TraceError` if it is no path."""
    if spill is None or isinstance(spill, Spill):
        return spill
    if not isinstance(spill, str | os.PathLike) or not os.fspath(spill):
        cure = "Give the path of a folder, on a disk with room for what is kept."
        raise TraceError(message("spill", f"is {spill!r}, not a folder.", cure))
    return Spill(str(Path(os.fsdecode(spill)).absolute()))


@dataclass(frozen=True, eq=False)
class SpillPacking:
    """Arrays in files as a form (a `Packing`)."""

    disk: Disk

    def pack(self, x: Any) -> Sequence[Any]:
        """Return the number of the array once it is written; a small array is returned unchanged."""
        if not is_spilled(x):
            return [x]
        return [jax.pure_callback(self.disk.write, _NUMBER, x, vmap_method="sequential")]

    def unpack(self, aval: Any, arrays: Sequence[Any]) -> Any:
        """Return the array of a number."""
        (number,) = arrays
        if not is_spilled(aval):
            return number
        struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        return jax.pure_callback(partial(self.disk.read, struct), struct, number, vmap_method="sequential")

    def check(self, aval: Any, where: Callable[[], str]) -> None:
        """Accept every array: files return it unchanged."""


def is_spilled(aval: Any) -> bool:
    """Whether an array of this type (in a loop, the array of one step) is written to a file."""
    return abstract.is_plain(aval) and abstract.aval_bytes(aval) >= LEAST_BYTES


@dataclass(frozen=True)
class _InFile:
    """Where an array lies."""

    file: SpillFile
    start: int


@dataclass(eq=False)
class SpillFile:
    """The file of one run of a forward; `end` is behind its last reserved block, `used` behind its last array."""

    disk: Disk
    path: Path
    descriptor: int
    end: int = 0
    used: int = 0
    numbers: list[int] = field(default_factory=list)
    is_open: bool = True
    process: int = field(default_factory=os.getpid)

    def reserve(self, size: int) -> None:
        """Reserve more blocks; raises `OSError` where there are none."""
        if size <= 0:
            return
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.descriptor, self.end, size)
        else:
            os.truncate(self.descriptor, self.end + size)
        self.end += size

    def write(self, x: np.ndarray, start: int) -> None:
        """Write an array at a reserved place."""
        rest = np.ascontiguousarray(x).reshape(-1).view(np.uint8).data
        while rest:
            count = os.pwrite(self.descriptor, rest, start)
            rest, start = rest[count:], start + count

    def close(self) -> None:
        """Remove the file, unless that was done; in a forked process it belongs to another one."""
        if self.is_open and os.getpid() == self.process:
            self.disk.remove(self)

    def until_gone(self, arrays: Sequence[Any]) -> None:
        """Remove the file once none of these arrays is left, or at the end of the process."""
        left = itertools.count(len(arrays) - 1, -1)

        def gone() -> None:
            if next(left) == 0:
                self.close()

        for x in arrays:
            weakref.finalize(x, gone)


@dataclass(eq=False)
class Disk:
    """The files in one folder that the halves of one function write and read, from all threads.

    One half runs at a time: a half that calls back does not say for which call.
    """

    folder: str
    _turn: Any = field(default_factory=threading.Lock, repr=False)
    _guard: Any = field(default_factory=threading.RLock, repr=False)  # a finalizer may run inside of it
    _own: tuple[Path, int] | None = None
    _files: list[SpillFile] = field(default_factory=list, repr=False)
    _places: dict[int, _InFile] = field(default_factory=dict, repr=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)
    _free: list[int] = field(default_factory=list, repr=False)
    _running: SpillFile | None = None
    _error: OSError | None = None

    @contextmanager
    def forward(self, name: str, size: int) -> Iterator[SpillFile]:
        """Open a file for one run of the forward of a function, with blocks for `size` bytes.

        Raises `SpillError`, and leaves nothing behind, where the folder has no room or cannot be written.
        """
        with self._turn:
            file, is_done = None, False
            try:
                file = self._running = self._new()
                file.reserve(size)
                yield file
                self._raise_error()
                is_done = True
            except OSError as error:
                raise self._refused(name, max(size, file.used if file else 0), error) from error
            finally:
                self._running = self._error = None
                if file is not None and not is_done:
                    file.close()

    @contextmanager
    def backward(self, name: str) -> Iterator[None]:
        """Run the backward of a function; raises `SpillError` where a file cannot be read."""
        with self._turn:
            yield
            try:
                self._raise_error()
            except OSError as error:
                what = f"cannot be read back for the backward of {name}: {error.strerror or error}."
                raise SpillError(message(f"spill={self.folder!r}", what, "Call the forward again.")) from error

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    # --------------------------------------------------------------------------------------------- called by the halves

    def write(self, x: Any) -> np.ndarray:
        """Write an array, and return its number, or -1 if that failed, which the caller of the half is told."""
        x = np.asarray(x)
        try:
            with self._guard:
                file = self._running
                assert file is not None, "a forward that spills runs in a turn"
                start, file.used = file.used, file.used + x.nbytes
                file.reserve(file.used - file.end)
                number = self._free.pop() if self._free else next(self._numbers)
                file.numbers.append(number)
                self._places[number] = _InFile(file, start)
            file.write(x, start)
        except OSError as error:
            self._error = error
            number = -1
        return np.asarray(number, np.int32)

    def read(self, struct: Any, number: Any) -> np.ndarray:
        """Map an array of a type; zeros if that failed, and the caller of the half is told of the failure."""
        if number < 0:
            return np.zeros(struct.shape, struct.dtype)
        place = self._places[int(number)]
        try:
            return np.memmap(place.file.path, struct.dtype, "r", place.start, struct.shape)
        except OSError as error:
            self._error = error
            return np.zeros(struct.shape, struct.dtype)

    # ------------------------------------------------------------------------------------------------ files

    def _new(self) -> SpillFile:
        """Return an empty file in the folder of this process."""
        with self._guard:
            own, _ = self._own = self._own or self._made()
            descriptor, name = -1, ""
            try:
                descriptor, name = tempfile.mkstemp(".bin", _FILE, own)
            finally:
                if descriptor < 0:
                    self._leave()
            self._files.append(SpillFile(self, Path(name), descriptor))
            return self._files[-1]

    def remove(self, file: SpillFile) -> None:
        """Remove a file; with the last one, the folder of this process."""
        with self._guard:
            file.is_open = False
            os.close(file.descriptor)
            with suppress(OSError):
                file.path.unlink()
            for number in file.numbers:
                self._free.append(number)
                del self._places[number]
            self._files.remove(file)
            self._leave()

    def _leave(self) -> None:
        """Remove the folder of this process if it holds no file."""
        if self._own is not None and not self._files:
            folder, descriptor = self._own
            _remove(folder)
            os.close(descriptor)
            self._own = None

    def _made(self) -> tuple[Path, int]:
        """Return a new folder of this process, and its locked file; folders of processes that crashed are removed."""
        for left in Path(self.folder).glob(f"{_PREFIX}*"):
            _remove_if_left(left)
        own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self.folder))
        try:
            return own, _marked(own)
        except OSError:
            _remove(own)
            raise

    def _refused(self, name: str, size: int, error: OSError) -> SpillError:
        where, cause = f"spill={self.folder!r}", error.strerror or str(error)
        if not Path(self.folder).is_dir():
            return SpillError(message(where, "is no folder.", "Make it first, on a disk with room for what is kept."))
        if error.errno in _FULL:
            what = f"has no room for the {human_bytes(size)} that {name} keeps for its backward: {cause}."
            return SpillError(message(where, what, "Make room there, or give a folder on a larger disk."))
        return SpillError(message(where, f"cannot be written: {cause}.", "Give a folder that you may write to."))


def _lock(descriptor: int) -> None:
    """Lock a file for this process, or raise `BlockingIOError` at once if another one holds it."""
    if sys.platform != "win32":
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _marked(own: Path) -> int:
    """Mark a new folder, and return its locked file. Once the lock is free, another process may remove the folder."""
    descriptor = os.open(own / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _lock(descriptor)
        os.write(descriptor, _MARK.line)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_if_left(folder: Path) -> None:
    """Remove a folder with our mark whose process is not there any more."""
    if sys.platform == "win32" or not _MARK.is_in(folder / _LOCK):
        return
    with suppress(OSError):
        descriptor = os.open(folder / _LOCK, os.O_RDWR)
        try:
            _lock(descriptor)
            _remove(folder)
        finally:
            os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder of ours and our files in it."""
    remove(folder, [*(path.name for path in folder.glob(f"{_FILE}*.bin")), _LOCK])
