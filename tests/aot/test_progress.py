"""Each stage says in one line what came out, and while it lasts one line shows it, which then goes without a trace."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import time
import weakref
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import Primitive

from jointcut import aot
from jointcut.aot.options.options import Options
from jointcut.aot.planning.budgets.rates import rates
from jointcut.aot.progress import screens
from jointcut.aot.progress.progress import WORDS, Stage, progress, shortened, tell, text
from jointcut.partition import Plan
from jointcut.partition.errors import CallError
from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.search.budget import Planner

ROOT = Path(__file__).parent.parent.parent
MODULES = ("planning.budgets.fit", "planning.budgets.rates", "progress.progress")
fitting, measuring, module = (import_module(f"jointcut.aot.{name}") for name in MODULES)
DISPLAY = module._DISPLAY
ROOFLINE = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
quick = settings(deadline=None, max_examples=50, derandomize=True, database=None)


def layers(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w) * jnp.sin(x)
    return jnp.mean(x**2)


ARGS = jnp.eye(16), jnp.ones((32, 16))


def loss(**options):
    """A fresh function, of which nothing is compiled yet."""

    def loss(w, x):
        return layers(w, x)

    return aot.function(loss, **options)


pytestmark = pytest.mark.usefixtures("untouched")


# --------------------------------------------------------------------------------------------------------- the log


@pytest.fixture
def told(caplog):
    """The lines since the last question, their seconds replaced."""
    caplog.set_level(logging.INFO, logger="jointcut")

    def lines():
        records = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "jointcut"]
        caplog.clear()
        assert {level for level, _ in records} <= {"INFO"}
        return [re.sub(r"\b\d+\.\d+ s\b", "N s", line) for _, line in records]

    return lines


def figures(plan: Plan) -> str:
    return f"{len(plan.values)} values, {human_bytes(plan.bytes_saved)} saved, {len(plan.recomputed)} ops recomputed"


def test_tracing_cutting_and_compiling_say_one_line_each(told):
    traced = loss().trace(*ARGS)
    assert told() == [f"loss: traced in N s, {repr(traced).split()[-2]} equations"]
    cut = traced.partition()
    assert told() == [f"loss: cut by min_cut in N s, {figures(cut.plan)}"]
    cut.compile()
    assert told() == ["loss: compiled in N s"]
    saved = traced.partition("save_all").plan
    assert told() == [f"loss: cut by save_all in N s, {figures(saved)}"]


def test_a_search_says_each_attempt_and_what_it_chose(told):
    traced = loss(cost=ROOFLINE).trace(*ARGS)
    told()
    cut = traced.partition(budget=0.95)
    *lines, last = told()
    trail = cut.fitted.trail
    weighed = [a for a in trail if a.weighed]
    cuts = [f"loss: cut by {a.strategy} in N s" for a in (weighed or trail)]
    wanted = [*cuts, "loss: compiled in N s"]
    assert len(lines) == len(wanted) and all(map(str.startswith, lines, wanted))
    assert last == (
        f"loss: searched {counted(traced.planner.num_replayed, 'plan')} in N s, weighed {len(weighed)} and compiled 1, "
        f"for 95% of plain JAX's activations: {cut.plan.strategy}, {figures(cut.plan)}"
    )
    cut.compile()
    assert told() == []  # it was compiled to be weighed
    front = cut.pareto()
    assert told() == [f"loss: weighed {len(traced.planner.menu)} plans in N s, {len(front)} on the front"]


def test_exporting_and_loading_say_one_line_each(told, tmp_path):
    cut = loss().trace(*ARGS).partition()
    told()
    place = cut.export(tmp_path / "loss", platforms=("cpu", "tpu"))
    assert told() == [f"loss: exported in N s for cpu, tpu, 3 programs in {place}"]
    aot.load(place)
    assert told() == [f"{place}: loaded loss in N s, for cpu, tpu"]


def test_a_cache_says_that_it_was_loaded_from_and_nothing_is_cut_then(told, tmp_path):
    for kind, run in (("call", "__call__"), ("step", "value_and_grad"), ("pair", "vjp")):
        getattr(loss(cache=tmp_path), run)(*ARGS)
        first = told()
        assert re.fullmatch(r"loss: traced without its derivative in N s, \d+ equations", first[0])
        assert first[-1] == "loss: compiled in N s" and len(first) == (2 if kind == "call" else 4)
        getattr(loss(cache=tmp_path), run)(*ARGS)
        assert told() == [first[0], f"loss: loaded from the cache in N s, {kind}"]


def test_what_is_cut_inside_a_transformation_says_so(told):
    jax.grad(loss())(*ARGS)
    assert told() == ["loss: cut inside a transformation in N s"]


def test_each_capture_of_a_tape_says_why_it_was_needed(told):
    @aot.tape
    def steps(w, count):
        for _ in range(count):
            w = jnp.tanh(w)
        return jnp.sum(w)

    line = steps.__wrapped__.__code__.co_firstlineno + 3
    steps.grad(jnp.ones(3), 3)
    assert told() == ["steps: captured the backward of 4 ops in N s: the first call"]
    steps.grad(jnp.ones(3), 3)
    assert told() == []
    steps.grad(jnp.ones(3), 5)
    assert told() == [f"steps: captured the backward of 6 ops in N s: 5 steps instead of 3 in test_progress.py:{line}"]


def test_a_capture_shows_while_it_runs():
    shown = []

    def update(gradients, state, params):
        shown.extend(text([stage]) for stage in DISPLAY.running.values())
        return params - gradients, state

    aot.tape(jnp.sum).value_and_update(jnp.ones(3), (), update=update)
    assert shown and {line.partition(",")[0] for line in shown} == {"jointcut: sum: capturing the backward"}


def test_measuring_a_device_says_what_it_does(told, tmp_path, monkeypatch):
    monkeypatch.setenv("JOINTCUT_RATES", str(tmp_path / "rates.json"))
    monkeypatch.setattr(measuring, "_KNOWN", {})
    monkeypatch.setattr(measuring, "_measure", lambda device: ROOFLINE)
    rates()
    assert told() == [f"{jax.devices()[0].device_kind}: measured in N s, 1.5e+11 flops/s, 37.0 GB/s"]


def test_a_first_call_says_that_it_was_compiled_and_a_second_says_nothing(told):
    for name, count in (("__call__", 1), ("value_and_grad", 3), ("vjp", 3)):
        function = loss()
        getattr(function, name)(*ARGS)
        lines = told()
        assert lines[-1] == "loss: compiled in N s" and len(lines) == count
        getattr(function, name)(*ARGS)
        assert told() == []


def test_a_first_call_that_fails_while_it_is_compiled_says_nothing_and_leaves_nothing(told):
    unknown = Primitive("unknown")
    unknown.def_abstract_eval(lambda x: x)
    with pytest.raises(NotImplementedError, match="unknown"):
        aot.function(lambda x: jnp.sum(unknown.bind(x)))(jnp.ones(3))
    assert told() == [] and not DISPLAY.running


def test_a_call_in_debug_mode_says_that_it_was_checked(told):
    function = loss()
    with aot.debug():
        function.value_and_grad(*ARGS)
        assert told()[2:] == ["loss: checked in N s"]
        function.vjp(*ARGS)[1](1.0)
        assert told()[2:] == 2 * ["loss: checked in N s"]


def test_a_stage_that_raises_says_nothing(told):
    with pytest.raises(ZeroDivisionError), Stage("cut", "f") as now:
        now.ends(lambda: "done")
        raise ZeroDivisionError
    assert told() == []


def test_nothing_is_formatted_where_nobody_reads(caplog):
    caplog.set_level(logging.WARNING, logger="jointcut")
    with Stage("cut", "f") as now:
        now.says(lambda: pytest.fail("nobody looks"))
        now.ends(lambda: pytest.fail("nobody reads"))


def test_the_record_names_the_line_that_runs_the_stage(caplog):
    caplog.set_level(logging.INFO, logger="jointcut")
    with Stage("cut", "f"):
        pass
    assert caplog.records[-1].funcName == "test_the_record_names_the_line_that_runs_the_stage"


def test_no_handler_is_installed():
    assert logging.getLogger("jointcut").handlers == []


def test_a_stage_that_has_ended_holds_nothing_of_what_it_told():
    class Program:
        pass

    program = Program()
    held = weakref.ref(program)
    with Stage("trace", "f") as now:
        now.says(lambda program=program: f"{program}")
        now.ends(lambda program=program: f"{program} {now}")
    del program
    assert held() is None


def test_calls_of_what_is_compiled_enter_no_stage(monkeypatch):
    function = loss()
    compiled = function.trace(*ARGS).partition().compile()

    def run():
        compiled.value_and_grad(*ARGS), function(*ARGS), function.value_and_grad(*ARGS), function.grad(*ARGS)
        function.vjp(*ARGS)[1](1.0)

    run()
    monkeypatch.setattr(Stage, "__enter__", lambda self: pytest.fail(f"{self.kind} is on the path of a call"))
    run()


# ------------------------------------------------------------------------------------------------- what is shown


@contextmanager
def stages(*kinds_and_names):
    """Nested stages, which all have run for 3.2 s."""
    before = time.perf_counter() - 3.2
    entered = [Stage(kind, name).__enter__() for kind, name in kinds_and_names]
    for stage in entered:
        stage._start_s = before
    yield entered
    for stage in reversed(entered):
        stage.__exit__(None)


def test_the_line_tells_the_stage_its_seconds_and_those_before_it():
    with Stage("trace", "loss") as traced:
        traced._start_s -= 0.52
    with Stage("cut", "loss"):
        pass
    with stages(("compile", "loss")) as (now,):
        assert text([now]) == "jointcut: loss: compiling, 3 s (traced 0.5 s, cut 0.0 s)"
    with Stage("trace", "loss") as now:
        assert text([now]) == "jointcut: loss: tracing, 0 s"
    with Stage("cut", "another") as now:
        assert text([now]) == "jointcut: another: cutting, 0 s"


def test_a_nested_stage_is_shown_behind_the_outer_one():
    with stages(("search", "loss"), ("compile", "loss")) as (outer, inner):
        outer.says(lambda: "attempt 2 of at most 10")
        assert text([inner]) == "jointcut: loss: searching (attempt 2 of at most 10), 3 s: compiling, 3 s"
        with Stage("measure", "cpu") as innermost:
            tell(lambda: "again")
            want = (
                "jointcut: loss: searching (attempt 2 of at most 10), 3 s: compiling, 3 s: cpu: measuring (again), 0 s"
            )
            assert text([innermost]) == want
        assert text([inner, innermost]).endswith("; 1 more")
    tell(lambda: pytest.fail("outside of stages nothing is told"))


def test_at_80_columns_the_end_of_the_line_stays():
    with stages(("search", "loss")) as (outer,):
        outer.says(lambda: "attempt 2 of at most 10")
        with Stage("cut", "loss"):
            pass
        with stages(("compile", "loss")) as (inner,):
            want = "jointcut: loss: searching (attempt 2 of at most 10), 3 s: compiling, 3 s"
            assert text([inner]) == text([inner], len(want) + 13) == f"{want} (cut 0.0 s)"
            assert text([inner], 80) == want
            assert text([inner], 60) == f"{want[:15]}...{want[-42:]}"
            assert text([inner, outer], 60).endswith("3 s: compiling, 3 s; 1 more")


@quick
@given(st.text(max_size=60), st.integers(12, 60))
def test_a_line_that_is_shortened_begins_and_ends_as_it_did(line, width):
    short = shortened(line, width)
    assert len(short) == min(len(line), width)
    if len(line) > width:
        head = width // 4
        assert short[:head] == line[:head] and short[head : head + 3] == "..."
        assert line.endswith(short[head + 3 :])


@quick
@given(st.lists(st.tuples(st.sampled_from(list(WORDS)), st.sampled_from("fgh")), min_size=1, max_size=5))
def test_a_line_names_all_stages_from_the_outermost_and_each_name_where_it_changes(nested):
    with Stage("trace", "which begins anew"):
        pass
    with stages(*nested) as entered:
        words = text(entered[-1:]).removeprefix("jointcut: ").split(": ")
    want = []
    for before, (kind, name) in zip([("", ""), *nested], nested, strict=False):
        want += [name] * (name != before[1]) + [f"{WORDS[kind][0]}, 3 s"]
    assert words == want


@given(st.integers(0, 10**13))
def test_a_size_is_told_to_three_digits_in_the_largest_unit_that_it_fills(num_bytes):
    number, unit = human_bytes(num_bytes).replace(",", "").split()
    factor = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    assert abs(float(number) * factor - num_bytes) <= (0.00501 * num_bytes if factor > 1 else 0)
    assert num_bytes < 1000 if unit == "B" else num_bytes >= 0.9995 * factor


def test_a_planner_tells_each_replay_once_and_of_how_many(monkeypatch):
    traced, said = loss().trace(*ARGS), []
    monkeypatch.setattr(fitting, "tell", lambda at: said.append(at()))
    planner = fitting.planner_for(traced.problem, Options(cost=ROOFLINE))
    count = len(planner.menu)
    assert planner.num_replayed == count
    assert said == [f"plan {n} of at most {count}" for n in range(1, count + 1)]
    assert len(Planner(traced.problem.timed(ROOFLINE)).menu) == count  # which tells nobody


# --------------------------------------------------------------------------------------------- and nowhere else


@pytest.mark.parametrize("on", ["off", 0, None, 1])
def test_a_switch_that_is_no_bool_is_refused(on):
    with pytest.raises(CallError) as caught:
        progress(on)
    assert str(caught.value) == f"progress was given {on!r}.\nGive True or False."


@pytest.mark.parametrize("stream", [None, object(), "closed"])
def test_nobody_looks_where_nothing_can_be_written(stream, monkeypatch):
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    with Stage("trace", "f"):
        assert not DISPLAY.is_seen()


@pytest.fixture
def often(monkeypatch):
    """A file as standard error, to which a stage that lasts writes five lines a second rather than one in ten."""
    monkeypatch.setattr(screens, "EVERY_S", 0.2)
    monkeypatch.setattr(module, "_DELAY_S", 0.0)

    def redirected():  # by the test itself: pytest puts its own files in place for each of its phases
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        return sys.stderr

    yield redirected
    DISPLAY.clear()


def lasts(condition):
    """A search that goes on until a condition holds."""
    with Stage("search", "loss") as now:
        now.says(lambda: "attempt 2 of at most 10")
        while not condition():
            assert now.seconds < 30, "never written"
            time.sleep(0.01)


def test_where_there_is_no_terminal_a_stage_that_lasts_writes_plain_lines(often):
    file = often()
    lasts(lambda: file.getvalue().count("\n") >= 3)
    lines = file.getvalue().splitlines()
    assert all(
        re.fullmatch(r"jointcut: loss: searching \(attempt 2 of at most 10\), \d+ s( \(.*\))?", line) for line in lines
    )
    assert DISPLAY.screen is None


def test_where_the_log_is_read_the_lines_go_there(often, caplog):
    file = often()
    caplog.set_level(logging.INFO, logger="jointcut")
    lasts(lambda: len(caplog.records) >= 2)
    *lines, last = [r.getMessage() for r in caplog.records]
    assert all(re.fullmatch(r"loss: searching \(attempt 2 of at most 10\), \d+ s( \(.*\))?", line) for line in lines)
    assert last.startswith("loss: searched in ")
    assert file.getvalue() == ""


def test_lines_come_ten_seconds_apart_and_what_is_done_sooner_says_nothing(monkeypatch):
    written, clock = [], [100.0]
    monkeypatch.setattr(screens.time, "monotonic", lambda: clock[0])
    lines = screens.Lines(written.append)
    for second in range(60):
        clock[0] = 100.0 + second
        lines.draw(str(second))
    lines.clear()
    assert written == ["10", "20", "30", "40", "50"]


def test_no_line_is_written_where_that_is_switched_off(often, monkeypatch):
    file = often()
    with progress(False):
        assert not DISPLAY.is_seen()
    monkeypatch.setenv(module.VARIABLE, "0")
    assert not DISPLAY.is_seen()
    with Stage("search", "loss"):
        time.sleep(0.5)
    assert file.getvalue() == ""


def test_a_file_that_is_closed_meanwhile_harms_no_stage(often):
    file = often()
    lasts(file.getvalue)
    with Stage("search", "loss"):
        file.close()
        time.sleep(0.5)
    assert not DISPLAY.is_seen()


PIPED = """
import time
import jax.numpy as jnp
from jointcut import aot

@aot.function
def loss(x):
    time.sleep(0.8)
    return jnp.sum(jnp.sin(x))

loss.value_and_grad(jnp.ones(3))
"""


def test_a_pipe_stays_silent_where_no_stage_lasts():
    done = subprocess.run([sys.executable, "-c", PIPED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
