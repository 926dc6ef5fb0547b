"""Read the options that XLA compiles with, and say where they cannot be had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jointcut.partition.errors import CallError, TraceError, message

#: Options of XLA as users give them, as in `jax.jit`; canonical options hold the pairs, by name.
GivenCompilerOptions = Mapping[str, Any] | tuple[tuple[str, Any], ...] | None


def read_compiler_options(given: GivenCompilerOptions) -> tuple[tuple[str, Any], ...]:
    """Return the pairs, by name; raises `TraceError` for what is no dict from names to plain values."""
    cure = 'Give a dict, such as {"xla_cpu_enable_fast_math": True}.'
    if isinstance(given, tuple):
        given = dict(given)
    if given is not None and not isinstance(given, Mapping):
        raise TraceError(message("compiler_options", f"is of type {type(given).__name__}, not a dict.", cure))
    for name, value in (given or {}).items():
        if not isinstance(name, str):
            raise TraceError(message("compiler_options", f"has the key {name!r}, not a name.", cure))
        if not isinstance(value, bool | int | float | str):
            what = f"is of type {type(value).__name__}, not a plain value."
            raise TraceError(message(f"compiler_options[{name!r}]", what, cure))
    return tuple(sorted((given or {}).items()))


def jit_options(given: GivenCompilerOptions) -> dict[str, Any] | None:
    """Return the options as `jax.jit` takes them; None for none."""
    return dict(given or ()) or None


def refuse_inside(name: str, given: GivenCompilerOptions) -> None:
    """Raise `CallError` for a call with options of XLA inside a transformation, as JAX does."""
    if given:
        what = "has compiler_options and is called inside a transformation of JAX, which XLA compiles as a whole."
        cure = f"Give them to the outer jax.jit(..., compiler_options=...), or call {name}'s own value_and_grad."
        raise CallError(message(name, what, cure))
