"""The plugin for pytest: what it records, what it fails, what it refuses, with its words and exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from compilers import FOLDER
from jointcut.aot.ratchet import session

pytest_plugins = ["pytester"]
assert session  # imported before any run inside a test, which would forget it

GOOD, FAILED, USAGE = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.USAGE_ERROR
HERE = f"JAX {version('jax')}, cpu"
TEST = "test_step.py::test_step"
ACCEPT = f"pytest --peak-record {TEST}"

STEP = """
import jax
import jax.numpy as jnp
import pytest

def block(x, w):
    return jnp.tanh(x @ w)

def loss(ws, x):
    for w in ws:
        x = block(x, w)
    return jnp.sum(x**2)

@jax.jit
def step(ws, x):
    return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))

def arguments(layers, rows=256):
    return [jnp.ones((32, 32))] * layers, jnp.ones((rows, 32))
"""
ONE = """
def test_step(peak):
    peak(step, *arguments(LAYERS))
"""


@pytest.fixture
def run(pytester):
    """Run pytest with the plugin on a test file; returns the result."""

    def run_on(text, *options, layers=3, **files):
        pytester.makepyfile(test_step=STEP + text.replace("LAYERS", str(layers)), **files)
        pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -p no:randomly --strict-markers")
        return pytester.runpytest_inprocess("-p", "jointcut.aot.ratchet.plugin", *options)

    return run_on


def told(result):
    """The text of the one failure, without pytest's own lines."""
    text = result.stdout.str()
    return text.partition("FAILURES")[2].partition("\n")[2].partition("\n")[2].partition("\n=====")[0].strip("\n")


def refused(result):
    """The words of wrong usage."""
    assert result.ret == USAGE
    return result.stderr.str().partition("ERROR: ")[2].rstrip("\n")


# ------------------------------------------------------------------------------------------- record, then check


def test_a_step_that_takes_as_much_passes_and_one_that_takes_more_fails_with_the_line(run, pytester):
    first = run(ONE, "--peak-record")
    assert first.ret == GOOD
    first.stdout.fnmatch_lines([f"1 step recorded in peaks.json for {HERE}: commit it"])
    assert run(ONE, "--peak-check").ret == GOOD
    grown = run(ONE, "--peak-check", layers=4)
    assert grown.ret == FAILED
    lines = told(grown).splitlines()
    assert lines[0] == (f"{TEST} takes more than peaks.json says for {HERE}: peak of a step, temporaries and flops.")
    assert lines[-1] == f"If that is meant, accept it: {ACCEPT}"
    assert re.fullmatch(r"  peak of a step +\S+ kB -> \S+ kB +\+\S+ kB +\+\d+%", lines[1])
    rows = [line for line in lines if line.startswith(("new", "larger"))]
    assert any(re.search(r"float32\[256,32\].*test_step.py:\d+ \(block\)", row) for row in rows)
    assert run(ONE, "--peak-record", layers=4).ret == GOOD
    assert run(ONE, "--peak-check", layers=4).ret == GOOD


def test_a_step_that_takes_less_passes_and_the_ratchet_may_close(run):
    run(ONE, "--peak-record", layers=4)
    less = run(ONE, "--peak-check", layers=3)
    assert less.ret == GOOD
    less.stdout.fnmatch_lines([f"{TEST} takes less than its record; keep that: {ACCEPT}"])


def test_the_records_are_keyed_by_version_and_target_and_read_by_line(run, pytester):
    run(ONE, "--peak-record")
    data = json.loads(text := pytester.path.joinpath("peaks.json").read_text())
    assert list(data["records"]) == [HERE] and list(data["records"][HERE]) == [TEST]
    entry = data["records"][HERE][TEST]
    assert set(entry["figures"]) == {"peak_bytes", "temp_bytes", "collective_bytes", "flops"}
    assert all(not array["line"].startswith("/") for array in entry["at_peak"])
    assert text.count("\n") >= len(entry["at_peak"]) and str(pytester.path) not in text
    run(ONE, "--peak-record")
    assert pytester.path.joinpath("peaks.json").read_text() == text


def test_an_aot_function_is_weighed_with_its_residuals(run, pytester):
    text = """
from jointcut import aot
cut = aot.function(loss)
def test_step(peak):
    found = peak(cut, *arguments(LAYERS))
    run = cut.trace(*arguments(LAYERS)).partition().compile()
    assert found.figures["peak_bytes"] == run.peak_bytes
    assert found.figures["residual_bytes"] == run.cut.plan.bytes_saved == sum(a.bytes for a in found.saved)
"""
    assert run(text, "--peak-record").ret == GOOD
    grown = run(text, "--peak-check", layers=5)
    assert "Saved for the backward: +" in told(grown) and "saved for the backward" in told(grown).splitlines()[0]


def test_without_options_a_step_is_weighed_and_returned(run, pytester):
    text = """
def test_step(peak):
    ws, x = arguments(3)
    found, memory = peak(step, ws, x), step.lower(ws, x).compile().memory_analysis()
    assert found.figures["temp_bytes"] == memory.temp_size_in_bytes
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (ws, x))
    assert peak.named("by shapes")(step, *shapes).figures == found.figures
"""
    assert run(text).ret == GOOD
    assert not pytester.path.joinpath("peaks.json").exists()


def test_only_tests_that_pass_are_recorded(run, pytester):
    failing = ONE + "    assert False\n"
    result = run(failing, "--peak-record")
    assert result.ret == FAILED and not pytester.path.joinpath("peaks.json").exists()
    result.stdout.fnmatch_lines(["no step was weighed, and nothing is recorded"])


def test_a_figure_may_grow_by_the_tolerance(run, pytester):
    run(ONE, "--peak-record")
    for tolerance, code in (("100%", GOOD), ("1.5 %", FAILED)):
        assert run(ONE, "--peak-check", "-o", f"peak_tolerance={tolerance}", layers=4).ret == code


def test_the_file_of_the_records_can_be_named(run, pytester):
    run(ONE, "--peak-record", "-o", "peak_file=kept/memory.json")
    assert pytester.path.joinpath("kept/memory.json").exists()
    assert run(ONE, "--peak-check", "-o", "peak_file=kept/memory.json").ret == GOOD


def test_workers_of_xdist_hand_over_what_they_weighed(run, pytester):
    two = "@pytest.mark.parametrize('n', [2, 3])\ndef test_step(peak, n):\n    peak(step, *arguments(n))\n"
    assert run(two, "--peak-record", "-p", "xdist", "-n", "2").ret == GOOD
    data = json.loads(pytester.path.joinpath("peaks.json").read_text())
    assert list(data["records"][HERE]) == [f"{TEST}[2]", f"{TEST}[3]"]
    assert run(two, "--peak-check", "-p", "xdist", "-n", "2").ret == GOOD


# ------------------------------------------------------------------------------------------------------- the mark


def test_a_mark_bounds_the_peak(run):
    text = "@pytest.mark.peak('{}')" + ONE
    assert run(text.format("1 MB")).ret == GOOD
    above = run(text.format("100 kB"))
    assert above.ret == FAILED
    lines = told(above).splitlines()
    assert re.fullmatch(
        f"{TEST} takes \\S+ kB \\([\\d,]+ bytes\\), more than the 100,000 bytes of @pytest.mark.peak.", lines[0]
    )
    assert lines[1] == "The largest arrays at the peak, by XLA's account:"
    assert any("(block)" in line for line in lines)
    assert lines[-1] == "Make the step smaller, or raise the bound."


def test_a_budget_in_the_settings_bounds_tests_without_a_mark(run):
    assert run(ONE, "-o", "peak_budget=1MB").ret == GOOD
    assert "more than the 1,000 bytes of peak_budget in [tool.pytest.ini_options]." in told(
        run(ONE, "-o", "peak_budget=1kB")
    )
    assert run("@pytest.mark.peak('1 MB')" + ONE, "-o", "peak_budget=1kB").ret == GOOD


def test_a_marked_test_that_weighs_no_function_fails(run):
    result = run("@pytest.mark.peak('1 MB')\ndef test_step():\n    pass\n")
    assert result.ret == FAILED
    assert told(result) == (
        f"{TEST} has @pytest.mark.peak and weighs no function.\n"
        "Weigh a step in it, as in: def test_step(peak): peak(step, params, batch). Or take the mark away."
    )
    skipped = run("@pytest.mark.peak('1 MB')\ndef test_step():\n    pytest.skip('not today')\n")
    assert skipped.ret == GOOD


MARKS = {
    "'66 M'": (
        "is '66 M', whose unit 'M' is unknown.",
    ),
    "'much'": ("is 'much', not a number and its unit.",),
    "0.5": ("is 0.5, which is no number of bytes.",),
    "'device'": ("is 'device', which is no number of bytes.",),
    "-3": ("is -3 bytes.",),
    "": ("does not have one argument.",),
    "'1 MB', '2 MB'": ("does not have one argument.",),
}  # fmt: skip


@pytest.mark.parametrize("given", MARKS)
def test_a_bound_that_cannot_be_read_is_the_error_of_its_test_alone(given, run):
    result = run(f"@pytest.mark.peak({given})" + ONE + "\ndef test_other():\n    pass\n")
    result.assert_outcomes(errors=1, passed=1)
    assert result.ret == FAILED
    text = result.stdout.str().partition("ERROR at setup of test_step")[2].split("\n", 1)[1].partition("\n=====")[0]
    assert text == f"@pytest.mark.peak of {TEST} {MARKS[given][0]}\nGive bytes, as in @pytest.mark.peak('66 MB')."


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_test_without_a_record_says_how_to_record_it(run):
    missing = run(ONE, "--peak-check")
    assert re.fullmatch(
        r"\S+/peaks.json cannot be read: No such file or directory.\n"
        "Record what the steps take now, and commit the file: pytest --peak-record",
        refused(missing),
    )
    run(ONE, "--peak-record")
    other = run(ONE.replace("test_step", "test_other"), "--peak-check")
    assert other.ret == FAILED
    assert told(other) == (
        "test_step.py::test_other has no record in peaks.json.\n"
        "Record it: pytest --peak-record test_step.py::test_other"
    )


def test_a_record_of_another_version_is_named_and_can_be_compared_with(run, pytester):
    run(ONE, "--peak-record")
    path = pytester.path / "peaks.json"
    path.write_text(path.read_text().replace(version("jax"), "0.9.9"))
    result = run(ONE, "--peak-check", layers=4)
    assert result.ret == FAILED
    assert told(result) == (
        f"{TEST} has a record in peaks.json with JAX 0.9.9, cpu, and none with {HERE}.\n"
        f"Record it: {ACCEPT}\n"
        f"See first what changed from there: pytest --peak-check '--peak-against=JAX 0.9.9, cpu' {TEST}"
    )
    compared = told(run(ONE, "--peak-check", "--peak-against=0.9.9", layers=4))
    assert f"  JAX 0.9.9 compiled the first, JAX {version('jax')} the second" in compared
    assert "test_step.py:" in compared
    assert run(ONE, "--peak-check", "--peak-against=0.9.9").ret == GOOD
    assert refused(run(ONE, "--peak-check", "--peak-against=0.8")) == (
        "--peak-against is '0.8', and peaks.json has no such record.\nKnown names: 'JAX 0.9.9, cpu'."
    )
    assert refused(run(ONE, "--peak-against=0.9.9")) == (
        "--peak-against compares nothing by itself.\nGive --peak-check with it."
    )


def test_two_steps_of_one_name_are_refused(run):
    twice = ONE + "    peak(step, *arguments(2))\n"
    cure = "Give each a name of its own: peak.named('a name')(step, params, batch)."
    assert told(run(twice)) == f"{TEST} weighs two functions without a name.\n{cure}"
    named = "\ndef test_{}(peak):\n    peak.named('gpt')(step, *arguments(3))\n"
    two = run(named.format("step") + named.format("more"))
    assert told(two) == (f"'gpt' is the name of two steps, in {TEST} and in test_step.py::test_more.\n{cure}")
    twice = named.format("step") + "    peak.named('gpt')(step, *arguments(2))\n"
    assert told(run(twice)) == f"'gpt' is the name of two steps, in {TEST}.\n{cure}"
    apart = ONE + "    peak.named('two layers')(step, *arguments(2))\n"
    assert run(apart, "--peak-record").ret == GOOD and run(apart, "--peak-check").ret == GOOD


def test_two_steps_of_one_name_are_found_in_two_workers(run):
    named = "\n@pytest.mark.xdist_group('{0}')\ndef test_{0}(peak):\n    peak.named('gpt')(step, *arguments(3))\n"
    options = ("--peak-record", "-p", "xdist", "-n", "2", "--dist", "loadgroup")
    result = run(named.format("step") + named.format("more"), *options)
    assert result.ret == FAILED
    text = result.stdout.str()
    assert re.search(r"'gpt' is the name of two steps, in test_step.py::\S+ and in test_step.py::", text)


DAMAGES = {
    "cut": (lambda text: text[: len(text) // 2], r"is damaged: it is no JSON from line \d+, column \d+ on."),
    "conflict": (lambda text: "<<<<<<< HEAD\n" + text, "is damaged: it is no JSON from line 1, column 1 on."),
    "format": (lambda text: text.replace('"format": 1', '"format": 9', 1), "has format 9, and this jointcut reads 1."),
    "list": (lambda text: '{"format": 1, "records": []}', "is damaged: its records are no object."),
    "entry": (
        lambda text: text.replace('"backend": "cpu"', '"backend": 3'),
        f", {re.escape(TEST)} is damaged: 3 is no text.",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("option", ["--peak-check", "--peak-record"])
def test_damaged_records_are_refused_and_left_as_they_are(name, option, run, pytester):
    run(ONE, "--peak-record")
    path, (damage, what) = pytester.path / "peaks.json", DAMAGES[name]
    path.write_text(wound := damage(path.read_text()))
    cure = "Take it from version control; or remove it and record anew: pytest --peak-record"
    gap = "" if what.startswith(",") else " "
    assert re.fullmatch(f"{re.escape(str(path))}{gap}{what}\n{re.escape(cure)}", refused(run(ONE, option)))
    assert path.read_text() == wound


def test_options_and_settings_that_mean_nothing_are_refused(run):
    assert refused(run(ONE, "--peak-check", "--peak-record")) == (
        "--peak-record and --peak-check exclude each other.\nCheck first, then record."
    )
    assert refused(run(ONE, "--peak-record", "--peak-target=h1000")).startswith("target 'h1000' is unknown.\n")
    assert refused(run(ONE, "--peak-record", "-o", "peak_tolerance=much")) == (
        "peak_tolerance in [tool.pytest.ini_options] is 'much', which is no share.\nGive per cent, such as '1%'."
    )
    assert refused(run(ONE, "--peak-record", "-o", "peak_budget=66")) == (
        "peak_budget in [tool.pytest.ini_options] is '66', a number without a unit.\n"
        "Give bytes, as in @pytest.mark.peak('66 MB')."
    )


def test_records_that_cannot_be_written_end_the_run_as_wrong_usage(run, pytester):
    pytester.path.joinpath("taken").write_text("")
    result = run(ONE, "--peak-record", "-o", "peak_file=taken/peaks.json")
    assert result.ret == USAGE
    assert "taken/peaks.json cannot be" in result.stdout.str()


def test_what_is_no_function_is_refused(run):
    text = "def test_step(peak):\n    peak(3)\n"
    assert told(run(text)) == (
        "peak(...) is of type int, which cannot be called.\n"
        "Give a function and its arguments: peak(step, params, batch)."
    )


# ---------------------------------------------------------------------------------------------- elsewhere compiled


@pytest.mark.skipif(not FOLDER.is_dir(), reason="python tests/compilers.py installs the compilers")
def test_a_step_is_weighed_for_a_target_that_is_not_here(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*filter(None, sys.path), str(FOLDER)]))
    options = ["-p", "jointcut.aot.ratchet.plugin", "--peak-target=h100"]
    pytester.makepyfile(test_step=STEP + ONE.replace("LAYERS", "3"))
    assert pytester.runpytest_subprocess(*options, "--peak-record").ret == GOOD
    data = json.loads(pytester.path.joinpath("peaks.json").read_text())
    assert list(data["records"]) == [f"JAX {version('jax')}, h100"]
    pytester.makepyfile(test_step=STEP + ONE.replace("LAYERS", "4"))
    grown = pytester.runpytest_subprocess(*options, "--peak-check")
    text = grown.stdout.str()
    assert f"If that is meant, accept it: pytest --peak-record --peak-target=h100 {TEST}" in text
    assert re.search(r"\nlarger +\+32\.8 kB +float32\[256,32\] +dot_general +test_step\.py:6 \(block\)", text)


# ------------------------------------------------------------------------------------------------------ manners

LIGHT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("jointcut_ratchet", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
print(sorted({"jax", "jointcut.aot"} & sys.modules.keys()), "pytest" in sys.modules)
"""


def test_the_plugin_imports_no_jax_and_the_library_no_pytest():
    file = sys.modules[session.__name__].__file__.replace("session.py", "plugin/__init__.py")
    done = subprocess.run([sys.executable, "-c", LIGHT, file], capture_output=True, text=True, check=True)
    assert done.stdout == "[] True\n"
    code = "import sys, jointcut.aot, jointcut.aot.ratchet.session; print('pytest' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_run_that_weighs_nothing_does_not_hear_of_the_plugin(run):
    result = run("def test_step():\n    pass\n")
    assert result.ret == GOOD and "memory of steps" not in result.stdout.str()
