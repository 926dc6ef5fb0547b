"""Write values as bytes, the same in every process.

An object that every process knows (see `known`) is written as its name, plain data as its content bit by bit, and an
object of JAX like pickle would write it. Any other object, such as a Python function of the user, raises
`IdentityError`, unless it has a `cache_key`: a string that the user changes whenever its behaviour changes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import struct
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jointcut.aot.cache import known
from jointcut.partition.errors import IdentityError, message
from jointcut.partition.program.jax import jaxprs, user_source

# By primitive: parameters that are read for differentiation or mapping, but not for compilation.
RULES: dict[str, tuple[str, ...]] = {
    "custom_jvp_call": ("jvp_jaxpr_fun",),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees"),
    "custom_vmap_call": ("rule",),
    "jointcut_call": ("rules",),
    "jointcut_half": ("rules",),
    "jointcut_waiting": ("rules",),
    "linear_call": ("transpose_thunk",),
    "reduce": ("computation",),
    "remat2": ("policy",),
}

CURE = (
    "Give it an attribute `cache_key`, a string that changes whenever its behaviour does, or switch the cache off for "
    "this function."
)
_NAMELESS = "which has no name that another process would know it by."

# Bookkeeping of a trace in the functions that JAX wraps around a rule. It does not change their results.
_NOTES = ("DebugInfo", "Store", "EqualStore", "DynamicJaxprTrace", "object")

_CACHED_LENGTH = 64


def pack(tag: str, *parts: bytes) -> bytes:
    """Join parts after their lengths, so that no other tag or parts give the same bytes."""
    head, lengths = _head(tag, len(parts))
    return head + lengths.pack(*map(len, parts)) + b"".join(parts)


@functools.lru_cache(maxsize=4096)
def _head(tag: str, count: int) -> tuple[bytes, struct.Struct]:
    """Return the bytes before the lengths (tag's length, number of parts, tag), and the struct of the lengths."""
    name = tag.encode()
    return struct.pack("<QQ", len(name), count) + name, struct.Struct(f"<{count}Q")


def _text(kind: type, x: Any) -> bytes:
    return pack(kind.__name__, x if isinstance(x, bytes) else str(x).encode("utf-8", "surrogatepass"))


_short_text = functools.lru_cache(maxsize=4096)(_text)


class Encoder:
    """Writes values as bytes; error messages give the path to a value, starting with `name`.

    Without `rules`, the `RULES` in jaxprs are skipped. With `in_program`, the value is part of a jaxpr, where an object
    of a user's class has behaviour besides its fields.
    """

    def __init__(self, name: str, *, rules: bool = True, in_program: bool = False) -> None:
        self._path: list[Any] = [name]
        self._rules = rules
        self._in_program = in_program
        self._known: dict[tuple[int, bool], tuple[Any, bytes]] = {}  # holding the object keeps its id from being reused
        self._within: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._numbers_read = 0

    def value(self, x: Any) -> bytes:
        """Return the bytes of any value."""
        return _method(type(x))(self, x)

    def at(self, name: str, x: Any) -> bytes:
        """Return the bytes of a value, and add a name to its path in error messages."""
        self._path.append(name)
        data = self.value(x)
        self._path.pop()
        return data

    def all(self, tag: str, xs: Iterable[Any]) -> bytes:
        """Return the bytes of several values in order."""
        return pack(tag, *[_method(type(x))(self, x) for x in xs])

    def refuse(self, what: str, cure: str = CURE) -> bytes:
        """Raise `IdentityError` with the path, the problem and the cure; a subclass may return bytes instead."""
        raise IdentityError(message(known.place(self._path), what, cure))

    def once(self, x: Any, write: Callable[[Any], bytes]) -> bytes:
        """Return the bytes from `write`, computed once per object unless they depend on the numbers of variables."""
        key = (id(x), self._in_program)
        if key in self._known:
            return self._known[key][1]
        if any(x is outer for outer in self._within):
            return self.refuse("holds itself.")
        numbers_read = self._numbers_read
        self._within.append(x)
        data = write(x)
        self._within.pop()
        if numbers_read == self._numbers_read:
            self._known[key] = (x, data)
        return data

    # ------------------------------------------------------------------------------------------ plain data

    def text(self, x: Any) -> bytes:
        """Write text, bytes, integers or None."""
        is_long = isinstance(x, str | bytes) and len(x) > _CACHED_LENGTH
        return (_text if is_long else _short_text)(type(x), x)

    def number(self, x: complex) -> bytes:
        """Write a float or complex number by its bits."""
        return pack(type(x).__name__, struct.pack("<dd", x.real, x.imag))

    def sequence(self, x: Any) -> bytes:
        """Write a tuple or list."""
        return self.all(type(x).__name__, x)

    def unordered(self, x: Any) -> bytes:
        """Write a set, sorted, since Python's order differs from process to process."""
        return pack("set", *sorted(map(self.value, x)))

    def mapping(self, x: dict[Any, Any]) -> bytes:
        """Write a dict, sorted."""
        pairs = [(self.value(k), self.at(k if isinstance(k, str) else repr(k), v)) for k, v in x.items()]
        return pack("dict", *(part for pair in sorted(pairs) for part in pair))

    def choice(self, x: enum.Enum) -> bytes:
        """Write a member of an enum."""
        if self._in_program and not known.is_own(type(x)):
            return self.refuse(f"is {known.described(x)}, {_NAMELESS}")
        return self.once(x, lambda x: pack("enum", known.class_name(type(x)), self.value(x.name), self.value(x.value)))

    def dtype(self, x: np.dtype[Any]) -> bytes:
        """Write a dtype of NumPy or ml_dtypes."""
        return self.once(x, lambda x: pack("dtype", known.class_name(type(x)), x.str.encode(), repr(x).encode()))

    def array(self, x: Any) -> bytes:
        """Write an array of NumPy or one of its scalars, by dtype, shape and bytes."""
        a = np.asarray(x)
        kind = "array" if isinstance(x, np.ndarray) else "scalar"
        if a.dtype.hasobject:
            return pack(kind, self.value(a.shape), self.all("objects", a.reshape(-1).tolist()))
        flat = np.ascontiguousarray(a).reshape(-1)
        data: Any = flat.view(np.uint8) if flat.nbytes else b""
        return pack(kind, self.value(a.dtype), self.value(a.shape), hashlib.sha256(data).digest())

    def device_array(self, x: jax.Array) -> bytes:
        """Write an array of JAX, by type, sharding and value."""
        if not x.is_fully_addressable:
            what = "is an array of which other processes hold parts."
            return self.refuse(what, "Pass it as an argument, or switch the cache off for this function.")
        data = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        placed = self.all("placed", (jax.typeof(x), x.sharding, x.committed))
        return pack("jax array", placed, self.value(np.asarray(data)))

    def tree(self, x: Any) -> bytes:
        """Write a tree of containers: their classes by name, and their auxiliary data."""
        data = x.node_data()
        if data is None:
            return pack("leaf" if x.num_leaves else "none")
        kind, more = data
        aux = b"" if more is kind else self.at("auxiliary data", more)
        return pack("node", known.class_name(kind), aux, *map(self.tree, x.children()))

    def device(self, x: Any) -> bytes:
        """Write a device, by its kind and number."""
        return self.all("device", (x.platform, x.device_kind, x.id, x.process_index))

    def size(self, x: Any) -> bytes:
        """Write a symbolic size of `jax.export`, with the constraints of its scope."""
        return self.all("size", (str(x), str(x.scope).partition(" with constraints:")[2]))

    # ------------------------------------------------------------------------------------------- behaviour

    def key(self, x: Any) -> bytes | None:
        """Return the `cache_key` of an object, or None if it has none of its own."""
        if (key := getattr(x, "cache_key", None)) is None:
            return None
        if not isinstance(key, str):
            return self.refuse(f"has a cache_key that is a {type(key).__name__}.", "Make it a string.")
        inner, is_own = getattr(x, "__wrapped__", None), known.is_versioned(known.module_of(x))
        if inner is not None and isinstance(x, types.FunctionType) and is_own:
            return None  # a function of JAX around the user's, which is written itself
        if inner is not None and not is_own and getattr(inner, "cache_key", None) == key:
            what = f"is {known.described(x)}, whose cache_key is that of the function it wraps."
            cure = "Give the wrapper a `cache_key` of its own, or switch the cache off for this function."
            return self.refuse(what, cure)
        return pack("key", known.title(x).encode(), key.encode())

    def function(self, x: Any) -> bytes:
        """Write a Python function: by its `cache_key`, or by code and closure if it is JAX's own."""
        return self.key(x) or self.once(x, self._function)

    def _function(self, x: Any) -> bytes:
        module = known.module_of(x)
        if not known.is_versioned(module):
            return self.refuse(f"is {known.described(x)}, {_NAMELESS}")
        cells = [pack(name, self.at(name, content)) for name, content in known.closure(x).items()]
        return pack("function", self.all("code", (module, x.__code__, x.__defaults__, x.__kwdefaults__)), *cells)

    def code(self, x: types.CodeType) -> bytes:
        """Write the code of a function, since two lambdas of one module have the same name."""
        return self.all("code", (x.co_qualname, x.co_firstlineno, x.co_code, x.co_names, x.co_consts))

    def method(self, x: types.MethodType) -> bytes:
        """Write a method of an object."""
        return pack("method", self.value(x.__func__), self.value(x.__self__))

    def partial(self, x: functools.partial[Any]) -> bytes:
        """Write a function with arguments."""
        return pack("partial", self.value(x.func), self.all("args", x.args), self.mapping(x.keywords))

    def wrapped(self, x: Any) -> bytes:
        """Write a function under JAX's transformations (`WrappedFun`)."""
        steps = []
        for step, args in x.transforms:
            read = [a for i, a in enumerate(args) if not known.only_for_messages(step, i - len(args))]
            steps.append(pack("step", self.value(step), self.all("given", read)))
        return pack("wrapped", self.value(x.f), self.value(x.params), self.value(x.in_type), *steps)

    def kind(self, x: type) -> bytes:
        """Write a class: by name if it is JAX's own or not in a program, else by its `cache_key`."""
        if known.is_own(x) or not self._in_program:
            return pack("type", known.class_name(x))
        return self.key(x) or self.refuse(f"is the class {known.title(x)}, {_NAMELESS}")

    def primitive(self, x: Any) -> bytes:
        """Write a primitive: by name if it is JAX's own, else by its `cache_key`."""
        if known.is_own_primitive(x):
            return pack("primitive", known.class_name(type(x)), x.name.encode())
        return pack("primitive", self.key(x) or self.refuse(f"is the primitive {x.name}, {_NAMELESS}"))

    def record(self, x: Any) -> bytes:
        """Write a dataclass or named tuple: its class, its fields, and its `cache_key` if it has one."""
        is_own = known.is_own(type(x))
        key = None if is_own else self.key(x)
        if key is None and not is_own and (self._in_program or callable(x)):
            return self.refuse(f"is {known.described(x)}, {_NAMELESS}")
        names = getattr(x, "_fields", ()) if isinstance(x, tuple) else [f.name for f in dataclasses.fields(x)]
        head = (known.class_name(type(x)), key or b"")
        return self.once(x, lambda x: pack("record", *head, *(self.at(n, getattr(x, n)) for n in names)))

    def other(self, x: Any) -> bytes:
        """Write any other object: by its `cache_key`, by its name, or like pickle if its class is JAX's own."""
        return self.once(x, self._other)

    def _other(self, x: Any) -> bytes:
        if (key := self.key(x)) is not None:
            return key
        if known.is_named(x):
            return pack("named", x.__module__.encode(), x.__qualname__.encode())
        if not known.is_own(type(x)):
            return self.refuse(f"is {known.described(x)}, {_NAMELESS}")
        state = known.pickled(x)
        if state is None:
            return self.refuse(f"is {known.described(x)}, which cannot be written down.")
        return self.all("object", (type(x), *state))

    def note(self, x: Any) -> bytes:
        """Write bookkeeping of a trace, by its class alone."""
        return pack("note", known.class_name(type(x)))

    def tracer(self, x: Any) -> bytes:
        """Refuse a traced value: it has no content yet."""
        cure = "Take the fingerprint outside of jit, grad and the like."
        return self.refuse("is a value that is still being traced.", cure)

    def reference(self, x: Any) -> bytes:
        """Refuse a reference: its content can change."""
        return self.refuse("is a jax.Ref, whose content can change.", "Pass it as an argument.")

    # -------------------------------------------------------------------------------------------- programs

    def program(self, x: Any) -> bytes:
        """Write a jaxpr, open or closed, with variables by number and without source lines.

        Names of scopes are included, since a strategy may use them.
        """
        return self.once(x, self._program)

    def _program(self, x: Any) -> bytes:
        jaxpr, consts = jaxprs.opened(x)
        outside, self._in_program = (self._numbers, self._in_program, self._numbers_read), True
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        self._numbers = {v: i for i, v in enumerate(inputs)}
        hashed = hashlib.sha256(self.all("given", [(v.aval, getattr(v, "initial_qdd", None)) for v in inputs]))
        hashed.update(pack("consts", self.value(len(jaxpr.constvars)), *(self.at("constant", c) for c in consts)))
        for eqn in jaxpr.eqns:
            hashed.update(self._equation(eqn))
            for v in eqn.outvars:
                self._numbers[v] = len(self._numbers)
        hashed.update(pack("ends", self.all("out", jaxpr.outvars), self.unordered(jaxpr.effects)))
        self._numbers, self._in_program, self._numbers_read = outside
        return pack("jaxpr", hashed.digest())

    def _equation(self, eqn: Any) -> bytes:
        self._path.append(eqn)
        skipped = () if self._rules else RULES.get(eqn.primitive.name, ())
        params = [pack(n, self.at(n, eqn.params[n])) for n in sorted(eqn.params) if n not in skipped]
        data = pack(
            "equation",
            self.once(eqn.primitive, self.primitive),
            pack("params", *params),
            self.all("in", eqn.invars),
            self.all("out", [v.aval for v in eqn.outvars]),
            self.unordered(eqn.effects),
            self.value(eqn.ctx),
            self.value(user_source.scope_of(eqn)),
        )
        self._path.pop()
        return data

    def variable(self, x: Any) -> bytes:
        """Write a variable of the current program, by its number."""
        self._numbers_read += 1
        if x not in self._numbers:
            return self.refuse("is a variable of another program.", "Switch the cache off for this function.")
        return b"v%d" % self._numbers[x]

    def literal(self, x: Any) -> bytes:
        """Write a literal constant in an equation."""
        return pack("literal", self.value(x.val), self.value(x.aval))


# ---------------------------------------------------------------------------------------------------- dispatch

Method = Callable[[Encoder, Any], bytes]

_EXACT: dict[type, Method] = {
    **dict.fromkeys((type(None), bool, int, str, bytes, type(...)), Encoder.text),
    **dict.fromkeys((float, complex), Encoder.number),
    **dict.fromkeys((tuple, list), Encoder.sequence),
    **dict.fromkeys((set, frozenset), Encoder.unordered),
    dict: Encoder.mapping,
    np.ndarray: Encoder.array,
    functools.partial: Encoder.partial,
    types.FunctionType: Encoder.function,
    types.MethodType: Encoder.method,
    types.CodeType: Encoder.code,
    type(jax.tree.structure(0)): Encoder.tree,
    jaxprs.Literal: Encoder.literal,
}
_BASES: dict[type, Method] = {
    jaxprs.Jaxpr: Encoder.program,
    jaxprs.ClosedJaxpr: Encoder.program,
    jaxprs.Var: Encoder.variable,
    jax.core.Tracer: Encoder.tracer,
    jax.Ref: Encoder.reference,
    jax.Array: Encoder.device_array,
    jax.Device: Encoder.device,
    np.dtype: Encoder.dtype,
    np.generic: Encoder.array,
    enum.Enum: Encoder.choice,
    type: Encoder.kind,
}
_BY_NAME: dict[str, Method] = {
    **dict.fromkeys(_NOTES, Encoder.note),
    "WrappedFun": Encoder.wrapped,
    "_DimExpr": Encoder.size,
}


@functools.lru_cache(maxsize=4096)
def _method(kind: type) -> Method:
    """Return the method that writes values of a class."""
    if kind in _EXACT:
        return _EXACT[kind]
    is_own = known.is_own(kind)
    if is_own and kind.__name__ in _BY_NAME:
        return _BY_NAME[kind.__name__]
    if known.is_primitive(kind):
        return Encoder.primitive
    for base, method in _BASES.items():
        if issubclass(kind, base):
            return method
    is_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    settings = getattr(kind, "__dataclass_params__", None)
    if is_tuple or (settings is not None and (is_own or settings.frozen)):
        return Encoder.record
    return Encoder.other
