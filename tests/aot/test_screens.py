"""What is shown in a terminal and in a notebook is one line, which is never garbled, and goes without a trace."""

from __future__ import annotations

import io
import logging
import os
import re
import select
import signal
import sys
import threading
import time
import warnings
from contextlib import redirect_stderr, suppress
from importlib import import_module, util
from pathlib import Path

import jax.numpy as jnp
import pytest

from jointcut import aot
from jointcut.aot.progress import screens
from jointcut.aot.progress.progress import VARIABLE, Stage, progress

ROOT = Path(__file__).parent.parent.parent
DISPLAY = import_module("jointcut.aot.progress.progress")._DISPLAY


pytestmark = pytest.mark.usefixtures("untouched")


class Pseudo:
    """A pseudo-terminal as standard error, and what can be seen on it."""

    def __init__(self, monkeypatch):
        self.master, slave = os.openpty()
        self.file = os.fdopen(slave, "w", encoding="utf-8")
        self.raw, self.left = b"", threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        monkeypatch.setattr(sys, "stderr", self.file)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "200")
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            monkeypatch.delenv(name, raising=False)

    def _read(self):
        with suppress(OSError):  # which says that the other end was closed
            while not self.left.is_set():
                if select.select([self.master], [], [], 0.05)[0]:
                    self.raw += os.read(self.master, 4096)

    def leave(self):
        """Take the terminal away: whoever writes on it meets an error."""
        self.left.set()
        self.reader.join()
        os.close(self.master)

    def seen(self) -> list[str]:
        """The lines of the screen at the end, that of the cursor last."""
        self.file.close()
        self.reader.join()
        os.close(self.master)
        return drawn(self.raw.decode())[-1]


def drawn(raw: str) -> list[list[str]]:
    """The screen after each thing written on it; fails at a control code that a dull terminal may not know."""
    lines, row, column, screens = [""], 0, 0, []
    for up, erase, char in re.findall(r"\x1b\[(\d+)A|\x1b\[(2)K|\x1b\[[\d;]*m|([^\x1b])", raw):
        if up:
            row -= int(up)
        elif erase:
            lines[row] = ""
        elif char == "\r":
            column = 0
        elif char == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif char:
            lines[row] = lines[row].ljust(column)[:column] + char + lines[row][column + 1 :]
            column += 1
        screens.append(lines[: row + 1])
    assert "\x1b" not in re.sub(r"\x1b\[(\d+A|2K|[\d;]*m)", "", raw)
    return screens or [[""]]


def wait_for(condition):
    """Wait until the display has come so far; fails where it never does."""
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit, "never shown"
        time.sleep(0.01)


@pytest.fixture
def logged(caplog):
    """A handler that writes each line of ours on the terminal, as a user's would."""
    caplog.set_level(logging.INFO, logger="jointcut")
    logger, added = logging.getLogger("jointcut"), []

    def to(file):
        added.append(logging.StreamHandler(file))
        logger.addHandler(added[0])

    yield to
    logger.removeHandler(added[0])


def test_a_stage_that_lasts_is_shown_in_a_terminal_and_then_gone(monkeypatch):
    terminal = Pseudo(monkeypatch)

    def slow(x):
        wait_for(lambda: b"slow: tracing, 1 s" in terminal.raw)
        return jnp.sum(x)

    aot.function(slow).trace(jnp.ones(3))
    terminal.file.write("done\n")
    assert terminal.seen() == ["done", ""]
    lines = {screen[-1] for screen in drawn(terminal.raw.decode())}
    assert {"⠋ jointcut: slow: tracing, 0 s"[1:], "⠋ jointcut: slow: tracing, 1 s"[1:]} <= {line[1:] for line in lines}
    assert "\x1b[?25l" not in terminal.raw.decode()  # the cursor stays


def test_a_line_is_cut_where_the_terminal_ends(monkeypatch):
    terminal = Pseudo(monkeypatch)
    monkeypatch.setenv("COLUMNS", "70")
    with Stage("trace", 90 * "f"):
        wait_for(lambda: DISPLAY.screen is not None)
    assert terminal.seen() == [""]
    assert max(len(line) for screen in drawn(terminal.raw.decode()) for line in screen) == 70
    assert all(len(screen) <= 2 for screen in drawn(terminal.raw.decode()))


def test_a_line_too_long_for_80_columns_keeps_its_end(monkeypatch):
    terminal = Pseudo(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    with Stage("search", 70 * "f") as now:
        now.says(lambda: "attempt 2 of at most 10")
        wait_for(lambda: b"(attempt 2 of at most 10), 0 s" in terminal.raw)
    assert terminal.seen() == [""]


def test_another_file_in_the_place_of_the_terminal_gets_no_control_codes(monkeypatch):
    terminal, file = Pseudo(monkeypatch), io.StringIO()
    monkeypatch.setattr(screens, "EVERY_S", 0.0)
    with Stage("trace", "f"):
        wait_for(lambda: DISPLAY.screen is not None)
        with redirect_stderr(file):
            wait_for(lambda: file.getvalue().count("\n") > 1)
        wait_for(lambda: isinstance(DISPLAY.screen, screens.Terminal))
    assert set(file.getvalue().splitlines()) <= {f"jointcut: f: tracing, {n} s" for n in range(30)}
    assert terminal.seen() == [""]


def test_a_stage_that_raises_or_is_interrupted_takes_its_line_away(monkeypatch):
    terminal = Pseudo(monkeypatch)
    for error, fail in ((ZeroDivisionError, lambda: 1 / 0), (KeyboardInterrupt, interrupt)):
        with pytest.raises(error), Stage("search", "f"), Stage("compile", "f"):
            wait_for(lambda: DISPLAY.screen is not None)
            fail()
        assert not DISPLAY.running and DISPLAY.screen is None
    assert terminal.seen() == [""]


def interrupt():
    """What Ctrl-C does; a shell lets jobs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.raise_signal(signal.SIGINT)
        time.sleep(30)
    finally:
        signal.signal(signal.SIGINT, before)


def test_log_lines_stand_on_lines_of_their_own(monkeypatch, logged):
    terminal = Pseudo(monkeypatch)
    logged(terminal.file)
    with Stage("search", "f") as outer:
        for _ in range(3):
            with Stage("compile", "f") as inner:
                wait_for(lambda: DISPLAY.shown is outer)
                inner.ends(lambda: "compiled")
        outer.ends(lambda: "searched")
    assert terminal.seen() == ["f: compiled", "f: compiled", "f: compiled", "f: searched", ""]


def test_many_threads_share_one_line_which_is_never_garbled(monkeypatch, logged):
    terminal = Pseudo(monkeypatch)
    logged(terminal.file)

    def work(n):
        for _ in range(2):
            with Stage("search", f"f{n}"), Stage("compile", f"f{n}"):
                wait_for(lambda: DISPLAY.screen is not None)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    *lines, last = terminal.seen()
    assert (len(lines), last) == (2 * 2 * 8, "")
    assert all(re.fullmatch(r"f\d: (searched|compiled) in \d+\.\d+ s", line) for line in lines)
    whole = r"(. jointcut: f\d: searching, \d+ s(: compiling, \d+ s)?( \(.*\))?(; \d more)?)?"
    for part in re.split(r"\r|\n|\x1b\[\d+[AK]", terminal.raw.decode()):
        part = re.sub(r"\x1b\[[\d;]*m", "", part)
        assert re.fullmatch(whole, part) or part in lines


def test_a_name_that_a_terminal_cannot_write_harms_no_stage(monkeypatch):
    terminal = Pseudo(monkeypatch)
    terminal.file.reconfigure(encoding="ascii")
    with Stage("trace", "größe"):
        wait_for(lambda: DISPLAY.wanted is False)
    with Stage("trace", "f"):
        assert not DISPLAY.is_seen()
    terminal.seen()


def test_a_terminal_that_has_gone_harms_no_stage(monkeypatch):
    terminal = Pseudo(monkeypatch)
    monkeypatch.setattr(screens, "EVERY_S", 0.0)
    with Stage("trace", "f"):
        wait_for(lambda: DISPLAY.screen is not None)
        terminal.leave()
        wait_for(lambda: DISPLAY.wanted is False)
    with Stage("trace", "f"):
        assert not DISPLAY.is_seen()
    with suppress(OSError):
        terminal.file.close()


def test_it_can_be_switched_off_and_on_and_back(monkeypatch):
    terminal = Pseudo(monkeypatch)
    assert DISPLAY.is_seen()
    with progress(False):
        assert not DISPLAY.is_seen()
        with progress(True):
            assert DISPLAY.is_seen()
        assert not DISPLAY.is_seen()
    assert DISPLAY.is_seen()
    for value, is_seen in {"0": False, "off": False, "False": False, "1": True}.items():
        monkeypatch.setenv(VARIABLE, value)
        assert DISPLAY.is_seen() is is_seen
    monkeypatch.setenv(VARIABLE, "0")
    assert repr(progress(True)) == "<progress on>" and DISPLAY.is_seen()
    assert repr(progress(False)) == "<progress off>" and not DISPLAY.is_seen()
    assert terminal.seen() == [""]


def test_switching_off_takes_the_line_away_while_its_stage_runs(monkeypatch):
    terminal = Pseudo(monkeypatch)
    with Stage("trace", "f"):
        wait_for(lambda: DISPLAY.screen is not None)
        progress(False)
        assert DISPLAY.screen is None
    assert terminal.seen() == [""]


# ------------------------------------------------------------------------------------------------ in a notebook


CELL = """
import sys, time, warnings
warnings.simplefilter("error")
from jointcut.aot.progress.progress import _DISPLAY, Stage, text

def run(name):
    with Stage("trace", name) as now:
        while now.seconds < 30 and not (_DISPLAY.screen and _DISPLAY.screen._line.endswith(f"{name}: tracing, 0 s")):
            time.sleep(0.01)
        assert now.seconds < 30, "never shown"

run("f"), run("g")
print("between")
run("h")
"""


@pytest.mark.skipif(
    not (util.find_spec("nbclient") and util.find_spec("ipykernel")), reason="nbclient or ipykernel is not installed"
)
def test_a_notebook_shows_it_in_one_output_of_the_cell_which_is_empty_in_the_end():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the client's own libraries
        nbformat, nbclient = import_module("nbformat"), import_module("nbclient")
        cells = [nbformat.v4.new_code_cell(source) for source in (CELL, "print('after')", "run('i')")]
        notebook = nbformat.v4.new_notebook(cells=cells)
        nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources={}).execute(cwd=ROOT)
    empty = ("display_data", {"text/plain": ""})
    outputs = [[(o.output_type, o.get("text") or o.get("data")) for o in cell.outputs] for cell in notebook.cells]
    assert outputs == [[empty, ("stream", "between\n")], [("stream", "after\n")], [empty]]
