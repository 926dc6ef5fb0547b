"""Call a jitted function, and look closer where its arguments ask for it.

The call path costs what it costs `jax.jit`, until a program meets what that does not take: an array that stands twice
among the arguments, an object that can give its array or that can be written, a leaf that is no array. From then on
each call is looked at, and its arrays alone enter a program, each once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jointcut.aot.blame import note
from jointcut.aot.joint import Results
from jointcut.aot.progress import Stage
from jointcut.partition import jaxprs
from jointcut.partition.errors import CallError, JointcutError, message
from jointcut.wrappers.table import Table
from jointcut.wrappers.tree import Bound, Statics, bind

KEPT_SIGNATURES = 256


class _Pending(threading.local):
    """What is under way on this thread: the arguments of a call, for the trace that it may set off, and the stage
    that began when that trace ended.
    """

    call: Any = None
    compiling: Stage | None = None


_pending = _Pending()


class _NotPlain(Exception):
    """Raised while a program is traced for arguments that `jax.jit` cannot take as they are."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pieces:
    """Flat results of a program whose caller puts them into trees, since objects stand among the arguments.

    Attributes:
        outputs: those of the function, states too; an alias stands for one that is handed back.
        rest: gradients, or the pullback.
        results: what the outputs are.
    """

    outputs: list[Any]
    rest: Any
    results: Results = field(metadata={"static": True})


class Jitted:
    """A jitted function that says by the user's path which argument it cannot take.

    `run` takes `front` arguments and a call that was bound to the user's parameters; `options` are those of `jax.jit`.
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
        """Run the program, or one that takes the arrays alone where something else stands among the arguments."""
        if self.looks_closer:
            return self._closer(args, kwargs)
        _pending.call = args[self.front :], kwargs
        try:
            result = self.program(*args, **kwargs)
            if _pending.compiling is not None:
                _compiled(None)
            return result
        except _NotPlain:
            return self._closer(args, kwargs)
        except JointcutError:
            raise
        except jax.errors.JAXTypeError as error:
            note(error, self.name)
            raise
        except (TypeError, ValueError):
            bound = bind(args[self.front :], kwargs, self.statics)
            if bound.is_plain:
                raise
        finally:
            _pending.call = None
            if _pending.compiling is not None:
                _compiled(JointcutError)
        return self._closer(args, kwargs)

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        """Run in a trace; from its end until the call returns, the program is compiled."""
        if _pending.call is not None:
            given, named = _pending.call
            if not bind(given, named, self.statics).is_plain:
                raise _NotPlain
        result = self.run(*args[: self.front], bind(args[self.front :], kwargs, self.statics))
        if _pending.compiling is None and _pending.call is not None and jaxprs.tracing():
            _pending.compiling = Stage("compile", self.name).__enter__()
        return result

    def _closer(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a program of the arrays alone, each once."""
        self.looks_closer, _pending.call = True, None
        front, bound = args[: self.front], bind(args[self.front :], kwargs, self.statics)
        if not (bound.duplicates or bound.holds_more):
            given, named = bound.rebuild(bound.leaves)
            return self.program(*front, *given, **named)
        key = (bound.tree, bound.places, bound.statics)
        return self.deduplicated.of(key, lambda: _Flat(self, bound))(front, bound.unique)


class _Flat:
    """A jitted program of the arrays of one call, each once."""

    def __init__(self, jitted: Jitted, bound: Bound) -> None:
        """Jit it for calls of the structure of `bound`; raises `CallError` where an object is donated."""
        self.donated = _donated(jitted, bound)
        empty, places = replace(bound, leaves=(), live=()), bound.places  # no array is kept alive

        def run(front: Sequence[Any], kept: Mapping[int, Any], given_up: Mapping[int, Any]) -> Any:
            unique = {**kept, **given_up}
            return jitted.run(*front, replace(empty, leaves=tuple(unique[p] for p in places)))

        self.program = jax.jit(run, donate_argnums=2, keep_unused=jitted.options.get("keep_unused", False))

    def __call__(self, front: Sequence[Any], unique: Sequence[Any]) -> Any:
        """Run it."""
        given_up = {p: x for p, x in enumerate(unique) if p in self.donated}
        return self.program(front, {p: x for p, x in enumerate(unique) if p not in self.donated}, given_up)


def _donated(jitted: Jitted, bound: Bound) -> frozenset[int]:
    """Places among the distinct arrays of those that a call gives up: never of one that stands twice."""
    positions = [n - jitted.front for n in jitted.options.get("donate_argnums", ())]
    leaves = bound.leaves_of(positions, jitted.options.get("donate_argnames", ()))
    for i in sorted(leaves & bound.in_objects):
        what = "belongs to an object that the function can write, and its argument is donated."
        cure = "Take it out of donate_argnums and donate_argnames: the object keeps the arrays that are not written."
        raise CallError(message(bound.paths()[i], what, cure))
    twice = {*bound.duplicates, *bound.duplicates.values()}
    return frozenset(bound.places[i] for i in leaves if i not in twice)


def _compiled(error_type: type[BaseException] | None) -> None:
    """End the stage that began when a trace ended."""
    stage, _pending.compiling = _pending.compiling, None
    if stage is not None:
        stage.__exit__(error_type)
