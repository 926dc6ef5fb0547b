"""Name a program within one process, also where it holds what no other process would know by name.

A callback and a rule of the user's have no identity that a disk could keep (`fingerprint` refuses them), and no
influence on which plan is good: neither memory nor predicted time depends on what they do. In a sketch an equation that
holds such a thing counts by its primitive and by what it reads and writes.
"""

from __future__ import annotations

import hashlib
from typing import Any

from jointcut.aot.cache.encode import Encoder, pack
from jointcut.aot.cache.fingerprint import WithoutRules
from jointcut.partition.errors import IdentityError


def sketch(**parts: Any) -> str:
    """The sha256, in hex, of named parts, as `fingerprint` has them; jaxprs are written without their rules.

    Raises `IdentityError` for a part that no sketch can name, such as an object of the user's outside of a jaxpr.
    """
    opened = {name: x.jaxpr if isinstance(x, WithoutRules) else x for name, x in parts.items()}
    written = [pack("part", name.encode(), _Sketch(name, rules=False).value(opened[name])) for name in sorted(opened)]
    return hashlib.sha256(pack("jointcut sketch", *written)).hexdigest()


class _Sketch(Encoder):
    """An encoder that goes on where an equation holds something without identity."""

    def _equation(self, eqn: Any) -> bytes:
        depths = len(self._path), len(self._within)
        state = self._numbers, self._in_program
        try:
            return super()._equation(eqn)
        except IdentityError:
            del self._path[depths[0] :], self._within[depths[1] :]
            self._numbers, self._in_program = state
            ends = self.all("in", eqn.invars), self.all("out", [v.aval for v in eqn.outvars])
            return pack("nameless", str(eqn.primitive).encode(), *ends)
