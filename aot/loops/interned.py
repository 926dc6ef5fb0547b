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
import types
from typing import Any

import jax

from jointcut.aot.cache import known
from jointcut.aot.cache.encode import Encoder, pack
from jointcut.aot.hooks.closures import globals_named
from jointcut.aot.loops.rules import Loop
from jointcut.partition.errors import IdentityError
from jointcut.partition.program.jax import runtime
from jointcut.partition.program.primitives import CALLING_BACK
from jointcut.wrappers.built_in.programs import Plain
from jointcut.wrappers.table import Table

#: The last 512 loops, each with its derivatives, by the sha256 of what they are and by JAX's configuration.
LOOPS: Table[Loop] = Table(512)


def same(loop: Loop) -> Loop:
    """Return the first loop of the same predicate, body, name and settings.

    A loop is returned as it is if its body calls a function of the user, such as a derivative's rule, that reads what
    may change: variables around it, or globals other than functions, numbers, texts, arrays and modules of libraries.
    """
    memory, known = loop.memory, sorted(loop.known.items())
    parts = (loop.parts.cond, loop.parts.body, loop.parts.num_consts)
    try:
        written = _Here(loop.name).all(loop.name, (parts, memory, known, loop.trips, loop.zero_cotangent))
    except IdentityError:
        return loop
    return LOOPS.of((hashlib.sha256(written).digest(), runtime.trace_context()), lambda: loop)


class _Here(Encoder):
    """Write a program as this process knows it: a user's functions by code and globals, calls of ours by identity.

    Code and calls stay alive as long as the loop that holds them, so that no other takes their identity. A function
    that a program calls back reads its globals when it is called.
    """

    _is_called_back = False

    def _equation(self, eqn: Any) -> bytes:
        before, self._is_called_back = self._is_called_back, eqn.primitive.name in CALLING_BACK
        data = super()._equation(eqn)
        self._is_called_back = before
        return data

    def function(self, x: Any) -> bytes:
        """As in `Encoder`; what a program calls back is written apart from the same function elsewhere."""
        return self.key(x) or self._function(x) if self._is_called_back else super().function(x)

    def _function(self, x: Any) -> bytes:
        if known.is_versioned(known.module_of(x)) or x.__closure__ or x.__defaults__ or x.__kwdefaults__:
            return super()._function(x)
        names = () if self._is_called_back else globals_named(x.__code__)
        read = [pack(name, self._global(x.__globals__[name])) for name in names if name in x.__globals__]
        return pack("function", b"%d %d" % (id(x.__code__), id(x.__globals__)), *read)

    def _global(self, x: Any) -> bytes:
        if isinstance(x, types.ModuleType) and known.is_versioned(x.__name__):
            return pack("module", x.__name__.encode())
        if isinstance(x, _FIXED) or known.is_named(x):
            return self.value(x)
        return self.refuse(f"is {known.described(x)}, which may change.")

    def _other(self, x: Any) -> bytes:
        return pack("call", b"%d" % id(x)) if isinstance(x, Plain) else super()._other(x)


#: Values that do not change.
_FIXED = (types.FunctionType, bool, int, float, complex, str, bytes, jax.Array, types.NoneType)
