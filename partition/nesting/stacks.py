"""Make the stacks of a backward's loops when the loop runs, not when the program starts.

A scan fills stacks that begin as zeros. XLA:CPU runs first what is ready first, and zeros are ready from the start: so
the stacks of all loops of the backward would be alive during the forward. Here such a loop carries its stacks, and the
zeros wait for what the loop reads. What the stacks hold in the end is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jointcut.partition.nesting.scans import Steps, operands_of, struct_of, traced
from jointcut.partition.program import jaxprs
from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Var
from jointcut.partition.program.primitives import REGION, REORDERING
from jointcut.partition.program.sizes import is_symbolic
from jointcut.partition.rewrite.simplify import named, renamed, with_bodies


def made_late(half: ClosedJaxpr) -> ClosedJaxpr:
    """A backward in which the stacks of loops wait, but for those that it returns: the caller has memory for these.

    In a region under `jax.checkpoint`, which runs again as a whole, they wait for what the region reads, too.
    """
    jaxpr, consts = jaxprs.opened(half)
    if not any(eqn.primitive.name in (SCAN, REGION) for eqn in jaxpr.eqns):
        return half
    return ClosedJaxpr(_late(jaxpr, [], jaxpr.outvars), consts)


def is_held(region: Equation | None) -> bool:
    """Whether a region under `jax.checkpoint` that runs again as a whole waits for all that it reads."""
    return region is not None and region.params["prevent_cse"]


def _late(jaxpr: Jaxpr, late: Sequence[Var], left: Sequence[Atom] = ()) -> Jaxpr:
    """A jaxpr in which stacks wait for what it computes, and for inputs that are `late`; those `left` out do not.

    They wait for no array in another order where they wait for something else: XLA would hold a copy for the barrier,
    and one for the loop.
    """
    inputs, made, moved = {*jaxpr.invars, *jaxpr.constvars}, set(late), set[Var]()
    names, eqns = dict[Var, Atom](), list[Equation]()
    for eqn in jaxpr.eqns:
        if names:
            eqn = jaxprs.rebound(eqn, [named(names, v) for v in eqn.invars], eqn.outvars)
        reads = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
        waited = [v for v in reads if v in made and jaxprs.is_plain(v.aval)]
        waited = [v for v in waited if v not in moved] or waited
        if eqn.primitive.name == SCAN and waited and (places := _places(eqn, left)):
            more, results = _carrying(eqn, places, waited)
            eqns += more
            names.update(zip(eqn.outvars, results, strict=True))
            made.update(v for v in results if isinstance(v, Var))
            continue
        if eqn.primitive.name == REGION:
            eqn = with_bodies(eqn, lambda inner: _late(inner, inner.invars))
            eqn, barriers = _held(eqn) if is_held(eqn) else (eqn, [])
            eqns += barriers
        eqns.append(eqn)
        moved.update(eqn.outvars if eqn.primitive.name in REORDERING else ())
        if any(v in made or v in inputs for v in reads):
            made.update(eqn.outvars)
    return jaxpr.replace(eqns=eqns, outvars=[named(names, v) for v in jaxpr.outvars])


def _held(region: Equation) -> tuple[Equation, list[Equation]]:
    """A region that runs once all that it reads is there, the cotangents too, and the barrier that this needs."""
    reads = [v for v in dict.fromkeys(v for v in region.invars if isinstance(v, Var)) if jaxprs.is_plain(v.aval)]
    if not reads:
        return region, []
    barrier, held = jaxprs.barrier(reads)
    names: dict[Var, Atom] = dict(zip(reads, held, strict=True))
    return jaxprs.rebound(region, [named(names, v) for v in region.invars], region.outvars), [barrier]


def _places(eqn: Equation, left: Collection[Atom]) -> list[int]:
    """Which of a scan's stacks can wait: arrays on the device, in a scan of several steps without effects.

    None where a size is a symbol.
    """
    layout = jaxprs.scan_layout(eqn)
    shapes = [(layout.length,), *(getattr(v.aval, "shape", ()) for v in eqn.outvars)]
    if eqn.effects or layout.body_consts or any(map(is_symbolic, shapes)) or layout.length < 2:
        return []
    stacks = enumerate(eqn.outvars[layout.num_carry :])
    plain = ((i, v) for i, v in stacks if jaxprs.is_plain(v.aval) and not jaxprs.is_on_host(v.aval))
    return [i for i, v in plain if not jaxprs.is_dropped(v) and not any(v is end for end in left)]


def _carrying(eqn: Equation, places: Sequence[int], waited: Sequence[Var]) -> tuple[list[Equation], list[Atom]]:
    """The equations in the place of a scan that carries some of its stacks, and their results."""
    (consts, xs), carry = operands_of(eqn)
    stacks: list[Any] = [v.aval for v in eqn.outvars[len(carry) :]]
    steps = Steps(eqn, _filling(eqn, places))
    others = [i for i in range(len(stacks)) if i not in places]
    dtypes = list(dict.fromkeys(stacks[i].dtype for i in places))

    def program(consts: list[Any], xs: list[Any], carry: list[Any], waited: list[Any]) -> list[Any]:
        zeros = dict(zip(dtypes, jaxprs.held([*(np.zeros((), d) for d in dtypes), *waited]), strict=False))
        empty = [jaxprs.full(stacks[i], zeros[stacks[i].dtype]) for i in places]
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
    """The body of a scan that puts some of its results into stacks which it carries, at the number of the step."""
    layout = jaxprs.scan_layout(eqn)
    inner, count = layout.body, layout.num_carry
    last = layout.num_consts + count
    stacks = [jaxprs.fresh(eqn.outvars[count + i].aval) for i in places]
    number = jaxprs.fresh(jax.typeof(np.uint32(0)))
    made = [inner.outvars[count + i] for i in places]

    def put(i: Any, stacks: list[Any], rows: list[Any]) -> list[Any]:
        at = [(i, *(np.uint32(0) for _ in row.shape)) for row in rows]
        return [
            lax.dynamic_update_slice(s, lax.expand_dims(y, [0]), k) for s, y, k in zip(stacks, rows, at, strict=True)
        ]

    program, _ = jaxprs.opened(traced(put, struct_of(number), *(list(map(struct_of, g)) for g in (stacks, made)))[0])
    eqns, filled = renamed(program, dict(zip(program.invars, [number, *stacks, *made], strict=True)))
    left = [v for i, v in enumerate(inner.outvars[count:]) if i not in places]
    invars = [*inner.invars[:last], *stacks, *inner.invars[last:], number]
    return jaxprs.build(invars, [*inner.outvars[:count], *filled, *left], [*inner.eqns, *eqns])
