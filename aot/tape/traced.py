"""Call hooks in programs that JAX traces: in `aot.function`, `jax.grad` and `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from jointcut.aot.hooks.hook import Hook, Place, hook_of
from jointcut.partition.program import jaxprs
from jointcut.wrappers.metadata.convention import is_inexact


def hooked_value(x: Any, place: Place, can_be_removed: bool) -> Any:
    """The value, with a hook on its cotangent from here on."""

    @jax.custom_vjp
    def value(x: Any) -> Any:
        return x

    def backward(residuals: None, cotangent: Any) -> tuple[Any]:
        del residuals
        return (_applied(place, [cotangent], can_be_removed)[0],)

    value.defvjp(lambda x: (x, None), backward)
    return value(x)


def hooked_call(function: Callable[..., Any], args: Sequence[Any], pre_hook: Any, post_hook: Any) -> Any:
    """The result of a call, with hooks before and after its backward."""
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
            made = Place("pre_hook", hook_of(pre_hook), types, (outer,), types, outer, "a call")
            cts = _applied(made, cts, isinstance(pre_hook, Hook))
        gradients = pull(jax.tree.unflatten(outer, cts))
        if post_hook is None:
            return gradients
        inner = jax.tree.structure(jax.tree.unflatten(tree, [0 if i in moving else None for i in range(len(leaves))]))
        given = tuple(map(jax.typeof, gradients))
        made = Place("post_hook", hook_of(post_hook), (*given, *types), (inner, outer), given, inner, "a call")
        return tuple(_applied(made, [*gradients, *cts], isinstance(post_hook, Hook)))

    call = jax.custom_vjp(flat)
    call.defvjp(forward, backward)
    return call(*(leaves[i] for i in moving))


def _applied(place: Place, flat: Sequence[Any], can_be_removed: bool) -> list[Any]:
    """What a hook makes of the values: as a part of the program, or by calling back."""
    if place.is_traced and not can_be_removed:
        return place(flat)

    def back(*arrays: Any) -> list[Any]:
        return [np.asarray(x) for x in place(arrays)]

    return list(io_callback(back, [jaxprs.struct(aval) for aval in place.returns], *flat, ordered=True))
