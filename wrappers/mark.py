"""Mark a folder as ours, so that a process removes no files of anybody else.

A folder that jointcut fills holds a file with a line of JSON: the kind of the folder, its version, and its user. The
folder's name does not count. A process removes files only from a folder with this mark, and only files with names that
it writes there itself. It removes the folder only once it is empty.

>>> Mark("cache").line.decode()[:42]
'{"kind": "jointcut cache", "version": 1, "'
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MOST_BYTES = 1024  # the most bytes that are read from a file that may hold a mark


@dataclass(frozen=True)
class Mark:
    """The mark of a folder: its `kind`, and the `version` of its contents."""

    kind: str
    version: int = 1

    @property
    def line(self) -> bytes:
        """The contents of the file with the mark, for this user."""
        return json.dumps(self._facts).encode() + b"\n"

    @property
    def _facts(self) -> dict[str, str | int]:
        owner = {"owner": os.getuid()} if hasattr(os, "getuid") else {}  # Windows has no numbers of users
        return {"kind": f"jointcut {self.kind}", "version": self.version, **owner}

    def is_in(self, path: Path) -> bool:
        """Whether a file holds this mark, of this user."""
        try:
            with path.open("rb") as file:
                found = json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError):
            return False
        return isinstance(found, dict) and self._facts.items() <= found.items()


def remove(folder: Path, names: Iterable[str]) -> None:
    """Remove files from a folder, and then the folder, which stays if it holds anything else."""
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()
    with suppress(OSError):
        folder.rmdir()
