"""Write a folder whole or not at all, and read back only what was written.

An artefact is a folder of files and a `signature.json` that names each file with its size and SHA-256, and carries a
SHA-256 of itself. Nothing is looked into before these agree. They find damage, a swapped file and an edit; they are no
signature in the sense of cryptography: read artefacts from people whom you trust, as you do with any program.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jointcut.partition.errors import ArtefactError, message

#: What `format` must say, and the newest `version` that is read here.
FORMAT, VERSION = "jointcut artefact", 1
SIGNATURE = "signature.json"

_AGAIN = "Export again, or copy the whole folder again."
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Artefact:
    """A folder whose files are what its signature says."""

    folder: Path
    signature: dict[str, Any]
    files: dict[str, bytes]


# ---------------------------------------------------------------------------------------------------- writing


def write(
    folder: str | os.PathLike[str], signature: Mapping[str, Any], files: Mapping[str, bytes], again: bool
) -> Path:
    """Write an artefact, and return where it is; `again` replaces one that is there.

    It is made beside its place under another name, and renamed when it is complete. Raises `ArtefactError` where
    something else is in the place or the disk refuses; then what was there before is still there, and nothing else.
    """
    place = free_place(folder, again)
    contents = {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in sorted(files.items())}
    document = {"format": FORMAT, "version": VERSION, **signature, "files": contents}
    document["checksum"] = checksum(document)
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    with _or_refused(place), _parents(place):
        made = place.parent / f".{place.name}.{uuid.uuid4().hex}"
        try:
            made.mkdir()
            for name, data in (*files.items(), (SIGNATURE, text.encode())):
                _write(made / name, data)
            _put(made, place)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return place


def free_place(folder: str | os.PathLike[str], again: bool, switch: str = "overwrite=True") -> Path:
    """Where an artefact will be; raises `ArtefactError` where something is that `again` does not replace.

    What is replaced is an artefact and nothing else: a folder in which anybody put a file of their own stays.
    `switch` is how the caller asks for that, for the messages.
    """
    place = Path(folder).absolute()
    with _or_refused(place):
        if place.is_symlink():
            place = place.resolve()
        if not os.path.lexists(place) or (place.is_dir() and not any(place.iterdir())):
            return place
        known = _names(place)
        if known is None:
            what = "is there already, and is no artefact."
            raise ArtefactError(message(str(place), what, "Give the name of a folder that does not exist yet."))
        if not again:
            cure = f"Give another name, or say {switch}."
            raise ArtefactError(message(str(place), "holds an artefact already.", cure))
        if foreign := sorted({path.name for path in place.iterdir()} - known):
            cure = f"Move it elsewhere, or give another name: {switch} replaces the whole folder."
            raise ArtefactError(message(str(place / foreign[0]), "is no file of the artefact beside it.", cure))
    return place


def _names(place: Path) -> set[str] | None:
    """The files of an artefact, None for what is none."""
    try:
        found = json.loads((place / SIGNATURE).read_bytes())
        return {*found["files"], SIGNATURE} if found["format"] == FORMAT else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


@contextlib.contextmanager
def _or_refused(place: Path) -> Iterator[None]:
    """Say of what the disk refuses which folder it was for."""
    try:
        yield
    except OSError as error:
        what = f"could not be written: {error.strerror or error}."
        cure = "Nothing was left behind. Give a folder on a disk that has room and that you may write to."
        raise ArtefactError(message(str(place), what, cure)) from error


@contextlib.contextmanager
def _parents(place: Path) -> Iterator[None]:
    """Make the folders above, and take away again those that were made where what follows fails."""
    missing = [folder for folder in place.parents if not folder.exists()]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _put(made: Path, place: Path) -> None:
    """Rename a complete folder into its place, and put the old one back where that fails."""
    if not place.exists():
        made.rename(place)
        return
    old = made.with_name(f"{made.name}.old")
    place.rename(old)
    try:
        made.rename(place)
    except BaseException:
        old.rename(place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def checksum(document: Mapping[str, Any]) -> str:
    """The SHA-256 of all that a signature says, its own checksum apart."""
    content = {key: value for key, value in document.items() if key != "checksum"}
    return _sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------------------------------------------- reading


def read(folder: str | os.PathLike[str]) -> Artefact:
    """The artefact in a folder, every file compared with its SHA-256.

    Raises `ArtefactError` that names the file and what is wrong with it.
    """
    place = Path(folder).absolute()
    try:
        document = _parsed(place)
        listed = _listed(document.get("files"), str(place / SIGNATURE))
        return Artefact(place, document, {name: _file(place / name, *entry) for name, entry in listed.items()})
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}."
        raise ArtefactError(message(str(error.filename or place), what, "See to its permissions.")) from error


def _parsed(place: Path) -> dict[str, Any]:
    """What the signature says, once it is known that it says so as it was written."""
    if not place.is_dir():
        what = "is no folder." if place.exists() else "does not exist."
        raise ArtefactError(message(str(place), what, "Give the folder that export wrote."))
    path = place / SIGNATURE
    if not path.is_file():
        raise ArtefactError(message(str(place), f"holds no {SIGNATURE}, so that it is no whole artefact.", _AGAIN))
    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite)
        agrees = isinstance(found, dict) and found.get("checksum") == checksum(found)
    except (ValueError, RecursionError) as error:
        raise ArtefactError(message(str(path), f"is not JSON as export writes it: {error}.", _AGAIN)) from error
    if not isinstance(found, dict):
        raise ArtefactError(message(str(path), "holds no JSON object.", _AGAIN))
    _refuse_version(found, str(path))
    if not agrees:
        what = "was changed after it was written: its checksum does not agree with what it says."
        raise ArtefactError(message(str(path), what, _AGAIN))
    return found


def _refuse_version(found: Mapping[str, Any], where: str) -> None:
    if found.get("format") != FORMAT:
        raise ArtefactError(message(where, f"is no {FORMAT}.", "Read what export wrote."))
    version = found.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        newer = type(version) is int and version > VERSION
        what = f"has the format version {version!r}, and this jointcut reads up to {VERSION}."
        cure = "Upgrade jointcut: pip install --upgrade jointcut." if newer else _AGAIN
        raise ArtefactError(message(where, what, cure))


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is no number of JSON's")
    return float(text)


def _listed(found: Any, where: str) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file; no name leads out of the folder."""
    if not isinstance(found, dict):
        raise ArtefactError(message(where, "lists no files.", _AGAIN))
    made = {}
    for name, entry in found.items():
        if not _PLAIN_NAME.fullmatch(name) or name == SIGNATURE:
            raise ArtefactError(message(where, f"lists {name!r}, which names no file of an artefact.", _AGAIN))
        size, sha256 = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or not isinstance(sha256, str):
            raise ArtefactError(message(where, f"does not tell bytes and sha256 of {name!r}.", _AGAIN))
        made[name] = size, sha256
    return made


def _file(path: Path, size: int, sha256: str) -> bytes:
    if not path.is_file():
        raise ArtefactError(message(str(path), "is missing.", _AGAIN))
    found = path.stat().st_size
    if found != size:
        raise ArtefactError(message(str(path), f"has {found:,} bytes, and {size:,} were written.", _AGAIN))
    data = path.read_bytes()
    if _sha256(data) != sha256:
        raise ArtefactError(message(str(path), "is not the file that was written: its SHA-256 differs.", _AGAIN))
    return data
