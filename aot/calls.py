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
from jointcut.partition.errors import JointcutError
from jointcut.wrappers.tree import Statics, bind, duplicates

KEPT_SIGNATURES = 256

_pending = threading.local()  # the arguments of the call that is under way, for the trace that it may set off


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
        self.program = jax.jit(run, **options)
        self.run, self.name, self.statics, self.front, self.options = run, name, statics, front, options
        self.looks_closer = False
        self.deduplicated: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program, or the one for the places where an array stands twice."""
        if self.looks_closer:
            return self._closer(args, kwargs)
        _pending.call = args[self.front :], kwargs
        try:
            return self.program(*args, **kwargs)
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
        return self._closer(args, kwargs)

    def _closer(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run with the arrays of objects, and each array once."""
        self.looks_closer, _pending.call = True, None
        front, bound = args[: self.front], bind(args[self.front :], kwargs, self.statics)
        if not bound.duplicates:
            given, named = bound.rebuild(bound.leaves)
            return self.program(*front, *given, **named)
        key = (bound.tree, bound.places, bound.statics)
        if key not in self.deduplicated:
            empty, places = replace(bound, leaves=()), bound.places  # no array is kept alive

            def run(front: Sequence[Any], unique: Sequence[Any]) -> Any:
                given, named = empty.rebuild([unique[p] for p in places])
                return self.run(*front, *given, **named)

            kept = {k: v for k, v in self.options.items() if k in ("keep_unused", "compiler_options")}
            keep(self.deduplicated, key, jax.jit(run, **kept))
        return self.deduplicated[key](front, bound.unique)


def refuse_twice() -> None:
    """Stop a trace that was set off by a call in which an array stands twice: that one has a program of its own."""
    call = getattr(_pending, "call", None)
    if call is not None and duplicates(jax.tree.leaves(call)):
        raise _Twice


def keep(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Remember a value, and forget the oldest where there are too many."""
    known[key] = value
    while len(known) > KEPT_SIGNATURES:
        known.pop(next(iter(known)))
