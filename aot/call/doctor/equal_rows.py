"""Find loops that stack a value which is the same at each step, and compute it before the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.partition.program.jax.jaxprs import Equation, Jaxpr
from jointcut.partition.program.places import line_of
from jointcut.partition.program.primitives import CALLS, ENCLOSING

_CALLS = CALLS | (ENCLOSING - {"shard_map"})


@dataclass(frozen=True)
class EqualRows:
    """A result of a loop whose rows do not depend on the step.

    Attributes:
        type: of the whole stack, as `float32[100,64]`.
        bytes: of the whole stack.
        rows: the number of its rows.
        line: the user's line that makes the row, or else the line of the loop.
        by_branch: whether rows differ by the branch of a `jax.lax.cond` that each step takes, and by nothing else.
    """

    type: str
    bytes: int
    rows: int
    line: str
    by_branch: bool

    @property
    def bytes_more(self) -> int:
        """The bytes of all rows but one."""
        return self.bytes - self.bytes // self.rows


def equal_rows(jaxpr: Jaxpr) -> Iterator[EqualRows]:
    """Yield the stacks of equal rows that the loops of a program write, and the loops inside its loops."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield from _of_scan(eqn)
        for inner in jaxprs.inner_jaxprs(eqn):
            yield from equal_rows(inner)


def hoisted(traced: jax.stages.Traced) -> Callable[..., Any]:
    """Return a traced function whose outer loops stack no equal rows: a row is computed before, and read instead."""

    def function(*args: Any, **kwargs: Any) -> Any:
        jaxpr, consts = jaxprs.opened(traced.jaxpr)
        flat = [leaf for leaf in jax.tree.leaves((args, kwargs)) if runtime.is_tracer(leaf)]
        known: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *flat], strict=True))
        rows: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            if isinstance(atom, jaxprs.Literal):
                return atom.val
            return jnp.broadcast_to(rows[atom], atom.aval.shape) if atom in rows else known[atom]

        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan":
                rows.update(_rows(eqn, read))
                eqn, fresh = _reading(eqn, rows)
                known.update(fresh)
            inputs = list(dict.fromkeys(jaxprs.variables(eqn.invars)))
            results = runtime.evaluate(jaxprs.build(inputs, eqn.outvars, [eqn]), *map(read, inputs))
            known.update(zip(eqn.outvars, results, strict=True))
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), list(map(read, jaxpr.outvars)))

    return function


def _rows(eqn: Equation, read: Callable[[Any], Any]) -> dict[Any, Any]:
    """Compute the rows of the stacks of a loop that are equal."""
    stacks = {stack: id(row) for row, stack, by_branch in _equal(eqn) if not by_branch}
    ends = jaxprs.opened(eqn.params["jaxpr"])[0].outvars
    wanted = [id(row) in stacks.values() for row in ends]
    part, used = jaxprs.pruned(eqn.params["jaxpr"], wanted)
    results = runtime.evaluate(part, *map(read, compress(eqn.invars, used)))
    by_row = dict(zip(map(id, compress(ends, wanted)), results, strict=True))
    return {stack: by_row[row] for stack, row in stacks.items()}


def _reading(eqn: Equation, rows: dict[Any, Any]) -> tuple[Equation, dict[Any, Any]]:
    """Return a loop that reads equal rows as a constant, and the values of the constants."""
    loop = jaxprs.scan_layout(eqn)
    first, last = loop.num_consts, loop.num_consts + loop.num_carry
    moved = [i for i, v in enumerate(eqn.invars) if i >= last and isinstance(v, jaxprs.Var) and v in rows]
    if not moved or loop.body_consts:
        return eqn, {}
    kept = [i for i in range(last, len(eqn.invars)) if i not in moved]
    order = [*range(first), *moved, *range(first, last), *kept]
    body = jaxprs.build([loop.body.invars[i] for i in order], loop.body.outvars, loop.body.eqns)
    fresh = {jaxprs.fresh(loop.body.invars[i].aval): rows[eqn.invars[i]] for i in moved}
    consts, carry, xs = [*eqn.invars[:first], *fresh], eqn.invars[first:last], [eqn.invars[i] for i in kept]
    return jaxprs.scan(eqn, body, consts, carry, xs, eqn.outvars), fresh


def _of_scan(eqn: Equation) -> Iterator[EqualRows]:
    loop = jaxprs.scan_layout(eqn)
    makers = {v: e for e in loop.body.eqns for v in e.outvars}
    for row, stack, by_branch in _equal(eqn):
        maker = eqn if isinstance(row, jaxprs.Literal) else makers.get(row, eqn)
        line, size = line_of(maker) or line_of(eqn), abstract.aval_bytes(stack.aval)
        yield EqualRows(stack.aval.str_short(), size, loop.length, line, by_branch)


def _equal(eqn: Equation) -> Iterator[tuple[Any, Any, bool]]:
    """Yield the rows of a loop that are equal, with their stack, and whether they differ by a branch."""
    loop = jaxprs.scan_layout(eqn)
    inputs, end = loop.body.invars, loop.num_consts + loop.num_carry
    carried = zip(inputs[loop.num_consts : end], loop.body.outvars, strict=False)
    given = [*loop.body.constvars, *inputs[: loop.num_consts], *(old for old, new in carried if old is new)]
    fixed = _fixed(loop.body, dict.fromkeys(given, False))
    for row, stack in zip(loop.body.outvars[loop.num_carry :], eqn.outvars[loop.num_carry :], strict=True):
        by_branch = False if isinstance(row, jaxprs.Literal) else fixed.get(row)
        if by_branch is not None and not jaxprs.is_dropped(stack) and loop.length > 1:
            yield row, stack, by_branch


def _fixed(jaxpr: Jaxpr, given: dict[Any, bool]) -> dict[Any, bool]:
    """Return the values that depend on `given` values alone; True for a value that a branch may also choose."""
    known = dict(given)

    def read(atom: Any) -> bool | None:
        return False if isinstance(atom, jaxprs.Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
        read_in = [read(v) for v in eqn.invars]
        results = [None] * len(eqn.outvars) if eqn.effects else _results(eqn, read_in)
        known.update({v: by for v, by in zip(eqn.outvars, results, strict=True) if by is not None})
    return known


def _results(eqn: Equation, given: Sequence[bool | None]) -> list[bool | None]:
    """Say of each result whether it depends on the given operands alone, as `_fixed` does."""
    count, name = len(eqn.outvars), eqn.primitive.name
    if None not in given:
        return [any(given)] * count
    inner = list(jaxprs.inner_jaxprs(eqn))
    if name == "cond" and given[0] is None:
        each = [_outputs(branch, given[1:]) for branch in inner]
        return [None if None in ways else True for ways in zip(*each, strict=True)]
    if name in _CALLS and len(inner) == 1 and len(inner[0].invars) == len(given):
        return _outputs(inner[0], given)
    return [None] * count


def _outputs(jaxpr: Jaxpr, given: Sequence[bool | None]) -> list[bool | None]:
    inputs = {v: by for v, by in zip(jaxpr.invars, given, strict=True) if by is not None}
    known = _fixed(jaxpr, dict.fromkeys(jaxpr.constvars, False) | inputs)
    return [False if isinstance(v, jaxprs.Literal) else known.get(v) for v in jaxpr.outvars]
