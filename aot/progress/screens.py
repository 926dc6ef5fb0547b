"""Draw one line in a terminal or in a notebook and take it away, or write it now and then elsewhere.

What the line says is not decided here. Nobody but the one who asked for a screen may draw on it, and one at a time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

EVERY_S = 10.0  # between two lines in a file


class Screen(Protocol):
    """A place for one line, which is drawn again and again and then taken away."""

    @property
    def width(self) -> int | None:
        """How many characters a line has room for; None where there is no end to it."""
        ...

    def draw(self, line: str) -> None:
        """Show the line in place of the one before; raises `OSError` or `ValueError` where that cannot be done."""
        ...

    def clear(self) -> None:
        """Leave nothing to be seen; raises as `draw`."""
        ...


class _Console(Console):
    """A terminal whose cursor is left alone: a process that is killed could not bring it back."""

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing."""
        del show
        return False


class Terminal:
    """The last line of a terminal, drawn by `rich`; one that takes no control codes (`TERM=dumb`) shows nothing.

    Standard output and error stay what they are, since a function that is being traced may redirect them meanwhile.
    """

    def __init__(self, file: TextIO) -> None:
        """Draw on the terminal behind a text stream."""
        console = _Console(file=file, force_jupyter=False)
        self._console = console
        self._spinner = Spinner("dots" if console.encoding.startswith("utf") else "line", style="cyan")
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    @property
    def width(self) -> int:
        """What the terminal has room for behind the spinner and a space."""
        return self._console.width - 2

    def draw(self, line: str) -> None:
        """Show the line behind a spinner that turns, cut at the terminal's width."""
        frame = self._spinner.render(time.perf_counter())
        assert isinstance(frame, Text)
        self._live.update(Text.assemble(frame, " ", line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def clear(self) -> None:
        """Erase the line; the cursor stands where it stood before."""
        self._live.stop()


class Notebook:
    """An output of the cell that runs, the same for all that is shown in it; what remains of it is empty.

    A kernel can change an output of its own, and can take none away without all others of the cell. It is plain text:
    what `rich` shows in notebooks needs widgets, and warns where there are none.
    """

    width = None

    def __init__(self) -> None:
        """Show nothing yet."""
        self._handle: Any = None
        self._cell, self._line = -1, ""

    def draw(self, line: str) -> None:
        """Show the line; nothing is sent where it is the one before."""
        if line == self._line:
            return
        shell = kernel_shell()
        cell = -1 if shell is None else shell.execution_count
        if self._handle is None or self._cell != cell:
            display = import_module("IPython.display").display
            self._handle, self._cell = display({"text/plain": line}, raw=True, display_id=True), cell
        else:
            self._handle.update({"text/plain": line}, raw=True)
        self._line = line

    def clear(self) -> None:
        """Empty the output."""
        if self._line:
            self._handle.update({"text/plain": ""}, raw=True)
        self._line = ""


class Lines:
    """A file or a pipe, in which nothing can be taken away: of all lines that are drawn one in ten seconds is written.

    The first is written after ten seconds, so that whatever is done sooner says nothing.
    """

    width = None

    def __init__(self, write: Callable[[str], object]) -> None:
        """Write lines by calling `write`."""
        self._write = write
        self._last_s = time.monotonic()

    def draw(self, line: str) -> None:
        """Write the line, if it is time."""
        if time.monotonic() - self._last_s >= EVERY_S:
            self._last_s = time.monotonic()
            self._write(line)

    def clear(self) -> None:
        """Leave what was written."""


def kernel_shell() -> Any:
    """IPython's shell where a kernel runs it, as for notebooks, else None; IPython is not imported for it."""
    asked = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if asked is None else asked()
    return shell if getattr(shell, "kernel", None) is not None else None


def is_open(file: Any) -> bool:
    """Whether a stream, or what somebody put in its place, can be written to."""
    return not getattr(file, "closed", False) and hasattr(file, "write")


def is_terminal(file: Any) -> bool:
    """Whether such a stream is an open terminal."""
    asked = getattr(file, "isatty", None) if is_open(file) else None
    return asked is not None and bool(asked())
