"""`benchmarks/tiles.py` keeps each row that it measures, in place of an older one."""

import json
from dataclasses import replace

from benchmarks import tiles
from benchmarks.tiles import Row, keep

ROW = Row("mlp", 0.25, 0.2, True, ("float32[8,4] of exp at a.py:1: 4 blocks along axis 0",), 1.5, None)


def test_a_row_is_kept_in_place_of_the_same_program_within_the_same_budget(tmp_path):
    path = tmp_path / "tiles.json"
    for row in (ROW, replace(ROW, budget=0.1), replace(ROW, name="gnn"), replace(ROW, share=0.1)):
        keep(path, row)
    kept = [(row["name"], row["budget"], row["share"]) for row in json.loads(path.read_text())["rows"]]
    assert kept == [("mlp", 0.25, 0.1), ("mlp", 0.1, 0.2), ("gnn", 0.25, 0.2)]


def test_what_some_programs_take_is_kept_and_names_no_folder_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "RESULTS", tmp_path)
    tiles.main(["mlp", "--budgets", "0.1"])
    text = (tmp_path / "tiles.json").read_text()
    (row,) = json.loads(text)["rows"]
    assert row["is_held"] and row["error"] < 1e-5 and "at benchmarks/programs/mlp.py:" in row["tiles"][0]
    assert str(tiles.HERE.parent) not in text
