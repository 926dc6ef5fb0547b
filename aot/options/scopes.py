"""Bound the bytes that a part of a program keeps for its backward."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jointcut.aot.options.limits import limit
from jointcut.partition.errors import BudgetError, message
from jointcut.partition.prices.allowances import mark
from jointcut.partition.prices.rules import KeepAtMost
from jointcut.partition.program.places import our_folders
from jointcut.wrappers.record import Record


class _ScopesOfThread(threading.local):
    """The scopes that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.scopes: list[AbstractContextManager[Any]] = []


_ENTERED = _ScopesOfThread()


@dataclass(frozen=True, init=False)
class budget(KeepAtMost, Record):
    """The most bytes that a part of a program keeps for its backward, in a `with` statement or in a policy.

    Code that is traced under `with aot.budget("300MiB"):` keeps at most 300 MiB in the device's memory between forward
    and backward; its other values are computed again. In a policy, `{"blocks/*": aot.budget("300MiB")}`, the same holds
    for the values that the key names. It holds with every strategy, budget and plan, and inside transformations: with
    `jax.vmap` outside of `jax.grad` for one example, in a loop for all its steps together. A value that is made under
    several statements counts for each, so nested ones all hold. Calls of one line count together. Plan and report tell
    the bytes that each keeps.

    It does not bound the memory of the part's backward while that runs, nor the part's inputs, which others make.
    Inputs and outputs of the function, and values that wait in host memory, count as nothing. Values in files
    of `spill` count as if they stayed. Residuals of a step of `aot.while_loop` are not counted. Outside of
    `aot.function` the statement changes nothing.

    Raises `BudgetError` for an invalid number of bytes (it is an int, or a text with a unit), and at a call, with the
    least that was found, if the part cannot keep so little.

    Attributes:
        most_bytes: the bytes.

    >>> import jax.numpy as jnp
    >>> from jointcut import aot
    >>> def loss(w, x):
    ...     with aot.budget("20kB"):
    ...         h = jnp.tanh(jnp.tanh(x @ w) @ w)
    ...     return jnp.sum(jnp.tanh(h @ w) ** 2)
    >>> cut = aot.function(loss).trace(jnp.ones((64, 64)), jnp.ones((64, 64))).partition()
    >>> cut.plan.bytes_saved  # without, it keeps the results of three products: 16.4 kB each
    32768
    """

    most_bytes: int

    def __init__(self, most_bytes: int | str) -> None:
        """Read the bytes; see the class."""
        asked = limit(most_bytes)
        if asked.peak_bytes is None:
            cure = "Give bytes: an int, or a text such as '300MiB'."
            raise BudgetError(message("aot.budget", f"is {asked}, and a part of a program needs a number.", cure))
        object.__setattr__(self, "most_bytes", asked.peak_bytes)

    def __repr__(self) -> str:
        """`aot.budget(314572800)`."""
        return f"aot.{self.name}"

    def __enter__(self) -> None:
        """Mark the code that is traced from here on."""
        scope = jax.named_scope(mark(self.most_bytes, _line()))
        scope.__enter__()
        _ENTERED.scopes.append(scope)

    def __exit__(self, *error: Any) -> None:
        """End the mark."""
        _ENTERED.scopes.pop().__exit__(*error)


def _line() -> str:
    """Return the user's line, as `train.py:41`."""
    frame, folders = sys._getframe(1), our_folders()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
