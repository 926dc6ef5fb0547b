"""Run the recorded ops of a tape again, as one step of `aot.function`.

With a budget or a policy a tape keeps no residuals. The recorded ops form a function without control flow. Its
arguments are the differentiated arrays and the other arrays that the ops read. The gradient of this function is cut,
compiled and run like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jointcut.aot.call.function import Function
from jointcut.aot.options.options import Options
from jointcut.aot.stages.traced import Traced
from jointcut.aot.tape.nodes import Edge, Node
from jointcut.partition.errors import CallError, message
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax import jaxprs, runtime, side_effects, user_source
from jointcut.partition.program.places import line_at

#: The source of an input: a step and its output; step -1 for a leaf, and step -2 for another array.
Origin = tuple[int, int]

_LEAF, _READ = -1, -2


@dataclass(frozen=True)
class Line:
    """The ops of a tape that lead to some of its values.

    Attributes:
        nodes: the ops, in running order.
        inputs: the origin of each input of each op.
        outputs: the origins of the values.
        arrays: the arrays that the ops read besides the leaves, each once.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[tuple[Origin, ...], ...]
    outputs: tuple[Origin, ...]
    arrays: list[Any]

    @classmethod
    def of(cls, values: Sequence[Edge]) -> Line:
        """Return the ops that lead to some values."""
        nodes = _reached(values)
        numbers, arrays, known = {node: i for i, node in enumerate(nodes)}, list[Any](), dict[int, int]()

        def origin(x: Any) -> Origin:
            if isinstance(x, tuple):
                node, i = x
                return (_LEAF, node.place) if node.record is None else (numbers[node], i)
            if id(x) not in known:
                known[id(x)] = len(arrays)
                arrays.append(x)
            return _READ, known[id(x)]

        inputs = tuple(tuple(map(origin, node.given)) for node in nodes)
        return cls(tuple(nodes), inputs, tuple(map(origin, values)), arrays)

    @property
    def key(self) -> Any:
        """The key that determines the program."""
        ids = tuple(node.record.id for node in self.nodes if node.record is not None)
        return ids, self.inputs, self.outputs

    def function(self, name: str, options: Options) -> Function:
        """Return a function of the leaves, in a tree, and of the other arrays; it holds neither.

        The function returns a list of the values; a single scalar is returned without a list. Raises `CallError` for an
        op with an effect, which would happen twice.
        """
        steps = [(_program(name, node), own) for node, own in zip(self.nodes, self.inputs, strict=True)]
        outputs = self.outputs

        def run(leaves: Any, *, arrays: Sequence[Any]) -> Any:
            given, made = jax.tree.leaves(leaves), list[list[Any]]()

            def read(origin: Origin) -> Any:
                step, i = origin
                return given[i] if step == _LEAF else arrays[i] if step == _READ else made[step][i]

            for closed, inputs in steps:
                made.append(runtime.evaluate(closed, *map(read, inputs)))
            results = list(map(read, outputs))
            return results[0] if len(results) == 1 and results[0].shape == () else results

        run.__name__ = run.__qualname__ = name
        return Function(run, options)


def _reached(values: Sequence[Edge]) -> list[Node]:
    """Return the ops that lead to some values, in running order."""
    found, todo = set[Node](), [node for node, _ in values]
    while todo:
        if (node := todo.pop()) not in found and node.record is not None:
            found.add(node)
            todo.extend(x[0] for x in node.given if isinstance(x, tuple))
    return sorted(found, key=lambda node: node.order)


def _program(name: str, node: Node) -> Any:
    assert node.record is not None, "leaves are no ops"
    closed = side_effects.silenced(node.record.closed)  # its prints were printed already
    effects = [effect for eqn in jaxprs.opened(closed)[0].eqns for effect in side_effects.effect_names(eqn)]
    if effects:
        why = "by a budget, policy or another option it would come twice"
        what = f"has the effect {effects[0]} at {line_at(node.source)}: {why}."
        raise CallError(message(name, what, "Move it out of the function, or leave the option out."))
    return user_source.written_at(closed, node.source)


@dataclass(frozen=True)
class Straight:
    """The step of one structure: a function, and the types of its leaves and arrays."""

    function: Function
    types: tuple[Any, Any]

    @cached_property
    def traced(self) -> Traced:
        """The traced step, which can be cut and reported."""
        return self.function.trace(self.types[0], arrays=self.types[1])

    @property
    def closed(self) -> Any:
        """The joint program as a closed jaxpr."""
        return self.traced.joint

    @property
    def graph(self) -> Graph:
        """The joint program as ops and values."""
        return self.traced.graph
