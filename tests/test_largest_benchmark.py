"""`benchmarks/largest.py` finds many times more rows in blocks, and two per cent more are refused."""

import re
import sys

from benchmarks import largest


def test_more_rows_than_the_largest_number_do_not_fit(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["largest", "perceptron"])
    largest.main()
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("perceptron"))
    rows, whole = (int(text.replace(",", "")) for text in re.findall(r"\d[\d,]{3,}", row)[:2])
    assert rows > 4 * whole > 0
    assert row.split()[-1] == "refused"
