"""Write a report to a file, in the format of its ending."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from jointcut.partition.errors import JointcutError, choices, message


def written_to(place: str | os.PathLike[str], contents: Mapping[str, Callable[[], str | bytes]]) -> Path:
    """Write the content for a file's ending to it, and return its path; no part of a file is left behind.

    Raises `JointcutError` for another ending, or if the file cannot be written.
    """
    path = Path(place)
    if path.suffix not in contents:
        raise JointcutError(message(str(path), "has no known ending.", choices(path.suffix, contents)))
    try:
        write_whole(path, contents[path.suffix]())
    except OSError as error:
        what = f"cannot be written: {error.strerror}."
        raise JointcutError(message(str(path), what, "Give a file in a folder that takes it.")) from error
    return path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a text or bytes to a file whole, or raise `OSError` and leave no part of it behind."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
