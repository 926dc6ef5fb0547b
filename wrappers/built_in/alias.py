"""Pass an array once when the caller passed it twice; return inputs as themselves.

An array that stands at two places of the arguments enters a program once (`tree.Bound.places`), and is differentiated
at each place by itself. An output that is an input, or an earlier output, does not pass through XLA, which would copy
it: it stays out of the program, a `TensorAlias` tells which it is, and the caller gets the very same array.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.partition.errors import CallError, message
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.metadata.schemas import TensorAlias
from jointcut.wrappers.wrapper import Target


@dataclass(frozen=True)
class AliasWrapper:
    """Let each array enter once."""

    traced: Bound

    def pre_compile(self, target: Target) -> Target:
        """The same function, with the arrays that are distinct for inputs."""
        first = [slot for i, slot in enumerate(target.convention.inputs) if i not in self.traced.duplicates]
        return replace(target, convention=replace(target.convention, inputs=tuple(first)), places=self.traced.places)

    def post_compile(self, call: Callable[..., Any], target: Target) -> Callable[..., Any]:
        """A call that raises `CallError` where arrays are distinct that were one."""
        del target

        def aliased(bound: Bound) -> Any:
            for i, j in self.traced.duplicates.items():
                if bound.duplicates.get(i) != j:
                    paths = bound.paths()
                    what = f"was the same array as {paths[j]} when traced, and is another one now."
                    cure = "Trace and compile for this call too, or call the function itself, which does so by need."
                    raise CallError(message(paths[i], what, cure))
            return call(bound)

        return aliased


def identities(inputs: Sequence[Any], outputs: Sequence[Any], donated: Collection[int] = ()) -> dict[int, TensorAlias]:
    """Which outputs are inputs or earlier outputs, by position: the same tracers, or variables of a jaxpr.

    An input whose array is given up to the program is none that could be handed back.
    """
    gone = {id(inputs[i]) for i in donated}
    given = {id(x): i for i, x in reversed(list(enumerate(inputs))) if id(x) not in gone}
    found: dict[int, TensorAlias] = {}
    made: dict[int, int] = {}
    for i, out in enumerate(outputs):
        if id(out) in given:
            found[i] = TensorAlias("input", given[id(out)])
        elif id(out) in made:
            found[i] = TensorAlias("output", made[id(out)])
        else:
            made[id(out)] = i
    return found


def inserted(results: Sequence[Any], found: Mapping[int, TensorAlias], leaves: Sequence[Any]) -> list[Any]:
    """A program's results, its outputs first, with what stayed out of it in its place."""
    whole = list(results)
    for i, twin in sorted(found.items()):
        whole.insert(i, leaves[twin.alias] if twin.source == "input" else whole[twin.alias])
    return whole


def as_array(x: Any) -> Any:
    """The array of JAX's that a program would return for an argument."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x.copy() if isinstance(x, np.ndarray) else x)
