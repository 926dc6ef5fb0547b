"""Call hooks in programs that JAX traces: in `aot.function`, `jax.grad` and `jax.jit`."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from jointcut.aot.hooks.hook import Hook, Place
from jointcut.partition.program.jax import abstract, runtime
from jointcut.partition.rewrite.hooks import CalledBack, refused_in_vmap
from jointcut.wrappers.metadata.convention import is_inexact


def hooked_value(x: Any, place: Place) -> Any:
    """Return the value, with a hook on its cotangent; a value that has hooks gets another, and is returned itself."""
    if _LATER.takes(x, place):
        return x
    known = _CHAINS.of(x)
    if known is not None:
        known.append(place)
        return x
    chain = [place]

    @jax.custom_vjp
    def value(x: Any) -> Any:
        return x

    def backward(residuals: None, cotangent: Any) -> tuple[Any]:
        del residuals
        for hook in sorted(chain, key=lambda place: place.kind == "post_accumulate"):
            (cotangent,) = applied(hook, [cotangent])
        return (cotangent,)

    value.defvjp(lambda x: (x, None), backward)
    made = value(x)
    _CHAINS.add(made, chain)
    _LATER.follow(x, made)
    return made


class _HooksOfValues(threading.local):
    """The hooks of values that are being traced, for as long as the values are there."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], list[Place]]] = {}

    def of(self, x: Any) -> list[Place] | None:
        found = self._known.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def add(self, x: Any, chain: list[Place]) -> None:
        if not runtime.is_tracer(x):  # nothing is differentiated
            return
        key = id(x)
        self._known[key] = weakref.ref(x, lambda _: self._known.pop(key, None)), chain


_CHAINS = _HooksOfValues()


class _Later(threading.local):
    """The arguments whose `post_accumulate` hooks are left out of the program that is traced.

    Attributes:
        arguments: for the arguments, and for them behind hooks: the argument, and the tracer itself, by its id.
        taken: the hooks that were left out, with their arguments.
    """

    arguments: dict[int, tuple[Any, Any]]
    taken: list[tuple[Any, Place]]

    def __init__(self) -> None:
        self.arguments, self.taken = {}, []

    def takes(self, x: Any, place: Place) -> bool:
        is_taken = place.kind == "post_accumulate" and id(x) in self.arguments
        if is_taken:
            self.taken.append((self.arguments[id(x)][0], place))
        return is_taken

    def follow(self, x: Any, made: Any) -> None:
        if id(x) in self.arguments:
            self.arguments[id(made)] = self.arguments[id(x)][0], made


_LATER = _Later()


def called_later(function: Callable[..., Any], taken: list[tuple[Any, Place]] | None = None) -> Callable[..., Any]:
    """Return a function without the `post_accumulate` hooks of its arguments, for a step that calls them after it.

    Where it is traced, it writes these hooks to a given `taken`, with the tracers of their arguments.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _LATER.arguments, _LATER.taken
        tracers = filter(runtime.is_tracer, jax.tree.leaves((args, kwargs)))
        _LATER.arguments, _LATER.taken = {id(x): (x, x) for x in tracers}, []
        try:
            return function(*args, **kwargs)
        finally:
            if taken is not None:
                taken[:] = _LATER.taken
            _LATER.arguments, _LATER.taken = before

    return call


def hooked_call(
    function: Callable[..., Any], args: Sequence[Any], pre_hook: Hook | None, post_hook: Hook | None
) -> Any:
    """Return the result of a call, with hooks before and after its backward."""
    leaves, tree = jax.tree.flatten(tuple(args))
    moving = [i for i, x in enumerate(leaves) if hasattr(x, "dtype") and is_inexact(x.dtype)]

    def flat(*values: Any) -> Any:
        given = iter(values)
        whole = [next(given) if i in moving else x for i, x in enumerate(leaves)]
        return function(*jax.tree.unflatten(tree, whole))

    def forward(*values: Any) -> tuple[Any, Any]:
        return jax.vjp(flat, *values)

    def backward(pull: Any, cotangents: Any) -> tuple[Any, ...]:
        outer = jax.tree.structure(cotangents)
        cts = jax.tree.leaves(cotangents)
        types = tuple(map(jax.typeof, cts))
        if pre_hook is not None:
            cts = applied(Place("pre_hook", pre_hook, types, (outer,), types, outer, "a call"), cts)
        gradients = pull(jax.tree.unflatten(outer, cts))
        if post_hook is None:
            return gradients
        inner = jax.tree.structure(jax.tree.unflatten(tree, [0 if i in moving else None for i in range(len(leaves))]))
        given = tuple(map(jax.typeof, gradients))
        made = Place("post_hook", post_hook, (*given, *types), (inner, outer), given, inner, "a call")
        return tuple(applied(made, [*gradients, *cts]))

    call = jax.custom_vjp(flat)
    call.defvjp(forward, backward)
    return call(*(leaves[i] for i in moving))


def applied(place: Place, flat: Sequence[Any]) -> list[Any]:
    """Return the values that a hook makes: as a part of the program, or by calling back."""
    if place.is_traced and not place.hook.can_be_removed:
        return place(flat)
    structs, back = [abstract.struct(aval) for aval in place.returns], _Back(place)
    with refused_in_vmap([back]):
        return list(io_callback(back, structs, *flat, ordered=True))


@dataclass(frozen=True)
class _Back(CalledBack):
    """Calls a hook with arrays that a program hands out."""

    place: Place

    @property
    def named(self) -> str:
        """The hook as messages name it."""
        return self.place.named

    def __call__(self, *arrays: Any) -> list[Any]:
        return [np.asarray(x) for x in self.place(arrays)]
