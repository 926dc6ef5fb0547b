"""Call a jitted function, and look closer where its arguments ask for it.

The call path costs what it costs `jax.jit`, until a program meets what that does not take: an array that stands twice
among the arguments, which then enters a program of its own once, or an object that can give its array. From then on it
looks for such at each call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jointcut.aot import pipeline
from jointcut.aot.progress import Stage
from jointcut.partition import jaxprs
from jointcut.partition.errors import JointcutError
from jointcut.wrappers.table import Table
from jointcut.wrappers.tree import Bound, Statics, bind, duplicates

KEPT_SIGNATURES = 256


class _Pending(threading.local):
    """What is under way on this thread: the arguments of a call, for the trace that it may set off, and the stage
    that began when that trace ended.
    """

    call: Any = None
    compiling: Stage | None = None


_pending = _Pending()


class _Twice(Exception):
    """Raised while a program is traced for arguments among which an array stands twice."""


class Jitted:
    """A jitted function that says by the user's path which argument it cannot take.

    `front` arguments come before the user's own; `options` are those of `jax.jit`.
    """

    def __init__(
        self, run: Callable[..., Any], name: str, statics: Statics, front: int, options: dict[str, Any]
    ) -> None:
        """Jit `run`, which is compiled at its first call."""
        self.program = jax.jit(self._traced, **options)
        self.run, self.name, self.statics, self.front, self.options = run, name, statics, front, options
        self.looks_closer = False
        self.deduplicated: Table[Callable[..., Any]] = Table(KEPT_SIGNATURES)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program, or the one for the places where an array stands twice."""
        if self.looks_closer:
            return self._closer(args, kwargs)
        _pending.call = args[self.front :], kwargs
        try:
            result = self.program(*args, **kwargs)
            if _pending.compiling is not None:
                _compiled(None)
            return result
        except _Twice:
            return self._closer(args, kwargs)
        except JointcutError:
            raise
        except jax.errors.JAXTypeError as error:
            pipeline.note(error, self.name)
            raise
        except (TypeError, ValueError):
            bound = bind(args[self.front :], kwargs, self.statics)
            if not bound.has_objects and not bound.duplicates:
                raise
        finally:
            _pending.call = None
            if _pending.compiling is not None:
                _compiled(JointcutError)
        return self._closer(args, kwargs)

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        """Run in a trace; from its end until the call returns, the program is compiled."""
        result = self.run(*args, **kwargs)
        if _pending.compiling is None and _pending.call is not None and jaxprs.tracing():
            _pending.compiling = Stage("compile", self.name).__enter__()
        return result

    def _closer(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run with the arrays of objects, and each array once."""
        self.looks_closer, _pending.call = True, None
        front, bound = args[: self.front], bind(args[self.front :], kwargs, self.statics)
        if not bound.duplicates:
            given, named = bound.rebuild(bound.leaves)
            return self.program(*front, *given, **named)
        key = (bound.tree, bound.places, bound.statics)
        return self.deduplicated.of(key, lambda: self._once_each(bound))(front, bound.unique)

    def _once_each(self, bound: Bound) -> Callable[..., Any]:
        """The program for the places where arrays stand in a call."""
        empty, places = replace(bound, leaves=()), bound.places  # no array is kept alive

        def run(front: Sequence[Any], unique: Sequence[Any]) -> Any:
            given, named = empty.rebuild([unique[p] for p in places])
            return self.run(*front, *given, **named)

        kept = {k: v for k, v in self.options.items() if k in ("keep_unused", "compiler_options")}
        return jax.jit(run, **kept)


def _compiled(error_type: type[BaseException] | None) -> None:
    """End the stage that began when a trace ended."""
    stage, _pending.compiling = _pending.compiling, None
    if stage is not None:
        stage.__exit__(error_type)


def refuse_twice() -> None:
    """Stop a trace that was set off by a call in which an array stands twice: that one has a program of its own."""
    if _pending.call is not None and duplicates(jax.tree.leaves(_pending.call)):
        raise _Twice
