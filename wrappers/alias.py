"""Pass an array once when the caller passed it twice; return inputs as themselves.

An array that stands at two places of the arguments enters a program once (`tree.Bound.places`), and is differentiated
at each place by itself. An output that is an input, or an earlier output, does not pass through XLA, which would copy
it: the program returns a `TensorAlias` in its place, and the caller gets the very same array.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.partition.errors import CallError, message
from jointcut.wrappers.metadata import TensorAlias
from jointcut.wrappers.tree import Bound
from jointcut.wrappers.wrapper import Target

jax.tree_util.register_static(TensorAlias)


@dataclass(frozen=True)
class AliasWrapper:
    """Let each array enter once, and put into results what stays out of the program."""

    traced: Bound

    def pre_compile(self, target: Target) -> Target:
        """The same function, with the arrays that are distinct for inputs."""
        first = [slot for i, slot in enumerate(target.convention.inputs) if i not in self.traced.duplicates]
        return replace(target, convention=replace(target.convention, inputs=tuple(first)), places=self.traced.places)

    def post_compile(self, call: Callable[..., Any], target: Target) -> Callable[..., Any]:
        """A call that raises `CallError` where arrays are distinct that were one, and that finishes results."""
        del target

        def aliased(bound: Bound) -> Any:
            for i, j in self.traced.duplicates.items():
                if bound.duplicates.get(i) != j:
                    paths = bound.paths()
                    what = f"was the same array as {paths[j]} when traced, and is another one now."
                    cure = "Trace and compile for this call too, or call the function itself, which does so by need."
                    raise CallError(message(paths[i], what, cure))
            result = call(bound)
            return finished(result.result, bound.leaves) if type(result) is Unfinished else result

        return aliased


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unfinished:
    """A result in which some outputs are still missing; calls that miss none never make one."""

    result: Any


def identities(inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[int, TensorAlias]:
    """Which outputs are inputs or earlier outputs, by position: the same tracers, or variables of a jaxpr."""
    given = {id(x): i for i, x in reversed(list(enumerate(inputs)))}
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


def kept_out(found: dict[int, TensorAlias], donated: Collection[int]) -> dict[int, TensorAlias]:
    """Without those whose array is given up to the program: that one must make a new one."""
    return {i: alias for i, alias in found.items() if alias.source == "output" or alias.alias not in donated}


def inserted(results: Sequence[Any], found: Mapping[int, TensorAlias], leaves: Sequence[Any]) -> list[Any]:
    """A program's results, its outputs first, with what stayed out of it in its place."""
    whole = list(results)
    for i, twin in sorted(found.items()):
        whole.insert(i, leaves[twin.alias] if twin.source == "input" else whole[twin.alias])
    return whole


def replaced(outputs: Sequence[Any], found: dict[int, TensorAlias]) -> list[Any]:
    """The outputs with an alias in the place of each that stays out of the program."""
    return [found.get(i, out) for i, out in enumerate(outputs)]


def finished(result: Any, inputs: Sequence[Any]) -> Any:
    """A result with the caller's own arrays in the place of aliases; its first leaves are the function's outputs."""
    leaves, tree = jax.tree.flatten(result, is_leaf=_is_alias)
    for i, leaf in enumerate(leaves):
        if _is_alias(leaf):
            found = inputs[leaf.alias] if leaf.source == "input" else leaves[leaf.alias]
            leaves[i] = as_array(found)
    return jax.tree.unflatten(tree, leaves)


def as_array(x: Any) -> Any:
    """What a program would return for an argument: an array of JAX's."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x.copy() if isinstance(x, np.ndarray) else x)


def _is_alias(x: Any) -> bool:
    return isinstance(x, TensorAlias)
