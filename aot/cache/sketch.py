"""Compute the key of a program within one process, even if it holds functions without identity.

A user's callback or rule has no identity that could be kept on disk, so `fingerprint` refuses it. It does not change
which plan is good: neither memory nor predicted time depends on it. A sketch writes the text of the error message in
place of the object, and everything around it in full. The programs inside an equation always count.
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
    """Return the sha256, in hex, of named parts, like `fingerprint`; jaxprs are written without their rules.

    Raises `IdentityError` for a user's object outside of a jaxpr.
    """
    values = {name: x.jaxpr if isinstance(x, WithoutRules) else x for name, x in parts.items()}
    encoded = [pack("part", name.encode(), _Sketch(name, rules=False).value(values[name])) for name in sorted(values)]
    return hashlib.sha256(pack("jointcut sketch", *encoded)).hexdigest()


def equations(closed: Any) -> list[tuple[Any, str]]:
    """Return the equations of a closed jaxpr, those inside an equation before it, each with 16 digits of its sha256."""
    encoder = _Equations("program", rules=False)
    encoder.value(closed)
    return encoder.found


class _Sketch(Encoder):
    """An encoder that accepts objects without identity inside a program."""

    def refuse(self, what: str, cure: str = CURE) -> bytes:
        """Return the message's text for an object in a program; elsewhere, raise like any encoder."""
        return pack("nameless", what.encode()) if self._in_program else super().refuse(what, cure)

    def _other(self, x: Any) -> bytes:
        if isinstance(x, Plain):
            return self._call(x)
        if isinstance(x, _JITTED):  # JAX's memory beside the function is not part of it
            return pack("jitted", self.value(x.__wrapped__))
        return super()._other(x)

    def _call(self, rules: Plain) -> bytes:
        """Write a call of ours: its program, the programs that it runs, with counts, and its separately cut steps."""
        step = rules.nested()
        steps = step and (step.trips, step.checkpoints, step.checkpoint_bytes, step.is_adjustable, step.most)
        return self.all("call", (type(rules), rules.closed, tuple(rules.runs() or ()), steps))


class _Equations(_Sketch):
    """A sketch that keeps the key of each equation."""

    def __init__(self, name: str, *, rules: bool = True) -> None:
        super().__init__(name, rules=rules)
        self.found: list[tuple[Any, str]] = []

    def _equation(self, eqn: Any) -> bytes:
        data = super()._equation(eqn)
        self.found.append((eqn, hashlib.sha256(data).hexdigest()[:16]))
        return data
