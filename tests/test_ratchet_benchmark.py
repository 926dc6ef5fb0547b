"""`benchmarks/ratchet.py` changes steps in thirty ways that take more and thirty that take no more."""

import json
from collections import Counter

import pytest

from benchmarks.ratchet import RESULTS, changed, judged
from benchmarks.ratchet_changes import REFACTORINGS, REGRESSIONS, Edit

SAMPLE = [("transformer", "no donation"), ("perceptron", "one layer more"), ("perceptron", "a mean as a sum")]


def test_there_are_thirty_of_each_and_no_two_are_alike():
    assert len(REGRESSIONS) == len(REFACTORINGS) == 30
    assert max(Counter((edit.file, edit.name) for edit in REGRESSIONS + REFACTORINGS).values()) == 1
    assert max(Counter((edit.file, edit.pairs) for edit in REGRESSIONS + REFACTORINGS).values()) == 1


def test_each_change_is_of_texts_that_are_there_and_is_a_program(tmp_path):
    for edit in REGRESSIONS + REFACTORINGS:
        assert callable(changed(edit, tmp_path).step), edit.name
    with pytest.raises(AssertionError):
        changed(Edit("perceptron", "none", (("is not there", ""),)), tmp_path)


def test_a_sample_is_judged_as_it_should_be():
    edits = [edit for edit in REGRESSIONS + REFACTORINGS if (edit.file, edit.name) in SAMPLE]
    rows = judged(edits)
    assert [row.is_right for row in rows] == [True] * len(SAMPLE)
    assert [row.is_found for row in rows] == [True, True, False]
    assert rows[0].grown == "peak of a step" and "tanh" in rows[1].line


def test_the_ratchet_found_all_and_flagged_no_refactoring():
    rows = json.loads(RESULTS.read_text("utf-8"))["changes"]
    assert Counter((row["is_regression"], row["is_found"]) for row in rows) == {(True, True): 30, (False, False): 30}
