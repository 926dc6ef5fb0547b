"""Cut a function whose arguments have symbolic sizes.

The function is traced once, for symbolic sizes. Put numbers in their place (`partition.sizes`) and the same program can
be weighed: the plan is made for it as for any other, by strategy or within a budget, and then both halves are written
once more, by that plan, from the symbolic program. Values and equations correspond by position, so that no two traces
need be compared, and whatever the symbolic program means, its halves mean.

Sizes are what `jax.export` makes of them: a function that asks whether a symbolic size is larger than a number cannot
be traced, unless a constraint tells; whether it equals a number, JAX answers with no.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jointcut.aot.options import Options, name_of
from jointcut.aot.stages import pipeline
from jointcut.aot.stages.cut import Cut
from jointcut.aot.stages.traced import Traced
from jointcut.aot.trace.shapes import checked_sizes, concrete, in_one_scope
from jointcut.partition.errors import PlanError, TraceError, message
from jointcut.partition.lower import verify
from jointcut.partition.lower.emit import Halves, Residual, emit
from jointcut.partition.lower.steps import Schedule
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program import jaxprs
from jointcut.partition.program.bodies import Body
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.roles import Role
from jointcut.partition.program.sizes import is_symbolic, names, names_in, numbers, with_numbers
from jointcut.partition.split import Split
from jointcut.wrappers.arguments.tree import Bound

_FOLDERS = ("aot", "wrappers", "partition")
_TOLD = re.compile(r"(\d+\*)?(?P<name>[^\W\d]\w*)( [+-] \d+)?")  # a size from which that of its one name follows


@dataclass(frozen=True)
class SymbolicCut:
    """A function cut in two for arguments with symbolic sizes.

    `split` holds the halves for all sizes, `traced` the program that they were cut from. `cut` is the same cut for the
    numbers in `sizes`, for which the plan was made: an ordinary one, that tells bytes and can be compiled.
    """

    cut: Cut
    traced: Traced
    split: SymbolicSplit
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class SymbolicSplit(Split):
    """A split whose halves have symbolic sizes; the figures of its plan and graph are those for the sizes given.

    Only `residual_bytes`, where it depends on sizes, is an expression such as `40*b + 32`. Each backward can tell every
    size that it needs from its own inputs, as `jax.export.export` demands: where no residual has it, the backward takes
    an argument of the function for the sake of its shape.
    """

    def _written(self, steps: Schedule) -> Halves:
        return told_sizes(super()._written(steps), self.graph)


def symbolic_cut(
    function: Callable[..., Any],
    options: Options,
    bound: Bound,
    sizes: Mapping[str, int],
    constraints: Sequence[str] = (),
) -> SymbolicCut:
    """Trace a function for symbolic sizes, plan for the numbers in `sizes`, and write halves for all.

    Arguments and plan are chosen by the `options`, as in `Function.trace` and `Traced.partition`. Raises `CallError`
    for sizes or constraints that do not fit the arguments, `TraceError` where the function does what cannot be done
    with a symbolic size, `GraphError` for a `jax.Ref` of such, and `PlanError` where the plan divides a loop of
    symbolic length into segments.
    """
    in_scope = in_one_scope(bound, constraints)
    known = checked_sizes(bound, sizes, constraints)
    with _explained(name_of(function)):
        traced = pipeline.trace(function, options, in_scope, options.chosen)
    cut = _with_numbers(traced, function, known).partition()
    return SymbolicCut(cut, traced, _split(traced, cut), known)


def _with_numbers(traced: Traced, function: Callable[..., Any], sizes: Mapping[str, int]) -> Traced:
    """The same trace for concrete sizes."""
    bound = replace(traced.bound, leaves=tuple(concrete(leaf, sizes) for leaf in traced.bound.leaves))
    results = traced.program.results
    avals = tuple(a.update(shape=numbers(a.shape, sizes)) if is_symbolic(a.shape) else a for a in results.avals)
    closed = with_numbers(traced.program.closed, sizes)
    program = replace(traced.program, closed=closed, results=replace(results, avals=avals))
    wrapped = pipeline.wrapped_for(function, bound, traced.inputs, traced.options.around)
    return replace(traced, bound=bound, wrapped=wrapped, program=program)


# ------------------------------------------------------------------------------------------------- the two halves


def _split(traced: Traced, cut: Cut) -> SymbolicSplit:
    """The halves of a symbolic program by the plan of the same program with numbers."""
    start, made = time.perf_counter(), cut.split
    graph = _with_payloads(made.graph, traced.graph)
    _refuse_segments(graph, made.plan)
    problem = replace(made.problem, graph=graph)
    halves = told_sizes(emit(graph, made.schedule), graph)
    verify.verify_structure(graph, halves)
    emit_ms = 1e3 * (time.perf_counter() - start)
    return SymbolicSplit(problem, made.plan, made.schedule, halves, made.cut_ms, emit_ms)


def _with_payloads(measured: Graph, symbolic: Graph) -> Graph:
    """A graph with the figures of one program and the equations and types of the other."""
    made = zip(measured.ops, symbolic.ops, strict=True)
    assert measured.regions == symbolic.regions and all(a.outputs == b.outputs for a, b in made), "another program"
    return replace(
        measured,
        values=_carrying(measured.values, symbolic.values),
        ops=_carrying(measured.ops, symbolic.ops),
        regions=symbolic.regions,
        loops=symbolic.loops,
        literals=symbolic.literals,
        bodies=_of_equations(measured.bodies, symbolic.bodies),
    )


def _of_equations(measured: Mapping[int, Body], symbolic: Mapping[int, Body]) -> dict[int, Body]:
    """The bodies of one program with what those of the other say of their equations."""
    pairs = ((op, body, symbolic[op]) for op, body in measured.items())
    return {op: replace(body, inside=other.inside, repeated=other.repeated) for op, body, other in pairs}


def _carrying(measured: Iterable[Any], symbolic: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(replace(a, payload=b.payload) for a, b in zip(measured, symbolic, strict=True))


def _refuse_segments(graph: Graph, plan: Plan) -> None:
    for loop, steps in plan.segments:
        if is_symbolic([length := graph.loops[loop].length]):
            what = f"has a symbolic length, {length}, and the plan divides it into segments of {steps} steps."
            cure = "Give that size as a number, or plan without a budget: strategy='min_cut'."
            raise PlanError(message(f"loop {loop}", what, cure))


def told_sizes(halves: Halves, graph: Graph) -> Halves:
    """The halves, with further arguments handed to the backward where its inputs do not tell a size that it needs.

    The caller holds them anyway; of those that tell a size the one of the fewest bytes is taken.
    """
    backward, _ = jaxprs.opened(halves.backward)
    residuals, given = list(halves.residuals), list(backward.invars)
    primals = [(i, v, graph.values[v].payload) for i, v in enumerate(graph.role_inputs(Role.PRIMAL))]
    for name in sorted(names_in(halves.backward)):
        if name in _told(v.aval for v in given):
            continue
        known = {r.index for r in residuals if r.kind == "input"}
        having = [(i, v, aval) for i, v, aval in primals if i not in known and name in _names(aval)]
        if not having:
            continue  # no argument tells it by one of its sizes alone, and JAX solves for those that are here
        i, v, aval = min(having, key=lambda primal: (name not in _told([primal[2]]), graph.values[primal[1]].bytes))
        given.insert(len(residuals), jaxprs.fresh(aval))
        residuals.append(Residual("input", i, v))
    if len(residuals) == len(halves.residuals):
        return halves
    return replace(halves, backward=jaxprs.build(given, backward.outvars, backward.eqns), residuals=tuple(residuals))


def _names(aval: Any) -> frozenset[str]:
    return names(getattr(aval, "shape", ()))


def _told(avals: Iterable[Any]) -> frozenset[str]:
    """The names whose sizes follow from arrays of these types, each from one of their sizes alone."""
    found = (_TOLD.fullmatch(str(n)) for aval in avals for n in getattr(aval, "shape", ()))
    return frozenset(match["name"] for match in found if match)


# ------------------------------------------------------------------------------------------------------- refusals


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Say of an error that JAX raises for a symbolic size where it arose, and what helps."""
    try:
        yield
    except (jax.errors.InconclusiveDimensionOperation, TypeError, ValueError) as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        asks = isinstance(error, jax.errors.InconclusiveDimensionOperation)
        if isinstance(error, TraceError) or not (asks or re.search("_DimExpr|Symbolic dimension", text)):
            raise
        what = f"asks of a symbolic size what only a number can answer{_line(error)}: {text.strip()}"
        cure = (
            "A function that branches on a size, or counts with it in Python, is exported with that size as a number; "
            "a comparison may be settled by a constraint, such as constraints=('b >= 2',)."
        )
        raise TraceError(message(name, what, cure)) from error


def _line(error: BaseException) -> str:
    """The last line outside JAX that an error passed, ` at file:line (function)`, if it is none of ours."""
    root, ours = Path(jax.__file__).parent, Path(__file__).parents[1]
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not Path(f.filename).is_relative_to(root)]
    if not theirs or any(Path(theirs[-1].filename).is_relative_to(ours / name) for name in _FOLDERS):
        return ""
    return f" at {theirs[-1].filename}:{theirs[-1].lineno} ({theirs[-1].name})"
