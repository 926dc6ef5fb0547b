"""Divide an update of all parameters into one for each parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.aot.update.joins import Joins
from jointcut.partition.errors import TraceError, message
from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.partition.rewrite import simplify


@dataclass(frozen=True)
class Stretch:
    """A part of an update: a program, its inputs, and the places of its results.

    Attributes:
        program: a jaxpr without constants.
        given: for each of its inputs the place among the inputs of the update and further known values, or None.
        consts: for each of its inputs the constant that it is, or None.
        places: the places of its results.
        olds: for each output of the update the place of the input that it replaces.
    """

    program: Any
    given: tuple[int | None, ...]
    consts: tuple[Any, ...]
    places: tuple[int, ...]
    olds: Sequence[int]

    def values(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the inputs of the program, from these arrays."""
        return [const if i is None else arrays[i] for i, const in zip(self.given, self.consts, strict=True)]

    def __call__(self, *arrays: Any) -> list[Any]:
        """Return the results for the inputs of the update and further known values."""
        return runtime.evaluate(self.program, *self.values(arrays))


@dataclass(frozen=True)
class Updates:
    """An update `(gradients, state, params) -> (params, state)`, flat, in parts that need one gradient each.

    Attributes:
        parts: for each parameter, the program of its outputs, from the inputs and the joined values.
        rest: the program of outputs that need no gradient, such as a count of the steps.
        first: for each parameter, the program from its gradient to values for joining; its places are among these.
        join: from the inputs and these values to the joined ones.
        count: the number of outputs.
        num_kept: the number of values that the first sweep makes; with none there is one sweep.
    """

    parts: tuple[Stretch, ...]
    rest: Stretch
    first: tuple[Stretch, ...]
    join: Stretch
    count: int
    num_kept: int

    @classmethod
    def of(cls, update: Any, params: Any, state: Any, paths: Sequence[str], sweeps: int) -> Updates:
        """Trace an update for parameters and a state.

        Raises `TraceError` if an output needs more than one gradient, with the equation that joins them, unless two
        sweeps can make it.
        """
        step = _step_of(update)
        leaves, tree = jax.tree.flatten(params)
        states, state_tree = jax.tree.flatten(state)
        count = len(leaves)

        def flat(*arrays: Any) -> list[Any]:
            given = jax.tree.unflatten(tree, arrays[:count])
            before = jax.tree.unflatten(state_tree, arrays[count : len(arrays) - count])
            after = step(given, before, jax.tree.unflatten(tree, arrays[len(arrays) - count :]))
            _refuse_others(after, (tree, state_tree))
            return jax.tree.leaves(after)

        structs = [abstract.struct(jax.typeof(x)) for x in (*leaves, *states, *leaves)]
        jaxpr, consts = jaxprs.opened(simplify.inlined(jax.make_jaxpr(flat)(*structs)))
        olds = (*range(count + len(states), len(jaxpr.invars)), *range(count, count + len(states)))
        return cls._divided(_Traced(jaxpr, consts, olds), Joins.of(jaxpr, count, paths, sweeps), count)

    @classmethod
    def _divided(cls, traced: _Traced, joins: Joins, count: int) -> Updates:
        outvars = traced.jaxpr.outvars
        kept, joined = list(joins.kept), list(joins.joined)
        owners = [_owner(v, o, joins, count) for o, v in enumerate(outvars)]
        places = [tuple(o for o, k in enumerate(owners) if k == i) for i in (*range(count), None)]
        ends = [traced.stretch([outvars[o] for o in at], joined, at) for at in places]
        held = [tuple(n for n, v in enumerate(kept) if joins.kept[v] == i) for i in range(count)]
        first = tuple(traced.stretch([kept[n] for n in at], (), at) for at in held)
        join = traced.stretch(joined, kept, range(len(joined)))
        return cls(tuple(ends[:-1]), ends[-1], first, join, len(outvars), len(kept))


@dataclass(frozen=True)
class _Traced:
    """An update as a jaxpr; `olds` are for each output the place of the input that it replaces."""

    jaxpr: Any
    consts: Sequence[Any]
    olds: Sequence[int]

    def stretch(self, wanted: Sequence[Any], known: Sequence[Any], places: Sequence[int]) -> Stretch:
        """Return the program of some variables, from the inputs and the variables that are known."""
        eqns = [eqn for eqn in self.jaxpr.eqns if not any(v in known for v in eqn.outvars)]
        consts = [v for v in self.jaxpr.constvars if v not in known]
        before = [*(v for v in self.jaxpr.invars if v not in known), *known]
        less, used = jaxprs.pruned(jaxprs.build([*consts, *before], wanted, eqns), [True] * len(wanted))
        places_of = {v: i for i, v in enumerate((*self.jaxpr.invars, *known))}
        values = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        read = [v for v, on in zip((*consts, *before), used, strict=True) if on]
        given, fixed = tuple(map(places_of.get, read)), tuple(map(values.get, read))
        return Stretch(less, given, fixed, tuple(places), self.olds)


def _owner(v: Any, place: int, joins: Joins, count: int) -> int | None:
    """Return the parameter whose gradient an output needs; an output that needs none belongs to its parameter."""
    if isinstance(v, jaxprs.Literal) or v not in joins.owners:
        return place if place < count else None
    return joins.owners[v]


def _step_of(update: Any) -> Callable[[Any, Any, Any], Any]:
    """Return the update as one function; for an Optax transformation it adds the transformation's result."""
    if not hasattr(update, "update"):
        what = f"is a {type(update).__name__}."
        if callable(update):
            if (given := _other_arguments(update)) is None:
                return update
            what = f"takes {given}, not three arguments."
        cure = "Give an Optax transformation, or a function (gradients, state, params) -> (params, state)."
        raise TraceError(message("update", what, cure))

    def step(gradients: Any, state: Any, params: Any) -> Any:
        changes, state = update.update(gradients, state, params)
        return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, changes), state

    return step


def _other_arguments(update: Callable[..., Any]) -> str | None:
    """Return the arguments of a function that cannot be called with three; None if it can, or if that is unknown."""
    try:
        signature = inspect.signature(update)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*range(3))
    except TypeError:
        return str(signature)
    return None


def _refuse_others(after: Any, trees: Any) -> None:
    if jax.tree.structure(after) != jax.tree_util.treedef_tuple(trees):
        what = "does not return parameters and state in the trees that it is given."
        raise TraceError(message("update", what, "Return (params, state)."))
