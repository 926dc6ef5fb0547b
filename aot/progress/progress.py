"""Tell the user which stage runs and how long it has run.

    with Stage("trace", name) as now:
        program = joint(...)
        now.ends(lambda: f"traced in {now}, {len(program.eqns)} equations")

A stage that ends without an error is one line of the logger `jointcut` at INFO; its text stands where the stage is. One
that lasts longer than half a second is shown while it runs, with a time that ticks by itself: on one line of a
terminal, through `rich`, or in an output of a notebook's cell. The line goes when the stage ends. Where standard error
is neither, as in a batch job, a stage that lasts writes a line every ten seconds: to the logger where somebody reads
that at INFO, else to standard error. Texts are functions: a log that nobody reads and a display that nobody sees cost
no formatting.

One thread of its own draws, for all threads that run stages, and calls no JAX; a stage that ends takes the line away
itself, so that whatever its thread writes next begins on a clean line.
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

#: The environment variable that switches the display off, and what it is set to then.
VARIABLE, _OFF = "JOINTCUT_PROGRESS", ("0", "false", "no", "off")

Kind = Literal["trace", "cut", "inside", "search", "compile", "weigh", "check", "export", "load", "measure"]

#: What is said of each kind of stage while it runs, and when it has ended.
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
}

_DELAY_S = 0.5  # that a stage runs before it is shown
_TICK_S = 0.125
_IDLE_S = 2.0  # after which the thread that draws ends

Text = Callable[[], str]


# ----------------------------------------------------------------------------------------------------------- stages


class Stage:
    """One stage of one function: a context manager, which tells how long it has run.

    Entered and left on one thread. Inside another stage of that thread it is shown behind that one.
    """

    def __init__(self, kind: Kind, name: str) -> None:
        """`kind` is one of `WORDS`, `name` what the user calls that which is traced, compiled or measured."""
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
        _DISPLAY.running[thread] = self  # last, since an interrupt before it leaves nothing to undo
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        self._taken_s = time.perf_counter() - self._start_s
        _DISPLAY.end(self)
        line, self._line, self.at = self._line, None, None  # texts hold programs, and this stage
        if error_type is not None:
            return
        done = WORDS[self.kind][1]
        self.earlier[done] = self.earlier.get(done, 0.0) + self._taken_s
        if _LOG.isEnabledFor(logging.INFO):
            with _DISPLAY.quiet():
                _LOG.info("%s: %s", self.name, f"{done} in {self}" if line is None else line(), stacklevel=2)

    @property
    def seconds(self) -> float:
        """How long it has run, or ran."""
        return time.perf_counter() - self._start_s if self._taken_s is None else self._taken_s

    def __str__(self) -> str:
        """`0.52 s`, `12.3 s`."""
        return f"{self.seconds:.2f} s" if self.seconds < 1 else f"{self.seconds:.1f} s"

    def says(self, at: Text) -> None:
        """Tell at what the stage is now; shown behind its name."""
        self.at = at

    def ends(self, line: Text) -> None:
        """Tell what came out: the line of the log, without the name. By default `compiled in 3.4 s`, or its like."""
        self._line = line

    def chain(self) -> list[Stage]:
        """The stages around this one and itself, the outermost first."""
        return [self] if self.outer is None else [*self.outer.chain(), self]


def tell(at: Text) -> None:
    """Tell at what the innermost stage of this thread is now; nothing is said outside of stages."""
    if (inner := _DISPLAY.running.get(threading.get_ident())) is not None:
        inner.says(at)


_here = threading.local()  # the name that this thread's last stage bore, and the seconds of those that ended


def _earlier(stage: Stage) -> dict[str, float]:
    """The seconds of the stages that this function went through before on this thread; a trace begins anew."""
    if stage.kind == "trace" or getattr(_here, "name", None) != stage.name:
        _here.name, _here.ended = stage.name, {}
    return _here.ended


def size(num_bytes: float) -> str:
    """A number of bytes in decimal units.

    >>> size(47_213_000), size(999)
    ('47.2 MB', '999 bytes')
    """
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if num_bytes >= u), (1, "bytes"))
    return f"{num_bytes / unit:.1f} {name}" if unit > 1 else f"{num_bytes:.0f} bytes"


# -------------------------------------------------------------------------------------------------------- the switch


class Switch:
    """What `progress` returns: as a context manager it puts the display back to what it was."""

    def __init__(self, on: bool, before: bool | None) -> None:
        """Use `progress`."""
        self._on, self._before = on, before

    def __repr__(self) -> str:
        """`<progress on>`."""
        return f"<progress {'on' if self._on else 'off'}>"

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        _DISPLAY.switch(self._before)


def progress(on: bool) -> Switch:
    """Show in this process which stage runs, or do not: from now on, or inside a `with`.

        aot.progress(False)
        with aot.progress(False):
            loss.value_and_grad(params, batch)

    On, which is the default, it is one line in terminals and notebooks, which goes when the stage ends; elsewhere a
    stage that lasts writes a line every ten seconds to standard error, or to the logger `jointcut` where that is read
    at INFO. The environment variable `JOINTCUT_PROGRESS=0` switches it off as well, and this function goes before
    that. Raises `CallError` where `on` is no bool.
    """
    given: Any = on
    if not isinstance(given, bool):
        raise CallError(message("progress", f"was given {on!r}.", "Give True or False."))
    return Switch(on, _DISPLAY.switch(on))


# -------------------------------------------------------------------------------------------------------- the display


class _Display:
    """What is shown of the stages of all threads: one line, drawn by a thread of its own.

    What is drawn is decided while the lock is held, and a stage is no longer `running` when it asks for the lock to
    take the line away: nothing is drawn of a stage that has ended.
    """

    def __init__(self) -> None:
        self.running: dict[int, Stage] = {}  # the innermost stage of each thread
        self.wanted: bool | None = None
        self.lock = threading.RLock()
        self.screen: Screen | None = None
        self.shown: Stage | None = None  # the outermost stage of what the screen shows
        self.quiet_count = 0
        self.notebook = Notebook()
        self.due: list[str] = []  # lines that are to be written where nothing is drawn
        self.ticker: threading.Thread | None = None
        self.closed = threading.Event()

    def switch(self, wanted: bool | None) -> bool | None:
        """Show from now on, or do not, or leave it to the environment; returns what was before."""
        with self.lock:
            before, self.wanted = self.wanted, wanted
            self.clear()
        return before

    def is_seen(self) -> bool:
        """Whether there is somebody to look, who wants to."""
        if self.wanted is False or (self.wanted is None and os.environ.get(VARIABLE, "").lower() in _OFF):
            return False
        return kernel_shell() is not None or is_open(sys.stderr) or _is_logged()

    def watch(self) -> None:
        """See to it that stages are drawn once they last."""
        if self.ticker is not None or not self.is_seen() or self.closed.is_set():
            return
        with self.lock, suppress(RuntimeError):  # no thread can be started any more
            if self.ticker is None:
                ticker = threading.Thread(target=self._tick, name="jointcut-progress", daemon=True)
                ticker.start()
                self.ticker = ticker

    def end(self, stage: Stage) -> None:
        """Put down a stage, and take its line away."""
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
        """Show nothing while somebody writes; the lock is not held meanwhile, whatever the writing waits for."""
        with self.lock:
            self.clear()
            self.quiet_count += 1
        try:
            yield
        finally:
            with self.lock:
                self.quiet_count -= 1

    def clear(self) -> None:
        """Take the line away, if there is one."""
        with self.lock:
            screen, self.screen, self.shown = self.screen, None, None
            if screen is not None:
                self._tried(screen.clear)

    def close(self) -> None:
        """End the display with the process: nothing may be written while the interpreter is taken down."""
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
            for line in due:  # the lock is not held, whatever a handler of the log waits for
                self._tried(lambda line=line: _written(line))

    def _draw(self, stages: Sequence[Stage]) -> None:
        if not stages or self.quiet_count or not self.is_seen():
            self.clear()
            return
        kind = Notebook if kernel_shell() is not None else Terminal if is_terminal(sys.stderr) else Lines
        if not isinstance(self.screen, kind):  # nothing was drawn yet, or somebody has put another file in its place
            self.clear()
            self.screen = self._new_screen(kind)
        self.shown = stages[0].chain()[0]
        screen, line = self.screen, text(stages, self.screen.width)
        self._tried(lambda: screen.draw(line))

    def _new_screen(self, kind: type[Screen]) -> Screen:
        if kind is Notebook:
            return self.notebook
        return Terminal(sys.stderr) if kind is Terminal else Lines(self.due.append)

    def _tried(self, write: Callable[[], None]) -> None:
        """Write, and never again where the terminal has gone or cannot take it: no stage fails for that."""
        try:
            write()
        except (OSError, ValueError):
            self.screen, self.shown, self.wanted = None, None, False


def lasting(stages: Sequence[Stage]) -> list[Stage]:
    """Of the innermost stages those that have lasted, or whose outermost stage has: the longest running first."""
    found = [(s.chain()[0].seconds, s) for s in stages]
    return [s for seconds, s in sorted(found, key=lambda f: -f[0]) if seconds >= _DELAY_S]


def text(stages: Sequence[Stage], width: int | None = None) -> str:
    """What is shown of the innermost stages of all threads.

    `jointcut: loss: searching (attempt 2 of at most 10), 4 s: compiling, 3 s (cut 0.0 s)`. Where that is longer than
    `width` it tells nothing of stages that have ended, and if need be its middle is left out: the end says what runs.
    """
    first = stages[0]
    ended = ", ".join(f"{done} {seconds:.1f} s" for done, seconds in list(first.earlier.items()))
    others = f"; {len(stages) - 1} more" if len(stages) > 1 else ""
    now = ": ".join(["jointcut", *_parts(first)])
    whole = now + (f" ({ended})" if ended else "") + others
    return whole if width is None or len(whole) <= width else shortened(now + others, width)


def shortened(line: str, width: int) -> str:
    """A line of at most so many characters, without its middle where it has more.

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
    """Whether somebody reads what is logged."""
    return _LOG.isEnabledFor(logging.INFO) and _LOG.hasHandlers()


def _written(line: str) -> None:
    """Put a line where somebody reads it; raises `OSError` or `ValueError` where that cannot be done."""
    if _is_logged():
        _LOG.info("%s", line.removeprefix("jointcut: "))
    elif is_open(sys.stderr):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


_DISPLAY = _Display()
atexit.register(_DISPLAY.close)
