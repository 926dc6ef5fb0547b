"""Let an array that is passed twice enter once, and return inputs without a copy.

An array at two places of the arguments enters a program once, and is differentiated at each place separately. An output
that is an input, or an earlier output, is not returned by the program, since XLA would copy it. A `TensorAlias` names
the array, and the caller gets this array.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.partition.errors import CallError, message
from jointcut.partition.program.jax.jaxprs import Literal
from jointcut.wrappers.arguments.tree import Bound, places
from jointcut.wrappers.metadata.schemas import InputAliasInfo, TensorAlias
from jointcut.wrappers.wrapper import Target


@dataclass(frozen=True)
class AliasWrapper:
    """Let each array enter once; `inputs` are the records of the arguments."""

    inputs: Sequence[InputAliasInfo]

    @property
    def duplicates(self) -> dict[int, int]:
        """Positions of arrays that were passed before, each with the first position."""
        return {i: info.duplicate_of for i, info in enumerate(self.inputs) if info.duplicate_of is not None}

    def pre_compile(self, target: Target) -> Target:
        """Return the same function, with the distinct arrays as inputs."""
        pairs = zip(target.convention.inputs, self.inputs, strict=True)
        entering = tuple(slot for slot, info in pairs if info.duplicate_of is None)
        convention = replace(target.convention, inputs=entering)
        return replace(target, convention=convention, places=places(len(self.inputs), self.duplicates))

    def post_compile(self, call: Callable[..., Any], target: Target) -> Callable[..., Any]:
        """Return a call that raises `CallError` if arrays that were one array at the trace are distinct now."""
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
    """Return the positions of repeated outputs, each with the position of the first occurrence."""
    first: dict[int, int] = {}
    positions = [first.setdefault(id(output), i) for i, output in enumerate(outputs)]
    return tuple((i, j) for i, j in enumerate(positions) if i != j)


def returnable(arguments: Sequence[Any], donated: Collection[int]) -> dict[Any, int]:
    """Return the variables of the arguments that may be handed back, each with its first position.

    An array that is donated at any of its positions is gone after the call.
    """
    gone = {arguments[i] for i in donated}
    return {var: i for i, var in reversed(list(enumerate(arguments))) if var not in gone}


def handed_back(
    returnable: Mapping[Any, int], outputs: Sequence[Any], repeated: Iterable[tuple[int, int]]
) -> dict[int, TensorAlias]:
    """Return, by position, the outputs of a jaxpr that the program does not return: arguments and `repeated` outputs.

    Equal outputs that the function computed twice are two arrays, since the caller may donate one; XLA may merge them.
    """
    aliases = {i: TensorAlias("output", j) for i, j in repeated}
    pairs = [(i, var) for i, var in enumerate(outputs) if not isinstance(var, Literal)]
    return aliases | {i: TensorAlias("input", returnable[var]) for i, var in pairs if var in returnable}


def inserted(results: Sequence[Any], aliases: Mapping[int, TensorAlias], leaves: Sequence[Any]) -> list[Any]:
    """Add the outputs that a program did not return to its results; `leaves` are the arguments."""
    outputs = list(results)
    for i, alias in sorted(aliases.items()):
        outputs.insert(i, leaves[alias.alias] if alias.source == "input" else outputs[alias.alias])
    return outputs


def as_array(x: Any) -> Any:
    """Return the JAX array that a program would return for an argument."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x.copy() if isinstance(x, np.ndarray) else x)
