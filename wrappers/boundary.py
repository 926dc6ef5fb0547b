"""Take our frames out of the traceback of an error that is the user's.

A traceback leads from the user's call to the user's line that failed, as if nothing stood between. JAX does so with its
own frames. `JOINTCUT_TRACEBACK=full`, or `JAX_TRACEBACK_FILTERING=off`, keeps all frames. So does a fault of ours: an
error that one of our lines raises, and that is neither ours nor JAX's by its class.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

import jax

from jointcut.partition.errors import JointcutError, VerifyError
from jointcut.partition.program.places import our_folders

P = ParamSpec("P")
T = TypeVar("T")

VARIABLE = "JOINTCUT_TRACEBACK"
NOTE = f"jointcut has taken its frames out of this traceback; {VARIABLE}=full shows them."

_JAX = str(Path(jax.__file__).parent) + os.sep
_BETWEEN = (contextlib.__file__, functools.__file__)  # what our frames enter, and cached properties


class Boundary:
    """A context, which may be entered any number of times: errors that leave it have no frames of ours."""

    def __enter__(self) -> None:
        """Enter."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Shorten the traceback of an error; Python re-raises it without adding the frame of the `with` again."""
        if not isinstance(error, Exception) or not _is_wanted() or _is_fault(error):
            return
        for each in _chain(error):
            each.with_traceback(_shortened(each.__traceback__))
        if not isinstance(error, JointcutError) and NOTE not in getattr(error, "__notes__", ()):
            error.add_note(NOTE)


BOUNDARY = Boundary()


def bounded(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose errors have no frames of ours."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with BOUNDARY:
            return function(*args, **kwargs)

    return call


def bounded_class(*apart: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes the public methods of a class, and its `__call__`, `bounded` ones.

    Methods in `apart` stay as they are: they are called often, and enter the `BOUNDARY` where they are slow anyway.
    """

    def changed(kind: type[T]) -> type[T]:
        for name, method in list(vars(kind).items()):
            is_public = name == "__call__" or not name.startswith("_")
            if is_public and name not in apart and inspect.isfunction(method):
                setattr(kind, name, bounded(method))
        return kind

    return changed


def users_frame() -> FrameType:
    """Return the innermost frame that is neither ours nor JAX's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_hidden(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_hidden(file: str) -> bool:
    """Whether a source file is ours or JAX's."""
    return file.startswith((*our_folders(), _JAX))


def _is_wanted() -> bool:
    mode: Any = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    return os.environ.get(VARIABLE) != "full" and mode != "off"


def _is_fault(error: BaseException) -> bool:
    """Whether an error comes from one of our own lines, and no class says that the user is to be told."""
    if isinstance(error, JointcutError):
        return isinstance(error, VerifyError)
    if type(error).__module__.split(".")[0] in ("jax", "jaxlib"):
        return False
    files = [part.tb_frame.f_code.co_filename for part in _parts(error.__traceback__)]
    last = next((file for file in reversed(files) if not file.startswith(_JAX)), "")
    return last.startswith(our_folders())


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from or while handling."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [each.__cause__, each.__context__]


def _shortened(tb: TracebackType | None) -> TracebackType | None:
    """Return a traceback without frames of ours, of JAX, and of what stands between these."""
    kept: list[TracebackType] = []
    is_inside = False
    for part in _parts(tb):
        file = part.tb_frame.f_code.co_filename
        is_inside = _is_hidden(file) or (is_inside and file in _BETWEEN)
        if not is_inside:
            kept.append(part)
    last = None
    for part in reversed(kept):
        last = TracebackType(last, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return last


def _parts(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next
