"""`make bench SUITE=firststep` times first steps under budgets; models outside of the suite train as in JAX."""

import os
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import firststep, outside, programs
from benchmarks.firststep import Bounds, Outcome, Point, Size
from benchmarks.measure import Seconds, xla_clock
from jointcut import aot

BOUNDS = Bounds(Size(100, 80), Size(90, 70), Size(40, 20), 9.0)
POINT = Point(
    budget=80,
    limit_bytes=80,
    taken_bytes=70,
    least_bytes=40,
    default_bytes=90,
    first=Seconds(3.0, 5.0),
    plain=Seconds(2.0, 4.0),
    compilations=1,
    programs=2,
    first_fits=True,
)
FRACTION = replace(POINT, budget=0.5, limit_bytes=40.0, taken_bytes=20, least_bytes=20, default_bytes=70)
REFUSED = replace(FRACTION, budget=0.25, limit_bytes=10.0, taken_bytes=None, first=Seconds(8.0, 9.0), first_fits=False)

#: Of the other two each takes as long to compile as these together.
CHOSEN = ("equinox-cde", "haiku-agent", "jraph-molecules", "transformers-llama")


@pytest.fixture(autouse=True)
def as_users_run():
    """The libraries promote dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.enable_checks(False):
        yield


@pytest.fixture(scope="module")
def mlp():
    """The least program of the suite, built once."""
    return programs.load("mlp", "tiny")


# ------------------------------------------------------------------------------------------------ models of libraries


@pytest.mark.parametrize("name", outside.MODELS if "JOINTCUT_EVERY_PROGRAM" in os.environ else CHOSEN)
def test_a_model_outside_of_the_suite_has_the_gradient_of_plain_jax(name):
    program = outside.load(name, "tiny")
    assert program.name == name
    _, wanted = jax.jit(jax.value_and_grad(program.loss, has_aux=program.has_aux))(*program.arguments)
    _, gradient = aot.function(program.loss, has_aux=program.has_aux).value_and_grad(*program.arguments)
    want, got = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (wanted, gradient))
    assert jax.tree.structure(wanted) == jax.tree.structure(gradient)
    assert np.linalg.norm(want) > 0
    assert np.linalg.norm(got - want) <= program.tolerance["float32"] * np.linalg.norm(want)


def test_the_list_of_models_quotes_the_first_line_of_each_file():
    folder = Path(outside.__file__).parent
    listed = dict(re.findall(r"^- (\w+): (.*)$", outside.__doc__ or "", re.MULTILINE))
    assert listed == {p.stem: p.read_text().split('"""')[1].splitlines()[0] for p in folder.glob("[a-z]*.py")}


def test_an_unknown_model_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=re.escape(f"unknown program 'bert'; there are {', '.join(outside.MODELS)}")):
        outside.load("bert")


# --------------------------------------------------------------------------------------------------------- first steps


@pytest.mark.parametrize(
    ("point", "used", "holds", "is_reachable", "is_between"),
    [
        (POINT, 0.875, True, True, True),
        (replace(POINT, limit_bytes=60), 70 / 60, False, True, True),
        (replace(POINT, limit_bytes=95), 70 / 95, True, True, False),
        (FRACTION, 0.5, True, True, True),
        (REFUSED, None, False, False, False),
    ],
)
def test_a_point_tells_what_it_used_and_whether_the_default_plan_would_not_have_done(
    point, used, holds, is_reachable, is_between
):
    assert (point.used, point.holds, point.is_reachable, point.is_between) == (used, holds, is_reachable, is_between)


def test_the_summary_counts_bytes_apart_from_fractions():
    slow = replace(POINT, first=Seconds(9.0, 6.0), compilations=4, programs=4, first_fits=False, taken_bytes=81)
    outcomes = [Outcome("mlp", "small", BOUNDS, (POINT, FRACTION, REFUSED)), Outcome("vit", "", BOUNDS, (slow, POINT))]
    assert firststep.summary(outcomes) == [
        "bytes: 3 budgets, 0 refused, 0 of them though a plan is known to hold",
        "    first step over plain's: median 1.50, worst 4.50 (vit); by the processor: median 1.25, worst 1.50",
        "    compiled on average: 2.00 plans in full, 2.67 programs in all",
        "    first plans that hold: 2 of 3 (67%)",
        "    budgets that hold: 2 of 3 (67%)",
        "fractions: 2 budgets, 1 refused, 0 of them though a plan is known to hold, after 4.00 of plain's first step "
        "(median)",
        "    first step over plain's: median 1.50, worst 1.50 (mlp); by the processor: median 1.25, worst 1.25",
        "    compiled on average: 1.00 plans in full, 2.00 programs in all",
        "    first plans that hold: 1 of 1 (100%)",
        "    budgets that hold: 1 of 1 (100%)",
        "used at least 0.85 of a budget between the least and the default plan: 3 of 4 (75%)",
    ]


def test_the_least_that_a_refusal_named_is_told_apart():
    named = replace(POINT, is_named=True)
    lines = firststep.summary([Outcome("mlp", "small", BOUNDS, (POINT, named))])
    assert lines[0].startswith("bytes: 1 budgets,")
    assert lines[5].startswith("named by a refusal: 1 budgets,")
    assert lines[-1].endswith("1 of 1 (100%)")


def test_the_least_that_is_found_is_told_apart_from_more():
    least = replace(POINT, budget=40, limit_bytes=40, taken_bytes=40, first=Seconds(7.0, 8.0))
    lines = firststep.summary([Outcome("mlp", "small", BOUNDS, (POINT, least, FRACTION))])
    assert lines[::5][:4] == [
        "bytes: 2 budgets, 0 refused, 0 of them though a plan is known to hold",
        "bytes, the least that is found: 1 budgets, 0 refused, 0 of them though a plan is known to hold",
        "bytes, more than that: 1 budgets, 0 refused, 0 of them though a plan is known to hold",
        "fractions: 1 budgets, 0 refused, 0 of them though a plan is known to hold",
    ]
    assert [line.partition(";")[0].rpartition(" worst ")[2] for line in lines[1:12:5]] == [
        "3.50 (mlp)", "3.50 (mlp)", "1.50 (mlp)"]  # fmt: skip


def test_a_first_step_at_what_a_refusal_named_compiles_one_plan(mlp):
    bounds = replace(BOUNDS, least=Size(7_000, 5_000))
    point = firststep.first_step(mlp, bounds, None)
    assert point.is_named and point.holds and point.taken_bytes == point.limit_bytes > 3_500
    assert point.compilations == 1


def test_of_nothing_measured_there_is_nothing_to_tell():
    assert firststep.summary([Outcome("mlp", "", BOUNDS)])[-1].endswith("the default plan: 0 of 0")


def test_a_first_step_is_weighed_and_compiles_what_the_users_own_call_compiles(mlp):
    point = firststep.first_step(mlp, BOUNDS, 1_000_000)
    assert point.holds and point.is_reachable and not point.is_between and point.first_fits
    assert (point.limit_bytes, point.least_bytes, point.default_bytes) == (1_000_000, 40, 90)
    assert (
        min(point.first.wall, point.plain.wall, point.first.processor, point.plain.processor) > 0
        and point.programs >= point.compilations == 1
    )
    firststep.forget()
    before = xla_clock.programs
    aot.function(mlp.loss, budget=1_000_000).value_and_grad(*mlp.arguments)
    assert xla_clock.programs - before == point.programs


def test_a_budget_that_is_refused_has_no_step(mlp, monkeypatch):
    class Traced:
        def trace(self, *_):
            return self

        def partition(self, budget):
            raise aot.BudgetError(f"no plan holds {budget}")

    monkeypatch.setattr(aot, "function", lambda *_, **__: Traced())
    monkeypatch.setattr(firststep, "plain_first", lambda _: Seconds(2.0, 2.0))
    point = firststep.first_step(mlp, BOUNDS, 0.5)
    assert (point.taken_bytes, point.used, point.holds, point.first_fits) == (None, None, False, False)
    assert (point.is_fraction, point.limit_bytes, point.least_bytes, point.default_bytes) == (True, 40.0, 20, 70)
    smaller = replace(BOUNDS, default=Size(30, 10))
    assert firststep.first_step(mlp, smaller, 0.5).least_bytes == 10


def options(whole, **changed):
    common = {"size": "small", "resume": False, "same_budgets": False, "programs": ["mlp"], "whole": whole}
    common["path"] = whole
    return Namespace(**(common | changed))


def test_a_stopped_run_goes_on_and_a_new_one_may_keep_the_budgets(tmp_path):
    path = tmp_path / "firststep.json"
    outcomes = {"mlp": Outcome("mlp", "a", BOUNDS, (POINT, REFUSED)), "vit": Outcome("vit", "b", BOUNDS)}
    firststep.write(path, outcomes)
    assert firststep.read(path) == outcomes
    bare = {"mlp": replace(outcomes["mlp"], points=())}
    assert firststep.started(options(path)) == {}
    assert firststep.started(options(path, resume=True)) == {"mlp": outcomes["mlp"]}
    assert firststep.started(options(path, same_budgets=True)) == bare
    assert firststep.started(options(path, resume=True, path=tmp_path / "other.json")) == bare
    assert firststep.started(options(path, resume=True, size="tiny")) == {}
    assert firststep.started(options(tmp_path / "none.json", resume=True)) == {}


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["bert"], f"unknown program bert; there are {', '.join(programs.PROGRAMS)}"),
        (["--outside", "mlp"], f"unknown program mlp; there are {', '.join(outside.MODELS)}"),
        (["--budgets", "1"], "--budgets must be at least 2, got 1"),
    ],
)
def test_what_is_not_there_cannot_be_measured(arguments, refusal, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["firststep", *arguments])
    with pytest.raises(SystemExit):
        firststep.parse_options()
    assert re.search(f"error: {re.escape(refusal)}$", capsys.readouterr().err.strip())
