"""Run a call that was not finite again with each cure.

The call's function is traced again, with `derivatives="finite"` or with one formula at the culprit's line, and runs
forward and backward on the same arrays. The change is a cure if the run is finite, and if the outputs that were finite
before are the same. For an infinity of the user's own, the rules of `checks` hold. A run with effects is not repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.aot.options.conventions import NAMED, Conventions
from jointcut.aot.stages.cures.formula import Formula, Replacing
from jointcut.aot.stages.cures.found import Cure
from jointcut.aot.stages.cures.patterns import FORMULAS
from jointcut.aot.trace.data import Trace
from jointcut.aot.trace.joint import Joint, joint
from jointcut.aot.trace.primal import Primal, primal
from jointcut.partition.errors import JointcutError
from jointcut.partition.program.jax import abstract, jaxprs, runtime, side_effects
from jointcut.partition.rewrite import simplify
from jointcut.wrappers.built_in.checks import first_nonfinite, is_finite
from jointcut.wrappers.built_in.culprit import Culprit
from jointcut.wrappers.metadata.convention import is_inexact


@dataclass(frozen=True)
class _Trial:
    """A form of the function, and its derivatives at singular points; `what` names the change."""

    what: str
    source: Primal
    conventions: Conventions


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a trial: whether it was finite, or else the first op to blame, unless it failed otherwise."""

    finite: bool
    culprit: Culprit | None = None


@dataclass(frozen=True)
class FailedCall:
    """A call that was not finite, and that runs again.

    Attributes:
        traced: the call's trace.
        leaves: its distinct arrays.
        outputs: the outputs that it returned, without gradients.
        cotangents: the cotangents of the outputs; None if only the forward runs.
    """

    traced: Trace
    leaves: Sequence[Any]
    outputs: Sequence[Any]
    cotangents: Sequence[Any] | None

    @cached_property
    def untried(self) -> str:
        """The reason why the call is not run again; empty if it can be."""
        return why_not_again(self.traced)

    def cures(self, half: str, culprit: Culprit) -> tuple[Cure, ...]:
        """Return the cures: the option, and the first formula at the culprit's line that makes the call finite.

        If no change does, return the first formula after which the op to blame is at another line.
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
        """Yield a trial for each formula found at a line; with `only_safer`, only for formulas that change values."""
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
        """The function's own program of constants and arguments; an array that is passed twice has two inputs."""
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
        except JointcutError:  # such as a missing derivative
            return _Outcome(False)
        closed = side_effects.silenced(program.closed)
        flat = [*program.consts, *(self.leaves[p] for p in self._places)]
        flat += self.cotangents or [] if program.is_train else []
        with jax.debug_nans(False), jax.debug_infs(False):
            try:
                results = jax.jit(functools.partial(runtime.evaluate, closed))(*flat)
                finite = is_finite(results)
            except jax.errors.JaxRuntimeError:  # such as a lack of memory
                return _Outcome(False)
        if not self._agrees(results):
            return _Outcome(False)
        is_nan = not finite and any(map(has_nan, results))
        if finite or (is_nan and not names_next):
            return _Outcome(finite)
        culprit = first_nonfinite(closed, flat)
        return _Outcome(culprit is None and not is_nan, culprit)

    def _program(self, trial: _Trial) -> Joint:
        """Return the joint program of a trial; its inputs are the constants, and the leaves at their places."""
        traced, source = self.traced, trial.source
        main, count = len(source.results.main), len(source.consts)

        def flat(*xs: Any) -> Any:
            out = runtime.evaluate(source.closed, *xs)
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
    """Return the option that chooses a set of derivatives, as text."""
    return f'aot.function(derivatives="{derivatives}")'


def _written(closed: Any, formula: Formula, line: str) -> Any | None:
    """Return the program with a formula replaced wherever it is found at a line; None if it is not found."""
    jaxpr, consts = jaxprs.opened(closed)
    replacing = Replacing(formula, line)
    new = replacing.through(jaxpr)
    return jaxprs.ClosedJaxpr(new, consts) if replacing.count else None


def _merged(closed: Any) -> Any:
    """Return the program with each computation done once, so that an operand that is written twice is one value."""
    jaxpr, consts = jaxprs.opened(closed)
    eqns, outvars, _ = simplify.merged(jaxpr.eqns, jaxpr.outvars, len(jaxpr.eqns))
    return jaxprs.ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outvars), consts)


def why_not_again(traced: Trace) -> str:
    """Return the reason why the call of a trace must not run twice; empty if it may."""
    eqns = jaxprs.opened(side_effects.silenced(traced.joint))[0].eqns  # prints may come twice
    if any(map(jaxprs.touches_references, eqns)):
        return "another run would write its references again."
    names = [name for eqn in eqns for name in side_effects.effect_names(eqn)]
    return f"another run would repeat its effect {names[0]}." if names else ""


def has_nan(x: Any) -> bool:
    """Whether an array has a NaN."""
    aval = jax.typeof(x)
    return abstract.is_plain(aval) and is_inexact(aval.dtype) and bool(jnp.any(jnp.isnan(x)))


def _close(old: Any, new: Any) -> bool:
    aval = jax.typeof(old)
    if not abstract.is_plain(aval) or not is_inexact(aval.dtype):
        return True
    wide = np.complex128 if jnp.issubdtype(aval.dtype, np.complexfloating) else np.float64
    one, other = np.asarray(old).astype(wide), np.asarray(new).astype(wide)
    both = np.isfinite(one) & np.isfinite(other)
    size = np.abs(one[both]).max(initial=1.0)
    return bool(np.all(np.abs(one - other, where=both, out=np.zeros(one.shape)) <= 1e-2 * size))
