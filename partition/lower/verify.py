"""Check that the two jaxprs fit together, and run them one after the other.

`verify_structure` runs after every cut. It compares the residuals of one half with the inputs of the other and, under
`jax_enable_checks`, runs JAX's own type checker over both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jointcut.partition.errors import VerifyError, message
from jointcut.partition.lower.emit import Halves
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax import abstract, barriers, jaxprs, runtime
from jointcut.partition.program.primitives import VIEWS
from jointcut.partition.program.roles import Role
from jointcut.partition.rewrite.hooks import hooks_in, refused_in_vmap
from jointcut.partition.rewrite.simplify import merged_among, renamed

_REPORT = "This is a fault of jointcut: please report the program that shows it."


def verify_structure(graph: Graph, halves: Halves) -> None:
    """Raise `VerifyError` where a half is malformed or a residual does not fit its place in the backward."""
    outputs = len(graph.role_outputs(Role.OUTPUT))
    for name, closed in (("forward", halves.forward), ("backward", halves.backward)):
        try:
            jaxprs.check(closed)
        except (TypeError, AssertionError) as error:
            raise VerifyError(message(f"The {name} half", f"is malformed: {error}", _REPORT)) from error
    forward, _ = jaxprs.opened(halves.forward)
    backward, _ = jaxprs.opened(halves.backward)
    places = {"input": forward.invars, "output": forward.outvars, "saved": forward.outvars[outputs:]}
    for residual, var in zip(halves.residuals, backward.invars, strict=False):
        given = places[residual.kind][residual.index].aval
        if (given.shape, given.dtype) != (var.aval.shape, var.aval.dtype):
            what = f"leaves the forward as {given} but enters the backward as {var.aval}."
            raise VerifyError(message(graph.where(residual.value), what, _REPORT))


def run(halves: Halves, graph: Graph, primals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Run the forward and then the backward on values or tracers; return outputs and gradients."""
    outputs, residuals = run_forward(halves, graph, primals)
    return outputs, run_backward(halves, residuals, cotangents)


def run_forward(halves: Halves, graph: Graph, primals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Run the forward; return the user's outputs and the residuals in the backward's order."""
    results = runtime.evaluate(halves.forward, *primals)
    count = len(graph.role_outputs(Role.OUTPUT))
    return results[:count], routed(halves.residuals, primals, results, count)


def routed(residuals: Sequence[Any], primals: Sequence[Any], results: Sequence[Any], count: int) -> list[Any]:
    """The residuals in the backward's order; of the forward's `results` the first `count` are the user's outputs."""
    places = {"input": primals, "output": results[:count], "saved": results[count:]}
    return [places[r.kind][r.index] for r in residuals]


def run_backward(halves: Halves, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """Run the backward on the residuals and one cotangent per output that has one; return the gradients."""
    flat = [*residuals, *cotangents]
    if halves.waits:
        flat = waited(halves.residuals, range(len(flat)), flat)
    with refused_in_vmap(hooks_in(jaxprs.opened(halves.backward)[0].eqns)):
        return runtime.evaluate(halves.backward, *flat)


def joined(halves: Halves, count: int) -> Any | None:
    """Both halves as one program of primals and cotangents, in which they take equal parts of a value once.

    A sharded weight of which each half takes its own part would be gathered for each. The forward has `count` outputs
    of the user's, before which no other stands. None for halves with effects or hooks.
    """
    (forward, _), (backward, _) = jaxprs.opened(halves.forward), jaxprs.opened(halves.backward)
    if forward.effects or backward.effects or any(hooks_in(backward.eqns)):
        return None
    results, start = forward.outvars[:count], len(halves.residuals)
    given = [*routed(halves.residuals, forward.invars, forward.outvars, count), *backward.invars[start:]]
    late = [n for n in _late(halves.residuals, range(len(given))) if halves.waits and _may_wait(given[n])]
    waits, held = barriers.barrier([given[n] for n in late]) if late else (None, [])
    for n, v in zip(late, held, strict=True):
        given[n] = v
    eqns, gradients = renamed(backward, dict(zip(backward.invars, given, strict=True)))
    made = [v for eqn in (*forward.eqns, *eqns) for v in eqn.outvars if not jaxprs.is_dropped(v)]
    assert len(made) == len(set(made)), "the halves share no variable"
    both = [*forward.eqns, *([] if waits is None else [waits]), *eqns]
    closed = jaxprs.build([*forward.invars, *backward.invars[start:]], [*results, *gradients], both)
    return jaxprs.ClosedJaxpr(merged_among(jaxprs.opened(closed)[0], VIEWS), [])


def _may_wait(atom: Any) -> bool:
    return not isinstance(atom, jaxprs.Literal) and abstract.is_plain(atom.aval)


def _late(residuals: Sequence[Any], places: Iterable[int]) -> list[int]:
    """The places in `places` of inputs of a backward that are no inputs of the program."""
    early = {i for i, r in enumerate(residuals) if r.kind == "input"}
    return [n for n, i in enumerate(places) if i not in early]


def waited(residuals: Sequence[Any], places: Iterable[int], given: Sequence[Any]) -> list[Any]:
    """Put a barrier on the arrays `given` to a backward at some `places` of its inputs; its `residuals` come first.

    So no op of the backward is merged with the forward, or starts before it ends. Inputs of the program do not wait.
    """
    flat = list(given)
    late = [n for n in _late(residuals, places) if abstract.is_plain(jax.typeof(flat[n]))]
    for n, x in zip(late, barriers.held([flat[n] for n in late]), strict=True):
        flat[n] = x
    return flat
