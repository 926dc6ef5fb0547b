"""Give the loops of a joint program other numbers of checkpoints, where nobody said how many there are.

A loop is a pair of equations there: one of the forward leaves checkpoints, and one of the backward starts from them.
Both are written again, with rows of another number between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jointcut.aot.loops.rules import Derivative, Pull
from jointcut.partition.program import jaxprs
from jointcut.partition.program.jaxprs import Equation, Literal


@dataclass(frozen=True)
class _Pair:
    """A loop of the program: the equation that leaves checkpoints, and those that start from them."""

    derivative: Derivative
    saving: Equation
    pulls: list[Equation]

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all checkpoints together."""
        count = len(self.derivative.loop.parts.carry)
        return sum(jaxprs.aval_bytes(v.aval) for v in self.saving.outvars[count:])


def checkpoint_bytes(closed: Any) -> int:
    """The bytes of the checkpoints of all loops that may have another number of them."""
    return sum(pair.checkpoint_bytes for pair in _pairs(closed))


def fewest_bytes(closed: Any, count: int) -> int:
    """The bytes of so many checkpoints of each of these loops."""
    kept = (aval for pair in _pairs(closed) for aval in pair.derivative.types)
    return (count + 1) * sum(map(jaxprs.aval_bytes, kept))  # one more is for the sweep


def limited(closed: Any, num_bytes: int) -> Any:
    """The program whose loops share so many bytes for their checkpoints, in equal parts; each keeps one at least."""
    jaxpr, consts = jaxprs.opened(closed)
    assert not consts, "a joint program has no constants"
    pairs = list(_pairs(closed))
    eqns, names = list(jaxpr.eqns), dict[Any, Any]()
    for pair in pairs:
        derivative = pair.derivative.within(num_bytes // len(pairs))
        saved = [v.aval for v in jaxprs.opened(derivative.saving.closed)[0].outvars]
        for v, aval in zip(pair.saving.outvars, saved, strict=True):
            if v.aval != aval:
                names[v] = jaxprs.fresh(aval)
        eqns[_place(eqns, pair.saving)] = _with(pair.saving, derivative.saving)
        for pull in pair.pulls:
            eqns[_place(eqns, pull)] = _with(pull, derivative.pull(pull.params["rules"].given))
    for i, eqn in enumerate(eqns):
        invars = [v if isinstance(v, Literal) else names.get(v, v) for v in eqn.invars]
        outvars = [names.get(v, v) for v in eqn.outvars]
        if invars != list(eqn.invars) or outvars != list(eqn.outvars):
            eqns[i] = jaxprs.rebound(eqn, invars, outvars)
    return jaxprs.build(jaxpr.invars, jaxpr.outvars, eqns)


def _place(eqns: list[Equation], eqn: Equation) -> int:
    return next(i for i, other in enumerate(eqns) if other is eqn)


def _with(eqn: Equation, rules: Any) -> Equation:
    return eqn.replace(params={"jaxpr": rules.closed, "rules": rules})


def _pairs(closed: Any) -> Iterator[_Pair]:
    """The loops outside of all bodies whose memory nobody chose, and whose checkpoints nothing else reads."""
    jaxpr, _ = jaxprs.opened(closed)
    readers: dict[Any, list[Equation]] = {}
    for eqn in jaxpr.eqns:
        for v in {v for v in eqn.invars if not isinstance(v, Literal)}:
            readers.setdefault(v, []).append(eqn)
    pulls = [eqn for eqn in jaxpr.eqns if isinstance(eqn.params.get("rules"), Pull)]
    derivatives = {id(d): d for d in (eqn.params["rules"].derivative for eqn in pulls)}
    for d in derivatives.values():
        own = [eqn for eqn in pulls if eqn.params["rules"].derivative is d]
        saving = [eqn for eqn in jaxpr.eqns if eqn.params.get("rules") is d.saving]
        if len(saving) != 1 or not d.loop.memory.is_default or not all(eqn.params["rules"].is_whole for eqn in own):
            continue
        rows = saving[0].outvars[len(d.loop.parts.carry) :]
        known = {id(eqn) for eqn in own}
        is_own = all(id(eqn) in known for v in rows for eqn in readers.get(v, []))
        if is_own and not {*rows} & {v for v in jaxpr.outvars if not isinstance(v, Literal)}:
            yield _Pair(d, saving[0], own)
