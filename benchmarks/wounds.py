"""Wound an artefact: the mutants of `mutants`, each the same for the same seed and number."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

Files = dict[str, bytes]
Wound = Callable[[random.Random, Files, Mapping[str, Files]], Files]

SIGNATURE = "signature.json"
_RAW = {  # texts that no Python value is written as
    "@NaN@": "NaN",
    "@infinity@": "1e999",
    "@deep@": "[" * 900 + "]" * 900,
    "@deeper@": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "@long@": "9" * 5_000,
    "@twice@": '{"name": 1, "name": 2}',
}
_NAMES = ("../../etc/passwd", "/etc/passwd", "..", ".", "", "a/b", "\\", "\0", "\ud800", "x" * 5_000, SIGNATURE)
_VALUES = (None, True, False, 0, 1, -1, 2, 2**31, 2**63, 10**30, 0.5, -0.0, "", "x", [], {}, [0], {"a": 1})


def mutant(originals: Mapping[str, Files], seed: int, index: int) -> tuple[str, str, Files]:
    """Which artefact was wounded, how, and the files that came of it."""
    draws = random.Random(f"{seed}:{index}")
    name = draws.choice(sorted(originals))
    wound = draws.choice(sorted(WOUNDS))
    return name, wound, WOUNDS[wound](draws, dict(originals[name]), originals)


# --------------------------------------------------------------------------------------------------------- bytes


def flip(draws: random.Random, files: Files, others: Mapping[str, Files]) -> Files:
    """One to eight bits of one file."""
    del others
    name = draws.choice(sorted(files))
    data = bytearray(files[name])
    for _ in range(draws.choice((1, 1, 1, 8))):
        data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
    return {**files, name: bytes(data)}


def truncate(draws: random.Random, files: Files, others: Mapping[str, Files]) -> Files:
    """The end of a file is lost, or all of it."""
    del others
    name = draws.choice(sorted(files))
    return {**files, name: files[name][: draws.choice((0, draws.randrange(len(files[name]))))]}


def append(draws: random.Random, files: Files, others: Mapping[str, Files]) -> Files:
    """Bytes behind the end of a file."""
    del others
    name = draws.choice(sorted(files))
    return {**files, name: files[name] + draws.choice((b"\0", b"\n", b"}", draws.randbytes(20)))}


def remove(draws: random.Random, files: Files, others: Mapping[str, Files]) -> Files:
    """A file is lost."""
    del others
    files.pop(draws.choice(sorted(files)))
    return files


def exchange(draws: random.Random, files: Files, others: Mapping[str, Files]) -> Files:
    """Two files under each other's names."""
    del others
    one, two = draws.sample(sorted(files), 2)
    return {**files, one: files[two], two: files[one]}


def foreign(draws: random.Random, files: Files, others: Mapping[str, Files]) -> Files:
    """A file of another artefact."""
    other = draws.choice([found for found in others.values() if found != files])
    name = draws.choice(sorted(files.keys() & other.keys()))
    return {**files, name: other[name]}


# ---------------------------------------------------------------------------------------------------------- JSON


def edit(draws: random.Random, files: Files, others: Mapping[str, Files]) -> Files:
    """One place of signature.json says something else."""
    del others
    document = json.loads(files[SIGNATURE])
    _change(draws, document)
    return {**files, SIGNATURE: _text(document)}


def laid_out(draws: random.Random, files: Files, others: Mapping[str, Files]) -> Files:
    """The same JSON with other spaces, or its keys in another order: nothing that anybody need notice."""
    del others
    document = json.loads(files[SIGNATURE])
    text = json.dumps(document, indent=draws.choice((None, 0, 4)), sort_keys=draws.random() < 0.5)
    return {**files, SIGNATURE: text.encode()}


WOUNDS: dict[str, Wound] = {
    "append bytes": append,
    "edit JSON": edit,
    "exchange files": exchange,
    "file of another": foreign,
    "flip bits": flip,
    "lay out JSON": laid_out,
    "remove a file": remove,
    "truncate": truncate,
}


def sealed(files: Files, document: dict[str, Any]) -> Files:
    """The files with a signature whose SHA-256s and checksum agree with whatever it and they hold."""
    listed = document.get("files")
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        if name in files and isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys():
            entry.update(bytes=len(files[name]), sha256=hashlib.sha256(files[name]).hexdigest())
    content = {key: value for key, value in document.items() if key != "checksum"}
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return {**files, SIGNATURE: _text({**content, "checksum": checksum})}


def _text(document: Any) -> bytes:
    text = json.dumps(document)
    for mark, raw in _RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text.encode()


def _change(draws: random.Random, document: dict[str, Any]) -> None:
    """Change one place; keys are drawn level by level, so that a long list is struck no more often than a short one."""
    holder, key = document, draws.choice(sorted(document))
    while isinstance(holder[key], dict | list) and holder[key] and draws.random() < 0.85:
        holder = holder[key]
        key = draws.choice(sorted(holder)) if isinstance(holder, dict) else draws.randrange(len(holder))
    kind = draws.choice(("value", "value", "near", "near", "near", "drop", "add", "rename", "raw", "shuffle"))
    if kind == "drop":
        holder.pop(key)
    elif kind == "add" and isinstance(holder, dict):
        holder[draws.choice(("added", "name", "", "__class__"))] = draws.choice(_VALUES)
    elif kind == "add":
        holder.insert(key, json.loads(json.dumps(holder[key])))
    elif kind == "rename" and isinstance(holder, dict):
        holder[draws.choice((*_NAMES, *sorted(holder)))] = holder.pop(key)
    elif kind == "raw":
        holder[key] = draws.choice(sorted(_RAW))
    elif kind == "shuffle" and isinstance(holder[key], list):
        draws.shuffle(holder[key])
    else:
        holder[key] = _near(draws, holder[key]) if kind == "near" else draws.choice((*_VALUES, *_NAMES))


def _near(draws: random.Random, value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draws.choice((value + 1, value - 1, -value, 2 * value, 0))
    if isinstance(value, str) and value:
        i = draws.randrange(len(value))
        return draws.choice((value[:i] + draws.choice("abz019_.[]'") + value[i + 1 :], value[:i], value + "0"))
    if isinstance(value, list) and value:
        return draws.choice((value[:-1], value[1:], value + value[:1], value[::-1]))
    return draws.choice(_VALUES)
