"""The test that the page of the ratchet shows: recorded, checked, and failing with one layer more as the page says."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

from fences import ROOT, examples
from jointcut.aot.ratchet import session

pytest_plugins = ["pytester"]
assert session  # imported before any run inside a test, which would forget it
PAGE = ROOT / "docs" / "ratchet.md"


def test_the_page_is_recorded_and_checked_as_it_says(pytester):
    (example,) = examples(PAGE)

    def run(*options):
        return pytester.runpytest_inprocess("-p", "jointcut.aot.ratchet.plugin", *options)

    pytester.makepyfile(test_step=example.code)
    assert run("--peak-record").ret == pytest.ExitCode.OK
    assert run("--peak-check").ret == pytest.ExitCode.OK
    pytester.makepyfile(test_step=example.code.replace("] * 3", "] * 4"))
    text = run("--peak-check").stdout.str()
    told = re.findall(r"With one more layer the check says:\n\n```\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[0]
    for line in told.replace("JAX 0.10.2", f"JAX {version('jax')}").splitlines():
        assert line.strip() in ("", "...") or line in text, line


def test_every_option_and_setting_of_the_page_is_there(pytester):
    text = PAGE.read_text("utf-8") + (ROOT / "docs" / "after-an-upgrade.md").read_text("utf-8")
    known = pytester.runpytest_inprocess("-p", "jointcut.aot.ratchet.plugin", "--help").stdout.str()
    names = set(re.findall(r"--peak-\w+", text)) | set(re.findall(r"^(peak_\w+) =", text, re.MULTILINE))
    assert len(names) == 9
    assert [name for name in names if name not in known] == []
