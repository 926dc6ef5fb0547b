"""Show the user which stage runs and how long it has run.

    with Stage("trace", name) as now:
        program = joint(...)
        now.ends(lambda: f"traced in {now}, {len(program.eqns)} equations")

A stage that ends without an error logs one line at INFO to the logger `jointcut`. A stage that lasts longer than half a
second is shown with a running time, on one line of a terminal (through `rich`) or in an output of a notebook's cell.
The line is removed when the stage ends. If standard error is not a terminal, as in a batch job, a line is written every
ten seconds: to the logger if its INFO records are handled, else to standard error. Texts are passed as functions, so
that they are formatted only when shown.

One background thread draws for all threads that run stages, and does not call JAX. A stage that ends removes the line
itself, so that the next output of its thread begins on an empty line.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from jointcut.aot.progress.screens import Lines, Notebook, Screen, Terminal, is_open, is_terminal, kernel_shell
from jointcut.partition.errors import CallError, message

_LOG = logging.getLogger("jointcut")

#: The environment variable that switches the display off, and its values for off.
VARIABLE, _OFF = "JOINTCUT_PROGRESS", ("0", "false", "no", "off")

Kind = Literal[
    "trace", "cut", "inside", "search", "compile", "weigh", "check", "export", "load", "measure", "capture", "agree"
]

#: The words for each kind of stage while it runs, and when it has ended.
WORDS: dict[Kind, tuple[str, str]] = {
    "trace": ("tracing", "traced"),
    "cut": ("cutting", "cut"),
    "inside": ("cutting inside a transformation", "cut inside a transformation"),
    "search": ("searching", "searched"),
    "compile": ("compiling", "compiled"),
    "weigh": ("weighing plans", "weighed"),
    "check": ("checking", "checked"),
    "export": ("exporting", "exported"),
    "load": ("loading", "loaded"),
    "measure": ("measuring", "measured"),
    "capture": ("capturing the backward", "captured the backward"),
    "agree": ("agreeing with other processes", "agreed with other processes"),
}

_DELAY_S = 0.5  # a stage is shown after this time
_TICK_S = 0.125
_IDLE_S = 2.0  # the drawing thread ends after this time without stages

Text = Callable[[], str]


# ----------------------------------------------------------------------------------------------------------- stages


class Stage:
    """One stage of one function: a context manager that measures its time.

    It must be entered and left on one thread. A stage inside another one is shown after it.
    """

    def __init__(self, kind: Kind, name: str) -> None:
        """`kind` is one of `WORDS`, `name` the user's name of the function."""
        self.kind: Kind = kind
        self.name = name
        self.outer: Stage | None = None
        self.at: Text | None = None
        self.earlier: dict[str, float] = {}
        self._inner: dict[str, float] = {}
        self._line: Text | None = None
        self._start_s = 0.0
        self._taken_s: float | None = None

    def __enter__(self) -> Stage:
        thread = threading.get_ident()
        self._start_s = time.perf_counter()
        self.outer = _DISPLAY.running.get(thread)
        self.earlier = _earlier(self) if self.outer is None else self.outer._inner
        _DISPLAY.watch()
        _DISPLAY.running[thread] = self  # last, so that an interrupt before it leaves nothing to undo
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        self._taken_s = time.perf_counter() - self._start_s
        _DISPLAY.end(self)
        line, self._line, self.at = self._line, None, None  # release the programs that the texts refer to
        if error_type is not None:
            return
        done = WORDS[self.kind][1]
        self.earlier[done] = self.earlier.get(done, 0.0) + self._taken_s
        if _LOG.isEnabledFor(logging.INFO):
            with _DISPLAY.quiet():
                _LOG.info("%s: %s", self.name, f"{done} in {self}" if line is None else line(), stacklevel=2)

    @property
    def seconds(self) -> float:
        """Seconds since the start, or the total once it has ended."""
        return time.perf_counter() - self._start_s if self._taken_s is None else self._taken_s

    def __str__(self) -> str:
        """`0.52 s`, `12.3 s`."""
        return f"{self.seconds:.2f} s" if self.seconds < 1 else f"{self.seconds:.1f} s"

    def says(self, at: Text) -> None:
        """Set the text after the stage's name, which says what it does now."""
        self.at = at

    def ends(self, line: Text) -> None:
        """Set the line of the log, without the name; the default is like `compiled in 3.4 s`."""
        self._line = line

    def chain(self) -> list[Stage]:
        """Return the enclosing stages and this one, outermost first."""
        return [self] if self.outer is None else [*self.outer.chain(), self]


def tell(at: Text) -> None:
    """Set the text of this thread's innermost stage; outside of stages, do nothing."""
    if (inner := _DISPLAY.running.get(threading.get_ident())) is not None:
        inner.says(at)


_here = threading.local()  # the name of this thread's last stage, and the seconds of its ended stages


def _earlier(stage: Stage) -> dict[str, float]:
    """Return the seconds of earlier stages of this function on this thread; a trace starts a new list."""
    if stage.kind == "trace" or getattr(_here, "name", None) != stage.name:
        _here.name, _here.ended = stage.name, {}
    return _here.ended


# -------------------------------------------------------------------------------------------------------- the switch


class Switch:
    """The return value of `progress`: as a context manager, it restores the previous setting."""

    def __init__(self, on: bool, before: bool | None) -> None:
        """Call `progress` instead."""
        self._on, self._before = on, before

    def __repr__(self) -> str:
        """`<progress on>`."""
        return f"<progress {'on' if self._on else 'off'}>"

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        _DISPLAY.switch(self._before)


def progress(on: bool) -> Switch:
    """Switch the display of running stages on or off in this process: from now on, or inside a `with`.

        aot.progress(False)
        with aot.progress(False):
            loss.value_and_grad(params, batch)

    The default is on. Terminals and notebooks show one line, which is removed when the stage ends. Elsewhere a line is
    written every ten seconds to standard error, or to the logger `jointcut` if its INFO records are handled. The
    environment variable `JOINTCUT_PROGRESS=0` switches the display off too; this function overrides it. Raises
    `CallError` if `on` is not a bool.
    """
    value: Any = on
    if not isinstance(value, bool):
        raise CallError(message("progress", f"was given {on!r}.", "Give True or False."))
    return Switch(on, _DISPLAY.switch(on))


# -------------------------------------------------------------------------------------------------------- the display


class _Display:
    """One line for the stages of all threads, drawn by a background thread.

    Drawing holds the lock. A stage leaves `running` before it takes the lock to remove the line, so that no ended stage
    is drawn.
    """

    def __init__(self) -> None:
        self.running: dict[int, Stage] = {}  # the innermost stage of each thread
        self.wanted: bool | None = None
        self.lock = threading.RLock()
        self.screen: Screen | None = None
        self.shown: Stage | None = None  # the outermost stage on the screen
        self.quiet_count = 0
        self.notebook = Notebook()
        self.due: list[str] = []  # lines to write to a file or log
        self.ticker: threading.Thread | None = None
        self.closed = threading.Event()

    def switch(self, wanted: bool | None) -> bool | None:
        """Show stages, hide them, or follow the environment (None); return the previous setting."""
        with self.lock:
            previous, self.wanted = self.wanted, wanted
            self.clear()
        return previous

    def is_seen(self) -> bool:
        """Whether the display is on and has somewhere to write."""
        if self.wanted is False or (self.wanted is None and os.environ.get(VARIABLE, "").lower() in _OFF):
            return False
        return kernel_shell() is not None or is_open(sys.stderr) or _is_logged()

    def watch(self) -> None:
        """Start the drawing thread, if stages are shown and it does not run yet."""
        if self.ticker is not None or not self.is_seen() or self.closed.is_set():
            return
        with self.lock, suppress(RuntimeError):  # the interpreter shuts down and starts no thread
            if self.ticker is None:
                ticker = threading.Thread(target=self._tick, name="jointcut-progress", daemon=True)
                ticker.start()
                self.ticker = ticker

    def end(self, stage: Stage) -> None:
        """Remove a stage and its line."""
        thread = threading.get_ident()
        if stage.outer is not None:
            self.running[thread] = stage.outer
            return
        del self.running[thread]
        if self.ticker is not None:
            with self.lock:
                if self.shown is stage:
                    self.clear()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Show nothing inside the `with`; the lock is not held there, since writing may wait for another thread."""
        with self.lock:
            self.clear()
            self.quiet_count += 1
        try:
            yield
        finally:
            with self.lock:
                self.quiet_count -= 1

    def clear(self) -> None:
        """Remove the line, if there is one."""
        with self.lock:
            screen, self.screen, self.shown = self.screen, None, None
            if screen is not None:
                self._try(screen.clear)

    def close(self) -> None:
        """End the display: nothing may be written while the interpreter shuts down."""
        self.closed.set()
        self.clear()

    def _tick(self) -> None:
        idle_s = 0.0
        while True:
            time.sleep(_TICK_S)
            with self.lock:
                idle_s = 0.0 if self.running else idle_s + _TICK_S
                if idle_s >= _IDLE_S or self.closed.is_set():
                    self.ticker = None
                    return
                self._draw(lasting(list(self.running.values())))
                due = self.due.copy()
                self.due.clear()
            for line in due:  # without the lock, since a log handler may wait for another thread
                self._try(lambda line=line: _write_line(line))

    def _draw(self, stages: Sequence[Stage]) -> None:
        if not stages or self.quiet_count or not self.is_seen():
            self.clear()
            return
        kind = Notebook if kernel_shell() is not None else Terminal if is_terminal(sys.stderr) else Lines
        if not isinstance(self.screen, kind):  # nothing was drawn yet, or standard error was replaced
            self.clear()
            self.screen = self._new_screen(kind)
        self.shown = stages[0].chain()[0]
        screen, line = self.screen, text(stages, self.screen.width)
        self._try(lambda: screen.draw(line))

    def _new_screen(self, kind: type[Screen]) -> Screen:
        if kind is Notebook:
            return self.notebook
        return Terminal(sys.stderr) if kind is Terminal else Lines(self.due.append)

    def _try(self, write: Callable[[], None]) -> None:
        """Write, and switch the display off if writing fails, so that no stage fails."""
        try:
            write()
        except (OSError, ValueError):
            self.screen, self.shown, self.wanted = None, None, False


def lasting(stages: Sequence[Stage]) -> list[Stage]:
    """Return the innermost stages whose outermost stage runs for at least half a second, longest first."""
    timed = [(s.chain()[0].seconds, s) for s in stages]
    return [s for seconds, s in sorted(timed, key=lambda pair: -pair[0]) if seconds >= _DELAY_S]


def text(stages: Sequence[Stage], width: int | None = None) -> str:
    """Return the line for the innermost stages of all threads.

    For example `jointcut: loss: searching (attempt 2 of at most 10), 4 s: compiling, 3 s (cut 0.0 s)`. A line longer
    than `width` omits the ended stages, and if necessary its middle, since its end names the running stage.
    """
    first = stages[0]
    ended = ", ".join(f"{done} {seconds:.1f} s" for done, seconds in list(first.earlier.items()))
    others = f"; {len(stages) - 1} more" if len(stages) > 1 else ""
    now = ": ".join(["jointcut", *_parts(first)])
    whole = now + (f" ({ended})" if ended else "") + others
    return whole if width is None or len(whole) <= width else shortened(now + others, width)


def shortened(line: str, width: int) -> str:
    """Shorten a line to `width` characters by leaving out its middle.

    >>> shortened("jointcut: the loss: tracing, 4 s", 24)
    'jointc...s: tracing, 4 s'
    """
    if len(line) <= width:
        return line
    head = width // 4
    return f"{line[:head]}...{line[head + 3 + len(line) - width :]}"


def _parts(stage: Stage) -> Iterator[str]:
    name = ""
    for s in stage.chain():
        if s.name != name:
            yield s.name
        name, at = s.name, "" if s.at is None else f" ({s.at()})"
        yield f"{WORDS[s.kind][0]}{at}, {int(s.seconds)} s"


def _is_logged() -> bool:
    """Whether INFO records are handled."""
    return _LOG.isEnabledFor(logging.INFO) and _LOG.hasHandlers()


def _write_line(line: str) -> None:
    """Write a line to the log if it is read, else to standard error; raises `OSError` or `ValueError` if that fails."""
    if _is_logged():
        _LOG.info("%s", line.removeprefix("jointcut: "))
    elif is_open(sys.stderr):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


_DISPLAY = _Display()
atexit.register(_DISPLAY.close)
