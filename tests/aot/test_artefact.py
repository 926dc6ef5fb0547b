"""An artefact is written whole or not at all, and what is not as it was written is not read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from benchmarks.wounds import sealed
from jointcut import aot
from jointcut.aot.export import artefact
from jointcut.partition.errors import ArtefactError, message

X = np.float32([0.1, -0.4, 0.9])
AGAIN = "Export again, or copy the whole folder again."
EDITED = "Export again; signature.json is not made to be edited."
SHIFT = np.float32([0.5, 0.25, 0.125])
ROOM = "Nothing was left behind. Give a folder on a disk that has room and that you may write to."


@aot.function
def loss(w, x):
    return jnp.sum(jnp.tanh(w * x + SHIFT))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return loss.export(tmp_path_factory.mktemp("original") / "loss", X, X, platforms="cpu")


@pytest.fixture
def folder(original, tmp_path):
    """A copy of an artefact, to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "loss"))


def told(run):
    with pytest.raises(ArtefactError) as caught:
        run()
    return str(caught.value)


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def document(folder):
    return json.loads((folder / "signature.json").read_text())


def reseal(folder, found):
    """Write a signature whose checksums agree with what it says and with the files."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "signature.json").write_bytes(sealed(files, found)["signature.json"])


# --------------------------------------------------------------------------------------------------------- writing


def test_it_holds_programs_their_text_a_signature_and_a_readme(original):
    programs = ["inference", "forward", "backward"]
    names = [f"{name}.{kind}" for name in programs for kind in ("stablehlo", "mlir")]
    assert everything(original) == sorted([*names, "constants.npz", "signature.json", "README.md"])
    found = document(original)
    assert found.keys() >= {"graph_signature", "plan", "versions", "files", "result_tree", "programs", "residuals"}
    assert found["graph_signature"]["GraphSignature"]["backward_signature"] is not None
    assert all(r["reason"] for r in found["residuals"]) and found["inputs"][1]["path"] == "args[0]"


def test_a_place_that_is_taken_is_left_as_it_is(tmp_path, folder):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "signature.json").write_text('{"format": "of somebody else"}')
    before = everything(tmp_path)
    for name in ("mine", "file", "other"):
        for again in (False, True):
            place = tmp_path / name
            cure = "Give the name of a folder that does not exist yet."
            assert told(lambda place=place, again=again: loss.export(place, X, X, overwrite=again)) == (
                f"{place} is there already, and is no artefact.\n{cure}"
            )
    assert told(lambda: loss.export(folder, X, X)) == (
        f"{folder} holds an artefact already.\nGive another name, or say overwrite=True."
    )
    (folder / "notes.txt").write_text("mine")
    cure = "Move it elsewhere, or give another name: overwrite=True replaces the whole folder."
    assert told(lambda: loss.export(folder, X, X, overwrite=True)) == (
        f"{folder / 'notes.txt'} is no file of the artefact beside it.\n{cure}"
    )
    assert everything(tmp_path) == sorted([*before, "loss/notes.txt"])


def test_a_file_of_an_artefact_that_was_changed_is_not_overwritten(folder):
    cure = "Move it elsewhere, or give another name: overwrite=True replaces the whole folder."
    for name in ("README.md", "signature.json"):
        before = (folder / name).read_text()
        (folder / name).write_text(before.replace("loss", "mine"))
        assert told(lambda: loss.export(folder, X, X, overwrite=True)) == (
            f"{folder / name} was changed after it was written.\n{cure}"
        )
        assert "mine" in (folder / name).read_text()
        (folder / name).write_text(before)


def test_overwrite_replaces_an_artefact_also_behind_a_link(tmp_path, folder):
    (tmp_path / "link").symlink_to(folder)
    aot.function(lambda w: jnp.sum(w**2)).export(tmp_path / "link", X, platforms="cpu", overwrite=True)
    assert (tmp_path / "link").is_symlink() and aot.load(folder).contract.name == "<lambda>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "loss"]


def test_where_no_folder_can_be_it_says_so(tmp_path):
    (tmp_path / "file").write_text("mine")
    place = tmp_path / "file" / "below" / "model"
    assert told(lambda: loss.export(place, X, X)) == f"{place} could not be written: Not a directory.\n{ROOM}"
    place = tmp_path / ("x" * 300)
    assert told(lambda: loss.export(place, X, X)) == f"{place} could not be written: File name too long.\n{ROOM}"
    assert everything(tmp_path) == ["file"]


def test_a_folder_that_may_not_be_written_to_is_told(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    place = tmp_path / "model"
    assert told(lambda: loss.export(place, X, X)) == f"{place} could not be written: Permission denied.\n{ROOM}"


@pytest.mark.parametrize("at", range(9))
def test_a_disk_that_is_full_leaves_nothing_behind_and_the_old_artefact_as_it_was(at, folder, tmp_path, monkeypatch):
    """At each of the nine files in turn: below new folders, and in the place of an artefact."""
    read, left = artefact.read(folder), [at]

    def fail(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    place = tmp_path / "new" / "deep" / "model"
    for target, again in ((place, False), (folder, True)):
        left[0] = at
        refused = told(lambda target=target, again=again: artefact.write(target, read.signature, read.files, again))
        assert refused == f"{target} could not be written: No space left on device.\n{ROOM}"
    assert [path.name for path in tmp_path.iterdir()] == ["loss"] and artefact.read(folder) == read


@pytest.mark.parametrize("at", [0, 1])
def test_a_rename_that_fails_puts_the_old_artefact_back(at, folder, tmp_path, monkeypatch):
    read, rename, left = artefact.read(folder), Path.rename, [at]

    def fail(self, target):
        left[0] -= 1
        if left[0] == -1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    refused = told(lambda: artefact.write(folder, read.signature, read.files, True))
    assert refused == f"{folder} could not be written: Input/output error.\n{ROOM}"
    assert [path.name for path in tmp_path.iterdir()] == ["loss"] and artefact.read(folder) == read


def test_a_quota_of_the_system_is_met_as_a_full_disk_is(tmp_path):
    code = (
        "import resource, sys; from jointcut.aot.export import artefact\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "artefact.write(sys.argv[1], {}, {'small': b'0' * 10, 'large': b'0' * 100_000}, False)"
    )
    place = tmp_path / "new" / "model"
    done = subprocess.run([sys.executable, "-c", code, str(place)], capture_output=True, text=True)
    assert f"ArtefactError: {place} could not be written: File too large.\n{ROOM}" in done.stderr
    assert everything(tmp_path) == []


# --------------------------------------------------------------------------------------------------------- reading


def test_what_is_no_artefact_is_told(tmp_path, folder):
    give = "Give the folder that export wrote."
    assert told(lambda: aot.load(tmp_path / "none")) == f"{tmp_path / 'none'} does not exist.\n{give}"
    (tmp_path / "file").write_text("{}")
    assert told(lambda: aot.load(tmp_path / "file")) == f"{tmp_path / 'file'} is no folder.\n{give}"
    (folder / "signature.json").unlink()
    whole = "holds no signature.json, so that it is no whole artefact."
    assert told(lambda: aot.load(folder)) == f"{folder} {whole}\n{AGAIN}"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is not JSON as export writes it: Expecting value: line 1 column 1 (char 0)."),
        ('{"format": "jointcut art', "is not JSON as export writes it: Unterminated string starting at: line 1"),
        ("[1, 2]", "holds no JSON object."),
        ('{"a": 1, "a": 2}', "is not JSON as export writes it: a key stands twice."),
        ('{"a": NaN}', "is not JSON as export writes it: NaN is no number of JSON's."),
        ('{"a": 1e999}', "is not JSON as export writes it: 1e999 is no number of JSON's."),
        ("[" * 100_000, "is not JSON as export writes it: "),
        ('{"format": "x"}', "is no jointcut artefact."),
    ],
    ids=["empty", "cut off", "array", "twice", "NaN", "infinity", "deep", "format"],
)
def test_a_signature_that_is_none_is_told(text, what, folder):
    (folder / "signature.json").write_text(text)
    cure = "Read what export wrote." if "format" in text and text.endswith("}") else AGAIN
    refused = told(lambda: aot.load(folder))
    assert refused.startswith(f"{folder / 'signature.json'} {what}") and refused.endswith(f"\n{cure}")


def test_a_newer_format_is_told_apart_from_damage(folder):
    path = folder / "signature.json"
    for version, cure in ((2, "Upgrade jointcut: pip install --upgrade jointcut."), (0, AGAIN), ("1", AGAIN)):
        reseal(folder, document(folder) | {"version": version})
        what = f"has the format version {version!r}, and this jointcut reads up to 1."
        assert told(lambda: aot.load(folder)) == f"{path} {what}\n{cure}"


def test_an_edit_is_told(folder):
    path = folder / "signature.json"
    path.write_text(path.read_text().replace('"args[0]"', '"args[7]"'))
    what = "was changed after it was written: its checksum does not agree with what it says."
    assert told(lambda: aot.load(folder)) == f"{path} {what}\n{AGAIN}"


@pytest.mark.parametrize("name", ["forward.stablehlo", "inference.mlir", "constants.npz", "README.md"])
def test_a_file_that_is_not_the_one_written_is_told(name, folder):
    path, data = folder / name, (folder / name).read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    other = "is not the file that was written: its SHA-256 differs."
    assert told(lambda: aot.load(folder)) == f"{path} {other}\n{AGAIN}"
    path.write_bytes(data[:-1])
    assert told(lambda: aot.load(folder)) == (
        f"{path} has {len(data) - 1:,} bytes, and {len(data):,} were written.\n{AGAIN}"
    )
    path.unlink()
    assert told(lambda: aot.load(folder)) == f"{path} is missing.\n{AGAIN}"


def test_a_file_that_may_not_be_read_is_told(folder, monkeypatch):
    path, read = folder / "forward.mlir", Path.read_bytes

    def refuse(self):
        if self == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert told(lambda: aot.load(folder)) == f"{path} cannot be read: Permission denied.\nSee to its permissions."


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "", "a/b", "signature.json", "\0", "\ud800"])
def test_no_name_leads_out_of_the_folder(name, folder):
    found = document(folder)
    found["files"][name] = found["files"].pop("forward.stablehlo")
    reseal(folder, found)
    what = f"lists {name!r}, which names no file of an artefact."
    assert told(lambda: aot.load(folder)) == f"{folder / 'signature.json'} {what}\n{AGAIN}"


def test_a_calling_convention_that_this_jax_does_not_speak_is_told(folder):
    newest = export.maximum_supported_calling_convention_version
    oldest = export.minimum_supported_calling_convention_version
    for spoken, cure in ((99, "Use a newer JAX, or export again."), (1, "Export again with this JAX.")):
        found = document(folder)
        for entry in found["programs"].values():
            entry["calling_convention_version"] = spoken
        reseal(folder, found)
        here = f"JAX {jax.__version__} speaks {oldest} to {newest}"
        what = f"speaks version {spoken} of JAX's calling convention, and {here}."
        assert told(lambda: aot.load(folder)) == message(str(folder / "inference.stablehlo"), what, cure)


def test_a_program_of_other_types_is_told(folder):
    found = document(folder)
    found["inputs"][1]["shape"] = [4]
    found["residuals"] = [r | {"shape": [4]} if r["name"] == "primals_2" else r for r in found["residuals"]]
    reseal(folder, found)
    what = "takes float32[3], and signature.json says primals_2: float32[4]."
    assert told(lambda: aot.load(folder)) == f"{folder / 'inference.stablehlo'} {what}\n{EDITED}"


def test_constants_that_are_not_those_described_are_told(folder):
    np.savez(folder / "constants.npz", constant_1=np.zeros(12, np.uint8))
    reseal(folder, document(folder))
    what = "does not hold the constants that signature.json describes: it holds constant_1."
    assert told(lambda: aot.load(folder)(X, X)) == f"{folder / 'constants.npz'} {what}\n{EDITED}"
