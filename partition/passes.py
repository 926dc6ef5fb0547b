"""Let a user's pass rewrite each half before XLA compiles it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from jointcut.partition.errors import TraceError, message
from jointcut.partition.lower.emit import Halves
from jointcut.partition.program.jax import jaxprs

_CURE = "Return a closed jaxpr with the inputs and outputs of the one that it is given."


class HalfPass(Protocol):
    """A rewrite of the jaxpr of a half to another jaxpr that means the same."""

    def pre_lower(self, half: str, jaxpr: Any) -> Any:
        """Return the jaxpr that XLA gets in the place of a closed jaxpr; `half` is `"forward"` or `"backward"`."""
        ...


def passed(halves: Halves, passes: Sequence[HalfPass]) -> Halves:
    """The halves after all passes, the first one first.

    Raises `TraceError` if a pass does not return a jaxpr with the same inputs and outputs.
    """
    for each in passes:
        forward = _rewritten(each, "forward", halves.forward)
        halves = replace(halves, forward=forward, backward=_rewritten(each, "backward", halves.backward))
    return halves


def _rewritten(each: HalfPass, half: str, given: Any) -> Any:
    where = f"pre_lower of {type(each).__name__}"
    made = each.pre_lower(half, given)
    if not isinstance(made, jaxprs.ClosedJaxpr | jaxprs.Jaxpr):
        raise TraceError(message(where, f"returned a {type(made).__name__} for the {half}, not a jaxpr.", _CURE))
    jaxpr, consts = jaxprs.opened(made)
    if consts:
        cure = "Compute them in the jaxpr, or write numbers there: a half has no constants."
        raise TraceError(message(where, f"returned a {half} that closes over {len(consts)} arrays.", cure))
    old, new = _types(jaxprs.opened(given)[0]), _types(jaxpr)
    if old != new:
        raise TraceError(message(where, f"returned a {half} {new}, where it was given one {old}.", _CURE))
    return made


def _types(jaxpr: Any) -> str:
    """`(float32[3]) -> (float32[])`."""
    ends = (", ".join(v.aval.str_short() for v in vs) for vs in (jaxpr.invars, jaxpr.outvars))
    return "({}) -> ({})".format(*ends)
