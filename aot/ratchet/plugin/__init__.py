"""Serve pytest: the mark and the fixture `peak`, and the options `--peak-record` and `--peak-check`.

pytest imports this as `jointcut.ratchet`, before it reads any `conftest.py`. So nothing of jointcut is imported here,
and with it JAX, before a test weighs a step: a `conftest.py` may set what JAX reads when it is imported.

A mistake in options or records ends the run with pytest's code 4. A step that takes more than it may fails its test, so
that the run ends with 1; so does a mark that cannot be read.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

_SESSION, _BOUND, _WRONG = pytest.StashKey[Any](), pytest.StashKey[Any](), pytest.StashKey[str]()
_TOLD, _STARTED = pytest.StashKey[list[str]](), pytest.StashKey[dict[str, str]]()
_OUTPUT = "jointcut_peaks"  # what a worker of pytest-xdist hands to the process that started it


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and the settings."""
    group = parser.getgroup("jointcut", "memory of steps")
    group.addoption("--peak-record", action="store_true", help="Write what the weighed steps take to the records.")
    group.addoption("--peak-check", action="store_true", help="Fail tests whose steps take more than their records.")
    group.addoption("--peak-target", default="", metavar="TARGET", help="Weigh for a device such as h100, not here.")
    text = "With --peak-check: compare with records of another JAX version or target, such as 0.10.2."
    group.addoption("--peak-against", default="", metavar="VERSION", help=text)
    text = "Run the tests with each of these versions of JAX, in environments that are made once: '0.10.2 0.12'."
    group.addoption("--peak-versions", default="", metavar="VERSIONS", help=text)
    parser.addini("peak_file", "The file of the records, from the project's folder.", default="peaks.json")
    parser.addini("peak_budget", "The most bytes of a step whose test has no mark, such as 66 MB.", default="")
    parser.addini("peak_tolerance", "The share by which a figure may grow, such as 1%%.", default="0%")
    text = "What pip installs for --peak-versions besides JAX, pytest and jointcut, by default the project."
    parser.addini("peak_requires", text, type="linelist", default=[])


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Keep the variables as they are before any `conftest.py`: what one sets for this JAX is not for another."""
    early_config.stash[_STARTED] = dict(os.environ)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and refuse options that exclude each other."""
    config.addinivalue_line("markers", "peak(bytes): the steps that a test weighs take at most these, as in '66 MB'.")
    config.stash[_TOLD] = []
    _refuse_both(config)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run the tests with each version of JAX that is asked for, in processes of their own."""
    versions = config.getoption("peak_versions")
    if not versions:
        return None
    _refuse_both(config)
    of, call = importlib.import_module("jointcut.aot.ratchet.versions"), config.invocation_params
    requires, arguments, is_check = config.getini("peak_requires"), tuple(map(str, call.args)), _mode(config) == "check"
    places, variables = (_file(config), config.rootpath, call.dir), config.stash.get(_STARTED, dict(os.environ))
    matrix = of.Matrix(versions, tuple(requires), *places, arguments, variables, is_check)
    return _usable(lambda: of.run(matrix))


def _refuse_both(config: pytest.Config) -> None:
    if config.getoption("peak_record") and config.getoption("peak_check"):
        raise pytest.UsageError("--peak-record and --peak-check exclude each other.\nCheck first, then record.")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Read the records before any test runs."""
    if _mode(session.config) or session.config.getoption("peak_against"):
        _session(session.config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Read the marks of the tests."""
    for item in items:
        if (mark := item.get_closest_marker("peak")) is not None:
            try:
                item.stash[_BOUND] = _module().bound_in(mark.args, mark.kwargs, item.nodeid)
            except _module().JointcutError as error:
                item.stash[_WRONG] = str(error)


class Peak:
    """Weigh the steps of a test: `peak(step, params, batch)`.

    A step is any function by `jax.jit`, or an `aot.function`, whose value and gradient are meant. It is compiled for
    the arguments, arrays or `jax.ShapeDtypeStruct`, and not run. The result has `figures`, and arrays `at_peak`.
    """

    def __init__(self, item: Any, name: str | None = None) -> None:
        """Weigh for a test, under a name of its own or the test's."""
        self._item, self._name = item, name

    def named(self, name: str) -> Peak:
        """Return the same under another name, for a second step of a test."""
        return Peak(self._item, name)

    def __call__(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Weigh a step; the test fails if it takes more than it may."""
        __tracebackhide__ = True
        config, item = self._item.config, self._item
        session = _session(config)
        try:
            return session.weigh(item.nodeid, item.stash.get(_BOUND, None), self._name, step, *args, **kwargs)
        except _module().REFUSED as error:
            text = str(error)
        return pytest.fail(text, pytrace=False)


@pytest.fixture
def peak(request: pytest.FixtureRequest) -> Peak:
    """Weigh a step by compiling it, `peak(step, params, batch)`, and hold it to its mark and its record."""
    return Peak(request.node)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Forget what a test weighed when it ran before."""
    if _SESSION in item.config.stash:
        item.config.stash[_SESSION].begin(item.nodeid)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a test whose mark cannot be read."""
    if _WRONG in item.stash:
        pytest.fail(item.stash[_WRONG], pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Refuse a marked test that weighs nothing, and keep what a passed one weighed."""
    result = yield
    has_mark = _BOUND in item.stash
    if has_mark or _SESSION in item.config.stash:
        session = _session(item.config)
        try:
            session.end(item.nodeid, has_mark)
        except _module().PeakError as error:
            text = str(error)
        else:
            return result
        pytest.fail(text, pytrace=False)
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over what a worker of pytest-xdist weighed."""
    del error
    taken = getattr(node, "workeroutput", {}).get(_OUTPUT)
    if taken is not None:
        config = node.config
        try:
            _session(config).join(taken)
        except _module().PeakError as found:
            config.stash[_TOLD].append(str(found))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the records, or hand what was weighed to the process that does."""
    config = session.config
    if _SESSION not in config.stash:
        return
    ratchet, told = config.stash[_SESSION], config.stash[_TOLD]
    if hasattr(config, "workeroutput"):
        config.workeroutput[_OUTPUT] = ratchet.taken()  # pyright: ignore[reportAttributeAccessIssue]
        return
    if told:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if _mode(config) == "record":
        try:
            told += ratchet.write()
        except _module().JointcutError as error:
            told.append(str(error))
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
    told += ratchet.told()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was recorded, and which steps take less than their records."""
    if told := config.stash.get(_TOLD, []):
        terminalreporter.section("memory of steps")
        for line in told:
            terminalreporter.line(line)


# --------------------------------------------------------------------------------------------------- what is not light


def _module() -> Any:
    """Return the module that weighs; it imports JAX, so it is imported by its name, and not before it is needed."""
    return importlib.import_module("jointcut.aot.ratchet.session")


def _session(config: pytest.Config) -> Any:
    """Return the steps of this run."""
    if _SESSION not in config.stash:
        of = _module()
        settings = of.Settings(
            _file(config),
            config.rootpath,
            _mode(config),
            config.getoption("peak_target"),
            config.getoption("peak_against"),
            config.getini("peak_budget"),
            config.getini("peak_tolerance"),
        )
        config.stash[_SESSION] = _usable(lambda: of.Session.of(settings))
    return config.stash[_SESSION]


def _file(config: pytest.Config) -> Path:
    return Path(config.rootpath, config.getini("peak_file"))


def _mode(config: pytest.Config) -> str:
    return "record" if config.getoption("peak_record") else "check" if config.getoption("peak_check") else ""


def _usable(make: Callable[[], Any]) -> Any:
    """Return what is made; a mistake of the user ends the run as wrong usage."""
    try:
        return make()
    except _module().JointcutError as error:
        text = str(error)
    raise pytest.UsageError(text)
