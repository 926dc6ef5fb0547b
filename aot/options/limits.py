"""Read a memory budget.

>>> limit("1.5GiB").peak_bytes
1610612736
>>> limit(0.5).fraction, limit("60%").fraction
(0.5, 0.6)
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

import jax

from jointcut.partition.errors import BudgetError, choices, message
from jointcut.partition.plans.plan import PLAIN_JAX
from jointcut.partition.program.jax import runtime
from jointcut.wrappers.record import Record

Budget = float | int | str

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_CURE = (
    "Give a fraction of plain JAX's activation memory (a float from 0.0 to 1.0, or a text such as '60%'), peak bytes "
    "of the whole step (an int, or a text such as '1.5GiB' or '800 MB'), or 'device'."
)
_CURE_ONE = "Write 1.0 for what plain JAX's activations take; an int is peak bytes of the step."


@dataclass(frozen=True)
class Limit(Record):
    """A budget; exactly one field is set.

    Attributes:
        fraction: share of the activation bytes of `jax.jit(jax.value_and_grad(f))`; 0.0 asks for the least found.
        peak_bytes: peak of the whole step on one device, arguments and results included.
        of_device: whether the budget is the memory that the device has free when the step is planned.
    """

    fraction: float | None = None
    peak_bytes: int | None = None
    of_device: bool = False

    def __str__(self) -> str:
        """`50% of plain JAX's activations`, or `1,610,612,736 bytes`."""
        return self.told(PLAIN_JAX)

    def told(self, baseline: str) -> str:
        """Return the same text for a program that is compared with the `baseline` of its plans."""
        if self.fraction is not None:
            return f"{100 * self.fraction:g}% of {activations(baseline)}"
        return "what the device has free" if self.of_device else f"{self.peak_bytes:,} bytes"


def activations(baseline: str) -> str:
    """Return the words for the activations that a fraction refers to."""
    return "plain JAX's activations" if baseline == PLAIN_JAX else f"the activations with {baseline}"


def limit(budget: Any) -> Limit:
    """Read a budget.

    Raises `BudgetError` for an unknown unit, a negative or non-finite number, a float above 1, or anything else.
    """
    if isinstance(budget, str):
        return _of_text(budget)
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise BudgetError(message("budget", f"is {budget!r}, of type {type(budget).__name__}.", _CURE))
    if isinstance(budget, numbers.Integral):
        if budget <= 1:
            what, cure = ("is 1 byte.", _CURE_ONE) if budget == 1 else (f"is {budget} bytes.", _CURE)
            raise BudgetError(message("budget", what, cure))
        return Limit(peak_bytes=int(budget))
    fraction: Any = budget
    if not 0 <= fraction <= 1:
        raise BudgetError(message("budget", f"is {fraction}, no fraction from 0.0 to 1.0.", _CURE))
    return Limit(fraction=float(fraction))


def plain_number(budget: Budget | None) -> Budget | None:
    """Convert a numeric budget to a Python int or float, and return any other budget unchanged."""
    if budget is None or isinstance(budget, str):
        return budget
    return int(budget) if isinstance(budget, numbers.Integral) else float(budget)


def _of_text(text: str) -> Limit:
    if text.strip() == "device":
        return Limit(of_device=True)
    match = re.fullmatch(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*|%)\s*", text)
    if match is None:
        raise BudgetError(message("budget", f"is {text!r}, not a number and its unit.", _CURE))
    number, unit = match.groups()
    if not unit:
        raise BudgetError(message("budget", f"is {text!r}, a number without a unit.", _CURE))
    if unit == "%":
        return _of_share(text, Decimal(number))
    if unit not in _UNITS:
        meant = next((known for known in _UNITS if known.lower() == unit.lower()), unit)
        raise BudgetError(
            message("budget", f"is {text!r}, whose unit {unit!r} is unknown.", choices(meant, (*_UNITS, "%")))
        )
    size = int(Decimal(number) * _UNITS[unit]) if 0 < float(number) < math.inf else 0
    if size <= 0:
        what = f"is {text!r}, which is less than a byte or no finite number."
        raise BudgetError(message("budget", what, "Give a positive number of bytes."))
    return Limit(peak_bytes=size)


def _of_share(text: str, percent: Decimal) -> Limit:
    if not 0 <= percent <= 100:
        raise BudgetError(message("budget", f"is {text!r}, no share from 0% to 100%.", _CURE))
    return Limit(fraction=float(percent / 100))


def default_device() -> Any:
    """Return the device on which JAX runs a program whose arrays are not on any device yet."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(chosen, str) or chosen is None:
        return jax.local_devices(backend=chosen)[0]
    return chosen


def free_bytes(leaves: Iterable[Any]) -> int:
    """Return the free bytes of the default device, plus the bytes of the call's own arrays on it.

    Raises `BudgetError` if the device does not report its memory; a CPU does not.
    """
    device = default_device()
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        what = f"asks what the device has free, and {device.device_kind} does not say."
        raise BudgetError(message("budget='device'", what, "Give a number of bytes, such as '8GiB'."))
    argument_bytes = sum(_bytes_on(device, leaf) for leaf in {id(leaf): leaf for leaf in leaves}.values())
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)) + argument_bytes


def _bytes_on(device: Any, leaf: Any) -> int:
    if not isinstance(leaf, jax.Array) or runtime.is_tracer(leaf) or leaf.is_deleted():
        return 0
    return sum(shard.data.nbytes for shard in leaf.addressable_shards if shard.device == device)


class Sized(Protocol):
    """XLA's account of a compiled step: the bytes of arguments and results."""

    @property
    def fixed_bytes(self) -> int:
        """Bytes of arguments and results."""
        ...


#: Bytes that temporaries may take, given a compiled step, or None before the first one.
Room = Callable[[Sized | None], float]


def room_for(
    budget: Limit,
    leaves: Iterable[Any],
    fixed_bytes: int,
    plain_bytes: Callable[[], int],
    device_bytes: int | None = None,
) -> Room:
    """Return the budget as bytes of temporaries.

    `leaves` are the arguments of the call, `fixed_bytes` the bytes of arguments and results as known before a step was
    compiled, `plain_bytes` gives the bytes of plain JAX's temporaries. `device_bytes` is the memory of a target, None
    for JAX's default device. Raises as `free_bytes`.
    """
    if budget.fraction is not None:
        share = budget.fraction
        return lambda measured: share * plain_bytes() if share else math.inf
    if not budget.of_device:
        peak = budget.peak_bytes or 0
    else:
        peak = free_bytes(leaves) if device_bytes is None else device_bytes
    return lambda measured: peak - (fixed_bytes if measured is None else measured.fixed_bytes)
