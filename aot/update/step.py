"""Run a backward that updates, equation by equation.

A gradient is given to the update of its parameter as soon as the equation that completes it has run. Each such update
is noted, so that a schedule can let the rest of the backward wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jointcut.aot.update.leaves import Scans, evaluated
from jointcut.aot.update.scans import updating
from jointcut.aot.update.updates import Stretch, Updates
from jointcut.partition.errors import TraceError, message
from jointcut.partition.program.jax import abstract, jaxprs


class Noted(NamedTuple):
    """An update that ran: the place of its parameter, its sweep, and its results."""

    place: int
    sweep: int
    made: Sequence[Any]


@dataclass
class Filling:
    """The results of one sweep of an update, which replaces each parameter and its gradient.

    Attributes:
        parts: for each parameter, the program of its results.
        params, state, joined: the parameters, the optimiser's state, and the joined values.
        sweep: 1 or 2.
        noted: the updates that ran.
        results: the results known so far, by place.
        is_last: whether the results are new parameters and state.
    """

    parts: Sequence[Stretch]
    params: Sequence[Any]
    state: Sequence[Any]
    joined: Sequence[Any]
    is_last: bool
    sweep: int
    noted: list[Noted]
    results: dict[int, Any] = field(default_factory=dict)

    def __call__(self, place: int, gradient: Any) -> None:
        """Compute the results that need the gradient of one parameter."""
        stretch = self.parts[place]
        made = stretch(*self.inputs(place, gradient))
        self.noted.append(Noted(place, self.sweep, made))
        self.results.update(zip(stretch.places, made, strict=True))

    def given(self, place: int) -> tuple[Stretch, list[Any]]:
        """Return the update of one parameter, and its inputs; the parameter is a placeholder for its gradient."""
        return self.parts[place], self.inputs(place, self.params[place])

    def inputs(self, place: int, gradient: Any) -> list[Any]:
        """Return the inputs of the update of one parameter; the gradients of others do not matter."""
        gradients = list(self.params)
        gradients[place] = gradient
        return [*gradients, *self.state, *self.params, *self.joined]


def in_sweeps(
    updates: Updates, params: Sequence[Any], state: Sequence[Any], backward: Callable[[Filling], None]
) -> tuple[list[Any], list[Noted]]:
    """Return the outputs of an update, flat: parameters, then state; and the updates that ran.

    The backward gives its gradients to a filling. There are two sweeps if the update joins gradients.
    """
    leaves, joined, noted = (*params, *state, *params), list[Any](), list[Noted]()

    def filled(parts: Sequence[Stretch], is_last: bool) -> dict[int, Any]:
        filling = Filling(parts, params, state, joined, is_last, 1 + bool(is_last and updates.num_kept), noted)
        backward(filling)
        return filling.results

    if updates.num_kept:
        first = filled(updates.first, False)
        joined += updates.join(*leaves, *(first[i] for i in range(updates.num_kept)))
    outputs = filled(updates.parts, True)
    outputs.update(zip(updates.rest.places, updates.rest(*leaves, *joined), strict=True))
    return [outputs[i] for i in range(updates.count)], noted


def refuse_sweeps(sweeps: int) -> int:
    """Return the number of sweeps; raises `TraceError` if it is neither 1 nor 2."""
    if sweeps not in (1, 2):
        what = f"is {sweeps!r}."
        raise TraceError(
            message("sweeps", what, "Give 1, or 2 for an update that joins gradients, as a global norm does.")
        )
    return sweeps


def refuse_twice(hook: str, is_rule: bool = False) -> None:
    """Raise `TraceError` for a hook, or a derivative rule, that two sweeps would call twice."""
    what = f"goes back twice, but {hook} is called back, and would see each cotangent twice."
    traced = "compute with jax.numpy in the rule" if is_rule else "aot.on_cotangent(..., traced=True)"
    cure = f"Remove it, or let JAX trace it: {traced}."
    raise TraceError(message("value_and_update with two sweeps", what, cure))


def run(jaxpr: Any, filling: Filling, inputs: Sequence[Any]) -> None:
    """Run a backward `(inputs, cotangents) -> gradients`, and hand out each gradient as soon as it is there."""
    _Run(jaxpr, filling, dict(zip(jaxpr.invars, inputs, strict=True)))()


class _Run:
    """One run of a backward.

    Attributes:
        values: the values so far, by variable.
        ends: the parameters whose gradient is a variable.
        scans: the parameters that scans update in their steps.
    """

    def __init__(self, jaxpr: Any, filling: Filling, values: dict[Any, Any]) -> None:
        """Begin with the inputs of the backward."""
        self.eqns, self.filling, self.values = jaxpr.eqns, filling, values
        self.ends: dict[Any, list[int]] = {}
        for place, v in enumerate(jaxpr.outvars):
            if isinstance(v, jaxprs.Literal):
                filling(place, abstract.full(v.aval, v.val))
            elif v in values:
                filling(place, values[v])
            else:
                self.ends.setdefault(v, []).append(place)
        self.scans = Scans.of(jaxpr, self.ends, values, filling)

    def __call__(self) -> None:
        """Run the equations, and update."""
        for n, eqn in enumerate(self.eqns):
            if n in self.scans.leaves:
                self.scan(n)
            elif n not in self.scans.done:
                self.take(eqn.outvars, evaluated([eqn], eqn.outvars, self.values))

    def scan(self, n: int) -> None:
        """Run a scan with its updates."""
        results, made = updating(self.eqns[n], self.scans.leaves[n], self.values)
        for leaf in self.scans.leaves[n]:
            self.filling.results.update((o, made[o]) for o in self.filling.parts[leaf.place].places)
        self.take(list(results), list(results.values()))

    def take(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Note the results of an equation, and update the parameters whose gradients are complete."""
        self.values.update(zip(variables, values, strict=True))
        for v, x in zip(variables, values, strict=True):
            for place in self.ends.get(v, ()):
                self.filling(place, x)
