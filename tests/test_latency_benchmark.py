"""The table of `benchmarks.latency`, and its file."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import jax
from rich.console import Console

from benchmarks import latency
from benchmarks.latency import DEFAULT, LEAST, SCAN, UNROLLED, Row


def test_what_is_measured_is_kept_and_shown(tmp_path):
    scan = Row("h100x8", "tied", DEFAULT, SCAN, "with", 1_000_000_000)
    rows = [scan, replace(scan, form=UNROLLED, temp_bytes=1_050_000_000)]
    rows.append(replace(scan, way=LEAST, temp_bytes=None, least_bytes=7_000_000))
    latency.write(tmp_path / "rows.json", rows)
    assert latency.read(tmp_path / "rows.json") == rows
    assert latency.read(tmp_path / "none.json") == []
    page = StringIO()
    Console(file=page, width=150).print(latency.table_of("here", rows))
    lines = [line.split() for line in page.getvalue().splitlines()]
    assert ["default", "1,000", "1,050", "1.05"] in lines
    assert ["budget=0.0", "refused:", "7"] in lines


def test_the_model_is_one_function_in_both_forms():
    small = replace(latency.CONFIG, layers=2, width=16, heads=2, context=8, tied=False)
    batch = jax.random.randint(jax.random.key(1), (2, 9), 0, latency.VOCABULARY)
    losses = []
    for scan in (True, False):
        config = replace(small, scan=scan)
        losses.append(latency.loss(latency.init(jax.random.key(0), config), batch, config))
    assert abs(losses[0] - losses[1]) < 1e-5
