"""The search takes the fastest plan that XLA's account says fits, tells how it came there, and says what is wrong."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import io_callback

from jointcut import aot
from jointcut.aot.options.limits import Limit, limit, room_for
from jointcut.aot.options.options import Options
from jointcut.aot.planning.budgets.attempts import Attempt, Ways, Weighed
from jointcut.aot.planning.budgets.fit import AT_ONCE, FULL, MOST_ROUNDS, MOST_SMALLEST, TIE, fit
from jointcut.partition import Plan
from jointcut.partition.errors import BudgetError, PlanError
from jointcut.partition.lower.memory.levels import Buffer
from jointcut.partition.lower.memory.replay import Replay
from jointcut.partition.plans.backend import PORTABLE
from jointcut.partition.plans.planfile import dumps
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.program.roles import Side
from jointcut.partition.search.candidates import Candidate, ranked

ROOFLINE = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
FIXED = 1000
quick = settings(deadline=None, max_examples=100, derandomize=True, database=None)


def fault(reason):
    """A law that does not hold yet; the mark goes when it does."""
    return pytest.mark.xfail(reason=reason, strict=True)


# ------------------------------------------------------------------------------------ the search on menus made by hand


@dataclass
class Menu:
    """What the search asks of a planner: plans with what the model promises; and what XLA takes for each of them.

    `plans` are (strategy, promised peak, seconds, bytes that XLA takes). Where the model `is_exact`, the promise is
    what XLA is expected to take. `fastest` looks at those at the places `looked_at`, or at all.
    """

    plans: list[tuple[str, int, float, int]]
    compiled: list[Plan] = field(default_factory=list)
    weighed: list[Plan] = field(default_factory=list)
    looks: int = 0
    scattered_bytes: int = 0
    is_exact: bool = False
    looked_at: tuple[int, ...] | None = None

    @property
    def menu(self):
        if not hasattr(self, "_menu"):
            self._menu = tuple(self.candidate(n, *p) for n, p in enumerate(self.plans))
        return self._menu

    def candidate(self, n, strategy, peak, seconds, taken):
        calibration = 1.0 if self.is_exact else PORTABLE.calibration
        return Candidate(self.plan(n), peak, seconds, calibration=calibration)

    def priced(self, plan):
        return plan

    def large(self, default):
        return self.known(default)

    def known(self, plan):
        return self.menu[plan.recomputed[0]]

    def fastest(self, most_bytes, expected):
        row = [c for n, c in enumerate(self.menu) if self.looked_at is None or n in self.looked_at]
        return next((c for c in ranked(row) if expected(c) <= most_bytes), None)

    def small(self, most_bytes, spread):
        return sorted(self.menu, key=lambda c: (c.peak_bytes, c.step_seconds))

    def plan(self, n):
        dropped = (n,) if "dropped" in self.plans[n][0] else ()
        segments = ((0, 2),) if "segments" in self.plans[n][0] else ()
        return Plan(self.plans[n][0], (), (n,), (), dropped=dropped, segments=segments)

    def measure(self, plan):
        self.compiled.append(plan)
        return replace(self.figures(plan), made=plan)

    def weigh(self, plans):
        self.weighed += plans
        return [done(self.figures(plan)) for plan in plans]

    def figures(self, plan):
        taken = self.plans[plan.recomputed[0]][3]
        return Weighed(None, FIXED + taken, taken, 5.0)

    def replay(self, plan):
        buffers = tuple(Buffer(10**6 * (9 - k), f"float32[{k}]", "sin", "model.py:7" if k else "") for k in range(7))
        return Replay(self.plans[plan.recomputed[0]][1], Side.BACKWARD, "sin", buffers)


def done(result):
    """A result that is there."""
    future = Future()
    future.set_result(result)
    return future


def fitted(menu, budget, plain_bytes=1000, default=None, quick=True):
    budget = limit(budget)
    ways = Ways(menu.measure, menu.weigh if quick else None)
    default = None if default is None else menu.plan(default)
    return fit(menu, budget, room_for(budget, (), FIXED, lambda: plain_bytes), ways, default)


def tried(found):
    return [(a.promised_bytes - FIXED, a.activation_bytes, a.fits, a.weighed) for a in found.trail]


both_ways = pytest.mark.parametrize("quick", [True, False], ids=["weighed", "compiled"])


@both_ways
def test_the_fastest_that_fits_is_taken(quick):
    menu = Menu([("front", 800, 1.0, 1000), ("front", 400, 2.0, 500), ("front", 80, 3.0, 100)])
    found = fitted(menu, FIXED + 550, quick=quick)
    assert found.plan.recomputed == (1,)
    assert tried(found)[-1] == (500, 500, True, False)
    assert found.measured.made == menu.plan(1)
    assert found.plan.peak_bytes == found.trail[-1].promised_bytes == FIXED + 500
    assert menu.compiled == [menu.plan(1)]


@both_ways
@pytest.mark.parametrize("budget", [FIXED + 600, 0.6], ids=["bytes", "fraction"])
def test_bytes_are_of_the_whole_step_and_a_fraction_is_of_the_temporaries_of_plain_jax(budget, quick):
    menu = Menu([("front", 481, 1.0, 601), ("front", 480, 2.0, 600)])
    assert fitted(menu, budget, plain_bytes=1000, quick=quick).plan.recomputed == (1,)


def test_where_the_model_is_too_optimistic_the_next_is_scaled_by_what_was_weighed():
    menu = Menu([("front", 400, 1.0, 800), ("front", 300, 1.5, 600), ("front", 200, 2.0, 400), ("front", 10, 3.0, 20)])
    found = fitted(menu, FIXED + 500)
    assert found.plan.recomputed == (2,)
    weighings = [(500, 800, False, True), (375, 600, False, True), (400, 400, True, True)]
    assert tried(found) == [*weighings, (400, 400, True, False)]
    assert [a.recomputed for a in menu.compiled] == [(2,)]


def test_once_two_did_not_fit_the_smallest_comes_next_if_the_room_is_hardly_larger():
    """The third would fit by the figures of the first two, but so many are expected to that often it does not."""
    fronts = [("front", 376, 1.0, 564), ("front", 350, 1.5, 490), ("front", 320, 2.0, 440)]
    menu = Menu([*fronts, ("2 pieces", 310, 3.0, 430)])
    weighings = [(470, 564, False, True), (438, 490, False, True), (434, 430, True, True)]
    assert tried(fitted(menu, FIXED + 470)) == [*weighings, (430, 430, True, False)]


def test_where_the_model_is_too_careful_a_faster_plan_is_tried():
    menu = Menu([("front", 500, 1.0, 480), ("front", 450, 2.0, 450), ("front", 400, 3.0, 400), ("front", 9, 4.0, 9)])
    for quick in (True, False):
        found = fitted(menu, FIXED + 500, quick=quick)
        assert found.plan.recomputed == ((0,) if quick else (2,))
    assert tried(fitted(menu, FIXED + 500))[-2:] == [(500, 480, True, True), (480, 480, True, False)]


def test_a_faster_plan_that_does_not_fit_after_all_changes_nothing():
    menu = Menu([("front", 500, 1.0, 700), ("front", 400, 2.0, 400)])
    found = fitted(menu, FIXED + 500)
    assert found.plan.recomputed == (1,)
    assert (500, 700, False, True) in tried(found)


@both_ways
def test_the_default_plan_comes_first_though_the_model_finds_others_faster(quick):
    menu = Menu([("front", 500, 1.0, 500), ("min_cut", 400, 2.0, 400), ("front", 300, 3.0, 300)])
    found = fitted(menu, FIXED + 1000, default=1, quick=quick)
    assert found.plan.recomputed == (1,)
    assert tried(found) == [(500, 400, True, False)]


def test_a_default_plan_that_may_fit_is_weighed_first():
    menu = Menu([("min_cut", 400, 2.0, 560), ("front", 300, 3.0, 420)])
    found = fitted(menu, FIXED + 510, default=0)
    assert tried(found) == [(500, 560, False, True), (420, 420, True, True), (420, 420, True, False)]
    menu = Menu([("min_cut", 400, 2.0, 510), ("front", 300, 3.0, 420)])
    assert tried(fitted(menu, FIXED + 510, default=0)) == [(500, 510, True, True), (510, 510, True, False)]


def test_a_default_plan_that_is_far_too_large_is_not_tried():
    menu = Menu([("min_cut", 400, 2.0, 500), ("front", 100, 3.0, 125)])
    assert tried(fitted(menu, FIXED + 130, default=0)) == [(125, 125, True, True), (125, 125, True, False)]


def test_a_plan_that_takes_more_than_it_did_when_it_was_weighed_is_not_taken():
    menu = Menu([("front", 400, 1.0, 500), ("front", 300, 2.0, 375)])
    measure = menu.measure

    def more(plan):
        weighed = measure(plan)
        return replace(weighed, peak_bytes=FIXED + 900, activation_bytes=900) if plan.recomputed == (0,) else weighed

    menu.measure = more
    found = fitted(menu, FIXED + 520)
    assert found.plan.recomputed == (1,)
    assert [a.recomputed for a in menu.compiled] == [(0,), (1,)]


def test_a_plan_that_would_leave_room_for_a_faster_one_is_not_compiled_at_once():
    menu = Menu([("front", 500, 1.0, 480), ("front", 400, 3.0, 400)], is_exact=True)
    weighed = [(500, 480, True, True), (400, 400, True, True)]
    assert tried(fitted(menu, FIXED + 500)) == [*weighed, (480, 480, True, False)]


def test_a_plan_that_drops_values_is_weighed_since_less_is_known_of_it():
    menu = Menu([("2 pieces, 3 values dropped", 460, 1.0, 470), ("front", 300, 2.0, 310)], is_exact=True)
    weighed = [(460, 470, True, True), (300, 310, True, True)]
    assert tried(fitted(menu, FIXED + 500)) == [*weighed, (470, 470, True, False)]


def test_where_a_plan_may_not_fit_one_that_surely_does_is_weighed_with_it():
    """Where there is none, the smallest one is; and XLA's figures tell of the others."""
    plans = [("front", 490, 1.0, 520), ("2 pieces, 3 values dropped", 460, 2.0, 480)]
    found = fitted(Menu(plans, is_exact=True), FIXED + 500)
    assert found.plan.recomputed == (1,)
    assert tried(found) == [(490, 520, False, True), (460, 480, True, True), (480, 480, True, False)]
    found = fitted(Menu([*plans, ("division", 300, 3.0, 300)], is_exact=True), FIXED + 500)
    assert found.plan.recomputed == (1,)
    assert tried(found)[:2] == [(490, 520, False, True), (300, 300, True, True)]
    assert tried(found)[2:] == [(485, 480, True, True), (480, 480, True, False)]


def test_where_nothing_surely_fits_and_two_plans_are_as_small_both_are_weighed():
    """The smallest may be either. Also where neither is expected to fit, but hardly more would be enough."""
    plans = [("front", 490, 1.0, 500), ("2 pieces", 488, 2.0, 495)]
    found = fitted(Menu(plans, is_exact=True), FIXED + 495)
    assert tried(found) == [(490, 500, False, True), (488, 495, True, True), (495, 495, True, False)]
    found = fitted(Menu([*plans[:1], ("2 pieces", 488, 2.0, 485)], is_exact=True), FIXED + 485)
    assert tried(found) == [(488, 485, True, True), (490, 500, False, True), (485, 485, True, False)]


def test_where_one_plan_alone_may_fit_it_is_weighed_though_it_is_expected_to_take_hardly_more():
    menu = Menu([("front", 540, 1.0, 540), ("2 pieces", 510, 2.0, 500)], is_exact=True)
    assert tried(fitted(menu, FIXED + 500)) == [(510, 500, True, True), (500, 500, True, False)]


def test_where_one_that_was_asked_for_may_fit_no_others_are_looked_at_first():
    plans = [("front", 540, 1.0, 540), ("2 pieces", 510, 2.0, 500), ("3 pieces", 505, 3.0, 505)]
    menu = Menu(plans, is_exact=True, looked_at=(0, 1))
    assert tried(fitted(menu, FIXED + 500)) == [(510, 500, True, True), (500, 500, True, False)]
    menu = Menu(plans, is_exact=True, looked_at=(0,))  # this one would not fit
    assert tried(fitted(menu, FIXED + 500))[:2] == [(505, 505, False, True), (510, 500, True, True)]


def test_a_default_plan_that_is_expected_to_take_more_is_not_weighed():
    plans = [("front", 560, 1.0, 500), ("2 pieces", 400, 2.0, 400)]
    menu = Menu(plans, is_exact=True)
    assert tried(fitted(menu, FIXED + 500, default=0)) == [(400, 400, True, True), (400, 400, True, False)]


def test_where_nothing_surely_fits_and_the_first_runs_in_segments_it_is_weighed_beside_the_smallest():
    plans = [("front, segments", 490, 1.0, 499), ("2 pieces", 480, 2.0, 520)]
    found = fitted(Menu(plans, is_exact=True), FIXED + 500)
    assert found.plan.recomputed == (0,)
    assert tried(found) == [(490, 499, True, True), (480, 520, False, True), (499, 499, True, False)]


KINDS = st.sampled_from(["min_cut", "front", "2 pieces", "3 pieces", "4 pieces", "front, segments"])
MOST_TRIED = AT_ONCE * MOST_ROUNDS * (2 + MOST_SMALLEST) + 2 * MOST_SMALLEST


@st.composite
def menus(draw, factor=None):
    """Plans of which some better others; XLA takes `factor` times what was promised, or anything."""
    plans = []
    for _ in range(draw(st.integers(1, 12))):
        peak = draw(st.integers(1, 1000))
        taken = round(factor * peak) if factor else round(draw(st.sampled_from([0.4, 0.9, 1.3, 3.0])) * peak)
        plans.append((draw(KINDS), peak, float(draw(st.integers(0, 20))), taken))
    return Menu(plans)


@both_ways
@quick
@given(menus(), st.integers(0, 3000), st.booleans(), st.booleans())
def test_what_is_found_fits_and_the_trail_tells_the_truth(quick, menu, room, has_default, follows):
    plans, menu.is_exact = menu.plans, follows
    try:
        found = fitted(menu, FIXED + room, default=0 if has_default else None, quick=quick)
    except BudgetError:
        assert all(plans[n][3] > room for (n,) in (p.recomputed for p in (*menu.compiled, *menu.weighed)))
        return
    assert found.measured.activation_bytes <= room
    assert found.measured.made == menu.compiled[-1] or not quick
    assert len(found.trail) == len(menu.compiled) + len(menu.weighed) <= MOST_TRIED
    assert len(menu.compiled) <= 1 + has_default or not quick
    for made in (menu.compiled, menu.weighed):
        assert len({plan.recomputed for plan in made}) == len(made)
    for attempt in found.trail:
        assert attempt.fits == (attempt.activation_bytes <= room)
        assert attempt.peak_bytes == FIXED + attempt.activation_bytes
        assert attempt.compile_ms == 5.0
        assert quick or not attempt.weighed


@quick
@given(st.data(), st.sampled_from([0.8, 1.0, 1.25, 2.0]), st.integers(1, 3000))
def test_where_xla_is_in_proportion_to_the_model_the_fastest_of_all_that_fit_is_found(data, factor, room):
    """After one plan was weighed the model is exact; a plan that takes nearly all of the budget is good enough."""
    menu = data.draw(menus(factor=4 * factor).map(lambda m: Menu([(k, 4 * p, s, t) for k, p, s, t in m.plans])))
    fitting = [c for n, c in enumerate(menu.menu) if menu.plans[n][3] <= room]
    if not any(c.predicted_bytes <= room for c in ranked(menu.menu)):
        return
    if not fitting:
        with pytest.raises(BudgetError):
            fitted(menu, FIXED + room)
        return
    found = fitted(menu, FIXED + room)
    chosen = menu.menu[found.plan.recomputed[0]]
    fastest = min(c.step_seconds for c in fitting)
    assert (1 - TIE) * chosen.step_seconds <= fastest or found.measured.activation_bytes >= FULL * room


# ------------------------------------------------------------------------------------ the least, and too little


def test_a_budget_of_nothing_returns_the_least_of_the_smallest_of_each_kind():
    fronts = [("front", 300, 2.0, 900), ("front", 200, 3.0, 350)]
    menu = Menu([("min_cut", 500, 1.0, 500), *fronts, ("2 pieces", 100, 4.0, 400)])
    found = fitted(menu, 0.0)
    assert found.plan.recomputed == (2,)
    assert [(a.strategy, a.weighed) for a in found.trail] == [
        ("2 pieces", True), ("front", True), ("min_cut", True), ("front", False)
    ]  # fmt: skip
    assert all(a.fits for a in found.trail)
    assert menu.compiled == [menu.plan(2)]
    assert [a.strategy for a in fitted(menu, 0.0, quick=False).trail] == ["2 pieces", "front", "min_cut"]


def test_of_equally_small_plans_the_faster_is_returned():
    menu = Menu([("front", 100, 5.0, 70), ("2 pieces", 101, 4.0, 70), ("3 pieces", 102, 6.0, 70)])
    assert fitted(menu, 0.0).plan.recomputed == (1,)


def test_the_smallest_are_tried_until_none_is_smaller():
    """Two that are no smaller than those before end it; where plans are compiled, three within a percent do."""
    menu = Menu([(f"{n} pieces", 100 + n, float(n), taken) for n, taken in enumerate([500, 1000, 1001, 1002, 9, 8, 7])])
    assert len(fitted(menu, 0.0, quick=False).trail) == MOST_SMALLEST
    menu = Menu([(f"{n} pieces", 100 + n, float(n), 1000 + n) for n in range(7)])
    assert len(fitted(menu, 0.0, quick=False).trail) == 3
    fitted(menu, 0.0)
    assert len(menu.weighed) == 4
    menu = Menu([(f"{n} pieces", 100 + n, float(n), taken) for n, taken in enumerate([500, 1000, 400, 1002, 500, 8])])
    fitted(menu, 0.0)
    assert len(menu.weighed) == MOST_SMALLEST


@quick
@given(menus())
def test_the_least_that_is_found_is_the_least_that_was_tried(menu):
    found = fitted(menu, 0.0)
    assert found.measured.activation_bytes == min(a.activation_bytes for a in found.trail)
    assert len({a.strategy for a in found.trail}) == len(menu.weighed) <= MOST_SMALLEST


def test_a_budget_that_nothing_fits_says_how_little_was_found_and_what_lies_there():
    menu = Menu([("min_cut", 900, 1.0, 900_000), ("front", 300, 2.0, 400_000), ("2 pieces", 200, 3.0, 500_000)])
    with pytest.raises(BudgetError) as refusal:
        fitted(menu, "2kB")
    assert str(refusal.value) == REFUSED
    assert [a.recomputed for a in menu.weighed] == [(1,), (2,), (0,)]
    assert menu.compiled == []


REFUSED = (
    "budget of 2,000 bytes cannot be met.\n"
    "The smallest peak found is 401,000 bytes (3 plans tried): 1,000 are arguments and results, 400,000 "
    "temporaries.\n"
    "Alive there, by the model:\n"
    "    9.00 MB float32[0] sin\n"
    "    8.00 MB float32[1] sin at model.py:7\n"
    "    7.00 MB float32[2] sin at model.py:7\n"
    "    6.00 MB float32[3] sin at model.py:7\n"
    "    5.00 MB float32[4] sin at model.py:7\n"
    "Give at least that much, a smaller batch, or budget=0.0 for the least that is found."
)


def test_a_refusal_names_the_op_that_alone_takes_most_of_the_least_peak(monkeypatch):
    menu = Menu([("min_cut", 900, 1.0, 900_000), ("front", 300, 2.0, 400_000), ("2 pieces", 200, 3.0, 500_000)])
    replay = menu.replay(menu.plan(0))
    heavy = replace(replay, peak_bytes=40_000_000, own_bytes=30_000_000, own_op="conv", source="model.py:9")
    monkeypatch.setattr(Menu, "replay", lambda self, plan: heavy)
    with pytest.raises(BudgetError) as refusal:
        fitted(menu, "2kB")
    *lines, last = REFUSED.split("\n")
    alone = "30.0 MB of it are what conv at model.py:9 reads and makes: no choice of what to save makes that less."
    assert str(refusal.value).split("\n") == [*lines, alone, last]


@quick
@given(menus(), st.integers(1, 2000))
def test_the_figure_in_the_error_is_the_smallest_that_was_tried(menu, room):
    try:
        fitted(menu, FIXED + room)
    except BudgetError as error:
        tries = {plan.recomputed for plan in (*menu.weighed, *menu.compiled)}
        least = min(menu.plans[n][3] for (n,) in tries)
        assert least > room
        count = f"{len(tries)} plan{'s' * (len(tries) > 1)}"
        assert f"found is {FIXED + least:,} bytes ({count} tried)" in str(error)


def test_an_error_has_no_heading_over_an_empty_list(monkeypatch):
    menu = Menu([("min_cut", 0, 1.0, 80)])
    monkeypatch.setattr(Menu, "replay", lambda self, plan: Replay(0, Side.FORWARD, "", ()))
    with pytest.raises(BudgetError) as refusal:
        fitted(menu, FIXED + 1)
    assert "Alive there" not in str(refusal.value)


def test_an_attempt_prints_what_was_promised_and_what_it_takes():
    attempt = Attempt("front", 10, 61_000_000, 62_500_000, 50_000_000, True, 812.4)
    assert str(attempt) == "front: promised 61,000,000 bytes, takes 62,500,000: fits (compiled in 812 ms)"
    assert Attempt.from_json(attempt.to_json()) == attempt
    weighed = replace(attempt, fits=False, weighed=True)
    assert str(weighed) == "front: promised 61,000,000 bytes, takes 62,500,000: does not fit (weighed in 812 ms)"


def test_room_for_a_budget():
    weighed = Weighed(None, 1500, 1000, 0.0)
    assert room_for(Limit(peak_bytes=4000), (), 700, lambda: 1 / 0)(None) == 3300
    assert room_for(Limit(peak_bytes=4000), (), 700, lambda: 1 / 0)(weighed) == 3500
    assert room_for(Limit(fraction=0.25), (), 700, lambda: 8000)(weighed) == 2000
    assert room_for(Limit(fraction=0.0), (), 700, lambda: 1 / 0)(weighed) == math.inf


# ------------------------------------------------------------------------------------ real programs


def test_several_processes_must_be_given_their_rates(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(BudgetError) as refusal:
        aot.function(deep, budget=0.5).trace(W, X).partition()
    assert str(refusal.value) == (
        "budget must lead to one plan in all 4 processes, and each would measure its own device.\n"
        "Give all of them the same rates: aot.function(cost=Roofline(...)) from jointcut.partition.prices.cost."
    )
    aot.function(deep, budget=0.0, cost=ROOFLINE).trace(W, X).partition()


W = jnp.asarray(np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32) / 6)
X = jnp.asarray(np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32))


def deep(w, x):
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def waves(w, x):
    for _ in range(6):
        x = jnp.sin(x @ w)
    return jnp.sum(x**2)


@pytest.fixture(scope="module")
def traced():
    return aot.function(deep, cost=ROOFLINE, tiles=False).trace(W, X)


@pytest.fixture(scope="module")
def least(traced):
    return traced.partition(budget=0.0).compile()


def assert_near(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("budget", "shown"), [(7, "7 bytes"), ("5 kB", "5,000 bytes"), (0.01, None)])
def test_too_small_a_budget_for_a_program(budget, shown, traced, least):
    """The figures are XLA's and the model's own, the text is fixed."""
    with pytest.raises(BudgetError) as refusal:
        traced.partition(budget=budget)
    alive = traced.planner.replay(least.cut.plan).alive[:5]
    fixed = least.peak_bytes - least.activation_bytes
    plain = traced.plain_memory.temp_bytes
    share = "" if shown else f" ({100 * least.activation_bytes / plain:.0f}% of plain JAX's activations)"
    count = sum(a.weighed for a in least.trail)
    assert len(alive) == 5
    assert all(re.fullmatch(r"8\.19 kB float32\[64,32\] \w+ at .*test_fit\.py:\d+ \(deep\)", str(b)) for b in alive)
    assert str(refusal.value) == "\n".join(
        [
            f"budget of {shown or '1% of plain JAX' + chr(39) + 's activations'} cannot be met.",
            f"The smallest peak found is {least.peak_bytes:,} bytes ({count} plans tried): {fixed:,} are "
            f"arguments and results, {least.activation_bytes:,} temporaries.",
            "Alive there, by the model:",
            *(f"    {buffer}" if n == 1 else f"    {n} × {buffer}" for buffer, n in Counter(map(str, alive)).items()),
            f"Give at least that much{share}, a smaller batch, or budget=0.0 for the least that is found.",
        ]
    )


def test_the_peak_that_the_error_names_can_be_met(traced, least):
    made = traced.partition(budget=least.peak_bytes).compile()
    assert made.peak_bytes == least.peak_bytes
    with pytest.raises(BudgetError):
        traced.partition(budget=least.peak_bytes - 1)


def test_an_error_about_a_fraction_names_the_least_fraction(traced, least):
    with pytest.raises(BudgetError) as refusal:
        traced.partition(budget=0.01)
    assert f"{100 * least.activation_bytes / traced.plain_memory.temp_bytes:.0f}%" in str(refusal.value)


def matrix(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


@pytest.mark.parametrize("budget", [0.0, "1MB"])
def test_a_function_that_is_no_loss_has_a_budget_by_vjp(budget):
    out, pullback = aot.function(matrix, budget=budget, cost=ROOFLINE).vjp(W, X)
    _, want = jax.vjp(matrix, W, X)
    assert_near(pullback(jnp.ones_like(out)), want(jnp.ones_like(out)))


def test_a_function_that_is_no_loss_has_a_fraction_by_vjp():
    """Its two programs hold residuals beside their temporaries, which plain JAX's one program frees as it goes."""
    _, want = jax.vjp(matrix, W, X)
    try:
        out, pullback = aot.function(matrix, budget=1.0, cost=ROOFLINE).vjp(W, X)
    except BudgetError as error:
        assert str(error).startswith("budget of 100% of plain JAX's activations cannot be met.\n")
        out, pullback = aot.function(matrix, budget=0.0, cost=ROOFLINE).vjp(W, X)
    assert_near(pullback(jnp.ones_like(out)), want(jnp.ones_like(out)))


def test_a_budget_of_the_functions_own_is_that_of_partition(traced, least):
    mine = aot.function(deep, budget=0.0, cost=ROOFLINE).trace(W, X)
    assert mine.partition().plan.values == least.cut.plan.values
    assert traced.partition(budget=0.0).plan == least.cut.plan
    assert mine.partition("save_all").plan.strategy == "save_all"
    assert mine.partition("save_all").fitted is None
    assert mine.partition("save_all").compile().trail == ()


def test_a_budget_compiles_a_plan_once(traced, least):
    """Another budget, and compile() itself, find what was compiled before."""
    again = traced.partition(budget=least.peak_bytes + 1)
    assert again.compile().programs[0] is again.fitted.measured.made.made.programs(1)[0]
    known = set(traced.request.weighing._compiled)
    assert traced.partition(budget=0.0).compile().programs[0] is least.programs[0]
    assert set(traced.request.weighing._compiled) == known


def test_a_cut_within_a_budget_tells_how_it_came_about(traced, least):
    cut = least.cut
    last = [a for a in least.trail if a.peak_bytes == least.peak_bytes]
    assert cut.plan.peak_bytes in [a.promised_bytes for a in last]
    assert cut.plan.bound_seconds <= cut.plan.seconds
    assert least.trail == cut.fitted.trail
    assert cut.compile(2).executables == 2
    assert_near(least.value_and_grad(W, X), jax.value_and_grad(deep)(W, X))


def fingerprint(traced=None):
    """The menu of a program and what the least budget chooses from it, as text."""
    traced = traced or aot.function(deep, cost=ROOFLINE).trace(W, X)
    chosen = traced.partition(budget=0.0).plan
    menu = [(c.plan.strategy, c.plan.values, c.peak_bytes, c.step_seconds) for c in traced.planner.menu]
    return repr((menu, chosen.strategy, chosen.values, chosen.recomputed, chosen.peak_bytes))


def test_two_runs_and_another_process_choose_the_same_plans(traced):
    here = fingerprint(traced)
    assert fingerprint() == here
    code = f"import runpy, sys; sys.stderr.write(runpy.run_path({__file__!r})['fingerprint']())"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.stderr == here


# ------------------------------------------------------------------------------------ one of the three

TWICE = [
    ({"strategy": "save_all", "budget": 0.5}, "strategy and budget"),
    ({"strategy": "save_all", "plan": "{}"}, "strategy and plan"),
    ({"budget": "1GB", "plan": "{}"}, "budget and plan"),
    ({"strategy": "save_all", "budget": 7, "plan": "{}"}, "strategy and budget and plan"),
]


@pytest.mark.parametrize(("given", "named"), TWICE, ids=[named for _, named in TWICE])
def test_two_of_strategy_budget_and_plan_are_refused(given, named, traced):
    text = f"{named} are given together.\nGive one: each of them decides the plan."
    for way in (lambda: aot.function(deep, **given), lambda: traced.partition(**given)):
        with pytest.raises(PlanError) as refusal:
            way()
        assert str(refusal.value) == text


def test_partition_refuses_a_strategy_beside_a_budget_though_it_is_the_default(traced):
    with pytest.raises(PlanError) as refusal:
        traced.partition("min_cut", budget=0.5)
    assert str(refusal.value) == "strategy and budget are given together.\nGive one: each of them decides the plan."


def test_what_partition_is_given_goes_before_the_options(traced, least):
    budgeted = aot.function(deep, budget=0.0, cost=ROOFLINE).trace(W, X)
    assert budgeted.partition("min_cut").plan == traced.partition().plan
    assert budgeted.partition(plan=least.cut.plan).plan.values == least.cut.plan.values
    planned = aot.function(deep, plan=least.cut.plan, cost=ROOFLINE).trace(W, X)
    assert planned.partition("min_cut").plan == traced.partition().plan


@pytest.mark.parametrize("budget", [1.5, -1, "12 apples", True])
def test_a_budget_that_says_nothing_is_refused_at_once(budget, traced):
    with pytest.raises(BudgetError) as expected:
        limit(budget)
    for way in (lambda: aot.function(deep, budget=budget), lambda: traced.partition(budget=budget)):
        with pytest.raises(BudgetError) as refusal:
            way()
        assert str(refusal.value) == str(expected.value)


# ------------------------------------------------------------------------------------ a plan given back


@pytest.mark.parametrize("form", ["plan", "text"])
def test_a_plan_given_back_gives_the_same_halves_and_results(form, traced, least):
    plan = least.cut.plan
    given = plan if form == "plan" else dumps(plan, traced.graph)
    want = least.value_and_grad(W, X)
    here = traced.partition(plan=given)
    there = aot.function(deep, plan=given).trace(W, X).partition()
    for cut in (here, there):
        assert (str(cut.forward), str(cut.backward)) == (str(least.cut.forward), str(least.cut.backward))
        assert cut.plan == plan
        got = cut.compile().value_and_grad(W, X)
        assert all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(want)))
    assert_near(aot.function(deep, plan=given).value_and_grad(W, X), want)


def test_the_text_of_a_plan_serves_inside_jit_too(traced, least):
    text = dumps(least.cut.plan, traced.graph)
    got = jax.jit(jax.grad(aot.function(deep, plan=text, cost=ROOFLINE)))(W, X)
    assert_near(got, jax.grad(deep)(W, X))


def test_the_text_of_a_plan_serves_vjp_too(traced, least):
    text = dumps(least.cut.plan, traced.graph)
    out, pullback = aot.function(deep, plan=text, cost=ROOFLINE).vjp(W, X)
    assert_near(pullback(jnp.ones_like(out))[0], jax.grad(deep)(W, X))


def test_a_text_of_another_program_is_refused_naming_the_first_difference(traced, least):
    text = dumps(least.cut.plan, traced.graph)
    graph = aot.function(waves).trace(W, X).graph
    for way in (lambda: aot.function(waves, plan=text).value_and_grad(W, X),
                lambda: aot.function(waves).trace(W, X).partition(plan=text)):  # fmt: skip
        with pytest.raises(PlanError) as refusal:
            way()
        assert str(refusal.value) == (
            f"op 1 is `%4:float32[64,32] = tanh %3` in the plan's program, but `%4:float32[64,32] = sin %3` at "
            f"{graph.ops[1].source} here.\n"
            "Read the plan for the program that it was made for, or make a plan for this one."
        )


def test_a_plan_of_a_program_with_more_values_is_refused(least):
    with pytest.raises(PlanError) as refusal:
        aot.function(lambda w, x: jnp.sum(jnp.tanh(x @ w))).trace(W, X).partition(plan=least.cut.plan)
    first = next(v for v in least.cut.plan.values if v >= 5)
    assert str(refusal.value) == (
        f"plan.saved[%{first}] does not exist in the forward.\n"
        "Save values of the forward only: see Graph.values and Value.maker."
    )


def test_a_plan_of_another_program_is_refused(least):
    with pytest.raises(PlanError):
        aot.function(waves).trace(W, X).partition(plan=least.cut.plan)


def test_a_plan_of_another_program_repeats_no_effect():
    """What that plan saves, nothing, would do here only if the callback ran again."""
    calls = []

    def squared(x):
        calls.append(x)
        return np.square(x)

    def loss(x):
        return jnp.sum(x * io_callback(squared, jax.ShapeDtypeStruct(x.shape, x.dtype), lax.stop_gradient(x)))

    simple = aot.function(lambda x: jnp.sum(2 * x)).trace(X).partition().plan
    assert (simple.values, simple.recomputed) == ((), ())
    with pytest.raises(PlanError):
        aot.function(loss, plan=simple).value_and_grad(X)
    jax.effects_barrier()
    assert not calls


# ------------------------------------------------------------------------------------ how it is shown and written


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "best"),
        ({"strategy": "min_cut"}, "min_cut"),
        ({"budget": 0.5}, "budget 50% of plain JAX's activations"),
        ({"budget": 0.0}, "budget 0% of plain JAX's activations"),
        ({"budget": "1.5GiB"}, "budget 1,610,612,736 bytes"),
        ({"budget": 10**6}, "budget 1,000,000 bytes"),
        ({"budget": "device"}, "budget what the device has free"),
        ({"plan": "{}"}, "plan"),
    ],
)
def test_the_repr_tells_the_budget(options, shown):
    assert repr(aot.function(deep, **options)) == f"<aot.function deep: {shown}>"


@pytest.mark.parametrize("budget", [None, 0.0, 0.5, 2, 10**9, "1.5GiB", "device"])
def test_options_with_a_budget_come_back_from_json(budget):
    options = aot.function(deep, budget=budget).trace(W, X).options
    assert options.budget == budget
    assert Options.from_json(options.to_json()) == options


def test_options_with_the_text_of_a_plan_come_back_from_json(traced, least):
    options = aot.function(deep, plan=dumps(least.cut.plan, traced.graph)).trace(W, X).options
    assert Options.from_json(options.to_json()) == options


@pytest.mark.parametrize("budget", [np.int64(10**6), np.float32(0.5)])
def test_options_with_a_number_of_numpys_come_back_from_json(budget):
    options = aot.function(deep, budget=budget).trace(W, X).options
    assert Options.from_json(options.to_json()) == options
