"""Decide what passes from one loop over blocks to a later one.

Where rows meet in between, a tiling runs in several loops, one behind the other. A value that a later loop reads passes
to it as a stack of blocks, and so it is whole in memory. What is cheap to compute from values that pass anyway, or that
take no more bytes, is computed again in the later loop. So of all that a norm makes of its operand, the operand alone
passes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jointcut.partition.program.axes import Joined
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.jax.jaxprs import Equation, Literal, Var
from jointcut.partition.program.primitives import CALLS, CHEAP, MOVEMENT
from jointcut.partition.rewrite.simplify import live
from jointcut.partition.tiles.grow import Tiling

#: Values are computed again only if so large a share of the bytes that would pass is left out.
WORTH = 0.1

#: Sums of so many products in a product of matrices are as cheap as elementwise chains.
FEW_TERMS = 16


@dataclass(frozen=True)
class Loop:
    """One loop over blocks.

    Attributes:
        level: the equations whose place it takes, by their places in the program.
        own: the equations that it runs.
        wanted: the values that it leaves whole.
        handed: the values that it leaves block by block, for later loops.
        rows_bytes: the bytes of its largest array with rows, when that is whole.
    """

    level: frozenset[int]
    own: tuple[Equation, ...]
    wanted: tuple[Var, ...]
    handed: tuple[Var, ...]
    rows_bytes: int


def loops(jaxpr: Any, tiling: Tiling, is_even: bool) -> tuple[list[Loop], frozenset[int]]:
    """Return the loops of a tiling in order, and the equations outside that run in them alone.

    `is_even` says that no two blocks overlap: then rows along a first axis are a stack of blocks.
    """
    eqns, readers = jaxpr.eqns, _readers(jaxpr.eqns)
    again = _moving(jaxpr, readers, tiling)
    ends = {*jaxprs.variables(jaxpr.outvars)}
    outside = {v for i in tiling.eqns for v in eqns[i].outvars if v in ends or readers.get(v, set()) - tiling.eqns}
    read_later, found = set[Var](), list[Loop]()
    for number, level in reversed([*enumerate(tiling.levels)]):
        earlier = frozenset[int]().union(*tiling.levels[:number])
        run = level if len(tiling.levels) < 3 else _with_cheap(eqns, tiling, level, earlier, outside)
        made = [v for i in sorted(level) for v in eqns[i].outvars if not jaxprs.is_dropped(v)]
        wanted = [v for v in made if v in outside]
        wanted += [v for v in made if v not in outside and v in read_later and _is_joined(tiling, v)]
        # values that are left whole anyway are read from there, unless they are stacks of blocks
        whole = {v for v in wanted if _is_joined(tiling, v) or tiling.rows.place(v) or not is_even}
        handed = [v for v in made if v in read_later and v not in whole]
        run = [eqns[i] for i in sorted({*run, *again})]
        own = [run[i] for i in sorted(live(run, (*wanted, *handed)).places)]
        mine = {v for eqn in own for v in eqn.outvars}
        read_later.update(v for eqn in own for v in jaxprs.variables(eqn.invars) if v not in mine)
        rows = (v for v in made if isinstance(tiling.rows.place(v), int))
        largest = max((abstract.aval_bytes(v.aval) for v in rows), default=0)
        found.append(Loop(level, tuple(own), tuple(wanted), tuple(handed), largest))
    return found[::-1], again


def _with_cheap(
    eqns: Sequence[Equation], tiling: Tiling, level: frozenset[int], earlier: frozenset[int], outside: Collection[Var]
) -> Collection[int]:
    """A level with equations of earlier ones, so that values of fewer bytes pass to it."""
    makers = {v: i for i in earlier for v in eqns[i].outvars if isinstance(tiling.rows.place(v), int)}

    def passing(i: int, run: Collection[int]) -> set[Var]:
        """The values that an equation reads and that would have to pass."""
        reads = jaxprs.variables(eqns[i].invars)
        return {v for v in reads if v in makers and makers[v] not in run and v not in outside}

    run, needed = {*level}, set[Var]().union(*(passing(i, level) for i in level))
    before, waiting = _bytes(needed), [*needed]
    while waiting:
        v = max(waiting, key=lambda v: makers[v])
        waiting.remove(v)
        mine = needed & {*eqns[makers[v]].outvars}
        new = passing(makers[v], run) - needed
        if v in needed and _is_cheap(eqns[makers[v]]) and _bytes(new) <= _bytes(mine):
            run.add(makers[v])
            needed = (needed - mine) | new
            waiting += new
    return run if _bytes(needed) <= (1 - WORTH) * before else level


def _is_cheap(eqn: Equation) -> bool:
    """Whether an equation is cheap to compute again: it is elementwise, moves data, or is a product of few terms."""
    name = eqn.primitive.name
    if name == "dot_general":
        (axes, _), _ = eqn.params["dimension_numbers"]
        terms: Any = math.prod(getattr(eqn.invars[0].aval, "shape", ())[axis] for axis in axes)
        return terms <= FEW_TERMS
    return name in CHEAP or (name in CALLS and jaxprs.inner_primitives(eqn) <= CHEAP)


def _bytes(values: Iterable[Var]) -> int:
    return sum(abstract.aval_bytes(v.aval) for v in values)


def _readers(eqns: Sequence[Equation]) -> dict[Var, set[int]]:
    readers: dict[Var, set[int]] = {}
    for i, eqn in enumerate(eqns):
        for v in jaxprs.variables(eqn.invars):
            readers.setdefault(v, set()).add(i)
    return readers


def _is_joined(tiling: Tiling, v: Var) -> bool:
    return isinstance(tiling.rows.place(v), Joined)


def _moving(jaxpr: Any, readers: Mapping[Var, set[int]], tiling: Tiling) -> frozenset[int]:
    """The equations that each block does again: they only move a whole argument, and blocks alone read the result.

    So weights that a backward reads in reverse order are not all reversed at once.
    """
    eqns, kept = jaxpr.eqns, {*jaxprs.variables(jaxpr.outvars)}
    kept |= {eqns[i].invars[0] for i in tiling.eqns if getattr(tiling.rows.place(eqns[i].outvars[0]), "starts", False)}
    moved, moving = {*jaxpr.invars}, list[int]()
    for i, eqn in enumerate(eqns):
        if i not in tiling.eqns and _moves_whole(eqn, tiling) and eqn.invars[0] in moved:
            moved.update(eqn.outvars)
            moving.append(i)
    again = set[int]()
    for i in reversed(moving):
        reading = readers.get(eqns[i].outvars[0])
        if reading and reading <= tiling.eqns | again and eqns[i].outvars[0] not in kept:
            again.add(i)
    return frozenset(again)


def _moves_whole(eqn: Equation, tiling: Tiling) -> bool:
    """Whether an equation only moves an array without rows, to one that is no smaller."""
    if eqn.primitive.name not in MOVEMENT or len(eqn.invars) != 1 or len(eqn.outvars) != 1:
        return False
    (before,), (after,) = eqn.invars, eqn.outvars
    is_whole = not isinstance(before, Literal) and tiling.rows.place(before) is tiling.rows.place(after) is None
    return is_whole and abstract.aval_bytes(before.aval) <= abstract.aval_bytes(after.aval)
