"""Give loops that are the same program one object, so that what was made for one serves all.

JAX compiles, and a tape captures, by the identity of a loop. A loop that a function makes anew at each call would be
compiled anew. So the first of equal loops is kept, and stands for the others.

>>> import jax
>>> from jointcut.aot.loops.memory import Memory
>>> from jointcut.aot.loops.parts import Parts, traced
>>> def made(limit):
...     carry = [jax.core.ShapedArray((), "float32")]
...     parts = Parts(traced(lambda x: [x < limit], carry), traced(lambda x: [2 * x], carry), 0)
...     return same(Loop(parts, Memory(), "body"))
>>> made(8.0) is made(8.0), made(8.0) is made(9.0)
(True, False)
"""

from __future__ import annotations

import hashlib
from typing import Any

from jointcut.aot.cache.encode import Encoder, pack
from jointcut.aot.loops.rules import Loop
from jointcut.partition.errors import IdentityError
from jointcut.partition.program.jax import runtime
from jointcut.wrappers.built_in.programs import Plain
from jointcut.wrappers.table import Table

#: The last 512 loops, each with its derivatives, by the sha256 of what they are and by JAX's configuration.
LOOPS: Table[Loop] = Table(512)


def same(loop: Loop) -> Loop:
    """Return the first loop of the same predicate, body, name and settings.

    A loop is returned as it is if its body calls a function of the user, such as a callback or a derivative's rule,
    that was made with values of its own: nothing says whether two such functions do the same.
    """
    memory, known = loop.memory, sorted(loop.known.items())
    parts = (loop.parts.cond, loop.parts.body, loop.parts.num_consts)
    try:
        written = _Here(loop.name).all(loop.name, (parts, memory, known, loop.trips, loop.zero_cotangent))
    except IdentityError:
        return loop
    return LOOPS.of((hashlib.sha256(written).digest(), runtime.trace_context()), lambda: loop)


class _Here(Encoder):
    """Write a program as this process knows it: functions without values by their code, calls of ours by identity.

    Code and calls stay alive as long as the loop that holds them, so that no other takes their identity.
    """

    def _function(self, x: Any) -> bytes:
        if not (x.__closure__ or x.__defaults__ or x.__kwdefaults__):
            return pack("function", b"%d %d" % (id(x.__code__), id(x.__globals__)))
        return super()._function(x)

    def _other(self, x: Any) -> bytes:
        return pack("call", b"%d" % id(x)) if isinstance(x, Plain) else super()._other(x)
