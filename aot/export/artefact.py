"""Write a folder completely or not at all, and read back only unchanged files.

An artefact is a folder of files with a `signature.json`, which lists the size and SHA-256 of each file and a SHA-256 of
itself. No file is used before these agree. They detect damage, swapped files and edits. They are not a cryptographic
signature: read artefacts only from people whom you trust, as with any program.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jointcut.partition.errors import ArtefactError, message
from jointcut.wrappers.mark import remove

#: The value of `format`, and the newest `version` that can be read.
FORMAT, VERSION = "jointcut artefact", 1
SIGNATURE = "signature.json"

_AGAIN = "Export again, or copy the whole folder again."
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Artefact:
    """A folder whose files match its signature."""

    folder: Path
    signature: dict[str, Any]
    files: dict[str, bytes]


# ---------------------------------------------------------------------------------------------------- writing


def write(
    folder: str | os.PathLike[str], signature: Mapping[str, Any], files: Mapping[str, bytes], overwrite: bool
) -> Path:
    """Write an artefact, and return its path; `overwrite` replaces an earlier artefact.

    It is written under another name in the same parent folder, and renamed when it is complete. Raises `ArtefactError`
    if its path is taken or the disk refuses; then nothing has changed.
    """
    place = free_place(folder, overwrite)
    contents = {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in sorted(files.items())}
    document = {"format": FORMAT, "version": VERSION, **signature, "files": contents}
    document["checksum"] = checksum(document)
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    with _or_refused(place), _parents(place):
        draft = place.parent / f".{place.name}.{uuid.uuid4().hex}"
        try:
            draft.mkdir()
            for name, data in (*files.items(), (SIGNATURE, text.encode())):
                _write(draft / name, data)
            _put(draft, place)
        finally:
            remove(draft, [*files, SIGNATURE])
    return place


def free_place(folder: str | os.PathLike[str], overwrite: bool, switch: str = "overwrite=True") -> Path:
    """Return the absolute path for an artefact; raises `ArtefactError` if it is taken.

    With `overwrite` an earlier artefact may be there, but only with its own unchanged files. `switch` names this option
    in messages.
    """
    place = Path(folder).absolute()
    with _or_refused(place):
        if place.is_symlink():
            place = place.resolve()
        if not os.path.lexists(place) or (place.is_dir() and not any(place.iterdir())):
            return place
        known = _listed_in(place)
        if known is None:
            what = "is there already, and is no artefact."
            raise ArtefactError(message(str(place), what, "Give the name of a folder that does not exist yet."))
        if not overwrite:
            cure = f"Give another name, or say {switch}."
            raise ArtefactError(message(str(place), "holds an artefact already.", cure))
        cure = f"Move it elsewhere, or give another name: {switch} replaces the whole folder."
        there = sorted(place.iterdir())
        if foreign := [path for path in there if path.name not in known]:
            raise ArtefactError(message(str(foreign[0]), "is no file of the artefact beside it.", cure))
        if changed := [path for path in there if known[path.name] not in (None, _sha256(path.read_bytes()))]:
            raise ArtefactError(message(str(changed[0]), "was changed after it was written.", cure))
    return place


def _listed_in(place: Path) -> dict[str, str | None] | None:
    """Return the SHA-256 of each file of an artefact by its name; None if the folder holds no artefact.

    The signature maps to None if it agrees with its checksum, and otherwise to a text that is no digest.
    """
    try:
        document = json.loads((place / SIGNATURE).read_bytes())
        listed = {name: str(entry["sha256"]) for name, entry in document["files"].items()}
        itself = None if document["checksum"] == checksum(document) else "changed"
        return {**listed, SIGNATURE: itself} if document["format"] == FORMAT else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


@contextlib.contextmanager
def _or_refused(place: Path) -> Iterator[None]:
    """Turn errors of the disk into an `ArtefactError` that names the folder."""
    try:
        yield
    except OSError as error:
        what = f"could not be written: {error.strerror or error}."
        cure = "Nothing was left behind. Give a folder on a disk that has room and that you may write to."
        raise ArtefactError(message(str(place), what, cure)) from error


@contextlib.contextmanager
def _parents(place: Path) -> Iterator[None]:
    """Create the folders above, and remove them again if the block fails."""
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


def _put(draft: Path, place: Path) -> None:
    """Rename a complete folder to its place, and restore the old one if that fails."""
    if not place.exists():
        draft.rename(place)
        return
    old, known = draft.with_name(f"{draft.name}.old"), _listed_in(place) or {}
    place.rename(old)
    try:
        draft.rename(place)
    except BaseException:
        old.rename(place)
        raise
    remove(old, [path.name for path in old.iterdir() if path.name in known])


def checksum(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a signature, without its own checksum."""
    content = {key: value for key, value in document.items() if key != "checksum"}
    return _sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------------------------------------------- reading


def read(folder: str | os.PathLike[str]) -> Artefact:
    """Return the artefact in a folder; compare every file with its SHA-256.

    Raises `ArtefactError` with the file and its fault.
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
    """Return the signature, after a comparison with its checksum."""
    if not place.is_dir():
        what = "is no folder." if place.exists() else "does not exist."
        raise ArtefactError(message(str(place), what, "Give the folder that export wrote."))
    path = place / SIGNATURE
    if not path.is_file():
        raise ArtefactError(message(str(place), f"holds no {SIGNATURE}, so that it is no whole artefact.", _AGAIN))
    try:
        document = json.loads(path.read_bytes(), object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite)
        agrees = isinstance(document, dict) and document.get("checksum") == checksum(document)
    except (ValueError, RecursionError) as error:
        raise ArtefactError(message(str(path), f"is not JSON as export writes it: {error}.", _AGAIN)) from error
    if not isinstance(document, dict):
        raise ArtefactError(message(str(path), "holds no JSON object.", _AGAIN))
    _refuse_version(document, str(path))
    if not agrees:
        what = "was changed after it was written: its checksum does not agree with what it says."
        raise ArtefactError(message(str(path), what, _AGAIN))
    return document


def _refuse_version(document: Mapping[str, Any], where: str) -> None:
    if document.get("format") != FORMAT:
        raise ArtefactError(message(where, f"is no {FORMAT}.", "Read what export wrote."))
    version = document.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        newer = type(version) is int and version > VERSION
        what = f"has the format version {version!r}, and this jointcut reads up to {VERSION}."
        cure = "Upgrade jointcut: pip install --upgrade jointcut." if newer else _AGAIN
        raise ArtefactError(message(where, what, cure))


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a key stands twice")
    return entries


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is no number of JSON's")
    return float(text)


def _listed(files: Any, where: str) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of each file by its name, which holds no folder."""
    if not isinstance(files, dict):
        raise ArtefactError(message(where, "lists no files.", _AGAIN))
    entries = {}
    for name, entry in files.items():
        if not _PLAIN_NAME.fullmatch(name) or name == SIGNATURE:
            raise ArtefactError(message(where, f"lists {name!r}, which names no file of an artefact.", _AGAIN))
        size, sha256 = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or not isinstance(sha256, str):
            raise ArtefactError(message(where, f"does not tell bytes and sha256 of {name!r}.", _AGAIN))
        entries[name] = size, sha256
    return entries


def _file(path: Path, size: int, sha256: str) -> bytes:
    if not path.is_file():
        raise ArtefactError(message(str(path), "is missing.", _AGAIN))
    actual = path.stat().st_size
    if actual != size:
        raise ArtefactError(message(str(path), f"has {actual:,} bytes, and {size:,} were written.", _AGAIN))
    data = path.read_bytes()
    if _sha256(data) != sha256:
        raise ArtefactError(message(str(path), "is not the file that was written: its SHA-256 differs.", _AGAIN))
    return data
