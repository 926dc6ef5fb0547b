"""Say whether a program keeps the lanes of a mapped axis apart.

Where `jax.vmap` has mapped a loop, its body is a program of arrays with one more axis, the lanes. A lane that has
finished may be given other values only if no other lane reads them. Nothing in a jaxpr says where the axis came from;
so its place is followed from the carry on, through equations whose effect on axes is known. Any other equation that
reads the carry is taken to mix the lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jointcut.partition.program import jaxprs
from jointcut.partition.program.jaxprs import Equation
from jointcut.partition.program.primitives import ELEMENTWISE
from jointcut.partition.rewrite import simplify

_REDUCING = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin")
_RUNNING = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


class _Mixed(Exception):
    """An equation may mix lanes."""


def of_inputs(programs: Sequence[Any], avals: Sequence[Any], num_consts: int) -> list[int | None] | None:
    """Which inputs of a mapped loop have the lanes, as their first axis: all of the carry, and some constants.

    The programs keep the lanes of all of these apart. Returns None where they mix those of the carry.
    """
    programs = [simplify.inlined(closed) for closed in programs]
    carry = avals[num_consts:]

    def are_apart(dims: Sequence[int | None]) -> bool:
        return all(apart(closed, [*dims, *[0] * len(carry)], 0) for closed in programs)

    dims: list[int | None] = [None] * num_consts
    if not are_apart(dims):
        return None
    for i in may_have(avals, num_consts):
        more = [0 if i == j else d for j, d in enumerate(dims)]
        dims = more if are_apart(more) else dims
    return [*dims, *[0] * len(carry)]


def may_have(avals: Sequence[Any], num_consts: int) -> list[int]:
    """The constants of a mapped loop whose first axis is as long as that of the carry."""
    lanes = avals[-1].shape[:1]
    return [i for i, aval in enumerate(avals[:num_consts]) if getattr(aval, "shape", ())[:1] == lanes]


def apart(closed: Any, dims: Sequence[int | None], outs: int) -> bool:
    """Whether all results have the lanes at `outs`, each from that lane of the inputs alone.

    `dims` says where the inputs have them; None for an input of which any lane may read anything.
    """
    jaxpr, _ = jaxprs.opened(simplify.inlined(closed))
    env: dict[Any, int] = {v: d for v, d in zip(jaxpr.invars, dims, strict=True) if d is not None}

    def place(atom: Any) -> int | None:
        return None if isinstance(atom, jaxprs.Literal) else env.get(atom)

    try:
        for eqn in jaxpr.eqns:
            places = [place(v) for v in eqn.invars]
            if any(p is not None for p in places):
                env.update(zip(eqn.outvars, _through(eqn, places), strict=True))
    except _Mixed:
        return False
    return all(place(v) in (None, outs) for v in jaxpr.outvars)


def _through(eqn: Equation, places: Sequence[int | None]) -> list[int]:
    """Where the results of an equation have the lanes. Raises `_Mixed` where that is not known."""
    name = eqn.primitive.name
    if name == "dot_general":
        return [_multiplied(eqn, places)]
    lanes = {p for p in places if p is not None}
    _require(len(lanes) == 1)
    (place,) = lanes
    if name in ELEMENTWISE or name == "pvary":
        ranks = {len(_shape(v)) for v, p in zip(eqn.invars, places, strict=True) if p is not None}
        _require(ranks == {len(_shape(eqn.outvars[0]))})
    elif name in ("concatenate", "sort"):
        _require(eqn.params["dimension"] != place)
    elif name == "custom_jvp_call":
        _require(apart(eqn.params["call_jaxpr"], places, place))
    else:
        _require(name in _MOVED and places[0] is not None and all(p is None for p in places[1:]))
        place = _MOVED[name](eqn, place)
    return [place] * len(eqn.outvars)


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _require(holds: bool) -> None:
    if not holds:
        raise _Mixed


def _multiplied(eqn: Equation, places: Sequence[int | None]) -> int:
    """The lanes of a product of matrices: a batch of products, or rows or columns of one operand."""
    contracted, batch = eqn.params["dimension_numbers"]
    count = len(batch[0])
    if None not in places:
        pairs = list(zip(*batch, strict=True))
        _require(tuple(places) in pairs)
        return pairs.index(tuple(places))
    side, place = next((i, p) for i, p in enumerate(places) if p is not None)
    if place in batch[side]:
        return tuple(batch[side]).index(place)
    _require(place not in contracted[side])
    free = [
        [i for i in range(len(_shape(v))) if i not in (*batch[k], *contracted[k])] for k, v in enumerate(eqn.invars)
    ]
    return count + (len(free[0]) if side else 0) + free[side].index(place)


def _broadcast(eqn: Equation, place: int) -> int:
    return eqn.params["broadcast_dimensions"][place]


def _transposed(eqn: Equation, place: int) -> int:
    return tuple(eqn.params["permutation"]).index(place)


def _reshaped(eqn: Equation, place: int) -> int:
    old, new = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    before = math.prod(old[:place])
    found = [i for i, n in enumerate(new) if n == old[place] and math.prod(new[:i]) == before]
    _require(bool(found) and eqn.params["dimensions"] is None)
    return found[0]


def _reduced(eqn: Equation, place: int) -> int:
    axes = eqn.params["dimensions"] if eqn.primitive.name == "squeeze" else eqn.params["axes"]
    _require(place not in axes)
    return place - sum(axis < place for axis in axes)


def _ran(eqn: Equation, place: int) -> int:
    _require(eqn.params["axis"] != place)
    return place


def _cut(eqn: Equation, place: int) -> int:
    _require(_shape(eqn.invars[0])[place] == _shape(eqn.outvars[0])[place])
    return place


def _padded(eqn: Equation, place: int) -> int:
    _require(tuple(eqn.params["padding_config"][place]) == (0, 0, 0))
    return place


def _turned(eqn: Equation, place: int) -> int:
    _require(place not in eqn.params["dimensions"])
    return place


_MOVED: dict[str, Callable[[Equation, int], int]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transposed,
    "reshape": _reshaped,
    "squeeze": _reduced,
    "slice": _cut,
    "dynamic_slice": _cut,
    "pad": _padded,
    "split": _ran,
    "rev": _turned,
    **dict.fromkeys(_REDUCING, _reduced),
    **dict.fromkeys(_RUNNING, _ran),
}
