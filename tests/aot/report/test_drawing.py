"""The picture of a step: as high as its peak, in a unit that suits it, divided where the backward begins."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from matplotlib.colors import to_hex

from drawn import rows
from jointcut.aot.report import drawing
from jointcut.partition.errors import JointcutError
from jointcut.partition.lifetimes import Lifetimes
from jointcut.partition.picture import timeline

few = settings(deadline=None, max_examples=6, derandomize=True, database=None)
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


@few
@given(rows(most=12), rows(most=12))
def test_the_picture_stacks_to_the_total_and_marks_its_peak(row, other):
    section = timeline(row, ("plain JAX", other))
    axes = drawing.memory("loss", section, None, "line")
    unit = UNITS[axes.get_ylabel().removeprefix("bytes alive (").removesuffix(")")]
    tops = [max(path.vertices[:, 1].max() for path in area.get_paths()) for area in axes.collections]
    assert max(tops, default=0) == pytest.approx(max(section["total"]) / unit)
    (mark,) = [line for line in axes.lines if line.get_marker() == "v"]
    peak = section["peak"]
    assert list(mark.get_xydata()[0]) == pytest.approx([peak["step"], peak["bytes"] / unit])
    (ghost,) = [line for line in axes.lines if line.get_label().startswith("plain JAX")]
    assert np.max(ghost.get_ydata()) == pytest.approx(max(other.totals) / unit)
    assert axes.get_ylim()[1] >= max(max(row.totals), max(other.totals)) / unit
    (line,) = [line for line in axes.lines if list(line.get_xdata()) == [section["boundary"] - 0.5] * 2]
    assert line is not mark


@pytest.mark.parametrize("ghost", [None, ("plain JAX", Lifetimes((), ()))])
def test_a_step_that_holds_nothing_can_be_drawn(ghost):
    axes = drawing.memory("identity", timeline(Lifetimes((), ()), ghost), None, "module")
    assert axes.get_title() == "identity: memory over a step, by module"
    assert drawing.png("identity", timeline(Lifetimes((), ()), ghost)).startswith(b"\x89PNG")


@few
@given(rows(most=6))
def test_groups_have_colours_of_their_own_in_both_groupings(row):
    section = timeline(row)
    for by in ("line", "module"):
        axes = drawing.memory("loss", section, None, by)
        colours = [to_hex(area.get_facecolor()[0]) for area in axes.collections]
        assert len(set(colours)) == len(colours)


def test_another_grouping_is_refused():
    with pytest.raises(JointcutError) as refused:
        drawing.memory("loss", timeline(Lifetimes((), ())), None, "lines")
    assert str(refused.value) == (
        "by='lines' is no way to group arrays.\nKnown names: 'line', 'module'. Did you mean 'line'?"
    )


def test_a_picture_is_drawn_on_the_axes_that_are_given():
    axes = drawing.new_axes((4, 3))
    assert drawing.memory("loss", timeline(Lifetimes((), ())), axes, "line") is axes


def test_without_matplotlib_a_picture_is_refused_or_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(drawing.MissingLibrary) as refused:
        drawing.memory("loss", timeline(Lifetimes((), ())), None, "line")
    assert str(refused.value) == "plot needs matplotlib.\npip install matplotlib, or print instead."
    with drawing.optional():
        drawing.png("loss", timeline(Lifetimes((), ())))
        raise AssertionError("a picture was drawn")
