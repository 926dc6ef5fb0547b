"""Run a call half by half, and check types and numbers.

    with aot.debug():
        value, grads = loss.value_and_grad(params, batch)

Inside `aot.debug()` each call runs forward and backward as two programs. The types of their inputs and outputs are
compared with the types in the jaxprs. If a half makes a NaN or an infinity, the error names the first op that did, by
the user's source line, and its cure (see `cures`). This reads every result and compiles the halves again; outside
`aot.debug()` it costs nothing. Calls inside an outer `jax.jit` have no numbers yet and are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax

from jointcut.aot.progress.progress import Stage, tell
from jointcut.aot.run.jits import Jits
from jointcut.aot.stages.cures.found import NonFinite
from jointcut.aot.stages.cures.trials import FailedCall, has_nan
from jointcut.aot.trace.data import Trace
from jointcut.partition.errors import CallError, VerifyError, message
from jointcut.partition.lower import verify
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.split import Split
from jointcut.wrappers.arguments.tree import Bound, struct
from jointcut.wrappers.built_in import alias
from jointcut.wrappers.built_in.checks import first_nonfinite, is_finite

_on: ContextVar[bool] = ContextVar("jointcut_debug", default=False)
_REPORT = "This is a fault of jointcut or of XLA: please report the program that shows it."


@contextmanager
def debug() -> Iterator[None]:
    """Check every call of an `aot.function` or a `Compiled` made inside the `with`.

    Raises `NonFiniteError` (a `FloatingPointError`) at the first half that makes a NaN or an infinity; its `found` is
    the record that `aot.first_nonfinite` returns. Raises `CallError` if arguments or cotangents differ from those that
    a program was compiled for.
    """
    token = _on.set(True)
    try:
        yield
    finally:
        _on.reset(token)


def is_on() -> bool:
    """Whether calls are checked."""
    return _on.get()


@dataclass(frozen=True)
class _RunOfHalf:
    """One run of a half: its jaxpr, its flat inputs, and the user's names for them."""

    closed: Any
    flat: Sequence[Any]
    paths: Sequence[str]


@dataclass
class Checked:
    """The programs of one call, with checks of every result.

    Attributes:
        traced, split: the traced call, and its cut.
        jits: the two halves.
        forward: the run of the forward, once it has run.
        outputs: the results of the forward.
        cotangents: the cotangents of the outputs, once they are known.
    """

    traced: Trace
    split: Split
    jits: Jits
    forward: _RunOfHalf | None = None
    outputs: Sequence[Any] = ()
    cotangents: Sequence[Any] | None = None

    def run(self, which: str, flat: Sequence[Any]) -> list[Any]:
        """Run a program as `Programs.run` does; a step runs both halves."""
        ones = self.traced.call.ones() if which == "step" else []
        self.cotangents = ones or None
        count, left_out = len(self.traced.program.results.avals), len(self.traced.handed_back)
        with Stage("check", self.traced.name):
            results = self._forward(flat)
            if which == "step":
                residuals = verify.routed(self.split.halves.residuals, flat, self._restored(results, flat), count)
                results[count - left_out :] = self._backward(residuals, ones)
        return results[: count - left_out] if which == "alone" else results

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any | None], keep: bool) -> list[Any]:
        """Run the backward as `Programs.backward` does; the residuals are always kept."""
        del keep
        with Stage("check", self.traced.name):
            return self._backward(residuals, cotangents)

    def _forward(self, flat: Sequence[Any]) -> list[Any]:
        tell(lambda: "forward")
        traced, split = self.traced, self.split
        starts = [f"constant {i}" for i in range(len(traced.consts))]
        paths = traced.bound.paths()
        run = self.forward = _RunOfHalf(split.forward, flat, [*starts, *(paths[i] for i in traced.call.entering)])
        results = self.jits.jitted["forward"](*flat)
        whole, count = self._restored(results, flat), len(traced.program.results.avals)
        residuals = verify.routed(split.halves.residuals, flat, whole, count)
        self._same_types("forward", whole[:count], jaxprs.opened(split.forward)[0].outvars[:count])
        self._same_types("forward", residuals, jaxprs.opened(split.backward)[0].invars[: len(residuals)])
        self.outputs = whole[:count]
        self._finite("forward", self.outputs, run)  # a residual that is not finite may never reach a gradient
        return results

    def _restored(self, results: Sequence[Any], flat: Sequence[Any]) -> list[Any]:
        """Return the forward's results with the outputs that the program does not return."""
        start = len(self.traced.consts)
        leaves = [flat[start + p] for p in self.traced.bound.places]
        return list(map(alias.as_array, alias.inserted(results, self.traced.handed_back, leaves)))

    def _backward(self, residuals: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any]:
        tell(lambda: "backward")
        assert self.forward is not None, "the forward runs first"
        self.cotangents = self.traced.call.filled(cotangents)
        gradients = self.jits.jitted["keeping backward"](*residuals, *cotangents)
        self._same_types("backward", gradients, jaxprs.opened(self.split.backward)[0].outvars)
        graph, halves = self.split.graph, self.split.halves
        paths = [*(graph.where(r.value) for r in halves.residuals), *(f"cotangent {i}" for i in range(len(cotangents)))]
        run = _RunOfHalf(self.split.backward, [*residuals, *self.cotangents], paths)
        self._finite("backward", gradients, run, self.forward, whole=True)
        return gradients

    def _same_types(self, half: str, results: Sequence[Any], outvars: Sequence[Any]) -> None:
        for i, (result, var) in enumerate(zip(results, outvars, strict=True)):
            aval: Any = jax.typeof(result)
            if not abstract.is_reference(var.aval) and (aval.shape, aval.dtype) != (var.aval.shape, var.aval.dtype):
                what = f"gave {aval.str_short()} as result {i}, and was made to give {var.aval.str_short()}."
                raise VerifyError(message(f"The {half} of {self.traced.name}", what, _REPORT))

    def _finite(self, half: str, results: Sequence[Any], *runs: _RunOfHalf, whole: bool = False) -> None:
        """Raise `NonFiniteError` if a half made a non-finite number, or passed on a NaN from its inputs.

        `runs` has the run of this half, then the run of the half that made its residuals, if any. With `whole`, both
        halves are first searched as one program: an infinity between them is then no input of the user's.
        """
        if is_finite(results):
            return
        found = NonFinite(self.traced.name, half)
        for run in (*([self._both()] if whole else []), *runs):
            culprit = first_nonfinite(run.closed, run.flat)
            if culprit is not None:
                call = FailedCall(self.traced, self._leaves, self.outputs, self.cotangents)
                cures = () if call.untried else call.cures(half, culprit)
                replace(found, culprit=culprit, cures=cures, untried=call.untried).refuse()
        if not any(map(has_nan, results)):
            return  # an infinity of the user's: a mask, the start of a maximum
        for run in reversed(runs):
            paths = [path for path, x in zip(run.paths, run.flat, strict=True) if has_nan(x)]
            if paths:
                replace(found, came_in=paths[0]).refuse()
        found.refuse()

    def _both(self) -> _RunOfHalf:
        """Return the run of both halves as one program, the joint one."""
        assert self.forward is not None and self.cotangents is not None, "both halves ran"
        return _RunOfHalf(self.traced.joint, [*self.forward.flat, *self.cotangents], ())

    @property
    def _leaves(self) -> Sequence[Any]:
        """The distinct arrays of the call."""
        assert self.forward is not None, "the forward runs first"
        return self.forward.flat[len(self.traced.consts) :]


def check_call(traced: Trace, bound: Bound) -> None:
    """Compare shardings and aliases of a call with the compiled call's; other calls skip this check.

    Raises `CallError` at the first difference.
    """
    cure = "Put it where it was (jax.device_put), or trace and compile for this one too."
    for path, compiled, leaf in zip(bound.paths(), traced.bound.leaves, bound.leaves, strict=True):
        placed = getattr(struct(leaf), "sharding", None)
        wanted = getattr(compiled, "sharding", None)
        if wanted is not None and placed is not None and not placed.is_equivalent_to(wanted, len(compiled.shape)):
            raise CallError(message(path, f"lies as {placed}, but was compiled to lie as {wanted}.", cure))
    infos = traced.metadata.input_info
    for i, j in bound.duplicates.items():
        if infos[i].is_donated or infos[j].is_donated:
            paths = bound.paths()
            what = f"is the same array as {paths[j]}, and one of them is donated: the other would lose it."
            raise CallError(message(paths[i], what, "Pass a copy (jax.numpy.copy), or do not donate it."))
