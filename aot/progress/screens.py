"""Draw and remove one line of a terminal or notebook, or write lines to a file now and then.

The caller supplies the text. A screen may be used by one thread at a time.
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
    """A place for one line, which is redrawn often and then removed."""

    @property
    def width(self) -> int | None:
        """The length of a line in characters, or None if it has no limit."""
        ...

    def draw(self, line: str) -> None:
        """Replace the line; raises `OSError` or `ValueError` if that fails."""
        ...

    def clear(self) -> None:
        """Remove the line; raises as `draw`."""
        ...


class _Console(Console):
    """A terminal whose cursor is never hidden: a killed process could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing."""
        del show
        return False


class Terminal:
    """The last line of a terminal, drawn by `rich`; a terminal without control codes (`TERM=dumb`) shows nothing.

    Standard output and error are not replaced, since the traced function may redirect them.
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
        """The terminal's width without the spinner and a space."""
        return self._console.width - 2

    def draw(self, line: str) -> None:
        """Show the line after a spinner, cut at the terminal's width."""
        frame = self._spinner.render(time.perf_counter())
        assert isinstance(frame, Text)
        self._live.update(Text.assemble(frame, " ", line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def clear(self) -> None:
        """Erase the line and return the cursor to its start."""
        self._live.stop()


class Notebook:
    """One plain-text output of the running cell, updated for each line and left empty at the end.

    A kernel can update an output, but cannot remove it without removing all others of the cell. `rich` is not used:
    in notebooks it needs widgets, and warns if there are none.
    """

    width = None

    def __init__(self) -> None:
        """Show nothing yet."""
        self._handle: Any = None
        self._cell, self._line = -1, ""

    def draw(self, line: str) -> None:
        """Show the line, unless it is shown already."""
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
    """A file or pipe, from which no line can be removed: at most one line every ten seconds is written.

    The first is written after ten seconds, so that shorter work writes nothing.
    """

    width = None

    def __init__(self, write: Callable[[str], object]) -> None:
        """Pass each line to `write`."""
        self._write = write
        self._last_s = time.monotonic()

    def draw(self, line: str) -> None:
        """Write the line, if ten seconds have passed since the last."""
        if time.monotonic() - self._last_s >= EVERY_S:
            self._last_s = time.monotonic()
            self._write(line)

    def clear(self) -> None:
        """Do nothing: written lines stay."""


def kernel_shell() -> Any:
    """IPython's shell if a kernel runs it, as in notebooks, else None; IPython is not imported."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_ipython is None else get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


def is_open(file: Any) -> bool:
    """Whether a stream, or an object that replaces it, can be written to."""
    return not getattr(file, "closed", False) and hasattr(file, "write")


def is_terminal(file: Any) -> bool:
    """Whether a stream is an open terminal."""
    isatty = getattr(file, "isatty", None) if is_open(file) else None
    return isatty is not None and bool(isatty())
