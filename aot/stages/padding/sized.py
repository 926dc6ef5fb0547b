"""Run a function whose sizes vary: one pair of halves for padded arrays serves all sizes of an axis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jointcut.aot.options.options import Options, name_of
from jointcut.aot.run.bound import KEPT_SIGNATURES
from jointcut.aot.run.flat import forward_only
from jointcut.aot.run.runner import Programs, Runner
from jointcut.aot.run.uncut import cut_around
from jointcut.aot.stages import tracing
from jointcut.aot.stages.padding.named import NamedSizes, SizeNames, is_plain
from jointcut.aot.stages.padding.padded import padded_joint
from jointcut.aot.stages.traced import Traced
from jointcut.aot.trace.joint import Joint
from jointcut.aot.trace.primal import Primal, Results
from jointcut.aot.trace.shapes import concrete
from jointcut.partition.errors import CallError, TraceError, message
from jointcut.partition.figures import counted
from jointcut.partition.program.jax import jaxprs, runtime
from jointcut.partition.program.sizes import is_symbolic, numbers
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.metadata.convention import is_inexact
from jointcut.wrappers.table import Table

#: A symbolic shape; None for an array whose sizes are all numbers.
Shape = tuple[Any, ...] | None


@dataclass(frozen=True)
class Ends:
    """The symbolic shapes of what a program takes and returns, by flat position.

    Attributes:
        inputs: those of the constants and arguments.
        outputs: those of the outputs that the program returns.
        cotangents: those of the outputs with a cotangent.
        gradients: those of the gradients.
        residuals: those of the residuals.
    """

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    cotangents: tuple[Shape, ...]
    gradients: tuple[Shape, ...]
    residuals: tuple[Shape, ...]


@dataclass
class Shared:
    """The programs for all sizes up to a bucket.

    Attributes:
        runner: runs them on padded arrays.
        results: the function's results, with symbolic sizes.
        ends: the symbolic shapes of what the programs take and return.
        constants: the number of constants that come before the sizes.
        names: the names of the sizes, in the order of the programs.
        words: the arguments with such sizes, in words.
        served: the number of sizes with which they were called.
    """

    runner: Runner
    results: Results
    ends: Ends
    constants: int
    names: tuple[str, ...]
    words: str
    served: int = 0

    def at(self, bound: Bound, named: NamedSizes) -> Runner:
        """Return the runner for the sizes of one call, whose arguments are given as types."""
        self.served += 1
        runner, results = self.runner, self.results
        avals = tuple(a.update(shape=numbers(a.shape, named.true)) for a in results.avals)
        call = replace(runner.call, bound=bound, results=replace(results, avals=avals))
        consts = (*runner.consts[: self.constants], *(named.scalars[name] for name in self.names))
        programs = _at_true_sizes(runner.programs, self.ends, named)
        return replace(runner, call=call, programs=programs, consts=consts)


class Sized:
    """The sizes of a function that have names, and the programs that serve all sizes; print it to see them."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        """Start without names: the first size of each axis has a program of its own."""
        self._function, self._options, self._name = function, options, name_of(function)
        self._change: Callable[[Traced], Traced] | None = None
        self._still = 0
        self._names = SizeNames()
        self._made: Table[Shared] = Table(KEPT_SIGNATURES)
        self._notes: list[str] = []

    def changed(
        self, function: Callable[..., Any], options: Options, change: Callable[[Traced], Traced], still: int
    ) -> Sized:
        """Return the sizes of another step, which `change` makes of a trace for padded arrays; it is told here, too.

        The first `still` arguments get no names.
        """
        other = Sized(function, options)
        other._change, other._still, other._made, other._notes = change, still, self._made, self._notes
        return other

    def __len__(self) -> int:
        """Return the number of programs, or pairs of halves, that serve more than one size."""
        return len(self._made)

    def __repr__(self) -> str:
        """Return a line for each program, and for each size that must be a number."""
        shared = [x for key in self._made if (x := self._made.get(key)) is not None]
        head = f"{self._name}: {counted(len(shared), 'program')} for sizes that vary"
        made = [f"  {i}: {x.words}, {counted(x.served, 'size')}" for i, x in enumerate(shared)]
        return "\n".join([head, *(f"  {note}" for note in self._notes), *made])

    def runner(self, kind: str, positions: Sequence[int] | None, bound: Bound) -> Runner | None:
        """Return the runner of a call by programs for padded arrays; None if its sizes are numbers."""
        named = self._of(bound)
        if named is None:
            return None
        whole = bound.abstract()
        leaves = list(whole.leaves)
        for (_, i), shape in named.shapes.items():
            leaves[i] = leaves[i].update(shape=shape)
        texts = tuple(x if _symbolic(x) is None else (str(x.shape), x.dtype) for x in leaves)
        duplicates = tuple(bound.duplicates.items())
        how = id(self), kind, positions, bound.tree, bound.statics, duplicates
        key = *how, texts, named.key, runtime.trace_context()
        if (shared := self._made.get(key)) is None:
            run = functools.partial(self._traced, kind, positions, replace(whole, leaves=tuple(leaves)), named)
            if (traced := self._names.tried(named, run, self._notes.append)) is None:
                return self.runner(kind, positions, bound)  # other sizes may keep their names
            closed = not traced[0].program.has_traced_consts
            shared = self._made.of(key, lambda: _shared(kind, traced[0], traced[1], named), keeps=lambda _: closed)
        return shared.at(whole, named)

    def in_grad(self, bound: Bound, find: Callable[[Any, Any, Any], tuple[Runner, Bound]]) -> tuple[Any] | None:
        """Return the result inside a `jax.grad` that runs op by op, in a tuple; None where the call is to be traced.

        `find` returns the runner of a call outside of it, from arguments, keyword arguments and positions.
        """
        options, leaves = self._options, bound.leaves
        moving = {i for i, x in enumerate(leaves) if runtime.is_tracer(x)}
        positions = tuple(n for n, span in enumerate(bound.spans) if not moving.isdisjoint(span))
        chosen = [i for n in positions for i in bound.spans[n]]
        has_more = options.has_aux or options.filter is not None or options.sparse_gradients or not bound.is_plain
        is_fit = moving.issubset(chosen) and all(is_inexact(jax.typeof(leaves[i]).dtype) for i in chosen)
        if has_more or not (is_fit and moving and runtime.only_pulls_back()):
            return None
        with runtime.outside():
            (args, kwargs), _ = bound.rebuilt(map(runtime.number_of, leaves))
            runner, here = find(args, kwargs, positions)
        if any(map(runtime.is_tracer, runner.consts)):
            return None

        def halves(*given: Any) -> tuple[Any, Any]:
            known = dict(zip(chosen, given, strict=True))
            again = replace(here, leaves=tuple(known.get(i, x) for i, x in enumerate(here.leaves)))
            out, _, pullback = runner.vjp(again, positions)
            return out, pullback

        call = jax.custom_vjp(lambda *given: halves(*given)[0])
        call.defvjp(halves, lambda pullback, ct: tuple(jax.tree.leaves(pullback(ct, keep_residuals=True))))
        return (call(*(leaves[i] for i in chosen)),)

    def _of(self, bound: Bound) -> NamedSizes | None:
        """Return the names for the sizes of a call; an array on a mesh leaves all sizes numbers."""
        if (count := jax.process_count()) > 1:
            what = f"is for one process, and these are {count}, which may see different sizes."
            raise CallError(message("sizes='dynamic'", what, "Leave it out, and pad arrays to sizes that all share."))
        if any(isinstance(getattr(x, "sharding", None), jax.NamedSharding) for x in bound.leaves):
            return None
        first = sum(map(len, bound.spans[: self._still]))
        arrays = [(0, i, x) for i, x in enumerate(bound.leaves) if i >= first and is_plain(x)]
        tree = bound.tree, bound.statics, tuple(bound.duplicates.items())
        return self._names.among(tree, arrays, lambda: {0: bound.paths()})

    def _traced(
        self, kind: str, positions: Sequence[int] | None, bound: Bound, named: NamedSizes
    ) -> tuple[Traced, Traced]:
        """Trace the function for symbolic sizes; return the trace, and its form for padded arrays."""
        options = self._options
        if kind == "call":
            options, positions = replace(options, has_aux=False, sparse_gradients=(), filter=None), ()
        with cut_around():
            traced = tracing.trace(self._function, options, bound, positions)
        if any(map(jaxprs.touches_references, jaxprs.opened(traced.joint)[0].eqns)):
            what = "reads or writes a jax.Ref, which holds an array of the true size."
            raise TraceError(message(traced.name, what, "Leave sizes out."))
        padded = replace(traced.bound, leaves=tuple(concrete(x, named.bucket) for x in traced.bound.leaves))
        wrapped = tracing.wrapped_for(self._function, padded, traced.inputs, options)
        program = _with_sizes(traced.program, named)
        made = replace(traced, bound=padded, wrapped=wrapped, program=program)
        return traced, made if self._change is None else self._change(made)


def _symbolic(x: Any) -> Shape:
    """Return the shape of a type with symbolic sizes, None for any other."""
    shape = tuple(getattr(x, "shape", ()))
    return shape if is_symbolic(shape) else None


def _with_sizes(program: Joint, named: NamedSizes) -> Joint:
    """Return a joint program for padded arrays."""
    names = sorted(named.true)
    made, results = padded_joint(program, names, named.bucket), program.results
    avals = tuple(a.update(shape=numbers(a.shape, named.bucket)) for a in results.avals)
    return replace(
        program,
        closed=made.closed,
        roles=made.roles,
        consts=(*made.consts, *(named.scalars[name] for name in names)),
        results=replace(results, avals=avals),
        unopened=None if program.unopened is None else _with_sizes(program.unopened, named),
    )


def _shared(kind: str, traced: Traced, padded: Traced, named: NamedSizes) -> Shared:
    """Cut a padded trace, and return its programs."""
    names, consts, leaves = tuple(sorted(named.true)), padded.consts, traced.bound.leaves
    if kind == "call":
        runner = forward_only(padded.call, Primal(padded.joint, consts, padded.program.results))
    else:
        runner = padded.partition().made.jitted
    results, paths = traced.program.results, traced.bound.paths()
    inputs = [*(None for _ in consts), *map(_symbolic, traced.bound.unique)]
    outputs = list(map(_symbolic, results.avals))
    places = {"input": inputs, "output": outputs}
    ends = Ends(
        tuple(inputs),
        tuple(shape for i, shape in enumerate(outputs) if i not in runner.handed_back),
        tuple(shape for shape, on in zip(outputs, results.with_cotangent, strict=True) if on),
        tuple(_symbolic(v.aval) for v in jaxprs.opened(traced.joint)[0].outvars[len(outputs) :]),
        tuple(None if r.kind == "saved" else places[r.kind][r.index] for r in runner.residuals),
    )
    listed = ", ".join(f"{paths[i]}: {jax.typeof(leaves[i]).str_short()}" for _, i in named.shapes)
    return Shared(runner, results, ends, len(consts) - len(names), names, f"{kind} of {listed} ({named.most})")


def _at_true_sizes(programs: Programs, ends: Ends, named: NamedSizes) -> Programs:
    """Return programs that take and return arrays of the true sizes of one call."""
    padded, cut = (functools.partial(_changed, how) for how in (named.padded, named.cut))
    inputs, outputs, gradients = map(_sized, (ends.inputs, ends.outputs, ends.gradients))
    residuals, cotangents = map(_sized, (ends.residuals, ends.cotangents))
    results = {"step": [*outputs, *((len(ends.outputs) + i, shape) for i, shape in gradients)]}

    def run(which: str, flat: Sequence[Any]) -> list[Any]:
        return cut(results.get(which, outputs), programs.run(which, padded(inputs, flat)))

    def backward(given: Sequence[Any], cts: Sequence[Any | None], keep: bool) -> list[Any]:
        return cut(gradients, programs.backward(padded(residuals, given), padded(cotangents, cts), keep))

    def ready(name: str) -> Callable[..., Sequence[Any]] | None:
        program, ends = programs.ready(name), results.get(name, outputs)
        return None if program is None else lambda *flat: cut(ends, program(*padded(inputs, flat)))

    return Programs(run, backward, programs.takes_zeros, ready)


def _sized(shapes: Sequence[Shape]) -> list[tuple[int, tuple[Any, ...]]]:
    """Return the positions and shapes of the arrays with symbolic sizes."""
    return [(i, shape) for i, shape in enumerate(shapes) if shape is not None]


def _changed(how: Callable[[Any, Any], Any], places: Sequence[tuple[int, Any]], xs: Sequence[Any]) -> list[Any]:
    """Return arrays that are padded or cut at some positions; None stays None."""
    changed = list(xs)
    for i, shape in places:
        changed[i] = None if changed[i] is None else how(changed[i], shape)
    return changed
