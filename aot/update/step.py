"""Run a backward that updates, equation by equation.

A gradient is given to the update of its parameter as soon as the equation that completes it has run. What the backward
computes next waits for the updated parameter, so that the gradient is gone by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jointcut.aot.trace.analyse import depending
from jointcut.aot.update.leaves import Scans
from jointcut.aot.update.scans import updating
from jointcut.aot.update.updates import Stretch, Updates
from jointcut.partition.errors import TraceError, message
from jointcut.partition.program import jaxprs

#: Puts arrays behind a barrier together with what a sweep has yet to read.
Hold = Callable[[Sequence[Any]], list[Any]]


@dataclass
class Filling:
    """The results of one sweep of an update, which takes the place of each parameter and its gradient.

    Attributes:
        parts: for each parameter, what computes its results.
        params, state, joined: what the update reads besides gradients.
        results: what is known so far, by place.
        left: the parameters whose gradients are not known yet.
        is_last: whether the results are new parameters and state.
    """

    parts: Sequence[Stretch]
    params: Sequence[Any]
    state: Sequence[Any]
    joined: Sequence[Any]
    is_last: bool
    results: dict[int, Any] = field(default_factory=dict)
    left: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with all parameters left."""
        self.left.update(enumerate(self.params))

    def __call__(self, place: int, gradient: Any, hold: Hold) -> None:
        """Compute what needs the gradient of one parameter."""
        stretch = self.parts[place]
        self.put(place, dict(zip(stretch.places, hold(stretch(*self.inputs(place, gradient))), strict=True)))

    def put(self, place: int, results: Mapping[int, Any]) -> None:
        """Take what the gradient of one parameter was needed for."""
        del self.left[place]
        self.results.update(results)

    def given(self, place: int) -> tuple[Stretch, list[Any]]:
        """The update of one parameter, and what it reads; the parameter stands in the place of its gradient."""
        return self.parts[place], self.inputs(place, self.params[place])

    def inputs(self, place: int, gradient: Any) -> list[Any]:
        """What the update of one parameter reads; the gradients of others do not matter."""
        gradients = list(self.params)
        gradients[place] = gradient
        return [*gradients, *self.state, *self.params, *self.joined]


#: A backward: it takes what to do with each gradient, and the arrays after which it may begin.
Sweep = Callable[[Filling, Sequence[Any]], None]


def in_sweeps(updates: Updates, params: Sequence[Any], state: Sequence[Any], sweep: Sweep) -> list[Any]:
    """The outputs of an update, flat: parameters, then state. There are two sweeps if it joins gradients."""
    leaves, joined = (*params, *state, *params), list[Any]()

    def filled(parts: Sequence[Stretch], is_last: bool) -> dict[int, Any]:
        filling = Filling(parts, params, state, joined, is_last)
        sweep(filling, joined)
        for place, x in list(filling.left.items()):
            filling(place, jaxprs.full(jaxprs.cotangent_aval(jax.typeof(x)), 0), list)
        return filling.results

    if updates.num_kept:
        first = filled(updates.first, False)
        joined += updates.join(*leaves, *(first[i] for i in range(updates.num_kept)))
    outputs = filled(updates.parts, True)
    outputs.update(zip(updates.rest.places, updates.rest(*leaves, *joined), strict=True))
    return [outputs[i] for i in range(updates.count)]


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
class BackwardPass:
    """A backward as a jaxpr `(what it reads, cotangents) -> gradients`; it reads the first `count` inputs.

    `places` are for each result the parameter that it is the gradient of.
    """

    jaxpr: Any
    count: int
    places: Sequence[int]

    def __call__(self, filling: Filling, read: Sequence[Any], cotangents: Sequence[Any]) -> None:
        """Run it, and hand out each gradient as soon as it is there.

        What needs no cotangent is not held behind updates: the forward may compute it.
        """
        _Run(self, filling, dict(zip(self.jaxpr.invars, read, strict=False)))(cotangents)


class _Run:
    """One run of a backward.

    Attributes:
        known: the values that need no cotangent, by variable.
        pending: those that need one and are read later.
        last: the last equation that reads a variable.
        ends: the parameters of which a variable is the gradient.
        scans: the parameters that scans update in their steps.
    """

    def __init__(self, backward: BackwardPass, filling: Filling, known: dict[Any, Any]) -> None:
        """Begin with what the backward reads."""
        jaxpr = backward.jaxpr
        self.eqns, self.filling, self.known = jaxpr.eqns, filling, known
        self.cotangents = jaxpr.invars[backward.count :]
        self.moved = depending(jaxpr.eqns, self.cotangents)
        self.pending: dict[Any, Any] = {}
        self.ends: dict[Any, list[int]] = {}
        for place, v in zip(backward.places, jaxpr.outvars, strict=True):
            if isinstance(v, jaxprs.Literal):
                filling(place, jaxprs.full(v.aval, v.val), list)
            elif v in known:
                filling(place, known[v], list)
            else:
                self.ends.setdefault(v, []).append(place)
        self.scans = Scans.of(jaxpr, self.ends, known, filling)
        self.last = {v: n for n in range(len(self.eqns)) if n not in self.scans.done for v in self.read(n)}

    def __call__(self, cotangents: Sequence[Any]) -> None:
        """Run the equations, and update."""
        self.take(-1, self.cotangents, cotangents)
        for n, eqn in enumerate(self.eqns):
            if n in self.scans.done:
                continue
            values = {v: self.pending[v] if v in self.pending else self.known[v] for v in self.read(n)}
            for v in values:
                if self.last[v] == n:
                    self.pending.pop(v, None)
            if n in self.scans.leaves:
                self.scan(n, values)
            else:
                program = jaxprs.build(list(values), eqn.outvars, [eqn])
                self.take(n, eqn.outvars, jaxprs.evaluate(program, *values.values()))

    def read(self, n: int) -> list[Any]:
        """The variables that an equation reads, with its updates if it is a scan."""
        outside = (v for leaf in self.scans.leaves.get(n, ()) for v in leaf.outside)
        return list(dict.fromkeys(v for v in (*self.eqns[n].invars, *outside) if not isinstance(v, jaxprs.Literal)))

    def scan(self, n: int, values: dict[Any, Any]) -> None:
        """Run a scan with its updates."""
        results, made = updating(self.eqns[n], self.scans.leaves[n], values)
        for leaf in self.scans.leaves[n]:
            self.filling.put(leaf.place, {o: made[o] for o in self.filling.parts[leaf.place].places})
        self.take(n, list(results), list(results.values()))

    def take(self, n: int, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Note what an equation made, and update the parameters whose gradients are complete."""
        for v, x in zip(variables, values, strict=True):
            if v not in self.moved:
                self.known[v] = x
            elif self.last.get(v, -1) > n:
                self.pending[v] = x
        for v, x in zip(variables, values, strict=True):
            for place in self.ends.get(v, ()):
                self.filling(place, x, self.hold)

    def hold(self, made: Sequence[Any]) -> list[Any]:
        """Let what is read later wait for what an update made."""
        waiting = [v for v in self.pending if jaxprs.is_plain(v.aval)]
        if waiting:
            held = jaxprs.held([*(self.pending[v] for v in waiting), *made])
            self.pending.update(zip(waiting, held, strict=False))
        return list(made)
