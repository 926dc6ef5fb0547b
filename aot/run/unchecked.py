"""Warn, once per function, that a call is not checked for NaN, or that an error is not measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jointcut.aot.run.uncut import warn
from jointcut.partition.errors import UncheckedWarning, message


@dataclass
class Once:
    """A warning of one function, issued once; `told` says whether it was."""

    name: str
    told: bool = False

    what: ClassVar[str]
    cure: ClassVar[str]

    def __call__(self) -> None:
        """Warn at the user's line."""
        if not self.told:
            self.told = True
            warn(UncheckedWarning(message(self.name, self.what, self.cure)))


class Unchecked(Once):
    """Results are not checked for NaN."""

    what = "is called inside a transformation (jax.jit, jax.grad, jax.vmap): its results are not checked there."
    cure = "Call its own value_and_grad, grad or vjp outside of it, or look at one call with aot.first_nonfinite."


class Unmeasured(Once):
    """The error of a function's gradient is not measured."""

    what = (
        "is differentiated inside a transformation (jax.jit, jax.grad, jax.vmap), where the error of its gradient "
        "cannot be measured: all that it saves waits as it is."
    )
    cure = "Call its own value_and_grad, grad or vjp outside of it, or name values in a policy, aot.SAVE_AS."
