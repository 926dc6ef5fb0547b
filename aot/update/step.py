"""Run a backward that updates, equation by equation.

A gradient is given to the update of its parameter as soon as the equation that completes it has run. What the backward
computes next waits for the updated parameter, so that the gradient is gone by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.aot.trace.analyse import depending
from jointcut.aot.update.updates import Stretch, Updates
from jointcut.partition.errors import TraceError, message
from jointcut.partition.program import jaxprs

#: Puts arrays behind a barrier together with what a sweep has yet to read.
Hold = Callable[[Sequence[Any]], list[Any]]
#: Takes the place of a parameter and its gradient.
Finish = Callable[[int, Any, Hold], None]
#: A backward: it takes what to do with each gradient, and the arrays after which it may begin.
Sweep = Callable[[Finish, Sequence[Any]], None]


def in_sweeps(updates: Updates, params: Sequence[Any], state: Sequence[Any], sweep: Sweep) -> list[Any]:
    """The outputs of an update, flat: parameters, then state. There are two sweeps if it joins gradients."""
    leaves, joined = (*params, *state, *params), list[Any]()

    def filled(count: int, parts: Sequence[Stretch]) -> list[Any]:
        results: list[Any] = [None] * count
        left = dict(enumerate(params))

        def finish(place: int, gradient: Any, hold: Hold) -> None:
            del left[place]
            run, places = parts[place]
            made = run(*params[:place], gradient, *leaves[place + 1 :], *joined)
            for i, x in zip(places, hold(made), strict=True):
                results[i] = x

        sweep(finish, joined)
        for place, x in list(left.items()):
            finish(place, jaxprs.full(jaxprs.cotangent_aval(jax.typeof(x)), 0), list)
        return results

    if updates.num_kept:
        joined += updates.join(*leaves, *filled(updates.num_kept, updates.first))
    outputs = filled(updates.count, updates.parts)
    run, places = updates.rest
    for i, x in zip(places, run(*leaves, *joined), strict=True):
        outputs[i] = x
    return outputs


def refuse_sweeps(sweeps: int) -> int:
    """The number of sweeps; raises `TraceError` if it is neither 1 nor 2."""
    if sweeps not in (1, 2):
        what = f"is {sweeps!r}."
        raise TraceError(
            message("sweeps", what, "Give 1, or 2 for an update that joins gradients, as a global norm does.")
        )
    return sweeps


def refuse_twice(hook: str) -> None:
    """Raise `TraceError` for a hook that two sweeps would call twice."""
    what = f"goes back twice, but {hook} is called back, and would see each cotangent twice."
    raise TraceError(message("value_and_update with two sweeps", what, "Remove it, or let JAX trace it: see aot.Hook."))


def after(cotangents: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """The cotangents behind a barrier, so that no compiler merges a second sweep with the first."""
    return jaxprs.held([*cotangents, *arrays])[: len(cotangents)] if arrays else list(cotangents)


@dataclass(frozen=True)
class Backward:
    """A backward as a jaxpr `(what it reads, cotangents) -> gradients`; it reads the first `count` inputs."""

    jaxpr: Any
    count: int

    def __call__(self, finish: Finish, read: Sequence[Any], cotangents: Sequence[Any]) -> None:
        """Run it, and hand out each gradient as soon as it is there.

        What needs no cotangent is not held behind updates: the forward may compute it.
        """
        jaxpr = self.jaxpr
        moved = depending(jaxpr.eqns, jaxpr.invars[self.count :])
        known: dict[Any, Any] = dict(zip(jaxpr.invars, read, strict=False))
        pending: dict[Any, Any] = {}
        last = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in _read(eqn)}
        ends: dict[Any, list[int]] = {}
        for place, v in enumerate(jaxpr.outvars):
            if isinstance(v, jaxprs.Literal):
                finish(place, jaxprs.full(v.aval, v.val), list)
            elif v in known:
                finish(place, known[v], list)
            else:
                ends.setdefault(v, []).append(place)

        def hold(made: Sequence[Any]) -> list[Any]:
            waiting = [v for v in pending if jaxprs.is_plain(v.aval)]
            if waiting:
                pending.update(zip(waiting, jaxprs.held([*(pending[v] for v in waiting), *made]), strict=False))
            return list(made)

        def made(n: int, variables: Sequence[Any], values: Sequence[Any]) -> None:
            for v, x in zip(variables, values, strict=True):
                if v not in moved:
                    known[v] = x
                elif last.get(v, -1) > n:
                    pending[v] = x
            for v, x in zip(variables, values, strict=True):
                for place in ends.get(v, ()):
                    finish(place, x, hold)

        made(-1, jaxpr.invars[self.count :], cotangents)
        for n, eqn in enumerate(jaxpr.eqns):
            variables = _read(eqn)
            values = [pending[v] if v in pending else known[v] for v in variables]
            for v in variables:
                if last[v] == n:
                    pending.pop(v, None)
            made(n, eqn.outvars, jaxprs.evaluate(jaxprs.build(variables, eqn.outvars, [eqn]), *values))


def _read(eqn: Any) -> list[Any]:
    return list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jaxprs.Literal)))
