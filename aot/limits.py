"""Say what a budget means in bytes.

>>> limit("1.5GiB").peak_bytes
1610612736
>>> limit(0.5).fraction
0.5
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.partition import jaxprs
from jointcut.partition.errors import BudgetError, choices, message
from jointcut.wrappers.record import Record

Budget = float | int | str

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_CURE = (
    "Give a fraction of plain JAX's activation memory (a float from 0.0 to 1.0), peak bytes of the whole step (an int, "
    "or a text such as '1.5GiB' or '800 MB'), or 'device'."
)


@dataclass(frozen=True)
class Limit(Record):
    """A budget that has been read: one of the three is set.

    Attributes:
        fraction: of the activation bytes of `jax.jit(jax.value_and_grad(f))`; 0.0 asks for the least that is found.
        peak_bytes: of the whole step on one device, arguments and results included.
        of_device: whether it is what the device has free when the step is planned.
    """

    fraction: float | None = None
    peak_bytes: int | None = None
    of_device: bool = False

    def __str__(self) -> str:
        """`50% of plain JAX's activations`, or `1,610,612,736 bytes`."""
        if self.fraction is not None:
            return f"{100 * self.fraction:g}% of plain JAX's activations"
        return "what the device has free" if self.of_device else f"{self.peak_bytes:,} bytes"


def limit(budget: Any) -> Limit:
    """Read a budget.

    Raises `BudgetError` for an unknown unit, a negative or non-finite number, a float above 1, or anything else.
    """
    if isinstance(budget, str):
        return _of_text(budget)
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise BudgetError(message("budget", f"is {budget!r}.", _CURE))
    if isinstance(budget, numbers.Integral):
        if budget <= 0:
            raise BudgetError(message("budget", f"is {int(budget)} bytes.", _CURE))
        return Limit(peak_bytes=int(budget))
    fraction = float(budget)
    if not math.isfinite(fraction) or not 0 <= fraction <= 1:
        raise BudgetError(message("budget", f"is {fraction!r}, no fraction from 0.0 to 1.0.", _CURE))
    return Limit(fraction=fraction)


def plain_number(budget: Budget | None) -> Budget | None:
    """The same budget as Python's own int or float, where it is a number."""
    if budget is None or isinstance(budget, str):
        return budget
    return int(budget) if isinstance(budget, numbers.Integral) else float(budget)


def _of_text(text: str) -> Limit:
    if text.strip() == "device":
        return Limit(of_device=True)
    found = re.fullmatch(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]+)\s*", text)
    if found is None:
        raise BudgetError(message("budget", f"is {text!r}.", _CURE))
    number, unit = float(found[1]), found[2]
    if unit not in _UNITS:
        raise BudgetError(message("budget", f"is {text!r}, whose unit {unit!r} is unknown.", choices(unit, _UNITS)))
    size = math.floor(number * _UNITS[unit]) if math.isfinite(number) else 0
    if size <= 0:
        raise BudgetError(message("budget", f"is {text!r}.", "Give a positive number of bytes."))
    return Limit(peak_bytes=size)


def free_bytes(leaves: Iterable[Any]) -> int:
    """What the default device has free, together with what the call's own arrays take on it already.

    Raises `BudgetError` where the device does not say, as a CPU does not.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        what = f"asks what the device has free, and {device.device_kind} does not say."
        raise BudgetError(message("budget='device'", what, "Give a number of bytes, such as '8GiB'."))
    own = sum(_bytes_on(device, leaf) for leaf in leaves)
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)) + own


def _bytes_on(device: Any, leaf: Any) -> int:
    if not isinstance(leaf, jax.Array) or jaxprs.is_tracer(leaf):
        return 0
    return sum(shard.data.nbytes for shard in leaf.addressable_shards if shard.device == device)
