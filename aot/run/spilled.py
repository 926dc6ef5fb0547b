"""Run programs that keep residuals in files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.aot.hooks.spilling import Disk
from jointcut.aot.run.runner import Programs
from jointcut.partition.errors import CallError, message


def spilled(programs: Programs, disk: Disk, name: str, size: int, count: int) -> Programs:
    """Return programs of a function that write up to `size` bytes to a disk for each run, and wait for it.

    `count` is the number of outputs that the forward returns before its residuals.
    """
    run = _Spilled(programs, disk, name, size, count)
    return Programs(run.run, run.backward, programs.takes_zeros, run.ready)


def refuse_spill(name: str) -> None:
    """Raise `CallError` for a function that spills and is differentiated inside a transformation."""
    what = "spills to files, and is differentiated inside a transformation (jax.jit, jax.grad, jax.vmap)."
    cure = "Call its own value_and_grad, grad or vjp outside of it, or leave spill out."
    raise CallError(message(name, what, cure))


@dataclass(frozen=True)
class _Spilled:
    """Programs whose runs have a file each."""

    programs: Programs
    disk: Disk
    name: str
    size: int
    count: int

    def run(self, which: str, flat: Sequence[Any]) -> Sequence[Any]:
        """Run a program as `Programs.run` does; the file of a step is removed at its end."""
        if which == "alone":
            return self.programs.run(which, flat)
        self._refuse_devices(flat)
        with self.disk.forward(self.name, self.size) as file:
            results = jax.block_until_ready(self.programs.run(which, flat))
        kept = results[self.count :] if which == "forward" and file.numbers else ()
        if kept:
            file.until_gone(kept)
        else:
            file.close()
        return results

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any | None], keep: bool) -> Sequence[Any]:
        """Run the backward as `Programs.backward` does."""
        with self.disk.backward(self.name):
            return jax.block_until_ready(self.programs.backward(residuals, cotangents, keep))

    def ready(self, name: str) -> Any:
        """Return a program as `Programs.ready` does; not a step, which needs a file."""
        return self.programs.ready(name) if name == "alone" else None

    def _refuse_devices(self, flat: Sequence[Any]) -> None:
        """Raise `CallError` for arrays on several devices."""
        for x in flat:
            devices = getattr(getattr(x, "sharding", None), "device_set", ())
            if len(devices) > 1:
                what = f"spills to files, and an argument lies on {len(devices)} devices."
                raise CallError(message(self.name, what, "Put its arguments on one device, or leave spill out."))
