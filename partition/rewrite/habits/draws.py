"""Draw random numbers where they are used, not when the program starts.

XLA:CPU runs first what is ready first, and random numbers need a key alone: so those of all layers would be made at the
start, each with the counters that it is made from. Here a key waits for what the last matrix product or convolution
before it reads, which is in memory anyway. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import jax

from jointcut.partition.program import jaxprs
from jointcut.partition.program.jaxprs import ClosedJaxpr, Equation, Var
from jointcut.partition.program.primitives import BARRIER, DRAWN, MOVEMENT, PACKING, RENAMING

T = TypeVar("T")

_MOVES = MOVEMENT | RENAMING | {"convert_element_type"}


class Last(Generic[T]):
    """While a half is followed, what the last product before an op reads; values are told apart by any key.

    Of its operands it is the first one that an op of the half computes, and that is in memory as it was computed: not a
    weight, nor an array in another order or dtype.
    """

    def __init__(self) -> None:
        """Begin where no product was."""
        self.read: T | None = None
        self._computed: dict[T, T] = {}

    def follow(self, name: str, operands: Sequence[T | None], results: Sequence[T]) -> None:
        """Go past an op; an operand is None for a literal."""
        computed = [self._computed[v] for v in operands if v in self._computed]
        if name in PACKING and computed:
            self.read = computed[0]
        if name in RENAMING:
            pairs = [(v, made) for v, made in zip(operands, results, strict=False) if v in self._computed]
            self._computed.update((made, made if name == BARRIER else self._computed[v]) for v, made in pairs)
        elif name not in _MOVES and any(v is not None for v in operands):
            self._computed.update(zip(results, results, strict=True))


def drawn_late(half: ClosedJaxpr) -> ClosedJaxpr:
    """A half in which keys wait."""
    jaxpr, consts = jaxprs.opened(half)
    if all(eqn.primitive.name != DRAWN for eqn in jaxpr.eqns):
        return half
    eqns, last = list[Equation](), Last[Var]()
    for eqn in jaxpr.eqns:
        key = eqn.invars[0] if eqn.primitive.name == DRAWN else None
        if isinstance(key, Var) and last.read is not None:
            waiting, key = _waiting(key, last.read)
            like = {"source_info": eqn.source_info, "ctx": eqn.ctx}
            eqns += [more.replace(**like) for more in waiting]
            eqn = jaxprs.rebound(eqn, [key], eqn.outvars)
        eqns.append(eqn)
        last.follow(eqn.primitive.name, [v if isinstance(v, Var) else None for v in eqn.invars], eqn.outvars)
    return ClosedJaxpr(jaxpr.replace(eqns=eqns), consts)


def _waiting(key: Var, last: Var) -> tuple[list[Equation], Var]:
    """The equations of a key that waits for another array, and that key."""

    def same(key: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(jax.random.key_data(key), impl=jax.random.key_impl(key))

    unwrap, wrap = jaxprs.opened(jax.make_jaxpr(same)(jaxprs.struct(key.aval)))[0].eqns
    barrier, (data, _) = jaxprs.barrier([unwrap.outvars[0], last])
    eqns = [jaxprs.rebound(unwrap, [key], unwrap.outvars), barrier, jaxprs.rebound(wrap, [data], wrap.outvars)]
    return eqns, wrap.outvars[0]
