"""Warn, once per function, that an option has no effect on a call: it is not checked, measured or kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jointcut.aot.run.uncut import warn
from jointcut.partition.errors import UncachedWarning, UncheckedWarning, message
from jointcut.partition.program.jax.meshes import Spec, spec_in_words


@dataclass
class WarnedOnce:
    """A warning of one function, issued once; `told` says whether it was."""

    name: str
    told: bool = False

    what: ClassVar[str]
    cure: ClassVar[str]
    kind: ClassVar[type[UserWarning]] = UncheckedWarning

    def __call__(self) -> None:
        """Warn at the user's line."""
        if not self.told:
            self.told = True
            warn(self.kind(message(self.name, self.what, self.cure)))


class Unchecked(WarnedOnce):
    """Results are not checked for NaN."""

    what = "is called inside a transformation (jax.jit, jax.grad, jax.vmap): its results are not checked there."
    cure = "Call its own value_and_grad, grad or vjp outside of it, or look at one call with aot.first_nonfinite."


class Uncached(WarnedOnce):
    """Programs are not kept for other processes."""

    kind = UncachedWarning
    what = (
        "is called inside a transformation (jax.jit, jax.grad, jax.vmap), where it is part of a program of yours: the "
        "cache does not keep that."
    )
    cure = (
        "Call its own value_and_grad, grad or vjp outside of it, or let JAX keep your program: "
        "jax.config.update('jax_compilation_cache_dir', folder)."
    )


class UncachedUpdate(Uncached):
    """The program of a step with its update is not kept for other processes."""

    what = "is updated by value_and_update, whose program the cache does not keep."
    cure = "Update after value_and_grad, or let JAX keep it: jax.config.update('jax_compilation_cache_dir', folder)."


class Unshared(WarnedOnce):
    """A budget is one for all devices of a mesh together."""

    what = (
        "has a budget, and is given what your jax.jit computes on automatic axes: it is not known how that lies, so "
        "the budget is for the bytes of all devices together."
    )
    cure = (
        "Give the arguments of the jax.jit themselves, or say how many devices share the batch: "
        "aot.function(..., devices=8)."
    )


@dataclass
class LaidOtherwise:
    """The warning of one function, issued once, that its plan was made for other shardings."""

    name: str
    told: bool = False

    def __call__(self, path: str, now: Spec, before: Spec) -> None:
        """Warn at the user's line of an argument, given how it lies and how it lay where the plan was made."""
        if self.told:
            return
        self.told = True
        what = (
            f"runs by a plan for other shardings: {path} lay as {spec_in_words(before)} where the plan was made, and "
            f"lies as {spec_in_words(now)} now. On automatic axes JAX traces a function once for all shardings."
        )
        cure = (
            "Lay the arguments alike in all calls, or jit a function of its own for each layout, such as "
            "jax.jit(lambda *args: step(*args)) with a step that is not jitted itself."
        )
        warn(UncheckedWarning(message(self.name, what, cure)))


class Unmeasured(WarnedOnce):
    """The error of a function's gradient is not measured."""

    what = (
        "is differentiated inside a transformation (jax.jit, jax.grad, jax.vmap), where the error of its gradient "
        "cannot be measured: all that it saves waits as it is."
    )
    cure = "Call its own value_and_grad, grad or vjp outside of it, or name values in a policy, aot.SAVE_AS."
