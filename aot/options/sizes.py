"""Read a user's wish for one program that serves all sizes, and refuse what cannot go with it.

>>> read_sizes("dynamic")
'dynamic'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jointcut.partition.errors import TraceError, choices, message

#: The choice of `sizes`.
DYNAMIC = "dynamic"
#: The options that see arrays or programs of one size.
OF_ONE_SIZE = "check", "saved_arrays", "wrappers", "devices", "cache", "spill", "error", "tiles", "plan"


def read_sizes(given: Any, beside: Sequence[str] = ()) -> str | None:
    """Return the choice of a user; raises `TraceError` for another one, or if options are given that `beside` names."""
    if given not in (None, DYNAMIC):
        raise TraceError(message("sizes", f"{given!r} is unknown.", choices(given, [DYNAMIC])))
    if given is not None:
        refuse_beside("sizes", "ops run on padded arrays", beside)
    return given


def refuse_beside(option: str, how: str, given: Sequence[str]) -> None:
    """Raise `TraceError` for the first option that is given beside another one, and say how that one runs."""
    for name in given:
        what = f"is given beside {option}, with which {how}, without {name}."
        raise TraceError(message(name, what, "Give one of them."))
