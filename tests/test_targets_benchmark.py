"""The benchmark of targets weighs and prices the same step in each way, without the device."""

import sys
from dataclasses import replace
from queue import Queue

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks import target_figures, targets
from benchmarks.measure import wide_console
from benchmarks.target_figures import Outcome, Row
from benchmarks.target_prices import estimated_cycles, jaxpr_seconds, step_seconds
from benchmarks.targets import Choice
from compilers import FOLDER
from jointcut import aot
from jointcut.aot.options import compilers
from jointcut.partition.errors import TargetError
from jointcut.partition.prices.cost import Roofline

PLAIN = Row("plain", 10_000_000, 1e-3, 200, 5_000_000, 1.0)
CHECKPOINT = replace(PLAIN, name="checkpoint block: nothing", temp_bytes=4_000_000, seconds=1.3e-3, cycles=260)
DEFAULT = replace(PLAIN, name="default", temp_bytes=5_000_000, seconds=0.9e-3, cycles=190, predicted_bytes=6_000_000)
LEAST = replace(DEFAULT, name="budget=0.0", temp_bytes=3_000_000, seconds=1.31e-3, cycles=None)
REFUSED = replace(LEAST, name="budget=0.1", temp_bytes=None, seconds=None, least_bytes=3_000_000)
OUTCOME = Outcome("mlp", "small", (PLAIN, CHECKPOINT, DEFAULT, LEAST, REFUSED), ("*",))


def installed(name):
    """A target whose compiler is installed; the test is skipped where none is."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    try:
        _ = aot.target(name).devices
    except TargetError as error:
        pytest.skip(str(error).splitlines()[1])
    return name


# --------------------------------------------------------------------------------------------------- what is measured


def test_one_program_is_weighed_plain_with_a_checkpoint_and_by_default():
    words = Queue()
    choice = Choice(placements=("block: nothing",), budgets=(), points=0)
    outcome = targets.measure(Outcome("mlp", "tiny"), installed("h100"), choice, words)
    assert [row.name for row in outcome.rows] == ["plain", "checkpoint block: nothing", "default"]
    assert all(row.temp_bytes > 0 and row.seconds > 0 and row.cycles is None for row in outcome.rows)
    assert [words.get() for _ in range(words.qsize())] == [f"mlp: {row.name}" for row in outcome.rows]
    assert outcome.row("default").predicted_bytes > 0 and outcome.row("default").strategy
    assert targets.measure(outcome, "h100", choice, words) == outcome and words.empty()


@pytest.mark.parametrize("name", ["mi300x", "h1000"])
def test_a_target_that_cannot_be_used_ends_with_what_the_library_says(name, monkeypatch, capsys):
    def at_once(manager, tell, function, *args):
        return function(*args, Queue())

    compilers.devices.cache_clear()
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    with pytest.raises(TargetError) as refused:
        _ = aot.target(name).devices
    monkeypatch.setattr(targets, "alone", at_once)
    monkeypatch.setattr("sys.argv", ["targets", "mlp", "--targets", name, "--size", "tiny"])
    assert targets.main() == 2
    assert capsys.readouterr().err == f"Error: {refused.value}\n"


def test_an_unknown_program_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["targets", "bert"])
    with pytest.raises(SystemExit):
        targets.parse_options()
    assert "unknown program bert; there are mlp, gpt-scan" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- prices


def test_a_loop_is_priced_as_often_as_it_runs_and_dead_code_not_at_all():
    rates = Roofline(1e12, 1e11, 1e10)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def product(x, _):
        return x @ x, None

    once = jaxpr_seconds(jax.make_jaxpr(lambda x: x @ x)(x), rates)
    looped = jax.make_jaxpr(lambda x: lax.scan(product, x, length=5)[0])(x)
    dead = jax.make_jaxpr(lambda x: (x @ x, x @ x.T)[0])(x)
    chosen = jax.make_jaxpr(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x))(x)
    assert once > 0
    assert jaxpr_seconds(looped, rates) == pytest.approx(5 * once)
    assert jaxpr_seconds(dead, rates) == pytest.approx(once)
    assert jaxpr_seconds(chosen, rates) == pytest.approx(2 * once, rel=0.01)
    assert step_seconds([looped, dead], 10**6, rates) == pytest.approx(6 * once + 2e6 / 1e10)


CYCLES = """HloModule jit_f

%fused (p: f32[8]) -> f32[8] {
  ROOT %b = f32[8] bitcast(%p)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %f = f32[8] fusion(%p), calls=%fused, backend_config={"window_config":{"estimated_cycles":"100"}}
  %g = f32[8] fusion(%f), calls=%fused, backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %n = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%unknown (p: (s32[], f32[8])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %j), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%x), condition=%condition, body=%body
  %v = (s32[], f32[8]) while(%w), condition=%unknown, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %u = (s32[], f32[8]) while(%v), condition=%unknown, body=%body
  %c = f32[8] conditional(%i, %v, %v), branch_computations={%fused, %body}
  ROOT %r = f32[8] fusion(%c), calls=%fused, backend_config={"window_config":{"estimated_cycles":"7"}}
}
"""


def test_the_cycles_of_a_loop_count_once_for_each_trip():
    assert estimated_cycles(CYCLES) == 6 * 100 + 3 * 100 + 100 + 100 + 7
    assert estimated_cycles("ENTRY %main (x: f32[8]) -> f32[8] {\n}") is None


# ------------------------------------------------------------------------------------------------------- what is told


def test_a_placement_is_matched_by_a_plan_that_takes_no_more_of_either():
    assert OUTCOME.unmatched == []
    slow = replace(LEAST, seconds=1.4e-3)
    assert replace(OUTCOME, rows=(PLAIN, CHECKPOINT, DEFAULT, slow)).unmatched == [CHECKPOINT]


def test_the_summary_tells_means_matches_and_what_takes_more_than_plain():
    worse = replace(DEFAULT, temp_bytes=11_000_000, strategy="min_cut")
    half = replace(LEAST, name="budget=0.5", first_fits=True, used=0.6)
    other = Outcome("vit", "small", (PLAIN, worse, half), failed="")
    assert list(target_figures.summary([OUTCOME, other, Outcome("gru", "small", failed="it died")])) == [
        "best checkpoint: geometric mean of 1: memory 0.400, time 1.300, 1.300 by XLA's cycles of plain's",
        "default: geometric mean of 2: memory 0.742, time 0.900, 0.950 by XLA's cycles of plain's",
        "budget=0.5: geometric mean of 1: memory 0.300, time 1.310 of plain's",
        "budget=0.0: geometric mean of 1: memory 0.300, time 1.310 of plain's",
        "placements of jax.checkpoint that a plan of ours matches: 1 of 1",
        "the default takes more than plain JAX: vit, 11,000,000 bytes for 10,000,000 (1.10), by min_cut",
        "budgets that the first plan holds: 1 of 1; they use 0.60 at the median",
        "predicted within 10% of XLA's temporaries: 0 of 4 plans",
        "default's predicted temporaries over XLA's: median 0.87, quartiles 0.71 and 1.04, from 0.55 to 1.20",
        "failed: gru: it died",
    ]


def test_the_least_of_a_row_is_bold():
    console = wide_console(150)
    with console.capture() as shown:
        console.print(target_figures.table_of("h100", [OUTCOME, Outcome("gru", "small", failed="it died")]))
    assert "mlp small" in shown.get() and "it died" in shown.get()
    assert [cell for cell in target_figures.cells(OUTCOME) if "bold" in cell] == ["[bold]3.00", "[bold]0.30"]


def test_a_run_goes_on_from_what_was_written(tmp_path):
    path = tmp_path / "targets.json"
    assert target_figures.read_outcomes(path) == {}
    target_figures.write_outcomes(path, [OUTCOME], {"jax": "0"})
    assert target_figures.read_outcomes(path) == {("mlp", "small"): OUTCOME}
