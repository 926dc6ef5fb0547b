"""Name the device that a program is planned for, which need not be here.

>>> t = target("h100x8")
>>> t.platform, t.count, t.memory_bytes
('cuda', 8, 84942979072)
>>> with target("h100"):
...     current().name
'h100'
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jointcut.aot.options import compilers
from jointcut.aot.options.limits import Limit
from jointcut.partition.errors import TargetError, choices, message
from jointcut.partition.figures import human_bytes
from jointcut.partition.plans.backend import Backend
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.prices.targets import ATTAINED, CHIPS, Chip, chip_of
from jointcut.partition.program.jax.runtime import quiet_plugins
from jointcut.wrappers.record import Record

#: A GPU and how many, `h100x8`; and a slice of TPUs, `v5e-4`.
_NAME = re.compile(r"(?P<chip>[a-z0-9]+?(?:-[0-9]+gb)?)(?:(?P<by>[x-])(?P<count>[0-9]+))?")

#: Measured memory of plain JAX's large steps on an H200, divided by XLA's account made without it: the least and the
#: greatest share, and the number of programs. The device had jaxlib 0.11.2 and timed no kernels either; the accounts
#: are of 0.11.2, and for four programs of 0.10.2 and 0.12. By `benchmarks.account`.
ON_H200 = (0.99, 1.01, 20)

#: The target of the current trace. JAX's own caches, and ours, keep programs of different targets apart.
_CURRENT: Any = jax.make_user_context(None)
_LOG = logging.getLogger("jointcut")
_THREAD = threading.local()


@dataclass(frozen=True)
class Target(Record):
    """The devices that a program is planned, weighed and compiled for; made by `aot.target`.

    In a `with` statement it is the target of all functions that are traced there and have none of their own.

    Attributes:
        name: as `aot.target` takes it.
        count: the number of devices.
    """

    name: str
    count: int

    def __str__(self) -> str:
        """`h100x8: 8 x NVIDIA H100 80GB HBM3, 84.9 GB each`."""
        many = f"{self.count} x " if self.count > 1 else ""
        return f"{self.name}: {many}{self.device_kind}, {human_bytes(self.memory_bytes)}{' each' if many else ''}"

    def __enter__(self) -> Self:
        """Become the target of functions that are traced on this thread."""
        entered = _CURRENT(self)
        entered.__enter__()
        _entered().append(entered)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop being the target."""
        _entered().pop().__exit__(kind, error, trace)

    @property
    def chip(self) -> Chip:
        """The chip, with the sources of its figures."""
        return CHIPS[_parts(self.name)[0]]

    @property
    def platform(self) -> str:
        """`"cuda"`, `"rocm"` or `"tpu"`."""
        return self.chip.platform

    @property
    def device_kind(self) -> str:
        """JAX's name for the kind of device."""
        return self.chip.kind

    @property
    def topology(self) -> str:
        """How the devices are connected, as JAX's topologies name it."""
        return dict(self.chip.counts)[self.count] if self.platform == "tpu" else f"1x1x{self.count}"

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of one device."""
        return self.chip.memory_bytes

    @property
    def rates(self) -> Roofline:
        """Return how much one device computes and moves in a second."""
        return self.chip.rates

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bytes a second between devices, both ways together; None where one device has no links."""
        return self.chip.link_bytes_per_s

    @property
    def source(self) -> str:
        """Where the figures come from."""
        return self.chip.source

    @property
    def share(self) -> str:
        """The rates as a share of the data sheet's figures: `75% to 85%`."""
        shares = sorted(ATTAINED.values())
        return f"{shares[0]:.0%} to {shares[-1]:.0%}"

    @property
    def is_here(self) -> bool:
        """Whether this process has `count` devices of this kind: then it runs steps that are planned for them."""
        return len(_attached(self.device_kind)) >= self.count

    @property
    def is_unseen_gpu(self) -> bool:
        """Whether it is a GPU that is not here, so that XLA compiles without it."""
        return self.platform != "tpu" and not self.is_here

    @cached_property
    def devices(self) -> tuple[Any, ...]:
        """The devices to compile for: this process's own, or else devices that only compile.

        Raises `TargetError` with the line to install if the plugin of the platform is missing, or does not fit jaxlib.
        """
        attached = _attached(self.device_kind)
        if len(attached) >= self.count:
            return attached[: self.count]
        return compilers.devices(self.chip, self.count, self.topology)

    @cached_property
    def sharding(self) -> jax.sharding.Sharding:
        """Return where an argument without a sharding lies: on the one device, or whole on each of several."""
        if self.count == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh((self.count,), ("devices",)), PartitionSpec())

    def mesh(self, shape: tuple[int, ...], axis_names: tuple[str, ...]) -> Mesh:
        """Return the devices as a mesh, for the shardings of arguments."""
        return Mesh(np.array(self.devices).reshape(shape), axis_names)

    def placed(self, struct: Any) -> Any:
        """Return the type of an argument, on the target's devices unless it has a sharding of its own there."""
        devices = getattr(getattr(struct, "sharding", None), "device_set", ())
        is_there = bool(devices) and all(device.device_kind.startswith(self.device_kind) for device in devices)
        if not isinstance(struct, jax.ShapeDtypeStruct) or is_there:
            return struct
        return struct.update(sharding=self.sharding)


#: A target as users give it: its name, or what `aot.target` made.
GivenTarget = str | Target


def target(name: GivenTarget) -> Target:
    """Return the device, or devices, that a program is planned for; they need not be here.

    A GPU is named with the number of devices, `"h100"` or `"h100x8"`: `h100`, `h200`, `a100-80gb`, `b200`, `l4`,
    `mi300x`. A TPU is named as Google Cloud names slices, `"v5e-4"`, `"v5p-8"` (8 cores, 4 devices) or `"v6e-8"`.

    A function with a target, `aot.function(target="h100")`, or one that is traced under `with aot.target("h100"):`, is
    traced, planned, weighed and compiled for that device: `trace`, `partition`, `explain`, `pareto`, plan files and
    `export` speak of it. XLA's compilers for GPUs and TPUs do that without the device, by their JAX plugins. Running a
    step for a device that is not here is refused.

    Raises `TargetError` for an unknown name. A missing plugin is an error where it is needed first.

    >>> print(target("v5e-4"))
    v5e-4: 4 x TPU v5 lite, 17.2 GB each
    """
    if isinstance(name, Target):
        return name
    if not isinstance(name, str):
        raise TargetError(message("target", f"is a {type(name).__name__}.", f"Give a name, such as {_NAMES[0]!r}."))
    known, count = _parts(name)
    return Target(name.lower(), count) if known else _unknown(name)


_NAMES = ("h100", "h100x8", "h200", "a100-80gb", "b200", "l4", "mi300x", "v5e-4", "v5p-8", "v6e-8")


def _parts(name: str) -> tuple[str, int]:
    """Return the chip and the number of devices of a name; an empty text and 0 where it is none."""
    match = _NAME.fullmatch(name.lower())
    chip = None if match is None else CHIPS.get(match["chip"])
    if match is None or chip is None:
        return "", 0
    count, is_slice = int(match["count"] or 1), chip.platform == "tpu"
    if match["count"] is not None and (match["by"] == "-") != is_slice:
        return "", 0
    if not is_slice:
        return (chip.name, count) if count else ("", 0)
    devices = count // 2 if chip.name == "v5p" and match["count"] else count  # Google counts the cores of a v5p
    return (chip.name, devices) if devices in dict(chip.counts) else ("", 0)


def _unknown(name: str) -> Target:
    match = _NAME.fullmatch(name.lower())
    chip = None if match is None else CHIPS.get(match["chip"])
    if chip is not None and chip.platform == "tpu":
        double = 2 if chip.name == "v5p" else 1
        known = ", ".join(f"{chip.name}-{double * n}" for n, _ in chip.counts)
        raise TargetError(message("target", f"{name!r} is no slice that is known.", f"Those of {chip.name}: {known}."))
    raise TargetError(message("target", f"{name!r} is unknown.", choices(name, _NAMES)))


def _entered() -> list[Any]:
    """Return the contexts that this thread has entered, the innermost last."""
    return _THREAD.__dict__.setdefault("entered", [])


def with_excess_logged(goal: Target | None, budget: Limit) -> Limit:
    """Return the budget unchanged; log it if it is more than the target's memory."""
    peak_bytes = budget.peak_bytes or 0
    if goal is not None and peak_bytes > goal.memory_bytes:
        _LOG.warning("The budget of %s is more than %s has: %s.", budget, goal.name, f"{goal.memory_bytes:,} bytes")
    return budget


# ---------------------------------------------------------------------------------------------- which one it is


def current() -> Target | None:
    """Return the target of the innermost `with` statement on this thread."""
    return _CURRENT.value


def target_of(leaves: Iterable[Any]) -> Target | None:
    """Return the target on whose devices the shardings of some arguments lie; None where they lie on devices that run.

    Raises `TargetError` for arguments on devices of two targets, or on a device that is not known.
    """
    kinds = dict[str, int]()
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(leaf, jax.ShapeDtypeStruct) and sharding is not None and _compiles_only(sharding):
            kind = next(iter(sharding.device_set)).device_kind
            kinds[kind] = max(kinds.get(kind, 0), len(sharding.device_set))
    if not kinds:
        return None
    if len(kinds) > 1:
        what = f"lie on devices of two kinds, {' and '.join(kinds)}."
        raise TargetError(message("The arguments", what, "Lay all of them on the devices of one target."))
    ((kind, count),) = kinds.items()
    chip = chip_of(kind)
    if chip is None:
        what = f"lie on {kind}, of which jointcut knows no rates."
        raise TargetError(message("The arguments", what, "Give the rates as aot.function(cost=Roofline(...))."))
    return _of_chip(chip, count)


def _of_chip(chip: Chip, count: int) -> Target:
    if chip.platform == "tpu":
        return Target(f"{chip.name}-{2 * count if chip.name == 'v5p' else count}", count)
    return Target(chip.name if count == 1 else f"{chip.name}x{count}", count)


def backend_for(goal: Target | None) -> Backend:
    """Return the compiler's properties for a target, or for JAX's default device."""
    if goal is None:
        return Backend.here()
    return Backend.of((goal.platform,)).among(goal.count)


def rates_for(goal: Target | None) -> Roofline | None:
    """Return the rates of a target, or of JAX's default device; None where nobody knows them without measuring."""
    chip = _chip_for(goal)
    return None if chip is None else chip.rates


def memory_for(goal: Target | None) -> int | None:
    """Return the bytes of memory of a device of a target, or of JAX's default device; None where nobody knows them."""
    chip = _chip_for(goal)
    return None if chip is None else chip.memory_bytes


def _chip_for(goal: Target | None) -> Chip | None:
    if goal is not None:
        return goal.chip
    device = jax.local_devices()[0]
    return None if device.platform == "cpu" else chip_of(device.device_kind)


_UNRUN = "Call trace, partition, explain, pareto or export, which need none; or leave the target out."


def refuse_to_run(name: str, goal: Target | None, cure: str = _UNRUN) -> None:
    """Raise `TargetError` for a step of a device that is not here."""
    if goal is not None and not goal.is_here:
        what = f"is planned for {goal.name}, and there is no {goal.device_kind} here to run it."
        raise TargetError(message(name, what, cure))


def _compiles_only(sharding: Any) -> bool:
    """Whether a sharding lies on devices that only compile."""
    has_devices = not isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
    devices = sharding.device_set if has_devices else ()
    return any("CompileOnly" in type(device.client).__name__ for device in devices)


def _attached(kind: str) -> tuple[Any, ...]:
    with quiet_plugins():
        return tuple(device for device in jax.devices() if device.device_kind.startswith(kind))
