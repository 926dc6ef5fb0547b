"""Make the stacks of a backward's loops when the loop runs, not when the program starts.

A scan fills stacks that begin as zeros. A compiler that runs an op as soon as it is ready makes these at the start.
Here the loop carries its stacks, and the zeros wait for the operands of the loop. In the end the stacks hold the same.
A schedule says which loops wait, and for which values (`Delay` in `lower/steps`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jointcut.partition.bodies.scans import Steps, operands_of, struct_of, traced
from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.jax import abstract, barriers, jaxprs
from jointcut.partition.program.jax.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Var
from jointcut.partition.program.primitives import REGION, REORDERING
from jointcut.partition.program.sizes import is_symbolic
from jointcut.partition.rewrite.simplify import named, renamed, with_bodies


def made_late(
    eqns: Sequence[Equation], late: Sequence[Atom], left: Collection[Atom] = ()
) -> tuple[list[Equation], dict[Var, Atom]]:
    """Rewrite equations so that the stacks of loops wait.

    They wait for the atoms `late` that a loop reads, and for values computed from these. The stacks that are `left` out
    do not wait. In a region under `jax.checkpoint`, which runs again as a whole, they wait for the values that the
    region reads. Also returns new names for results.
    """
    made, moved, numbers = set(jaxprs.variables(late)), set[Var](), set[Var]()
    names, out = dict[Var, Atom](), list[Equation]()
    for eqn in eqns:
        eqn = jaxprs.reading(eqn, [named(names, v) for v in eqn.invars])
        reads = list(dict.fromkeys(jaxprs.variables(eqn.invars)))
        waited = [v for v in reads if v in made and abstract.is_plain(v.aval)]
        waited = [v for v in waited if v not in moved] or waited
        if eqn.primitive.name == SCAN and waited and (places := _places(eqn, left)):
            more, results = _carrying(eqn, places, waited)
            out += more
            names.update(zip(eqn.outvars, results, strict=True))
            made.update(jaxprs.variables(results))
            continue
        out += _within(eqn) if eqn.primitive.name == REGION else [eqn]
        moved.update(eqn.outvars if eqn.primitive.name in REORDERING else ())
        (numbers if numbers.issuperset(reads) else made).update(eqn.outvars)
    return out, names


def is_held(eqn: Equation) -> bool:
    """Whether this is a region under `jax.checkpoint` that runs again as a whole, after all values that it reads."""
    return eqn.primitive.name == REGION and eqn.params["prevent_cse"]


def _within(region: Equation) -> list[Equation]:
    """A region in which stacks wait for all values that it reads; regions in it run after all values that they read."""

    def late(jaxpr: Jaxpr) -> Jaxpr:
        held = [each for eqn in jaxpr.eqns for each in _held(eqn)]
        eqns, names = made_late(held, jaxpr.invars)
        return jaxpr.replace(eqns=eqns, outvars=[named(names, v) for v in jaxpr.outvars])

    return [with_bodies(region, late)]


def _held(eqn: Equation) -> list[Equation]:
    """A region that runs after all values that it reads, with the barrier for this; any other equation unchanged."""
    reads = [v for v in dict.fromkeys(jaxprs.variables(eqn.invars)) if abstract.is_plain(v.aval)]
    if not reads or not is_held(eqn):
        return [eqn]
    barrier, held = barriers.barrier(reads)
    names: dict[Var, Atom] = dict(zip(reads, held, strict=True))
    return [barrier, jaxprs.rebound(eqn, [named(names, v) for v in eqn.invars], eqn.outvars)]


def _places(eqn: Equation, left: Collection[Atom]) -> list[int]:
    """The scan's stacks that can wait: arrays on the device, in a scan of several steps without effects.

    The list is empty where a size is a symbol.
    """
    layout = jaxprs.scan_layout(eqn)
    shapes = [(layout.length,), *(getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars))]
    if eqn.effects or layout.body_consts or any(map(is_symbolic, shapes)) or layout.length < 2:
        return []
    stacks = enumerate(eqn.outvars[layout.num_carry :])
    plain = ((i, v) for i, v in stacks if abstract.is_plain(v.aval) and not abstract.is_on_host(v.aval))
    return [i for i, v in plain if not jaxprs.is_dropped(v) and not any(v is end for end in left)]


def _carrying(eqn: Equation, places: Sequence[int], waited: Sequence[Var]) -> tuple[list[Equation], list[Atom]]:
    """The equations that replace a scan and carry some of its stacks, and their results."""
    (consts, xs), carry = operands_of(eqn)
    stacks: list[Any] = [v.aval for v in eqn.outvars[len(carry) :]]
    steps = Steps(eqn, _filling(eqn, places))
    others = [i for i in range(len(stacks)) if i not in places]
    dtypes = list(dict.fromkeys(stacks[i].dtype for i in places))

    def program(consts: list[Any], xs: list[Any], carry: list[Any], waited: list[Any]) -> list[Any]:
        zeros = dict(zip(dtypes, barriers.held([*(np.zeros((), d) for d in dtypes), *waited]), strict=False))
        empty = [abstract.full(stacks[i], zeros[stacks[i].dtype]) for i in places]
        length = eqn.params["length"]
        end, ys = steps.run(length, consts, [*carry, *empty], [*xs, lax.iota(np.uint32, length)])
        filled = dict(zip([*places, *others], [*end[len(carry) :], *ys], strict=True))
        return [*end[: len(carry)], *(filled[i] for i in range(len(stacks)))]

    groups = [consts, xs, carry, list(waited)]
    inner, _ = jaxprs.opened(traced(program, *(list(map(struct_of, g)) for g in groups))[0])
    operands = [v for group in groups for v in group]
    eqns, results = renamed(inner, dict(zip(inner.invars, operands, strict=True)))
    like = {"source_info": eqn.source_info, "ctx": eqn.ctx}
    return [made if made.primitive.name == SCAN else made.replace(**like) for made in eqns], results


def _filling(eqn: Equation, places: Sequence[int]) -> ClosedJaxpr:
    """The body of a scan that puts some of its results into stacks that it carries, at the number of the step."""
    layout = jaxprs.scan_layout(eqn)
    inner, count = layout.body, layout.num_carry
    last = layout.num_consts + count
    stacks = [jaxprs.fresh(eqn.outvars[count + i].aval) for i in places]
    number = jaxprs.fresh(jax.typeof(np.uint32(0)))
    made = [inner.outvars[count + i] for i in places]

    def put(i: Any, stacks: list[Any], rows: list[Any]) -> list[Any]:
        return [abstract.with_row(stack, row, i) for stack, row in zip(stacks, rows, strict=True)]

    program, _ = jaxprs.opened(traced(put, struct_of(number), *(list(map(struct_of, g)) for g in (stacks, made)))[0])
    eqns, filled = renamed(program, dict(zip(program.invars, [number, *stacks, *made], strict=True)))
    left = [v for i, v in enumerate(inner.outvars[count:]) if i not in places]
    invars = [*inner.invars[:last], *stacks, *inner.invars[last:], number]
    return jaxprs.build(invars, [*inner.outvars[:count], *filled, *left], [*inner.eqns, *eqns])
