"""Cut a function whose arguments have symbolic sizes.

The function is traced once, for symbolic sizes. With numbers in their place (`partition.program.sizes`), the program is
planned like any other, by strategy or within a budget. Then both halves are written again from the symbolic program by
that plan. Values and equations correspond by position, so no second trace is needed.

Sizes behave as in `jax.export`. A function that compares a symbolic size with a number (`<`) cannot be traced unless a
constraint decides it. JAX takes a symbolic size to be unequal to any number.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax

from jointcut.aot.options.options import Options, name_of, wanted_plan
from jointcut.aot.stages import tracing
from jointcut.aot.stages.cut import Cut
from jointcut.aot.stages.traced import Traced
from jointcut.aot.trace.blame import line_of_error
from jointcut.aot.trace.shapes import checked_sizes, concrete, in_one_scope
from jointcut.partition.errors import BudgetError, PlanError, TraceError, message
from jointcut.partition.lower import verify
from jointcut.partition.lower.emit import Halves, Residual, emit
from jointcut.partition.lower.listing import Schedule
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.bodies import Body
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.roles import Role
from jointcut.partition.program.sizes import is_symbolic, names, names_in, numbers, with_numbers
from jointcut.partition.split import Split
from jointcut.wrappers.arguments.tree import Bound

_SOLVABLE = re.compile(r"(\d+\*)?(?P<name>[^\W\d]\w*)( [+-] \d+)?")  # a size that determines its only name


@dataclass(frozen=True)
class SymbolicCut:
    """A function cut in two for arguments with symbolic sizes.

    `split` holds the halves for all sizes, `traced` their program. `cut` is the ordinary cut for the numbers in
    `sizes`, for which the plan was made; it has bytes and can be compiled.
    """

    cut: Cut
    traced: Traced
    split: SymbolicSplit
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class SymbolicSplit(Split):
    """A split whose halves have symbolic sizes; the figures of its plan and graph are for the given numbers.

    Only `residual_bytes` may be an expression, such as `40*b + 32`. `jax.export.export` requires that each size in the
    backward follows from the shapes of its inputs. If no residual has a size, the backward takes an argument of the
    function for its shape.
    """

    def _written(self, problem: Problem, steps: Schedule) -> Halves:
        return with_sizes(super()._written(problem, steps), self.graph)


def symbolic_cut(
    function: Callable[..., Any],
    options: Options,
    bound: Bound,
    sizes: Mapping[str, int],
    constraints: Sequence[str] = (),
) -> SymbolicCut:
    """Trace a function for symbolic sizes, plan for the numbers in `sizes`, and write halves for all.

    The `options` choose arguments and plan, as in `Function.trace` and `Traced.partition`. Raises `CallError` if sizes
    or constraints do not fit the arguments, `TraceError` if the function needs the number of a symbolic size,
    `GraphError` for a `jax.Ref` of symbolic size, and `PlanError` if the plan divides a loop of symbolic length.
    No rows run in blocks: raises `TraceError` or `PlanError` if the options ask for them, by a plan or otherwise.
    """
    _refuse_blocks(options)
    in_scope = in_one_scope(bound, constraints)
    known = checked_sizes(bound, sizes, constraints)
    with _explained(name_of(function)):
        traced = tracing.trace(function, options, in_scope, options.chosen)
    cut = _without_blocks(_with_numbers(traced, function, known))
    return SymbolicCut(cut, traced, _split(traced, cut), known)


def _with_numbers(traced: Traced, function: Callable[..., Any], sizes: Mapping[str, int]) -> Traced:
    """Return the same trace for concrete sizes."""
    bound = replace(traced.bound, leaves=tuple(concrete(leaf, sizes) for leaf in traced.bound.leaves))
    results = traced.program.results
    avals = tuple(a.update(shape=numbers(a.shape, sizes)) if is_symbolic(a.shape) else a for a in results.avals)
    closed = with_numbers(traced.program.closed, sizes)
    program = replace(traced.program, closed=closed, results=replace(results, avals=avals), is_as_jax=True)
    wrapped = tracing.wrapped_for(function, bound, traced.inputs, traced.options)
    return replace(traced, bound=bound, wrapped=wrapped, program=program)


def _without_blocks(traced: Traced) -> Cut:
    """Return the cut by the options, in which no rows run in blocks."""
    try:
        return replace(traced, options=replace(traced.options, tiles=False)).partition()
    except BudgetError as refusal:
        refusal.add_note(
            "No rows run in blocks where sizes are symbolic. With numbers for all sizes this budget may hold."
        )
        raise


# ------------------------------------------------------------------------------------------------- the two halves


def _split(traced: Traced, cut: Cut) -> SymbolicSplit:
    """Return the halves of a symbolic program by the plan of the same program with numbers."""
    start, measured = time.perf_counter(), cut.split
    symbolic = traced.program.graph  # without cheaper forms, like the program with numbers
    graph = _with_payloads(measured.graph, symbolic)
    _refuse_segments(graph, measured.plan)
    problem = replace(measured.problem, graph=graph)
    halves = with_sizes(emit(graph, measured.schedule, problem.packings), graph)
    verify.verify_structure(graph, halves)
    emit_ms = 1e3 * (time.perf_counter() - start)
    return SymbolicSplit(problem, measured.plan, measured.schedule, halves, measured.cut_ms, emit_ms)


def _with_payloads(measured: Graph, symbolic: Graph) -> Graph:
    """Return a graph with the figures of one program and the equations and types of the other."""
    ops = zip(measured.ops, symbolic.ops, strict=True)
    assert measured.regions == symbolic.regions and all(a.outputs == b.outputs for a, b in ops), "another program"
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
    """Return the bodies of one program with the equations of the other."""
    pairs = ((op, body, symbolic[op]) for op, body in measured.items())
    return {op: replace(body, inside=other.inside, repeated=other.repeated) for op, body, other in pairs}


def _carrying(measured: Iterable[Any], symbolic: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(replace(a, payload=b.payload) for a, b in zip(measured, symbolic, strict=True))


def _refuse_blocks(options: Options) -> None:
    """Raise `TraceError` if the options ask for rows in blocks, `PlanError` if their plan has some."""
    what = "in blocks, which are parted for one number of rows, and sizes are symbolic."
    for path in {} if isinstance(options.tiles, bool) else dict(options.tiles):
        cure = "Export with numbers for all sizes, or leave it out."
        raise TraceError(message(f"tiles[{path!r}]", f"asks for rows {what}", cure))
    if wanted_plan(options).tiles:
        cure = "Export with numbers for all sizes, or make a plan under tiles=False."
        raise PlanError(message("plan.tiles", f"name rows {what}", cure))


def _refuse_segments(graph: Graph, plan: Plan) -> None:
    divided = [(loop, f"divides it into segments of {steps} steps") for loop, steps in plan.segments]
    divided += [(loop, f"treats its last {steps} steps apart") for loop, steps in plan.partly_offloaded.items()]
    for loop, how in divided:
        if is_symbolic([length := graph.loops[loop].length]):
            what = f"has a symbolic length, {length}, and the plan {how}."
            cure = "Give that size as a number, or plan without a budget: strategy='min_cut'."
            raise PlanError(message(f"loop {loop}", what, cure))


def with_sizes(halves: Halves, graph: Graph) -> Halves:
    """Pass further arguments to the backward if its inputs do not determine a size that it needs.

    The caller holds these arrays anyway. The smallest in bytes is passed.
    """
    backward, _ = jaxprs.opened(halves.backward)
    residuals, invars = list(halves.residuals), list(backward.invars)
    primals = [(i, v, graph.values[v].payload) for i, v in enumerate(graph.role_inputs(Role.PRIMAL))]
    for name in sorted(names_in(halves.backward)):
        if name in _solvable(v.aval for v in invars):
            continue
        known = {r.index for r in residuals if r.kind == "input"}
        having = [(i, v, aval) for i, v, aval in primals if i not in known and name in _names(aval)]
        if not having:
            continue  # no other argument has it; JAX must solve for it from the present inputs
        i, v, aval = min(having, key=lambda primal: (name not in _solvable([primal[2]]), graph.values[primal[1]].bytes))
        invars.insert(len(residuals), jaxprs.fresh(aval))
        residuals.append(Residual("input", i, v))
    if len(residuals) == len(halves.residuals):
        return halves
    return replace(halves, backward=jaxprs.build(invars, backward.outvars, backward.eqns), residuals=tuple(residuals))


def _names(aval: Any) -> frozenset[str]:
    return names(getattr(aval, "shape", ()))


def _solvable(avals: Iterable[Any]) -> frozenset[str]:
    """Return the names that are determined by a single size of these types."""
    matches = (_SOLVABLE.fullmatch(str(n)) for aval in avals for n in getattr(aval, "shape", ()))
    return frozenset(match["name"] for match in matches if match)


# ------------------------------------------------------------------------------------------------------- refusals


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn JAX's errors about symbolic sizes into a `TraceError` with place and cure."""
    try:
        yield
    except (jax.errors.InconclusiveDimensionOperation, TypeError, ValueError) as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        is_comparison = isinstance(error, jax.errors.InconclusiveDimensionOperation)
        if isinstance(error, TraceError) or not (is_comparison or re.search("_DimExpr|Symbolic dimension", text)):
            raise
        what = f"asks of a symbolic size what only a number can answer{line_of_error(error)}: {text.strip()}"
        cure = (
            "A function that branches on a size, or counts with it in Python, is exported with that size as a number; "
            "a comparison may be settled by a constraint, such as constraints=('b >= 2',)."
        )
        raise TraceError(message(name, what, cure)) from error
