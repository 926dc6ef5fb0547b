"""Compute the key of a program within one process, even if it holds functions without identity.

A callback or a rule of the user's has no identity that could be kept on disk, so `fingerprint` refuses it. It does not
change which plan is good: neither memory nor predicted time depends on it. A sketch writes an equation that holds one
as its primitive, its inputs and its outputs.
"""

from __future__ import annotations

import hashlib
from typing import Any

from jointcut.aot.cache.encode import Encoder, pack
from jointcut.aot.cache.fingerprint import WithoutRules
from jointcut.partition.errors import IdentityError


def sketch(**parts: Any) -> str:
    """The sha256, in hex, of named parts, like `fingerprint`; jaxprs are written without their rules.

    Raises `IdentityError` for an object of the user's outside of a jaxpr.
    """
    values = {name: x.jaxpr if isinstance(x, WithoutRules) else x for name, x in parts.items()}
    encoded = [pack("part", name.encode(), _Sketch(name, rules=False).value(values[name])) for name in sorted(values)]
    return hashlib.sha256(pack("jointcut sketch", *encoded)).hexdigest()


class _Sketch(Encoder):
    """An encoder that accepts equations holding an object without identity."""

    def _equation(self, eqn: Any) -> bytes:
        depths = len(self._path), len(self._within)
        state = self._numbers, self._in_program
        try:
            return super()._equation(eqn)
        except IdentityError:
            del self._path[depths[0] :], self._within[depths[1] :]
            self._numbers, self._in_program = state
            inputs, outputs = self.all("in", eqn.invars), self.all("out", [v.aval for v in eqn.outvars])
            return pack("nameless", str(eqn.primitive).encode(), inputs, outputs)
