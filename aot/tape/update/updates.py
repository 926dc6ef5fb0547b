"""Divide an update of all parameters into one for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.partition.errors import TraceError, message
from jointcut.partition.program import jaxprs
from jointcut.partition.program.places import line_of
from jointcut.partition.rewrite import simplify


@dataclass(frozen=True)
class Updates:
    """An update `(gradients, state, params) -> (params, state)`, flat, in parts that need one gradient each.

    Attributes:
        parts: for each parameter, what it computes, and the places of its outputs.
        rest: what needs no gradient, such as a count of the steps, and the places of its outputs.
        count: the number of outputs.
    """

    parts: tuple[tuple[Callable[..., list[Any]], tuple[int, ...]], ...]
    rest: tuple[Callable[..., list[Any]], tuple[int, ...]]
    count: int

    @classmethod
    def of(cls, update: Any, params: Any, state: Any, paths: Sequence[str]) -> Updates:
        """Trace an update for parameters and a state.

        Raises `TraceError` if an output needs more than one gradient, with the equation that joins them.
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

        structs = [jaxprs.struct(jax.typeof(x)) for x in (*leaves, *states, *leaves)]
        closed = simplify.inlined(jax.make_jaxpr(flat)(*structs))
        jaxpr, _ = jaxprs.opened(closed)
        owners = _owners(jaxpr, count, paths)
        parts = tuple(_part(closed, [o for o, k in enumerate(owners) if k == i]) for i in range(count))
        return cls(parts, _part(closed, [o for o, k in enumerate(owners) if k is None]), len(owners))


def _step_of(update: Any) -> Callable[[Any, Any, Any], Any]:
    """The update as one function; that of an Optax transformation adds what it returns."""
    if not hasattr(update, "update"):
        if callable(update):
            return update
        what = f"is a {type(update).__name__}."
        cure = "Give an Optax transformation, or a function (gradients, state, params) -> (params, state)."
        raise TraceError(message("update", what, cure))

    def step(gradients: Any, state: Any, params: Any) -> Any:
        changes, state = update.update(gradients, state, params)
        return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, changes), state

    return step


def _refuse_others(after: Any, trees: Any) -> None:
    if jax.tree.structure(after) != jax.tree_util.treedef_tuple(trees):
        what = "does not return parameters and state in the trees that it is given."
        raise TraceError(message("update", what, "Return (params, state)."))


def _owners(jaxpr: Any, count: int, paths: Sequence[str]) -> list[int | None]:
    """For each output the parameter whose gradient it needs; an output without a gradient belongs to its parameter."""
    needs: dict[Any, frozenset[int]] = {v: frozenset([i]) for i, v in enumerate(jaxpr.invars[:count])}
    joins: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        read = [needs.get(v, frozenset()) for v in eqn.invars if not isinstance(v, jaxprs.Literal)]
        all_of = frozenset[int]().union(*read)
        known = [joins[v] for v in eqn.invars if not isinstance(v, jaxprs.Literal) and v in joins]
        for v in eqn.outvars:
            needs[v] = all_of
            if len(all_of) > 1:
                joins[v] = known[0] if known else (eqn, all_of)
    owners: list[int | None] = []
    for o, v in enumerate(jaxpr.outvars):
        needed = frozenset[int]() if isinstance(v, jaxprs.Literal) else needs.get(v, frozenset())
        if len(needed) > 1:
            eqn, both = joins[v]
            first, second = sorted(both)[:2]
            what = (
                f"joins the gradients of {paths[first]} and {paths[second]} in {eqn.primitive.name} at {line_of(eqn)}."
            )
            cure = "Release needs an update of each leaf alone: take value_and_grad, and update after it."
            raise TraceError(message("update", what, cure))
        owners.append(next(iter(needed), o if o < count else None))
    return owners


def _part(closed: Any, outputs: Sequence[int]) -> tuple[Callable[..., list[Any]], tuple[int, ...]]:
    jaxpr, _ = jaxprs.opened(closed)
    less, used = jaxprs.pruned(closed, [o in outputs for o in range(len(jaxpr.outvars))])

    def run(*arrays: Any) -> list[Any]:
        return jaxprs.evaluate(less, *(x for x, on in zip(arrays, used, strict=True) if on))

    return run, tuple(outputs)
