"""Pass an array once when the caller passed it twice; return inputs as themselves.

An array that stands at two places of the arguments enters a program once (`tree.Bound.places`), and is differentiated
at each place by itself. An output that is an input, or an earlier output, does not pass through XLA, which would copy
it: it stays out of the program, a `TensorAlias` tells which it is, and the caller gets the very same array.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.partition.errors import CallError, message
from jointcut.partition.program.jaxprs import Literal
from jointcut.wrappers.arguments.tree import Bound, places
from jointcut.wrappers.metadata.schemas import InputAliasInfo, TensorAlias
from jointcut.wrappers.wrapper import Target


@dataclass(frozen=True)
class AliasWrapper:
    """Let each array enter once; `inputs` are the records of the arguments."""

    inputs: Sequence[InputAliasInfo]

    @property
    def duplicates(self) -> dict[int, int]:
        """Positions of arrays that stand at an earlier position already, each with the first one."""
        return {i: info.duplicate_of for i, info in enumerate(self.inputs) if info.duplicate_of is not None}

    def pre_compile(self, target: Target) -> Target:
        """The same function; its inputs are the distinct arrays."""
        pairs = zip(target.convention.inputs, self.inputs, strict=True)
        entering = tuple(slot for slot, info in pairs if info.duplicate_of is None)
        convention = replace(target.convention, inputs=entering)
        return replace(target, convention=convention, places=places(len(self.inputs), self.duplicates))

    def post_compile(self, call: Callable[..., Any], target: Target) -> Callable[..., Any]:
        """A call that raises `CallError` where arrays are distinct that were one."""
        del target
        duplicates = self.duplicates

        def aliased(bound: Bound) -> Any:
            for i, j in duplicates.items():
                if bound.duplicates.get(i) != j:
                    what = f"was the same array as {self.inputs[j].path} when traced, and is another one now."
                    cure = "Trace and compile for this call too, or call the function itself, which does so by need."
                    raise CallError(message(self.inputs[i].path, what, cure))
            return call(bound)

        return aliased


def repeated(outputs: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Positions of outputs that are the same object as an earlier one, each with that of the first."""
    first: dict[int, int] = {}
    positions = [first.setdefault(id(output), i) for i, output in enumerate(outputs)]
    return tuple((i, j) for i, j in enumerate(positions) if i != j)


def returnable(arguments: Sequence[Any], donated: Collection[int]) -> dict[Any, int]:
    """Variables of the arguments that can be returned as they are, each with its first position.

    An array that is donated at any of its positions is gone after the call.
    """
    gone = {arguments[i] for i in donated}
    return {var: i for i, var in reversed(list(enumerate(arguments))) if var not in gone}


def handed_back(
    returnable: Mapping[Any, int], outputs: Sequence[Any], repeated: Iterable[tuple[int, int]]
) -> dict[int, TensorAlias]:
    """Outputs of a jaxpr that are arguments or `repeated`, by position: they stay out of the compiled program.

    Equal outputs that the function computed twice are two arrays, though XLA may merge them: the caller may donate one.
    """
    aliases = {i: TensorAlias("output", j) for i, j in repeated}
    pairs = [(i, var) for i, var in enumerate(outputs) if not isinstance(var, Literal)]
    return aliases | {i: TensorAlias("input", returnable[var]) for i, var in pairs if var in returnable}


def inserted(results: Sequence[Any], found: Mapping[int, TensorAlias], leaves: Sequence[Any]) -> list[Any]:
    """A program's results, its outputs first, with what stayed out of it in its place."""
    whole = list(results)
    for i, twin in sorted(found.items()):
        whole.insert(i, leaves[twin.alias] if twin.source == "input" else whole[twin.alias])
    return whole


def as_array(x: Any) -> Any:
    """The array of JAX's that a program would return for an argument."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x.copy() if isinstance(x, np.ndarray) else x)
