"""Make the flat programs of a function: inside a trace, jitted, or compiled ahead of time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.aot.options.options import Options
from jointcut.aot.options.target import backend_for
from jointcut.aot.run import compile as compiling
from jointcut.aot.run.jits import Jits
from jointcut.aot.run.pullback import Run
from jointcut.aot.run.runner import Programs, Runner
from jointcut.aot.trace.primal import Primal
from jointcut.aot.trace.trees import Call
from jointcut.partition.errors import CallError, message
from jointcut.partition.lower import verify
from jointcut.partition.lower.emit import Halves
from jointcut.partition.program.jax import jaxprs, runtime
from jointcut.wrappers.arguments.tree import Bound, struct
from jointcut.wrappers.built_in import alias
from jointcut.wrappers.built_in.autograd import JITTED, Wrap
from jointcut.wrappers.built_in.zeros import Backwards, filled
from jointcut.wrappers.metadata.schemas import TensorAlias


@dataclass(frozen=True)
class Open:
    """The halves of a cut, run on values or tracers; outputs at positions in `left_out` are not returned.

    `forward` runs the forward half, `backwards` the backward. If the halves have no derivatives of their own
    (`is_plain`), a step evaluates both directly: `jax.jit` with `inline` would lose their source lines.
    """

    call: Call
    halves: Halves
    left_out: Collection[int]
    forward: Callable[..., list[Any]]
    backwards: Backwards
    is_plain: bool

    @classmethod
    def of(cls, call: Call, halves: Halves, left_out: Collection[int], wrap: Wrap = JITTED) -> Open:
        """Return the halves of one cut; `wrap` says how they are differentiated."""
        forward, is_plain = functools.partial(runtime.evaluate, halves.forward), wrap is JITTED
        return cls(call, halves, left_out, forward if is_plain else wrap(forward), Backwards(halves, wrap), is_plain)

    def run(self, which: str, flat: Sequence[Any]) -> list[Any]:
        """Run a program as `Programs.run` does."""
        ones, count = self.call.ones() if which == "step" else [], len(self.call.results.avals)
        if which == "step" and self.is_plain and backend_for(self.call.options.goal).several:
            both = verify.joined(self.halves, count)
            if both is not None:
                results = runtime.evaluate(both, *flat, *ones)
                return [*without(results[:count], self.left_out), *results[count:]]
        results = self.forward(*flat)
        outputs = without(results[:count], self.left_out)
        if which == "forward":
            return [*outputs, *results[count:]]
        residuals = verify.routed(self.halves.residuals, flat, results, count)
        if self.is_plain:
            return [*outputs, *verify.run_backward(self.halves, residuals, ones)]
        return [*outputs, *self.backward(residuals, ones, keep=False)]

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any | None], keep: bool) -> list[Any]:
        """Run the backward as `Programs.backward` does; values that depend only on zero cotangents are not computed."""
        del keep
        gradients = self.backwards(residuals, cotangents)
        return filled(gradients, (v.aval for v in jaxprs.opened(self.halves.backward)[0].outvars))


def in_a_trace(halves: Open) -> Programs:
    """Return programs that run the halves inside the current trace."""
    return Programs(halves.run, halves.backward, takes_zeros=True)


def jitted(jits: Jits, backward: Run | None) -> Programs:
    """Return programs that are jitted, and compiled at the first call; `backward` has derivatives of its own, or None.

    With options of XLA it is None: JAX takes these for whole programs alone, so the pullback is one.
    """
    if backward is None:
        return Programs(jits.run, _backward_by(jits.run), ready=jits.known)
    return Programs(jits.run, backward, takes_zeros=True, ready=jits.known)


def executables(jits: Jits) -> Programs:
    """Return programs that are compiled for the types of the signature."""

    def run(which: str, flat: Sequence[Any]) -> list[Any]:
        return jits.compiled(which)(*flat)

    return Programs(run, _backward_by(run), ready=jits.compiled)


def _backward_by(run: Callable[[str, Sequence[Any]], list[Any]]) -> Run:
    def backward(residuals: Sequence[Any], cotangents: Sequence[Any | None], keep: bool) -> list[Any]:
        return run("keeping backward" if keep else "backward", [*residuals, *cotangents])

    return backward


# ------------------------------------------------------------------------------------------------------ what to jit


def of_cut(
    run: Open, structs: Sequence[Any], residual_structs: Callable[[Jits], Sequence[Any]], overwritten: tuple[int, ...]
) -> Jits:
    """Return a cut's programs; `structs` are the forward's input types, `residual_structs` the backward's.

    The backward may take the memory of the residuals at the positions `overwritten`.
    """
    call = run.call
    keep, start = call.options.keep_unused, len(structs) - len(call.entering)

    def forward(*flat: Any) -> list[Any]:
        return run.run("forward", flat)

    def step(*flat: Any) -> list[Any]:
        return run.run("step", flat)

    def backward(*flat: Any) -> list[Any]:
        return runtime.evaluate(run.halves.backward, *flat)

    def takes() -> Sequence[Any]:
        return residual_structs(jits)

    jit = functools.partial(jax.jit, compiler_options=compiling.options_for(call.options))
    last = functools.partial(jit, backward, keep_unused=True)
    jitted = {
        "step": jit(step, keep_unused=keep, donate_argnums=donated(call, start)),
        "forward": jit(forward, keep_unused=keep),
        "backward": last(donate_argnums=overwritten),
        "keeping backward": last(),
    }
    known = dict.fromkeys(("step", "forward"), lambda: structs)
    takers = {**known, **dict.fromkeys(("backward", "keeping backward"), takes)}
    jits = Jits(call.name, jitted, takers, call.options.goal)
    return jits


def of_function(call: Call, source: Primal, left_out: Collection[int]) -> Jits:
    """Return the program of the function alone."""
    jaxpr, _ = jaxprs.opened(source.closed)
    closed = jaxprs.build(jaxpr.invars, without(jaxpr.outvars, left_out), jaxpr.eqns)
    structs = [*map(struct, source.consts), *call.bound.unique]

    def alone(*flat: Any) -> list[Any]:
        return runtime.evaluate(closed, *flat)

    given_up = donated(call, len(source.consts))
    how = {"keep_unused": call.options.keep_unused, "compiler_options": compiling.options_for(call.options)}
    program = jax.jit(alone, donate_argnums=given_up, **how)
    return Jits(call.name, {"alone": program}, {"alone": lambda: structs})


def forward_only(call: Call, source: Primal) -> Runner:
    """Return a runner of the function alone, compiled at the first call."""
    aliases = handed_back(call, source)
    return Runner(call, jitted(of_function(call, source, aliases), _no_backward), source.consts, aliases)


def _no_backward(residuals: Sequence[Any], cotangents: Sequence[Any | None], keep: bool) -> list[Any]:
    raise AssertionError("a function that runs alone has no backward")


def handed_back(call: Call, source: Primal) -> dict[int, TensorAlias]:
    """Return outputs of the function alone that are arguments or earlier outputs, by position."""
    (jaxpr, _), results = jaxprs.opened(source.closed), source.results
    arguments = [jaxpr.invars[len(source.consts) + place] for place in call.bound.places]
    returnable = alias.returnable(arguments, call.bound.leaves_of(*call.options.donated))
    return alias.handed_back(returnable, jaxpr.outvars[: results.num_returned], results.repeated)


def donated(call: Call, start: int) -> tuple[int, ...]:
    """Return the positions of the donated inputs of a program; the arguments are its inputs from `start` on.

    An array that is passed twice is not donated. Nor is an array of an object, which keeps its unwritten arrays.
    """
    bound = call.bound
    kept = {*bound.duplicates, *bound.duplicates.values(), *bound.in_objects}
    return tuple(sorted(start + bound.places[i] for i in bound.leaves_of(*call.options.donated) if i not in kept))


def refuse_donated_objects(bound: Bound, options: Options) -> None:
    """Raise `CallError` if a writable object is donated."""
    for i in sorted(bound.leaves_of(*options.donated) & bound.in_objects):
        what = "belongs to an object that the function can write, and its argument is donated."
        cure = "Take it out of donate_argnums and donate_argnames: the object keeps the arrays that are not written."
        raise CallError(message(bound.paths()[i], what, cure))


def without(results: Sequence[Any], left_out: Collection[int]) -> list[Any]:
    """Return the results, except those at positions in `left_out`."""
    return [x for i, x in enumerate(results) if i not in left_out] if left_out else list(results)
