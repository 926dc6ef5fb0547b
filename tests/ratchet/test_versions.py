"""`--peak-versions`: what it installs and where, what it records and prints, and its words and exit codes."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from jointcut.aot.ratchet import environments as module
from jointcut.aot.ratchet import versions
from jointcut.aot.ratchet.environments import Environment, environments
from jointcut.partition.errors import PeakError

pytest_plugins = ["pytester"]
assert versions  # imported before any run inside a test, which would forget it

GOOD, FAILED, USAGE, NONE = 0, 1, 4, 5
JAX, PYTHON = version("jax"), ".".join(map(str, sys.version_info[:3]))
LATER = "99.1.2"  # a version of JAX that the second Python says it has

STEP = """
import os
import jax
import jax.numpy as jnp

def block(x, w):
    return jnp.tanh(x @ w)

def loss(ws, x):
    for w in ws:
        x = block(x, w)
    return jnp.sum(x**2)

def test_step(peak):
    peak(jax.jit(jax.grad(loss)), [jnp.ones((32, 32))] * int(os.environ.get("LAYERS", 3)), jnp.ones((256, 32)))
"""
CONFTEST = """
import os
assert os.environ["FOR_JAX"] == "any"  # a process of another JAX starts as this one did
os.environ["FOR_JAX"] = "this one alone"
"""


def python_at(path, *lines):
    """Write a Python: a script that does as it is told, and then calls that of this test."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, f'exec {sys.executable} "$@"', ""]))
    path.chmod(0o755)
    return path


def later(folder):
    """The lines of a Python whose JAX says that it is of a later version."""
    known = folder / "known" / f"jax-{LATER}.dist-info"
    known.mkdir(parents=True, exist_ok=True)
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jax\nVersion: {LATER}\n")
    return f"export PYTHONPATH={known.parent}:$PYTHONPATH"


@pytest.fixture
def run(pytester, monkeypatch):
    """Run pytest with the plugin and with versions on a test file; returns the result, without what the tests say."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run_on(versions, *options, text=STEP):
        pytester.makepyfile(test_step=text)
        pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -p no:randomly --strict-markers")
        plugin = ("-p", "jointcut.aot.ratchet.plugin")
        return pytester.runpytest_inprocess(*plugin, "--peak-versions", versions, *options)

    return run_on


# ----------------------------------------------------------------------------------------- what is recorded and told


def test_steps_of_all_versions_are_recorded_and_what_grew_is_told_by_line(run, pytester, monkeypatch):
    two = python_at(pytester.path / "later/bin/python", later(pytester.path), "export LAYERS=4")
    result = run(f"{sys.executable} later/bin/python")
    assert result.ret == GOOD
    text = result.stdout.str()
    assert f"\nJAX {JAX}, Python {PYTHON}: {sys.executable}\n" in text
    assert f"\nJAX {LATER}, Python {PYTHON}: {two}\n" in text
    table = text.partition("memory of steps, JAX ")[2]
    assert table.startswith(f"{JAX}, then {LATER}\n\ntest_step.py::test_step, cpu\n")
    assert re.search(rf"\n +{JAX} +{LATER} +change\n", table)
    assert re.search(r"\n  peak of a step +\S+ kB +\S+ kB +\+\S+ kB +\+\d+%\n", table)
    assert f"\nfrom {JAX} to {LATER}\nAlive at the peak: +" in table
    assert re.search(r"\n(new|larger) .*float32\[256,32\].*test_step.py:\d+ \(block\)", table)
    records = json.loads((pytester.path / "peaks.json").read_text())["records"]
    assert list(records) == [f"JAX {JAX}, cpu", f"JAX {LATER}, cpu"]
    less, more = (named["test_step.py::test_step"]["figures"]["peak_bytes"] for named in records.values())
    assert less < more

    before = (pytester.path / "peaks.json").read_text()
    assert run(f"{sys.executable} later/bin/python", "--peak-check").ret == GOOD  # each against its own
    monkeypatch.setenv("FOR_JAX", "any")
    pytester.makeconftest(CONFTEST)
    against = run("later/bin/python", "--peak-check", f"--peak-against={JAX}")
    assert against.ret == FAILED
    assert (pytester.path / "peaks.json").read_text() == before


@pytest.mark.parametrize(
    ("text", "code"), [("def test_step():\n    assert False\n", FAILED), ("def helper():\n    pass\n", NONE)]
)
def test_the_exit_code_is_that_of_the_tests(text, code, run, pytester):
    assert run(sys.executable, text=text).ret == code
    assert not (pytester.path / "peaks.json").exists()


# ------------------------------------------------------------------------------------------------- what is made, once

MAKER = """\
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit; fi
if [ "$1 $2 $3" = "-I -m pip" ]; then echo "$@" >> {log}; exit; fi"""
REFUSER = MAKER.replace(">> {log}; exit;", '>> {log}; echo "ERROR: No matching distribution found for $6" >&2; exit 1;')


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A project's folder, and a cache of its own."""
    monkeypatch.setenv("JOINTCUT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    (root := tmp_path / "project").mkdir()
    return root


def interpreters(monkeypatch, folder, *scripts):
    """Let these be the Pythons of the machine; returns the file of what pip was told."""
    log = folder / "pip"
    pythons = [python_at(folder / f"py{n}" / "bin/python", s.format(log=log)) for n, s in enumerate(scripts)]
    monkeypatch.setattr(module, "interpreters", lambda: iter(pythons))
    return log


def test_an_environment_is_made_once_by_the_first_python_that_can_have_the_version(home, tmp_path, monkeypatch):
    log = interpreters(monkeypatch, tmp_path, REFUSER, MAKER + "\n" + later(tmp_path), "exit 3")
    (home / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    said = []
    (made,) = environments(LATER, (), home, said.append)
    assert made == Environment(made.python, LATER, PYTHON)
    assert made.python.is_relative_to(tmp_path / "cache" / "environments")
    told = log.read_text().splitlines()
    assert len(told) == len(said) == 2
    assert all(re.fullmatch(rf"-I -m pip install --quiet jax=={LATER}\.\* pytest .*-e {home}", line) for line in told)
    assert all(re.fullmatch(rf"Making an environment with JAX {LATER} by \S+, once, in \S+", line) for line in said)
    assert environments(LATER, (), home, said.append) == [made] and len(said) == 2
    (home / "pyproject.toml").write_text("[project]\nname = 'mine'\ndependencies = ['optax']\n")
    assert environments(LATER, (), home, said.append) != [made]


def test_the_settings_say_what_else_is_installed(home, tmp_path, monkeypatch):
    log = interpreters(monkeypatch, tmp_path, MAKER + "\n" + later(tmp_path))
    environments("99.1rc1", ("pytest-xdist", "-r 'my tests.txt'"), home, str)
    (told,) = log.read_text().splitlines()
    assert "install --quiet jax==99.1rc1 pytest " in told and told.endswith(" pytest-xdist -r my tests.txt")


def test_the_pythons_of_the_machine_are_those_that_run(tmp_path, monkeypatch):
    minor = 20 if sys.version_info[1] != 20 else 19
    python_at(tmp_path / "on" / f"python3.{minor}", "exit 127")  # a shim that stands for none
    kept = python_at(tmp_path / "pyenv/versions" / f"3.{minor}.1" / "bin" / f"python3.{minor}")
    monkeypatch.setenv("PATH", str(tmp_path / "on"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert list(module.interpreters()) == [Path(sys.executable), kept]


# --------------------------------------------------------------------------------------------------- what is refused


def test_a_version_that_cannot_be_installed_is_told_with_each_python(home, tmp_path, monkeypatch):
    interpreters(monkeypatch, tmp_path, REFUSER, "echo No module named ensurepip; exit 1")
    with pytest.raises(PeakError) as caught:
        environments("98", (), home, str)
    assert str(caught.value) == (
        "--peak-versions: JAX 98 cannot be installed with\n"
        f"  {tmp_path}/py0/bin/python: No matching distribution found for jax==98.*\n"
        f"  {tmp_path}/py1/bin/python: No module named ensurepip\n"
        "Give a version that pip finds, put a Python that can have it on the PATH, mend peak_requires in\n"
        "[tool.pytest.ini_options], or give the Python of an environment of yours: --peak-versions='my/bin/python'."
    )


GIVE = "Give versions of JAX, or Pythons of environments that have one: --peak-versions='0.10.2 0.12'."
INSTALL = "Install jax, pytest and jointcut there, or give a version, for which an environment is made."
WRONG = {
    "newest": f"--peak-versions has 'newest', which is no version of JAX and no path of a Python.\n{GIVE}",
    "0.12,0.13": f"--peak-versions has '0.12,0.13', which is no version of JAX and no path of a Python.\n{GIVE}",
    " ": f"--peak-versions names no version.\n{GIVE}",
    "no/python": f"--peak-versions names no/python, which does not serve: No such file or directory.\n{INSTALL}",
    "./bare": "--peak-versions names ./bare, which does not serve: "
    f"ModuleNotFoundError: No module named 'jointcut'.\n{INSTALL}",
    "{0} {0}": "--peak-versions names JAX {1} twice, the second time by '{0}'.\nName each version once.",
}


@pytest.mark.parametrize("given", WRONG)
def test_what_cannot_be_read_ends_the_run_before_any_test(given, run, pytester):
    python_at(pytester.path / "bare", f'exec {sys.executable} -I -S "$@"')
    result = run(given.format(sys.executable))
    assert result.ret == USAGE and "passed" not in result.stdout.str()
    assert result.stderr.str().strip() == "ERROR: " + WRONG[given].format(sys.executable, JAX)


def test_records_and_options_are_refused_before_any_environment_is_made(run, pytester):
    assert "exclude each other" in run("0.10.2", "--peak-check", "--peak-record").stderr.str()
    missing = run("0.10.2", "--peak-check")
    assert missing.ret == USAGE and "peaks.json cannot be read: No such file or directory." in missing.stderr.str()
    (pytester.path / "peaks.json").write_text("{")
    damaged = run("0.10.2")
    assert damaged.ret == USAGE and "peaks.json is damaged: it is no JSON" in damaged.stderr.str()
