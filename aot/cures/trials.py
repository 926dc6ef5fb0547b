"""Run a call that was not finite once more with each cure.

The call's function is traced anew, with `derivatives="finite"` or with one formula at the culprit's line, and runs
forward and backward on the same arrays. What is finite then is a cure, if the outputs that were finite before are the
same. The rules for an infinity of the user's own are those of `checks`. A run with effects is not repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.aot.choices.conventions import NAMED, Conventions
from jointcut.aot.cures.formula import Formula, Replacing
from jointcut.aot.cures.found import Cure
from jointcut.aot.cures.patterns import FORMULAS
from jointcut.aot.trace.joint import Joint, Primal, joint, primal
from jointcut.partition.errors import JointcutError
from jointcut.partition.program import jaxprs
from jointcut.partition.rewrite import simplify
from jointcut.wrappers.built_in.checks import first_nonfinite, is_finite
from jointcut.wrappers.built_in.culprit import Culprit
from jointcut.wrappers.metadata.convention import is_inexact

if TYPE_CHECKING:
    from jointcut.aot.stages.traced import Traced


@dataclass(frozen=True)
class _Trial:
    """A form of the function, and the derivatives it has at singular points; `what` says what it changes."""

    what: str
    source: Primal
    conventions: Conventions


@dataclass(frozen=True)
class _Outcome:
    """Whether a trial was finite; if not, the first op to blame, unless it failed in another way."""

    finite: bool
    culprit: Culprit | None = None


@dataclass(frozen=True)
class FailedCall:
    """A call that was not finite, to be run again.

    Attributes:
        traced: the call's trace.
        leaves: its distinct arrays.
        outputs: what it returned, without gradients.
        cotangents: those of the outputs; None if only the forward is run.
    """

    traced: Traced
    leaves: Sequence[Any]
    outputs: Sequence[Any]
    cotangents: Sequence[Any] | None

    @cached_property
    def untried(self) -> str:
        """Why the call is not run again; empty if it can be."""
        return why_not_again(self.traced)

    def cures(self, half: str, culprit: Culprit) -> tuple[Cure, ...]:
        """What makes the call finite: the option, and the first formula at the culprit's line that does.

        If nothing does, the first formula after which the op to blame is at another line.
        """
        base = self.traced.options.conventions
        named = {name: Conventions(**{**NAMED[name].chosen, **base.chosen}) for name in ("finite", "pytorch")}
        plain, finite = _Trial("", self._source, base), named["finite"]
        options = named.items() if half == "backward" else ()
        sets = (replace(plain, what=_option(name), conventions=chosen) for name, chosen in options if chosen != base)
        first = next((trial for trial in sets if self._outcome(trial).finite), None)
        found = [Cure(first.what)] if first else []
        moved, trials = [], list(self._at(culprit.source, plain, half == "forward"))
        for trial in trials:
            outcome = self._outcome(trial, names_next=not found)
            if outcome.finite:
                return (*found, Cure(trial.what))
            if outcome.culprit is not None and outcome.culprit.source != culprit.source:
                moved.append((trial, outcome.culprit))
        if not found:
            is_open = self.cotangents is not None and finite != base
            both = (
                replace(t, what=f"{t.what}, together with {_option('finite')},", conventions=finite)
                for t in trials
                if is_open
            )
            more = (second for trial, then in moved[:1] for second in self._at(then.source, trial))
            whole = next((trial for trial in (*both, *more) if self._outcome(trial).finite), None)
            found = [Cure(whole.what)] if whole else [Cure(trial.what, str(then)) for trial, then in moved[:1]]
        return tuple(found)

    def _at(self, line: str, before: _Trial, only_safer: bool = False) -> Iterator[_Trial]:
        """The trials of all formulas found at a line, in a form of the function; or only of those with other values."""
        opened = _merged(simplify.inlined(before.source.closed))
        for formula in (f for f in FORMULAS if f.is_safer or not only_safer):
            closed = _written(before.source.closed if formula.is_named else opened, formula, line)
            if closed is not None:
                both = f"{before.what}, together with {formula} at {line},"
                what = both if before.what else f"{formula} at that line"
                yield _Trial(what, replace(before.source, closed=closed), before.conventions)

    # ------------------------------------------------------------------------------------------------- running

    @cached_property
    def _source(self) -> Primal:
        """The function's own program: constants and arguments, an array that is passed twice at each place."""
        traced, target = self.traced, self.traced.wrapped.target
        shapes = traced.bound.unique
        return primal(target.function, [shapes[p] for p in self._places], traced.options.has_aux)

    @cached_property
    def _places(self) -> Sequence[int]:
        places = self.traced.wrapped.target.places
        return range(len(self.leaves)) if places is None else places

    def _outcome(self, trial: _Trial, names_next: bool = False) -> _Outcome:
        """Run a trial; with `names_next`, find the op to blame if a result is still NaN."""
        try:
            program = self._program(trial)
        except JointcutError:  # such as no derivative
            return _Outcome(False)
        closed = jaxprs.silenced(program.closed)
        flat = [*program.consts, *(self.leaves[p] for p in self._places)]
        flat += self.cotangents or [] if program.is_train else []
        with jax.debug_nans(False), jax.debug_infs(False):
            try:
                results = jax.jit(functools.partial(jaxprs.evaluate, closed))(*flat)
                finite = is_finite(results)
            except jax.errors.JaxRuntimeError:  # such as no memory
                return _Outcome(False)
        if not self._agrees(results):
            return _Outcome(False)
        is_nan = not finite and any(map(has_nan, results))
        if finite or (is_nan and not names_next):
            return _Outcome(finite)
        culprit = first_nonfinite(closed, flat)
        return _Outcome(culprit is None and not is_nan, culprit)

    def _program(self, trial: _Trial) -> Joint:
        """The joint program of a trial; its inputs are the constants, and the leaves at their places."""
        traced, source = self.traced, trial.source
        main, count = len(source.results.main), len(source.consts)

        def flat(*xs: Any) -> Any:
            out = jaxprs.evaluate(source.closed, *xs)
            return out[:main], out[main:]

        wanted = set(traced.wanted) if self.cotangents is not None else ()
        mask = [False] * count + [i in wanted for i in range(len(self._places))]
        entered = [*source.consts, *(traced.bound.unique[p] for p in self._places)]
        names = [f"input {i}" for i in range(len(entered))]
        program = joint(flat, entered, True, mask, names, conventions=trial.conventions)
        return replace(program, consts=(*program.consts, *source.consts))

    def _agrees(self, results: Sequence[Any]) -> bool:
        """Whether the outputs that were finite before are the same, up to rounding."""
        return all(_close(old, new) for old, new in zip(self.outputs, results, strict=False))


def _option(derivatives: str) -> str:
    """How a set of derivatives is chosen."""
    return f'aot.function(derivatives="{derivatives}")'


def _written(closed: Any, formula: Formula, line: str) -> Any | None:
    """The program with a formula wherever it is found at a line; None if it is not."""
    jaxpr, consts = jaxprs.opened(closed)
    replacing = Replacing(formula, line)
    new = replacing.through(jaxpr)
    return jaxprs.ClosedJaxpr(new, consts) if replacing.count else None


def _merged(closed: Any) -> Any:
    """The program with each computation done once, so that an operand that is written twice is one value."""
    jaxpr, consts = jaxprs.opened(closed)
    eqns, outvars, _ = simplify.merged(jaxpr.eqns, jaxpr.outvars, len(jaxpr.eqns))
    return jaxprs.ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outvars), consts)


def why_not_again(traced: Traced) -> str:
    """Why the call of a trace must not be run twice; empty if it may."""
    eqns = jaxprs.opened(jaxprs.silenced(traced.joint))[0].eqns  # prints may come twice
    if any(map(jaxprs.touches_references, eqns)):
        return "another run would write its references again."
    names = [name for eqn in eqns for name in jaxprs.effect_names(eqn)]
    return f"another run would repeat its effect {names[0]}." if names else ""


def has_nan(x: Any) -> bool:
    """Whether an array has a NaN."""
    aval = jax.typeof(x)
    return jaxprs.is_plain(aval) and is_inexact(aval.dtype) and bool(jnp.any(jnp.isnan(x)))


def _close(old: Any, new: Any) -> bool:
    aval = jax.typeof(old)
    if not jaxprs.is_plain(aval) or not is_inexact(aval.dtype):
        return True
    wide = np.complex128 if jnp.issubdtype(aval.dtype, np.complexfloating) else np.float64
    one, other = np.asarray(old).astype(wide), np.asarray(new).astype(wide)
    both = np.isfinite(one) & np.isfinite(other)
    size = np.abs(one[both]).max(initial=1.0)
    return bool(np.all(np.abs(one - other, where=both, out=np.zeros(one.shape)) <= 1e-2 * size))
