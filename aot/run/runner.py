"""Run the programs of one signature on the caller's trees.

All ways of calling use this runner with different `Programs`: the decorated function, `Compiled`, the cache, an
artefact, debug mode, and an outer trace. It flattens the arguments, inserts the outputs that a program leaves out,
passes residuals to the backward, and puts results and gradients into the caller's trees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import treedef_tuple

from jointcut.aot.run.bound import Ready
from jointcut.aot.run.pullback import Pullback, Run, StaticPart
from jointcut.aot.trace.trees import Call
from jointcut.partition.lower import verify
from jointcut.partition.lower.emit import Residual
from jointcut.partition.program.jax import meshes
from jointcut.wrappers.arguments.given_up import is_given_up, refuse_given_up, remember
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.built_in import alias
from jointcut.wrappers.metadata.schemas import TensorAlias
from jointcut.wrappers.metadata.signatures import GraphSignature


@dataclass(frozen=True)
class Programs:
    """Flat programs of one signature. They do not return the outputs in `Runner.handed_back`.

    Attributes:
        run: runs `alone` (the outputs of the function), `step` (the outputs, then the gradients for a cotangent of one)
            or `forward` (the outputs, then the saved residuals).
        backward: returns the gradients.
        takes_zeros: whether a zero cotangent is passed to the backward as None, and not as an array of zeros.
        ready: returns `alone` or `step` as a function of arrays, or None if it cannot be called directly.
    """

    run: Callable[[str, Sequence[Any]], Sequence[Any]]
    backward: Run
    takes_zeros: bool = False
    ready: Callable[[str], Callable[..., Sequence[Any]] | None] = lambda name: None


@dataclass(frozen=True)
class Runner:
    """The programs of one signature, and how to call them.

    Attributes:
        call: the arguments and results of the signature.
        programs: the flat programs.
        consts: the arrays that the function closes over: leading inputs of every program but the backward.
        handed_back: outputs that are inputs or earlier outputs, which the programs do not return.
        residuals: the origin of each leading input of the backward.
        signed: returns the signature of the programs for the pullback; None if there is no trace.
        is_apart: whether `value_and_grad` runs both halves as two programs.
    """

    call: Call
    programs: Programs
    consts: tuple[Any, ...] = ()
    handed_back: Mapping[int, TensorAlias] = field(default_factory=dict)
    residuals: tuple[Residual, ...] = ()
    signed: Callable[[], GraphSignature] | None = None
    is_apart: bool = False
    _backwards: dict[Any, StaticPart] = field(default_factory=dict, init=False, repr=False, compare=False)

    def result(self, bound: Bound) -> Any:
        """Return the function's result."""
        results = self._restored(self.programs.run("alone", self.flat(bound)), bound)
        self._remember(bound)
        return self.call.result(results, bound)

    def value_and_grad(self, bound: Bound) -> Any:
        """Like `jax.value_and_grad` of the function: `value, grads`, or `(value, aux), grads` with `has_aux`."""
        if self.is_apart:
            return self.value_and_grad_in_two(bound)
        results = self._restored(self.programs.run("step", self.flat(bound)), bound)
        count = len(self.call.results.avals)
        return self._in_trees(results[:count], results[count:], bound)

    def value_and_grad_in_two(self, bound: Bound) -> Any:
        """Like `value_and_grad`, by two programs; the second may overwrite the residuals."""
        if not self.call.is_scalar:
            self.call.ones()  # raises
        outputs, residuals = self.forward(bound)
        is_explicit = meshes.is_explicit(getattr(outputs[0], "sharding", None))  # only the output knows its devices
        ones = [jnp.ones_like(outputs[0])] if is_explicit and self.call.is_train else self.call.ones()
        return self._in_trees(outputs, self.programs.backward(residuals, ones, False), bound)

    def _in_trees(self, outputs: Sequence[Any], gradients: Sequence[Any], bound: Bound) -> Any:
        self._remember(bound)
        value = self.call.result(outputs, bound)
        return value, self.call.in_argnums(gradients, bound, keep_structure=True)

    def vjp(
        self, bound: Bound, positions: Sequence[int] | None = None, overwrites: bool = False
    ) -> tuple[Any, Any, Pullback]:
        """Return the output, the aux, and the pullback; see `StaticPart` for `positions` and `overwrites`."""
        bound = bound.copied()
        outputs, residuals = self.forward(bound)
        main, aux = self.call.given_back(outputs, bound)
        kinds = [r.kind for r in self.residuals]
        pairs = list(zip(kinds, residuals, strict=True))
        saved = [x for kind, x in pairs if kind != "input"]
        inputs = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for kind, x in pairs if kind == "input"]
        return main, aux, Pullback(saved, inputs, self._backward(bound, outputs, positions, overwrites))

    def forward(self, bound: Bound) -> tuple[list[Any], list[Any]]:
        """Return all outputs, flat, and the residuals in the backward's order."""
        flat = self.flat(bound)
        results, count = self._restored(self.programs.run("forward", flat), bound), len(self.call.results.avals)
        return results[:count], verify.routed(self.residuals, flat, results, count)

    def ready(self, name: str) -> Ready | None:
        """Return the program for a "call" or "step", if a call only needs to run it on arrays, else None."""
        tree = self._step_tree if name == "step" else self._result_tree
        if tree is None or not self.call.enters_as_it_is or (name == "step" and self.is_apart):
            return None
        program = self.programs.ready("step" if name == "step" else "alone")
        return None if program is None else (program, self.consts, tree)

    @cached_property
    def _result_tree(self) -> Any:
        """The tree of the function's result, if its leaves are exactly a program's outputs, else None."""
        results = self.call.results
        holds_more = results.states or results.grown or results.holds_objects or results.holds_fixed
        return None if self.handed_back or holds_more or self.call.order is not None else results.tree

    @cached_property
    def _step_tree(self) -> Any:
        """The tree of the result of `value_and_grad`, if its leaves are exactly a program's outputs, else None."""
        gradients = self.call.gradient_tree
        if self._result_tree is None or gradients is None:
            return None
        return treedef_tuple((self._result_tree, gradients))

    def flat(self, bound: Bound) -> list[Any]:
        """Return the inputs of the programs: constants, then leaves; raises `CallError` for one that was given up."""
        leaves = bound.leaves
        if any(map(is_given_up, leaves)):
            refuse_given_up(bound)
        if self.call.enters_as_it_is:
            return [*self.consts, *leaves]
        return [*self.consts, *(leaves[i] for i in self.call.entering)]

    def _remember(self, bound: Bound) -> None:
        if self._donates:
            remember(bound.leaves, self.call.name)

    @cached_property
    def _donates(self) -> bool:
        return any(self.call.options.donated)

    def _restored(self, results: Sequence[Any], bound: Bound) -> list[Any]:
        """Return a program's results with the outputs in `handed_back` inserted."""
        if not self.handed_back:
            return list(results)
        whole = alias.inserted(results, self.handed_back, bound.leaves)
        return [alias.as_array(x) if i in self.handed_back else x for i, x in enumerate(whole)]

    def _backward(
        self, bound: Bound, outputs: Sequence[Any], positions: Sequence[int] | None, overwrites: bool
    ) -> StaticPart:
        """Return the static part of a pullback; shared by all calls unless their sizes differ."""
        key = None if positions is None else tuple(positions), overwrites
        backward = self._backwards.get(key)
        if backward is None:
            kinds, programs = tuple(r.kind for r in self.residuals), self.programs
            how = self.call, programs.backward, kinds, programs.takes_zeros
            backward = StaticPart(*how, *key, id(programs), None if self.signed is None else self.signed())
            self._backwards[key] = backward
        if not self.call.is_sized:
            return backward
        order = self.call.order or range(len(outputs))
        results = replace(self.call.results, avals=tuple(jax.typeof(outputs[i]) for i in order))
        return replace(backward, call=replace(self.call, bound=bound.abstract(), results=results))
