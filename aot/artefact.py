"""Write a folder whole or not at all, and read back only what was written.

An artefact is a folder of files and a `signature.json` that names each file with its size and SHA-256, and carries a
SHA-256 of itself. Nothing is looked into before these agree. They find damage, a swapped file and an edit; they are no
signature in the sense of cryptography: read artefacts from people whom you trust, as you do with any program.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jointcut.partition.errors import ArtefactError, message

#: What `format` must say, and the newest `version` that is read here.
FORMAT, VERSION = "jointcut artefact", 1
SIGNATURE = "signature.json"

_AGAIN = "Export again, or copy the whole folder again."


@dataclass(frozen=True)
class Artefact:
    """A folder whose files are what its signature says."""

    folder: Path
    signature: dict[str, Any]
    files: dict[str, bytes]


# ---------------------------------------------------------------------------------------------------- writing


def write(folder: str | os.PathLike[str], signature: Mapping[str, Any], files: Mapping[str, bytes], again: bool) -> Path:
    """Write an artefact, and return where it is; `again` replaces one that is there.

    It is made beside its place under another name, and renamed when it is complete. Raises `ArtefactError` where
    something else is in the place or the disk refuses; then what was there before is still there, and nothing else.
    """
    place = Path(folder).absolute()
    _is_free(place, again)
    contents = {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in sorted(files.items())}
    document = {"format": FORMAT, "version": VERSION, **signature, "files": contents}
    document["checksum"] = checksum(document)
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    made = place.parent / f".{place.name}.{uuid.uuid4().hex}"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        made.mkdir()
        for name, data in (*files.items(), (SIGNATURE, text.encode())):
            _write(made / name, data)
        _put(made, place)
    except OSError as error:
        what = f"could not be written: {error.strerror or error}."
        cure = "Nothing was left behind. Give a folder on a disk that has room and that you may write to."
        raise ArtefactError(message(str(place), what, cure)) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return place


def _is_free(place: Path, again: bool) -> None:
    if not os.path.lexists(place) or (place.is_dir() and not any(place.iterdir())):
        return
    if not (place / SIGNATURE).is_file():
        what = "is there already, and is no artefact."
        raise ArtefactError(message(str(place), what, "Give the name of a folder that does not exist yet."))
    if not again:
        cure = "Give another name, or say overwrite=True."
        raise ArtefactError(message(str(place), "holds an artefact already.", cure))


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
    except OSError:
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
    document = _parsed(place)
    if document.get("format") != FORMAT:
        raise ArtefactError(message(f"{place / SIGNATURE}", f"is no {FORMAT}.", "Read what export wrote."))
    version = document.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        newer = type(version) is int and version > VERSION
        what = f"has the format version {version!r}, and this jointcut reads up to {VERSION}."
        cure = "Upgrade jointcut: pip install --upgrade jointcut." if newer else _AGAIN
        raise ArtefactError(message(f"{place / SIGNATURE}", what, cure))
    if document.get("checksum") != checksum(document):
        what = "was changed after it was written: its checksum does not agree with what it says."
        raise ArtefactError(message(f"{place / SIGNATURE}", what, _AGAIN))
    listed = document["files"]
    return Artefact(place, document, {name: _file(place / name, listed[name]) for name in listed})


def _parsed(place: Path) -> dict[str, Any]:
    if not place.is_dir():
        what = "is no folder." if place.exists() else "does not exist."
        raise ArtefactError(message(str(place), what, "Give the folder that export wrote."))
    path = place / SIGNATURE
    if not path.is_file():
        raise ArtefactError(message(str(place), f"holds no {SIGNATURE}, so that it is no whole artefact.", _AGAIN))
    try:
        found = json.loads(_bytes(path), object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise ArtefactError(message(str(path), f"is not JSON as export writes it: {error}.", _AGAIN)) from error
    if not isinstance(found, dict):
        raise ArtefactError(message(str(path), "holds no JSON object.", _AGAIN))
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is no number of JSON's")
    return float(text)


def _file(path: Path, listed: Mapping[str, Any]) -> bytes:
    if not path.is_file():
        raise ArtefactError(message(str(path), "is missing.", _AGAIN))
    data = _bytes(path)
    if len(data) != listed["bytes"]:
        what = f"has {len(data):,} bytes, and {listed['bytes']:,} were written."
        raise ArtefactError(message(str(path), what, _AGAIN))
    if _sha256(data) != listed["sha256"]:
        raise ArtefactError(message(str(path), "is not the file that was written: its SHA-256 differs.", _AGAIN))
    return data


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}."
        raise ArtefactError(message(str(path), what, "See to its permissions.")) from error
