"""Look at the results of every call, and find the op that made one of them NaN.

This is `aot.function(check="nonfinite")`. The programs of a call are unchanged. A second small program says whether
all their results are finite, and the call waits for that one number. If they are not, the call is replayed as in debug
mode (see `debug`), half by half with the same arrays, and the error tells the whole story.

The call that made the NaN raises, before it hands out its results. Later is too late: by then the caller may have
donated or overwritten the arguments, and a replay needs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.aot.run.runnable import Runnable
from jointcut.aot.run.runner import Programs, Runner
from jointcut.aot.run.unchecked import Unchecked
from jointcut.aot.stages.cures.found import NonFinite
from jointcut.aot.stages.cures.trials import has_nan, why_not_again
from jointcut.aot.stages.debug import Checked
from jointcut.partition.program.jax import abstract, runtime
from jointcut.wrappers.built_in.checks import first_nonfinite
from jointcut.wrappers.metadata.convention import is_inexact

_NOT_KEPT = "the backward does not have the arguments of its call. aot.first_nonfinite takes them, and tries."


def watched(runner: Runner, made: Callable[[], Runnable], unchecked: Unchecked) -> Runner:
    """Return a runner of the same programs that raises `NonFiniteError` for a NaN, or for an infinity that they made.

    `made` makes the programs that are replayed. `unchecked` warns of calls inside a transformation.
    """
    watch = _Watch(runner, made, unchecked)
    return replace(runner, programs=Programs(watch.run, watch.backward, runner.programs.takes_zeros, watch.ready))


@dataclass(frozen=True)
class _Watch:
    """Programs whose results are looked at."""

    runner: Runner
    made: Callable[[], Runnable]
    unchecked: Unchecked
    _tests: dict[str, _Test] = field(default_factory=dict)

    def run(self, which: str, flat: Sequence[Any]) -> Sequence[Any]:
        """Run a program as `Programs.run` does."""
        results = self.runner.programs.run(which, flat)
        count = len(self.runner.call.results.avals) - len(self.runner.handed_back)
        self._look(which, flat, results[:count] if which == "forward" else results)
        return results

    def ready(self, name: str) -> Callable[..., Sequence[Any]] | None:
        """Return a program as `Programs.ready` does."""
        program = self.runner.programs.ready(name)
        if program is None:
            return None

        def call(*flat: Any) -> Sequence[Any]:
            results = program(*flat)
            self._look(name, flat, results)
            return results

        return call

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any | None], keep: bool) -> Sequence[Any]:
        """Run the backward as `Programs.backward` does; residuals are always kept, for the replay."""
        del keep
        gradients = self.runner.programs.backward(residuals, cotangents, True)
        if not self._is_fine("backward", gradients):
            self._replay_backward(residuals, cotangents, gradients)
        return gradients

    def _look(self, which: str, flat: Sequence[Any], results: Sequence[Any]) -> None:
        if self._is_fine(which, results):
            return
        made, count = self.made(), len(self.runner.call.results.avals) - len(self.runner.handed_back)
        half = "forward" if any(map(has_nan, results[:count])) else "backward"
        if why := why_not_again(made.trace):
            note = f"returns a NaN, and the call is not replayed to find the op: {why}"
        else:
            flat = [*made.trace.consts, *flat[len(self.runner.consts) :]]
            Checked(made.trace, made.split, made.jits).run(which, flat)
            note = "returned a NaN, and none when it ran once more, half by half."
        self._end(which, results, NonFinite(self.runner.call.name, half, note=note))

    def _replay_backward(
        self, residuals: Sequence[Any], cotangents: Sequence[Any | None], gradients: Sequence[Any]
    ) -> None:
        split, call = self.made().split, self.runner.call
        flat = [*residuals, *call.filled(cotangents)]
        found = NonFinite(call.name, "backward", untried=_NOT_KEPT)
        fits = [jax.typeof(x).shape for x in flat] == [s.shape for s in abstract.input_structs(split.backward)]
        culprit = first_nonfinite(split.backward, flat) if fits else None
        if culprit is not None:
            replace(found, culprit=culprit).refuse()
        bad = [f"residual {i}" for i, x in enumerate(residuals) if has_nan(x)]
        bad += [f"cotangent {i}" for i, x in enumerate(cotangents) if x is not None and has_nan(x)]
        self._end("backward", gradients, replace(found, came_in=bad[0] if bad else ""))

    def _end(self, which: str, results: Sequence[Any], found: NonFinite) -> None:
        """Raise if there is a NaN; else the infinities are the user's own, and are not looked at again."""
        if any(map(has_nan, results)):
            found.refuse()
        test = self._tests[which]
        infinite = [i for i in test.floats if not bool(_test((False,))(results[i]))]
        self._tests[which] = replace(test, theirs=test.theirs.union(infinite))

    def _is_fine(self, which: str, results: Sequence[Any]) -> bool:
        test = self._tests.get(which)
        if test is None:
            test = self._tests[which] = _Test(tuple(i for i, x in enumerate(results) if _is_float(x)))
        if not test.floats:
            return True
        floats = [results[i] for i in test.floats]
        if any(map(runtime.is_tracer, floats)):
            self.unchecked()
            return True
        return bool(test.program(*floats))


@dataclass(frozen=True)
class _Test:
    """The test of one program's results: the positions of its floats, and of the floats that may be infinite."""

    floats: tuple[int, ...]
    theirs: frozenset[int] = frozenset()

    @functools.cached_property
    def program(self) -> Callable[..., jax.Array]:
        """A function that says whether all floats are fine."""
        return _test(tuple(i in self.theirs for i in self.floats))


@functools.lru_cache(maxsize=256)
def _test(allowed: tuple[bool, ...]) -> Callable[..., jax.Array]:
    """Return a program that says whether no array has a NaN, nor an infinity where that is not allowed."""

    def fine(*arrays: Any) -> jax.Array:
        wide = (x.astype(jnp.float32) if x.dtype.itemsize < 4 else x for x in arrays)  # narrow floats lack isnan
        pairs = zip(wide, allowed, strict=True)
        return jnp.stack([(~jnp.isnan(x) if may else jnp.isfinite(x)).all() for x, may in pairs]).all()

    return jax.jit(fine)


def _is_float(x: Any) -> bool:
    aval = jax.typeof(x)
    return abstract.is_plain(aval) and is_inexact(aval.dtype)
