"""A report names only smaller budgets that were tried and hold, and says what became of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jointcut import aot
from jointcut.aot.options.limits import limit
from jointcut.aot.report.lists import LessRow
from jointcut.aot.report.sections import less, promises, within
from jointcut.aot.report.tried import MOST_SECONDS, SHARES, Tried, try_budgets, typed
from jointcut.partition.errors import BudgetError
from jointcut.partition.prices.cost import Roofline
from larger import LARGER
from programs import named

RATES = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
quick = settings(deadline=None, max_examples=60, derandomize=True, database=None)


CASES = [
    ("elman", "min_cut"),
    ("unrolled_layers", "save_all"),
    ("scan_over_layers", "min_cut"),
    ("convolutions", "save_all"),
]


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_each_budget_of_a_report_can_be_typed_and_is_met_by_the_plan_that_is_told(name, strategy):
    program = next((p for p in LARGER if p.name == name), None) or named(name)

    def function(**options: Any) -> Any:
        return aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux, cost=RATES, **options)

    report = function(strategy=strategy).trace(*program.args, **program.kwargs).partition().explain()
    assert report.less or report.tried != Tried(), "neither a budget nor why there is none"
    for row in report.less:
        compiled = function(budget=row.budget).trace(*program.args, **program.kwargs).partition().compile()
        assert compiled.peak_bytes == row.peak_bytes <= limit(row.budget).peak_bytes < report.peak_bytes
        assert f'aot.function(budget="{report.less[0].budget}")' in report.table()
        assert set(compiled.cut.plan.values) - set(report.plan.values) == {saved.value for saved in row.kept}


# ------------------------------------------------------------------------------------ how they are tried


class Plans:
    """Plans of given peaks: a budget is met by the largest one that it holds."""

    def __init__(self, *peaks: int) -> None:
        self.peaks, self.asked = sorted(peaks, reverse=True), []

    def __call__(self, budget: Any) -> Any:
        self.asked.append(budget)
        most = limit(budget).peak_bytes
        fitting = self.peaks if most is None else [peak for peak in self.peaks if peak <= most]
        if not fitting:
            raise BudgetError("none fits")
        peak = fitting[0] if most is not None else fitting[-1]
        plan = SimpleNamespace(key=(peak,))
        return SimpleNamespace(plan=plan, fitted=SimpleNamespace(measured=SimpleNamespace(peak_bytes=peak)))


def tried(plans: Plans, least: float, clock: Any = None) -> Tried:
    known = {} if clock is None else {"seconds": clock}
    return try_budgets(100_000_000, 20_000_000, lambda met: least, plans, **known)


def told(found: Tried) -> list[tuple[str, int]]:
    return [(met.budget, met.peak_bytes) for met in found.met]


def test_each_plan_stands_once_at_the_least_budget_that_it_holds():
    plans = Plans(85_000_000, 58_000_000, 39_000_000)
    found = tried(plans, 19_000_000)
    assert told(found) == [("90.0 MB", 85_000_000), ("60.0 MB", 58_000_000), ("40.0 MB", 39_000_000)]
    assert (found.refused, found.hopeless, found.in_time) == ("", "", True)
    assert plans.asked == ["90.0 MB", "80.0 MB", "60.0 MB", "40.0 MB"]  # the least found would hardly be less


def test_a_least_peak_that_no_budget_gives_is_not_told_as_the_least():
    class Shy(Plans):
        def __call__(self, budget: Any) -> Any:
            if budget == "45.7 MB":
                raise BudgetError("none fits")
            return super().__call__(budget)

    found = tried(Shy(85_000_000, 58_000_000, 45_678_900), 20_000_000)
    assert told(found)[-1] == ("60.0 MB", 58_000_000) and not found.has_least


def test_below_a_budget_that_is_refused_the_least_is_looked_for_and_told_by_a_budget_that_holds():
    found = tried(Plans(85_000_000, 58_000_000, 45_678_900), 20_000_000)
    assert told(found)[-1] == ("45.7 MB", 45_678_900) and found.met[-1].share == 0.0
    assert found.refused == "40.0 MB"


def test_a_budget_that_no_plan_is_expected_to_hold_is_not_tried():
    plans = Plans(85_000_000, 78_000_000)
    found = tried(plans, 57_000_000)
    assert plans.asked == ["90.0 MB", "80.0 MB"] and found.hopeless == "60.0 MB" and not found.refused


def test_after_its_time_nothing_more_is_tried():
    plans, ticks = Plans(85_000_000, 55_000_000), iter([0.0, 1.0, MOST_SECONDS + 1, MOST_SECONDS + 2])
    found = tried(plans, 0, lambda: next(ticks))
    assert plans.asked == ["90.0 MB"] and told(found) == [("90.0 MB", 85_000_000)] and not found.in_time


def test_where_the_plan_at_hand_is_the_least_there_is_no_row():
    found = tried(Plans(100_000_000), 1_000_000)
    assert not found.met and found.refused == "90.0 MB"
    assert len(SHARES) == 4


@quick
@given(st.integers(1, 10**14))
def test_a_typed_budget_is_rounded_down_or_up_by_less_than_a_hundredth(num_bytes):
    low, high = (limit(typed(num_bytes, up=up)).peak_bytes for up in (False, True))
    assert low is not None and high is not None
    assert num_bytes * 0.99 <= low <= num_bytes <= high <= num_bytes * 1.01


# ------------------------------------------------------------------------------------ what is told

ROW = LessRow(0.6, 58_000_000, "60.0 MB")
HOLDS = 'Each budget was tried and holds: aot.function(budget="60.0 MB")'


@pytest.mark.parametrize(
    ("rows", "found", "texts"),
    [
        ([ROW], Tried(), [HOLDS]),
        ([ROW], Tried(refused="40.0 MB"), [HOLDS, "No plan was found for 40.0 MB"]),
        (
            [ROW],
            Tried(in_time=False, has_least=False),
            [HOLDS, "Trying ended after 60 s. budget=0.0 finds the least memory"],
        ),
        ([], Tried(hopeless="90.0 MB"), ["90.0 MB was not tried: every plan is expected to take more"]),
        ([], Tried(in_time=False, has_least=False), ["Trying ended after 60 s. budget=0.0 finds the least memory"]),
        (
            [ROW],
            None,
            [
                "These budgets are predictions and may be refused: nothing was compiled. Explain with measure=True "
                "(by default) to have them tried"
            ],
        ),
    ],
)
def test_the_reader_is_told_what_was_tried(rows, found, texts):
    assert promises(rows, found) == texts


def test_a_row_names_its_budget_and_how_far_it_lies_below_the_peak():
    assert within(ROW, 100_000_000) == "60.0 MB (−40%)"
    assert within(LessRow(0.6, 58_000_000), 100_000_000) == "60.0 MB (−40%)"
    assert within(LessRow(0.0, 58_000_000), 100_000_000) == "the least"


@pytest.mark.parametrize(
    ("found", "peaks"),
    [
        (Tried(), ["80.0 MB (−20%)", "least: 58.0 MB"]),
        (Tried(in_time=False, has_least=False), ["80.0 MB (−20%)", "58.0 MB (−42%)"]),
        (None, ["80.0 MB (−20%)", "58.0 MB (−42%)"]),
    ],
)
def test_the_last_row_of_the_page_is_marked_where_it_takes_the_least(found, peaks):
    table = less([LessRow(0.8, 80_000_000, "80.0 MB"), ROW], 100_000_000, found)
    assert [row[1] for row in table["rows"]] == peaks
    is_told = table["lead"].endswith("The last takes the least that is found, to 5%.")
    assert is_told == (found is not None and found.has_least)
