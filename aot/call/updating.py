"""Run a function with an update of its parameters as one step."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jointcut.aot.options.options import Options, name_of
from jointcut.aot.options.xla import refuse_inside
from jointcut.aot.run.bound import Binder, Signature
from jointcut.aot.run.runner import Runner
from jointcut.aot.run.unchecked import LaidOtherwise, UncachedUpdate, Unchecked
from jointcut.aot.stages import debug, tracing
from jointcut.aot.stages.cut import Cut
from jointcut.aot.stages.padding.sized import Sized
from jointcut.aot.stages.traced import Traced
from jointcut.aot.update.released import with_update
from jointcut.aot.update.step import refuse_sweeps
from jointcut.aot.update.updates import Updates
from jointcut.partition.errors import TraceError, message
from jointcut.partition.program.jax import abstract, runtime
from jointcut.wrappers.arguments.tree import Bound, Statics, bind

_LOG = logging.getLogger("jointcut")

#: The number of updates that a function keeps programs for.
KEPT_UPDATES = 16


class Updating:
    """The steps of a function with one update.

    A step is a function of `(params, state, *args)`. Its gradients of the first two are the new parameters and the new
    state. So every stage works on it: a plan and a budget are for the step with its update.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: Options,
        statics: Statics,
        update: Any,
        sweeps: int,
        sizes: Sized | None,
    ) -> None:
        """Put the state second among the arguments of a function, whose `sizes` may vary.

        Raises `TraceError` if more or other than argument 0 is differentiated, or `sweeps` is neither 1 nor 2.
        """
        _refuse_others(options)
        self.update, self._sweeps = update, refuse_sweeps(sweeps)
        nums, names = options.donated
        self._function, name = _with_state(function), name_of(function)
        self._name, self._is_told = name, False
        self._unchecked, self._uncached = Unchecked(name), UncachedUpdate(name)
        self._options = replace(
            options,
            argnums=0,
            static_argnums=tuple(sorted(n + 1 for n in statics.argnums)),
            donate_argnums=(0, 1, *(n + 1 for n in nums if n > 0)),
            donate_argnames=names,
            tiles=options.tiles if isinstance(options.tiles, bool) else _behind_state(options.tiles),
            shapes=_behind_state(options.shapes),
            check=None,
        )
        count = None if statics.count is None else statics.count + 1
        self._statics = Statics(frozenset(n + 1 for n in statics.argnums), statics.argnames, count)
        otherwise = LaidOtherwise(name)
        self._binder, self._is_checked = Binder(self._statics, otherwise), options.check is not None
        how = self._function, self._options, self._updated
        self._sized = None if sizes is None else sizes.changed(*how, still=2)

    def ran(self, given: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any] | None:
        """Run the program of a call like the latest one, and return its result as a call does; None to call."""
        if debug.is_on() or (ran := self._binder.ran("step", given, kwargs)) is None:
            return None
        value, (params, state) = ran[0]
        return value, params, state

    def __call__(self, params: Any, state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Return the value, and parameters and state after the step."""
        given = (params, state, *args)
        if (ran := self.ran(given, kwargs)) is not None:
            return ran
        signature, bound = self._binder(given, kwargs)
        runner = self._runner(signature, bound)
        value, made = runner.value_and_grad(bound)
        if bound.holds_more:
            made = _rebuilt(bound, made)
        return value, *made

    def trace(self, params: Any, state: Any, *args: Any, **kwargs: Any) -> Traced:
        """Trace the step for these arguments, without computing."""
        return self._traced(bind((params, state, *args), kwargs, self._statics))

    def _runner(self, signature: Signature, bound: Bound) -> Runner:
        if self._is_checked:
            self._unchecked()
        if self._options.cache and self._options.budget is None:
            self._uncached()
        if runtime.tracing():
            refuse_inside(self._name, self._options.compiler_options)
            return self._cut(signature, bound).made.open
        if debug.is_on():
            return self._cut(signature, bound).checked()
        self._tell()
        runner = signature.made.of("step", lambda: self._jitted(signature, bound))
        self._binder.keep("step", bound, runner.ready("step"))  # from the second call on
        return runner

    def _jitted(self, signature: Signature, bound: Bound) -> Runner:
        """Return a runner that compiles at its first call."""
        sized = None if self._sized is None else self._sized.runner("step", (0,), bound)
        return self._cut(signature, bound).made.jitted if sized is None else sized

    def _tell(self) -> None:
        """Say once that arrays are given up."""
        if not self._is_told:
            self._is_told = True
            what = "gives up the arrays of params and state: use those that it returns"
            _LOG.info("%s: value_and_update %s", self._name, what)

    def _cut(self, signature: Signature, bound: Bound) -> Cut:
        signature.planned.is_made = True
        return signature.made.of(
            "cut", lambda: self._traced(bound).partition(), keeps=lambda cut: not cut.traced.program.has_traced_consts
        )

    def _traced(self, bound: Bound) -> Traced:
        """Trace the step with its update."""
        return self._updated(tracing.trace(self._function, self._options, bound, (0,)))

    def _updated(self, plain: Traced) -> Traced:
        """Return the step with its update, whose gradients are new parameters and a new state."""
        bound = plain.bound
        params, state = plain.wanted, tuple(bound.spans[1])
        if set(params) != set(bound.spans[0]):
            what = "updates parameters that are floating-point arrays with dense gradients."
            raise TraceError(message("value_and_update", what, "Take value_and_grad, and update after it."))
        results = plain.program.results
        if written := results.grown.paths if results.grown else [path for _, path in results.states]:
            what = f"belongs to an object that is updated, and {plain.name} writes to it."
            raise TraceError(message(written[0], what, "Take value_and_grad, and update after it."))
        options = replace(self._options, argnums=(0, 1))
        paths = bound.paths()
        given, before = _types(bound, 0, params), _types(bound, 1, state)
        updates = Updates.of(self.update, given, before, [paths[i] for i in params], self._sweeps)
        places = bound.places
        twice = (*bound.duplicates, *bound.duplicates.values())
        kept = {places[i] for i in (*bound.in_objects, *twice)}
        program = with_update(plain.program, updates, [places[i] for i in params], [places[i] for i in state], kept)
        return replace(plain, options=options, program=program, wanted=(*params, *state))


def _with_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, with a second argument that it does not read."""

    def step(params: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        del state
        return function(params, *args, **kwargs)

    step.__name__ = step.__qualname__ = name_of(function)
    return step


def _behind_state(given: Any) -> tuple[tuple[str, Any], ...]:
    """Return pairs of an option by path, with the paths that arguments have behind the state."""
    later = (re.sub(r"^args\[([1-9]\d*)\]", lambda found: f"args[{int(found[1]) + 1}]", path) for path, _ in given)
    return tuple(zip(later, (value for _, value in given), strict=True))


def _types(bound: Bound, place: int, leaves: Sequence[int]) -> Any:
    """Return the types of an argument in the tree of its gradient, with None for each leaf that is not an array."""
    tree = jax.tree.structure(bound.gradients(range(len(bound.leaves)))[place])
    return jax.tree.unflatten(tree, [abstract.struct(jax.typeof(bound.leaves[i])) for i in leaves])


def _rebuilt(bound: Bound, made: Any) -> tuple[Any, Any]:
    """Return new parameters and a new state, with the old leaves that are not arrays."""
    leaves = list(bound.leaves)
    leaves[: len(jax.tree.leaves(made))] = jax.tree.leaves(made)
    (args, _), _ = bound.rebuilt(leaves)
    return args[0], args[1]


def _refuse_others(options: Options) -> None:
    """Raise `TraceError` if more or other than the first argument is differentiated, or not all of it densely."""
    if options.chosen == (0,) and not options.sparse_gradients and options.filter is None:
        return
    what = f"updates all of argument 0, but argnums is {options.argnums}, or sparse_gradients or filter is given."
    raise TraceError(message("value_and_update", what, "Put the parameters first, and leave these options out."))
