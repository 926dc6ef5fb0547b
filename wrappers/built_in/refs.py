"""Turn writes to references into extra results, then write them back.

In a compiled program a `jax.Ref` is an argument, and XLA writes its buffer in place (MUTATED_IN_GRAPH). JAX allows a
custom derivative for pure functions only. So inside a user's `jax.grad` or `jax.vmap` the function is made pure: the
array that a reference holds is an input, and its new state is an extra result that is written back after the call
(MUTATED_OUT_GRAPH).

Derivatives treat a reference as JAX does. A reference that is not differentiated may only be written with values
without a derivative (`jax.lax.stop_gradient`), and values read from it are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jointcut.partition.errors import TraceError, message
from jointcut.partition.program.jax import abstract, jaxprs, runtime, side_effects
from jointcut.partition.program.primitives import RULED
from jointcut.wrappers.arguments.paths import tree_paths
from jointcut.wrappers.wrapper import Target


@dataclass(frozen=True)
class RefsWrapper:
    """Make a flat jaxpr pure, and write the new states of its references after each call.

    `closed` has no constants: the arrays and references that the function closes over are inputs.
    """

    closed: Any

    @cached_property
    def references(self) -> tuple[int, ...]:
        """Positions of the inputs that are references."""
        jaxpr, _ = jaxprs.opened(self.closed)
        return tuple(i for i, var in enumerate(jaxpr.invars) if abstract.is_reference(var.aval))

    @cached_property
    def written(self) -> tuple[int, ...]:
        """Positions of the references that the function writes."""
        jaxpr, _ = jaxprs.opened(self.closed)
        changed = {var for eqn in jaxpr.eqns for var in written(eqn)}
        return tuple(i for i in self.references if jaxpr.invars[i] in changed)

    @cached_property
    def pure(self) -> Any | None:
        """The jaxpr without references; it returns the results, then the new state of each written reference.

        It is None if JAX cannot remove the references, such as when a function with a custom derivative takes one.
        """
        jaxpr, _ = jaxprs.opened(self.closed)
        if _hands_to_rules(jaxpr):
            return None
        try:
            inner, _ = jaxprs.opened(side_effects.discharged(self.closed))
        except NotImplementedError:
            return None
        count = len(jaxpr.outvars)
        last = dict(zip(self.references, inner.outvars[count:], strict=True))
        return jaxprs.build(inner.invars, [*inner.outvars[:count], *(last[i] for i in self.written)], inner.eqns)

    def pre_compile(self, target: Target) -> Target:
        """Return the pure function of the arrays that references hold; its last results are the new states."""
        convention = replace(target.convention, states=self.written)
        pure = self.pure
        assert pure is not None, "the caller has looked whether there is a pure form"
        return Target(lambda *flat: runtime.evaluate(pure, *flat), convention)

    def post_compile(self, call: Callable[..., Any], target: Target) -> Callable[..., Any]:
        """Return a call that takes references, made from a call that takes the arrays in them."""
        states = target.convention.states

        def with_references(*flat: Any) -> list[Any]:
            results = call(*(x[...] if i in self.references else x for i, x in enumerate(flat)))
            count = len(results) - len(states)
            for i, state in zip(states, results[count:], strict=True):
                flat[i][...] = state
            return list(results[:count])

        return with_references


def _hands_to_rules(jaxpr: Any) -> bool:
    """Whether a function with a custom derivative takes a reference, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in RULED:
            if any(abstract.is_reference(v.aval) for v in eqn.invars):
                return True
        elif any(map(_hands_to_rules, jaxprs.inner_jaxprs(eqn))):
            return True
    return False


def written(eqn: Any) -> Iterator[Any]:
    """Yield the references among an equation's operands that it writes."""
    return (e.input for e in eqn.effects if hasattr(e, "input") and type(e).__name__ != "ReadEffect")


def read(eqn: Any, used: AbstractSet[Any]) -> Iterator[Any]:
    """Yield the references among an equation's operands that it reads; `used` are the variables that are read.

    Adding to a reference reads it. Writing does not, unless the write returns the old array and this array is used.
    """
    for effect in eqn.effects:
        if hasattr(effect, "input") and (type(effect).__name__ != "WriteEffect" or _returns_used(eqn, used)):
            yield effect.input


def _returns_used(eqn: Any, used: AbstractSet[Any]) -> bool:
    """Whether the old array that a write returns is used, also in the bodies of loops and branches."""
    if eqn.primitive.name == "swap":
        return not used.isdisjoint(eqn.outvars)
    for body in jaxprs.inner_jaxprs(eqn):
        inner = {v for ends in (body.outvars, *(e.invars for e in body.eqns)) for v in jaxprs.variables(ends)}
        if any(_returns_used(e, inner) for e in body.eqns):
            return True
    return False


def refuse_results(tree: Any, leaves: Sequence[Any]) -> None:
    """Raise `TraceError` if a function returns a reference, traced or not."""
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Ref) or (runtime.is_tracer(leaf) and abstract.is_reference(jax.typeof(leaf))):
            what = "is a jax.Ref, which a compiled function cannot return."
            cure = "Return what it holds, ref[...]; the caller has the reference itself."
            raise TraceError(message(tree_paths("result", tree)[i], what, cure))
