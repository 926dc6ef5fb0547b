"""Compute the key of a program within one process, even if it holds functions without identity.

A callback or a rule of the user's has no identity that could be kept on disk, so `fingerprint` refuses it. It does not
change which plan is good: neither memory nor predicted time depends on it. A sketch writes what a message would say of
it, and all around it in full: the programs inside an equation count, whatever else that equation holds.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax

from jointcut.aot.cache.encode import CURE, Encoder, pack
from jointcut.aot.cache.fingerprint import WithoutRules
from jointcut.wrappers.built_in.programs import Plain

_JITTED: Any = type(jax.jit(lambda: None))


def sketch(**parts: Any) -> str:
    """The sha256, in hex, of named parts, like `fingerprint`; jaxprs are written without their rules.

    Raises `IdentityError` for an object of the user's outside of a jaxpr.
    """
    values = {name: x.jaxpr if isinstance(x, WithoutRules) else x for name, x in parts.items()}
    encoded = [pack("part", name.encode(), _Sketch(name, rules=False).value(values[name])) for name in sorted(values)]
    return hashlib.sha256(pack("jointcut sketch", *encoded)).hexdigest()


class _Sketch(Encoder):
    """An encoder that accepts objects without identity inside a program."""

    def refuse(self, what: str, cure: str = CURE) -> bytes:
        """What a message would say of an object in a program; elsewhere, raise as any encoder does."""
        return pack("nameless", what.encode()) if self._in_program else super().refuse(what, cure)

    def _other(self, x: Any) -> bytes:
        if isinstance(x, Plain):
            return self._call(x)
        if isinstance(x, _JITTED):  # what JAX remembers beside the function is not part of it
            return pack("jitted", self.value(x.__wrapped__))
        return super()._other(x)

    def _call(self, rules: Plain) -> bytes:
        """A call of ours: its program, the programs that it runs and how often, and the steps that are cut apart."""
        step = rules.nested()
        steps = step and (step.trips, step.checkpoints, step.checkpoint_bytes, step.is_adjustable)
        return self.all("call", (type(rules), rules.closed, tuple(rules.runs() or ()), steps))
