"""The picture of a step: as high as its peak, in a unit that suits it, divided where the backward begins."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from matplotlib import pyplot
from matplotlib.colors import to_hex

from drawn import rows
from jointcut.aot.fitting.axes import MissingLibrary, apart, optional
from jointcut.aot.report import drawing
from jointcut.partition.drawing.picture import timeline
from jointcut.partition.errors import JointcutError
from jointcut.partition.lower.lifetimes import Lifetimes

few = settings(deadline=None, max_examples=6, derandomize=True, database=None)
SIZE = (4, 3)
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


@few
@given(rows(most=12), rows(most=12))
def test_the_picture_stacks_to_the_total_and_marks_its_peak(row, other):
    section = timeline(row, ("plain JAX", other))
    axes = drawing.memory("loss", section, apart(SIZE), "line")
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
    axes = drawing.memory("identity", timeline(Lifetimes((), ()), ghost), apart(SIZE), "module")
    assert axes.get_title() == "identity: memory over a step, by module"
    assert drawing.picture("identity", timeline(Lifetimes((), ()), ghost)).startswith(b"\x89PNG")


@few
@given(rows(most=6))
def test_groups_have_colours_of_their_own_in_both_groupings(row):
    section = timeline(row)
    for by in ("line", "module"):
        axes = drawing.memory("loss", section, apart(SIZE), by)
        colours = [to_hex(area.get_facecolor()[0]) for area in axes.collections]
        assert len(set(colours)) == len(colours)


def test_another_grouping_is_refused():
    with pytest.raises(JointcutError) as refused:
        drawing.memory("loss", timeline(Lifetimes((), ())), None, "lines")
    assert str(refused.value) == (
        "by='lines' is no way to group arrays.\nKnown names: 'line', 'module'. Did you mean 'line'?"
    )


def test_a_picture_is_drawn_on_the_axes_that_are_given_or_on_a_figure_that_pyplot_shows():
    before = pyplot.get_fignums()
    axes = apart((4, 3))
    assert drawing.memory("loss", timeline(Lifetimes((), ())), axes, "line") is axes
    assert pyplot.get_fignums() == before
    shown = drawing.memory("loss", timeline(Lifetimes((), ())), None, "line").figure
    assert [number for number in pyplot.get_fignums() if number not in before] == [shown.number]
    pyplot.close(shown)


def test_without_matplotlib_a_picture_is_refused_or_left_out(monkeypatch):
    for name in ("matplotlib.figure", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingLibrary) as refused:
        drawing.memory("loss", timeline(Lifetimes((), ())), None, "line")
    assert str(refused.value) == "plot needs matplotlib.\npip install matplotlib, or print instead."
    with optional():
        drawing.picture("loss", timeline(Lifetimes((), ())))
        raise AssertionError("a picture was drawn")
