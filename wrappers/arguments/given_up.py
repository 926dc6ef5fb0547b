"""Remember which call gave up an array, and refuse a later call that is given it.

The first calls of a program are remembered array by array. A call that only repeats an earlier one keeps no account: it
was made at a line that is known, and that line is named as one that gives up arrays.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax

from jointcut.partition.errors import CallError, message
from jointcut.partition.program.jax.runtime import is_tracer
from jointcut.wrappers.boundary import users_frame

if TYPE_CHECKING:
    from jointcut.wrappers.arguments.tree import Bound

_MOST = 4096  # arrays
_FEW = 3  # lines in a message
_CURE = (
    "Pass what that call returned in its place, as value_and_update returns new params and state, or give it a copy: "
    "jax.tree.map(jnp.copy, ...)."
)

_LOCK = threading.Lock()
_GIVERS: dict[int, tuple[weakref.ref[Any], str]] = {}  # by the identity of an array
_PLACES: dict[str, None] = {}


def is_given_up(leaf: Any) -> bool:
    """Whether a leaf is an array that was donated to a call, and whose memory is gone."""
    return isinstance(leaf, jax.Array) and not is_tracer(leaf) and leaf.is_deleted()


def remember(leaves: Iterable[Any], name: str) -> None:
    """Remember that a call of a function at the user's line gave up those of its arrays that are gone."""
    frame = users_frame()
    place = f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}"
    with _LOCK:
        _PLACES[place] = None
        for leaf in filter(is_given_up, leaves):
            _GIVERS.pop(id(leaf), None)
            _GIVERS[id(leaf)] = weakref.ref(leaf), place
        while len(_GIVERS) > _MOST:
            del _GIVERS[next(iter(_GIVERS))]


def refuse_given_up(bound: Bound) -> None:
    """Raise `CallError` for a call with an array that was donated to an earlier call."""
    for path, leaf in zip(bound.paths(), bound.leaves, strict=True):
        if is_given_up(leaf):
            what = f"holds nothing any more: its memory was given up to {_giver(leaf)}"
            raise CallError(message(path, what, _CURE))


def _giver(leaf: Any) -> str:
    """Return the call that gave up an array, or else the lines of the calls that do so."""
    with _LOCK:
        known, place = _GIVERS.get(id(leaf), (lambda: None, ""))
        places = list(_PLACES)
    if known() is leaf:
        return f"the call of {place}, which donates that argument."
    if not places:
        return "an earlier call, which donates that argument."
    more = f" and {len(places) - _FEW} more" if len(places) > _FEW else ""
    return f"an earlier call, which donates that argument. Such calls here: {', '.join(places[-_FEW:])}{more}."
