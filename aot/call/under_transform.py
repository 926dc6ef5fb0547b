"""Run a function inside a transformation, which may differentiate it.

Under `jax.grad`, `jax.vmap` or `jax.lax.scan` the function becomes one call with a derivative of its own. That is the
halves of its cut, and in forward mode the derivative of its formulas.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jointcut.aot.options.limits import limit
from jointcut.aot.options.options import Options
from jointcut.aot.planning.request import Request
from jointcut.aot.planning.together import answered
from jointcut.aot.progress.progress import Stage
from jointcut.aot.run.again import differentiated_again
from jointcut.aot.run.bound import Planned, Signature
from jointcut.aot.run.unchecked import Unmeasured, Unshared
from jointcut.aot.run.uncut import Uncut, has_symbolic_sizes
from jointcut.aot.stages.tracing import tree_wrapper, with_target
from jointcut.aot.trace import escapes
from jointcut.aot.trace.blame import explained, for_one_example
from jointcut.aot.trace.formulas.rewrite import with_formulas
from jointcut.aot.trace.joint import Joint, joint, rewritten
from jointcut.aot.trace.primal import Primal, primal
from jointcut.aot.trace.signature import described_inside
from jointcut.partition.program.jax import abstract, jaxprs, processes, runtime
from jointcut.partition.program.jax.meshes import spec_of
from jointcut.partition.tiles.layouts import Layout
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.built_in import refs
from jointcut.wrappers.built_in.autograd import JITTED, differentiable
from jointcut.wrappers.metadata.convention import Convention, slots
from jointcut.wrappers.wrapper import Target

#: The number of each function, in the order in which they are made.
_numbers = itertools.count()


class CallsInside:
    """Calls of one function inside transformations."""

    def __init__(
        self, function: Callable[..., Any], options: Options, name: str, uncut: Uncut, unmeasured: Unmeasured
    ) -> None:
        """Keep the function; `uncut` warns once where no cut is applied, `unmeasured` where no error is measured."""
        self._function, self._options, self._name = function, options, name
        self._numbered = f"{name}#{next(_numbers)}"
        self._uncut, self._unmeasured, self._unshared = uncut, unmeasured, Unshared(name)

    def __call__(self, signature: Signature, bound: Bound) -> Any:
        """The function's result for the arguments of one call; traced once for a signature."""

        def make() -> tuple[Primal, Callable[..., list[Any]]]:
            with (
                explained(self._name, self._function, bound.paths(), bound),
                escapes.refused(self._function, self._name, bound),
            ):
                wrapper = tree_wrapper(self._function, bound, bound.input_info(), self._options)
                source = primal(wrapper.flat(self._function), bound.leaves, False)
            lying = [*map(spec_of, (*source.consts, *bound.leaves))]
            return source, self._flat(source, bound.abstract(), lying, signature.planned)

        source, call = signature.made.of(
            "inside", make, keeps=lambda pair: not any(map(runtime.is_tracer, pair[0].consts))
        )
        placed = processes.given(lambda: zip(bound.paths(), bound.leaves, strict=True))
        with for_one_example(bound.leaves), placed:
            outputs = call(*source.consts, *bound.leaves)
        return source.results.given_back(outputs, bound)[0]

    def _flat(self, source: Primal, bound: Bound, lying: list[Any], planned: Planned) -> Callable[..., list[Any]]:
        """Return a flat function whose derivative is the halves, and in forward mode the derivative of its formulas.

        `lying` tells of each input how it lies on a mesh (`spec_of`), and `planned` is told of a plan.
        """
        closed = with_formulas(source.closed, self._options.conventions)
        if has_symbolic_sizes(bound.leaves):
            self._uncut.symbolic()
            return functools.partial(runtime.evaluate, closed)
        paths = [*(f"constant {i}" for i in range(len(source.consts))), *bound.paths()]
        again = JITTED if source.has_references else differentiated_again(self._options.conventions, self._name)
        twice = self._uncut.twice if again is JITTED else lambda: None
        options = with_target(self._options, bound)
        how = functools.partial(self._cut, paths, lying, planned, options), twice, again, self._numbered
        if not source.has_references:
            return differentiable(closed, *how)
        wrapper = refs.RefsWrapper(closed)
        if wrapper.pure is None:  # leave the derivative to JAX
            self._uncut.references()
            return functools.partial(runtime.evaluate, closed)
        run = differentiable(wrapper.pure, *how)
        inputs = slots(paths, abstract.input_structs(wrapper.pure))
        target = wrapper.pre_compile(Target(functools.partial(runtime.evaluate, closed), Convention(inputs, ())))
        write = wrapper.post_compile(run, target)

        def call(*flat: Any) -> list[Any]:
            with explained(self._name, self._function):
                return write(*flat)

        return call

    def _cut(
        self,
        paths: Sequence[str],
        lying: list[Any],
        planned: Planned,
        options: Options,
        closed: Any,
        mask: tuple[bool, ...],
    ) -> Any:
        """Return the joint graph, its halves and constants, for the inputs that JAX differentiates."""
        structs = abstract.input_structs(closed)
        more = len(mask) - len(paths)  # constants of `jax.vmap`
        paths = [*(f"constant {i}" for i in range(more)), *paths]
        if self._options.measures_error:
            self._unmeasured()
        with Stage("inside", self._name):
            with explained(self._name, self._function):
                flat = functools.partial(runtime.evaluate, closed)
                program = joint(flat, structs, False, mask, paths, conventions=self._options.conventions)
                program = rewritten(program, self._options.rewrites, described_inside)
                found = [spec_of(v.aval) for v in jaxprs.opened(closed)[0].invars]
                known = lying if [at and at[0] for at in lying] == [at and at[0] for at in found] else found
                program = replace(program, layout=Layout.of([*map(spec_of, program.consts), *known]))
                planned.is_made |= known is lying
            self.warn_unshared(program, options)
            split = answered(Request(self._name, program, options)).split
            self._uncut.closed(split.graph, split.plan)
        return split.graph, split.halves, program.consts

    def warn_unshared(self, program: Joint, options: Options) -> None:
        """Warn if the bytes of a budget are those of all devices, since it is not known how values lie."""
        is_bytes = options.budget is not None and limit(options.budget).peak_bytes is not None
        if is_bytes and options.sharing is None and program.layout is not None and not program.layout.is_known:
            self._unshared()
