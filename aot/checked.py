"""Run a call half by half, and check everything that can be checked.

    with aot.debug():
        value, grads = loss.value_and_grad(params, batch)

Inside `aot.debug()` each call of ours runs its forward and its backward as two programs. What enters and leaves them is
compared with what they were made for, and where one makes a NaN or an infinity the first op to blame is named by the
user's source line. It costs a pass over every result, and recompiles the halves; outside it nothing is checked and
nothing paid. What runs inside an outer `jax.jit` has no numbers yet, and is not checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.aot.progress import Stage, tell
from jointcut.aot.traced import TracedCall
from jointcut.partition import jaxprs, verify
from jointcut.partition.errors import CallError, NonFiniteError, VerifyError, message
from jointcut.partition.split import Split
from jointcut.wrappers import alias
from jointcut.wrappers.checks import first_nonfinite, is_finite
from jointcut.wrappers.convention import is_inexact
from jointcut.wrappers.tree import Bound, struct
from jointcut.wrappers.zeros import filled

_on: ContextVar[bool] = ContextVar("jointcut_debug", default=False)
_REPORT = "This is a fault of jointcut or of XLA: please report the program that shows it."
_CURE = (
    "Look at that line with these numbers; jax.numpy.where on an operand, not on the result, keeps a gradient finite."
)


@contextmanager
def debug() -> Iterator[None]:
    """Check every call of an `aot.function`, and of what was compiled from one, that is made inside.

    Raises `NonFiniteError` (a `FloatingPointError`) at the first half that makes a NaN or an infinity, `CallError`
    where arguments or cotangents are not what a program was compiled for.
    """
    token = _on.set(True)
    try:
        yield
    finally:
        _on.reset(token)


def is_on() -> bool:
    """Whether calls are checked here."""
    return _on.get()


@dataclass(frozen=True)
class Programs:
    """The two halves of a cut as two programs."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]

    @classmethod
    def of(cls, split: Split) -> Programs:
        """The halves, jitted."""
        halves = split.halves
        forward = functools.partial(verify.forward, halves, split.graph)
        backward = functools.partial(verify.backward, halves)
        return cls(jax.jit(forward), jax.jit(backward))


@dataclass(frozen=True)
class _Run:
    """What a half was run on: its jaxpr, its flat inputs, and how the user calls them."""

    closed: Any
    flat: Sequence[Any]
    paths: Sequence[str]


@dataclass(frozen=True)
class Checked:
    """One call of which every result is looked at."""

    traced: TracedCall
    split: Split
    programs: Programs
    bound: Bound

    def call(self) -> Any:
        """The function's result, forward only."""
        with Stage("check", self.traced.name):
            main, aux = self.traced.results(self._forward()[0], self.bound)
        return (main, aux) if self.traced.options.has_aux else main

    def value_and_grad(self) -> Any:
        """As `jax.value_and_grad`."""
        ones = self.traced.ones()
        with Stage("check", self.traced.name):
            outputs, residuals, run = self._forward()
            gradients = self._backward(residuals, ones, run)
        return self.traced.value_and_gradients(outputs, gradients, self.bound)

    def vjp(self) -> Any:
        """As `jax.vjp`: the output, a pullback that is checked as well (and aux with `has_aux`)."""
        main, aux, pullback = self._vjp(range(len(self.bound.spans)))
        return (main, pullback, aux) if self.traced.options.has_aux else (main, pullback)

    def vjp_in_argnums(self) -> Any:
        """As `Compiled.vjp`: the output (with `has_aux` a pair) and a pullback to the arguments in `argnums`."""
        options = self.traced.options
        main, aux, pullback = self._vjp(options.chosen)

        def to_chosen(cotangent: Any, *, keep_residuals: bool = False) -> Any:
            del keep_residuals  # they are kept here
            trees = pullback(cotangent)
            return trees[0] if isinstance(options.argnums, int) else trees

        return ((main, aux) if options.has_aux else main), to_chosen

    def _vjp(self, positions: Sequence[int]) -> tuple[Any, Any, Callable[..., Any]]:
        with Stage("check", self.traced.name):
            outputs, residuals, run = self._forward()
        main, aux = self.traced.results(outputs, self.bound)

        def pullback(cotangent: Any) -> tuple[Any, ...]:
            given = self.traced.cotangents(cotangent)
            with Stage("check", self.traced.name):
                flat = self._backward(residuals, given, run)
            return self.traced.gradients(flat, positions, self.bound)

        return main, aux, pullback

    def _forward(self) -> tuple[list[Any], list[Any], _Run]:
        """The forward half: outputs and residuals, and what it was run on."""
        tell(lambda: "forward")
        bound = self.bound.copied()
        flat = self.traced.flat(bound)
        starts = [f"constant {i}" for i in range(len(self.traced.consts))]
        paths = [*starts, *(path for i, path in enumerate(bound.paths()) if i not in self.traced.bound.duplicates)]
        outputs, residuals = self.programs.forward(flat)
        ends = jaxprs.opened(self.split.forward)[0].outvars[: len(outputs)]
        self._same_types("forward", outputs, ends)
        self._same_types("forward", residuals, jaxprs.opened(self.split.backward)[0].invars[: len(residuals)])
        run = _Run(self.split.forward, flat, paths)
        outputs = alias.finished(alias.replaced(outputs, self.traced.handed_back), bound.leaves)
        self._finite("forward", outputs, run)  # a residual that is not finite may never reach a gradient
        return outputs, residuals, run

    def _backward(self, residuals: Sequence[Any], cotangents: Sequence[Any | None], run: _Run) -> list[Any]:
        """The backward half: the flat gradients. None stands for a cotangent that is zero."""
        tell(lambda: "backward")
        inner, _ = jaxprs.opened(self.split.backward)
        given = filled(cotangents, (v.aval for v in inner.invars[len(residuals) :]))
        gradients = self.programs.backward(list(residuals), given)
        self._same_types("backward", gradients, inner.outvars)
        graph, halves = self.split.graph, self.split.halves
        paths = [*(graph.where(r.value) for r in halves.residuals), *(f"cotangent {i}" for i in range(len(given)))]
        self._finite("backward", gradients, _Run(self.split.backward, [*residuals, *given], paths), run)
        return gradients

    def _same_types(self, half: str, results: Sequence[Any], ends: Sequence[Any]) -> None:
        for i, (got, end) in enumerate(zip(results, ends, strict=True)):
            if not jaxprs.is_reference(end.aval) and (got.shape, got.dtype) != (end.aval.shape, end.aval.dtype):
                what = f"gave {jax.typeof(got).str_short()} as result {i}, and was made to give {end.aval.str_short()}."
                raise VerifyError(message(f"The {half} of {self.traced.name}", what, _REPORT))

    def _finite(self, half: str, results: Sequence[Any], *runs: _Run) -> None:
        """Raise `NonFiniteError` where a half made what is not finite, or a NaN came in and out of it.

        `runs` are this half, and before it the one that its residuals come from.
        """
        if is_finite(results):
            return
        where = f"The {half} of {self.traced.name}"
        for run in runs:
            culprit = first_nonfinite(run.closed, run.flat)
            if culprit is not None:
                raise NonFiniteError(message(where, f"is not finite: {culprit}", _CURE))
        if not any(map(_has_nan, results)):
            return  # an infinity that somebody wrote down or passed in: a mask, the start of a maximum
        for run in reversed(runs):
            given = [path for path, x in zip(run.paths, run.flat, strict=True) if _has_nan(x)]
            if given:
                what = f"returns a NaN that came in with {given[0]}."
                raise NonFiniteError(message(where, what, "Look at what made that one."))
        what = "returns a NaN, but no op makes one when they run one by one."
        cure = "Look at what its callbacks and references bring in, or report it: XLA's fused program makes the NaN."
        raise NonFiniteError(message(where, what, cure))


def _has_nan(x: Any) -> bool:
    aval = jax.typeof(x)
    return jaxprs.is_plain(aval) and is_inexact(aval.dtype) and bool(jnp.any(jnp.isnan(x)))


def check_call(traced: TracedCall, bound: Bound) -> None:
    """Compare a call's shardings and aliases with what was compiled, which a call does not do otherwise.

    Raises `CallError` at the first difference.
    """
    cure = "Put it where it was (jax.device_put), or trace and compile for this one too."
    for path, want, leaf in zip(bound.paths(), traced.bound.leaves, bound.leaves, strict=True):
        placed = getattr(struct(leaf), "sharding", None)
        wanted = getattr(want, "sharding", None)
        if wanted is not None and placed is not None and not placed.is_equivalent_to(wanted, len(want.shape)):
            raise CallError(message(path, f"lies as {placed}, but was compiled to lie as {wanted}.", cure))
    for i, j in bound.duplicates.items():
        if {i, j} & traced.donated:
            paths = bound.paths()
            what = f"is the same array as {paths[j]}, and one of them is donated: the other would lose it."
            raise CallError(message(paths[i], what, "Pass a copy (jax.numpy.copy), or do not donate it."))
