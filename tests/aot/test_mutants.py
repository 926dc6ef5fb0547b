"""A few hundred damaged artefacts; `python -m benchmarks.mutants` makes ten thousand."""

from __future__ import annotations

import json
import random
import subprocess

import pytest

from benchmarks import mutants
from benchmarks.wounds import SIGNATURE, WOUNDS, mutant

COUNT = 200


@pytest.fixture(scope="module")
def rows():
    """What became of each mutant."""
    return list(mutants.run(COUNT, seed=1, batch=COUNT))


def test_every_mutant_is_refused_with_an_error_of_ours_or_proves_equal(rows):
    assert [row for row in rows if not row.is_good] == []
    assert [row.index for row in rows] == list(range(COUNT))


def test_every_wound_was_dealt_and_what_changes_a_file_is_refused(rows):
    assert {row.wound for row in rows} == set(WOUNDS)
    refused = {"flip bits", "truncate", "append bytes", "remove a file", "exchange files", "file of another"}
    found = [row for row in rows if row.wound in refused]
    told = [row for row in found if row.outcome == "equal"]
    assert len(told) < len(found) / 20  # a file that two artefacts have in common, a space behind JSON
    assert all(row.outcome == "equal" for row in rows if row.wound == "lay out JSON")


def test_a_child_that_dies_is_told_with_the_mutant_it_was_at(monkeypatch):
    """A child that is made to die over mutant 2 of 4: the next one goes on behind it."""

    def child(what, folder, *rest):
        done = subprocess.CompletedProcess([], 0, "", "")
        if what == "judge":
            _, start, stop = rest
            lines = [json.dumps([i, "flip bits", "equal"]) for i in range(start, stop)]
            if start <= 2 < stop:
                lines, done.returncode, done.stderr = lines[: 2 - start], -11, "Segmentation fault"
            done.stdout = "".join(f"{line}\n" for line in lines)
        return done

    monkeypatch.setattr(mutants, "_child", child)
    rows = list(mutants.run(4, seed=1, batch=4))
    assert [row.index for row in rows] == [0, 1, 2, 3]
    assert [row.is_good for row in rows] == [True, True, False, True]
    assert rows[2].outcome == "CRASHED the interpreter (-11): Segmentation fault"
    assert "1 CRASHED" in mutants.table(rows)


def test_a_mutant_is_the_same_for_the_same_number_and_another_for_another():
    files = {name: random.Random(name).randbytes(64) for name in ("forward.stablehlo", "README.md")}
    files[SIGNATURE] = b'{"name": "loss", "files": {}, "programs": {}}'
    originals = {"one": files, "two": {**files, "README.md": b"another"}}
    numbers = [i for i in range(200) if _wound(originals, i) in ("flip bits", "truncate", "edit JSON")]
    made = [mutant(originals, 3, i) for i in numbers]
    assert made == [mutant(originals, 3, i) for i in numbers]
    assert len({str(found) for found in made}) > len(made) / 2
    assert sum(found != originals[name] for name, _, found in made) > 0.8 * len(made)


def _wound(originals, index):
    draws = random.Random(f"3:{index}")
    draws.choice(sorted(originals))
    return draws.choice(sorted(WOUNDS))
