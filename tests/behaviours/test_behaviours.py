"""Each behaviour of PyTorch's own tests holds here too, or stands in a list with the reason why it cannot."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

import behaviours
from behaviours.behaviour import GROUPS, Behaviour, behaviours_of
from behaviours.without_meaning import WITHOUT_MEANING

NO_TABLES = ("behaviour", "test_behaviours", "without_meaning")
TABLES = [m.name for m in pkgutil.iter_modules(behaviours.__path__) if m.name not in NO_TABLES]
ROWS: list[Behaviour] = [row for name in TABLES for row in behaviours_of(importlib.import_module(f"behaviours.{name}"))]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_behaviour(row):
    row.check()


@pytest.mark.parametrize("group", GROUPS)
def test_each_group_has_a_behaviour_or_a_reason(group):
    assert any(row.group == group for row in ROWS) or any(reason.group == group for reason in WITHOUT_MEANING)


def test_names_and_claims_are_unique():
    for said in ([row.name for row in ROWS], [(row.group, row.claim) for row in ROWS]):
        assert sorted(set(said)) == sorted(said)


def test_each_reason_is_a_sentence_about_a_group():
    for reason in WITHOUT_MEANING:
        assert reason.group in GROUPS
        assert re.fullmatch(r"[A-Za-z`].*\.", reason.why), reason


def test_each_meaning_is_a_sentence():
    for row in ROWS:
        assert re.fullmatch(r"[A-Za-z`].*\.", row.meaning), row.name
