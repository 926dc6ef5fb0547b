"""Add large products of matrices to a sum over blocks, piece by piece.

The gradient of a large table, such as the weights of a vocabulary, is a sum over blocks of rows, and the part of each
block is as large as the whole. A compiler that cannot add a product to an array in place holds both. So the product is
made in pieces, along one of its own axes, and each piece is added in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.jax.jaxprs import Equation, Literal, Var
from jointcut.partition.program.primitives import UNDONE
from jointcut.partition.tiles.grow import Growing
from jointcut.partition.tiles.scan import Blocks, BlockScan

#: Products of fewer bytes are added whole.
LEAST_BYTES = 2**20


def in_pieces(written: Sequence[Equation], most_bytes: int) -> list[Equation]:
    """Return the equations of a loop over blocks, in which no product of more bytes is added to a sum at once."""
    eqns = list(written)
    place = next(n for n, eqn in enumerate(eqns) if eqn.primitive.name == SCAN)
    scan, layout = eqns[place], jaxprs.scan_layout(eqns[place])
    body, own = layout.body, dict(enumerate([eqn] for eqn in layout.body.eqns))
    for before, after in zip(layout.parts(body.invars)[1], body.outvars, strict=False):
        found = _added(body, before, after) if abstract.aval_bytes(before.aval) > max(most_bytes, LEAST_BYTES) else []
        if pieces := _divided([body.eqns[i] for i in found], before, max(most_bytes, LEAST_BYTES)):
            own |= {i: [] for i in found} | {found[-1]: pieces}
    program = jaxprs.build(body.invars, body.outvars, [eqn for several in own.values() for eqn in several])
    eqns[place] = jaxprs.scan(scan, program, *layout.parts(scan.invars), scan.outvars)
    return eqns


def _added(body: Any, before: Var, after: Any) -> list[int]:
    """The places of a product that is added to a carried sum, of what stands between, and of the addition, if any."""
    makers = {v: i for i, eqn in enumerate(body.eqns) for v in eqn.outvars}
    readers = Counter(jaxprs.variables([*(v for eqn in body.eqns for v in eqn.invars), *body.outvars]))
    found, part = list[int](), after
    while not isinstance(part, Literal) and part in makers and readers[part] == 1:
        eqn, name = body.eqns[makers[part]], body.eqns[makers[part]].primitive.name
        is_sum = name == "add" and eqn.invars[0] is before and readers[before] == 1
        found.insert(0, makers[part])
        if name == "dot_general" and len(found) > 1:
            return found
        if not (is_sum if len(found) == 1 else name in UNDONE or name == "convert_element_type"):
            return []
        part = eqn.invars[-1]
    return []


def _divided(found: Sequence[Equation], before: Var, most_bytes: int) -> list[Equation]:
    """The equations that add a product in pieces of at most so many bytes; none if no axis allows it."""
    if not found:
        return []
    *product, last = found
    part: Any = last.invars[1]
    inputs = dict.fromkeys(v for eqn in product for v in jaxprs.variables(eqn.invars))
    made = {v for eqn in product for v in eqn.outvars}
    jaxpr, _ = jaxprs.opened(jaxprs.build([v for v in inputs if v not in made], [part], product))
    needed = -(-abstract.aval_bytes(part.aval) // most_bytes)
    for axis, count in enumerate(part.aval.shape):
        number = next((n for n in range(needed, min(4 * needed, count) + 1) if count % n == 0), None)
        growing = Growing.of(jaxpr, count, 0)
        growing.start(part, axis)
        if number is not None and len(growing.inside) == len(product):
            pieces = BlockScan(product, growing.rows(), Blocks.of(count, number, True))
            return pieces.adding(before, part, axis, last.outvars[0])
    return []
