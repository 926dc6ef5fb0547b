"""Hold a call of a jitted function by the types of its arguments, and weigh it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jointcut.aot.call.doctor.scheduled import scheduled
from jointcut.aot.call.doctor.within import Within, is_array, with_fixed
from jointcut.aot.call.method import refuse_unfinished
from jointcut.aot.options.options import name_of
from jointcut.aot.options.target import Target
from jointcut.aot.report.held import lifetimes_of
from jointcut.aot.report.liveness import Liveness
from jointcut.aot.run.compile import ProgramMemory, compiled, no_room
from jointcut.aot.run.meshed import given_devices
from jointcut.aot.run.weigh import can_weigh, weigh
from jointcut.partition.errors import CallError, RoomError, message
from jointcut.partition.lower.memory.lifetimes import Lifetimes
from jointcut.partition.program.jax import abstract, jaxprs, jitting
from jointcut.wrappers.arguments.tree import struct

_WORTH_IT = 0.05  # of the memory that a program takes: less is not told
_NEAR = 0.2  # of XLA's temporaries: a schedule that holds so much more or less is not told


@dataclass(frozen=True)
class Subject:
    """A call that may need too much memory.

    Attributes:
        name: the function's name.
        jitted: the function, made by `jax.jit`, or the program that it is `within`.
        args: its arguments, with types in place of arrays, so that no array is kept.
        kwargs: its arguments by name.
        goal: the device that it is compiled for; None for the devices that are here.
        is_gradient: whether the function is a gradient alone, whose arguments are needed after the call.
        within: the call of which `jitted` is the program, as of `eqx.filter_jit` or `nnx.jit`; None for `jax.jit`.
    """

    name: str
    jitted: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    goal: Target | None = None
    is_gradient: bool = False
    within: Within | None = None

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], goal: Target | None = None
    ) -> Subject:
        """Return a call; a function that is not jitted becomes so.

        Raises `TraceError` for an async function or a generator, and `CallError` for a program that is compiled.
        """
        _refuse(function)
        types: Sequence[Any] = types_of(args, kwargs, goal)
        jitted: Any = function
        if jitting.is_jitted(function):
            made = jitted.__wrapped__
        elif (within := Within.of(function, types[0], types[1])) is not None:
            return cls(name_of(function), within.jitted, within.types, {}, goal, within=within)
        else:
            traceable, *types = with_fixed(function, types[0], types[1])
            jitted, made = jax.jit(traceable), function
        is_gradient = getattr(made, "__code__", None) is jax.grad(abs).__code__
        return cls(name_of(function), jitted, types[0], types[1], goal, is_gradient)

    @cached_property
    def traced(self) -> jax.stages.Traced:
        """The traced call."""
        return self.jitted.trace(*self.args, **self.kwargs)

    @cached_property
    def most_bytes(self) -> int:
        """The bytes of all values that the program names, of which XLA keeps a part at a time."""
        return _named_bytes(jaxprs.opened(self.traced.jaxpr)[0])

    @cached_property
    def account(self) -> ProgramMemory:
        """XLA's account of the program."""
        return weigh(self.traced.lower()) if can_weigh(self.goal) else self._compiled[1]

    @property
    def returns_a_number(self) -> bool:
        """Whether the result is one real number."""
        results = jax.tree.leaves(self.traced.out_info)
        return len(results) == 1 and results[0].shape == () and jnp.issubdtype(results[0].dtype, jnp.floating)

    @property
    def program(self) -> Any | None:
        """The compiled program; None where XLA finds no room for it and stops."""
        return self._compiled[0]

    @cached_property
    def _compiled(self) -> tuple[Any | None, ProgramMemory]:
        lowered = self.traced.lower()
        try:
            program = compiled(lowered, self.goal)
        except (RoomError, jax.errors.JaxRuntimeError) as error:
            temp_bytes = error.temp_bytes if isinstance(error, RoomError) else no_room(error)
            if temp_bytes is None:
                raise
            return None, ProgramMemory.without_room(lowered, temp_bytes)
        return program, ProgramMemory.of(program)

    @cached_property
    def liveness(self) -> Liveness | None:
        """The temporary values of the program, by its schedule where the device does not say; None if that differs."""
        if self.program is None:
            return None
        if (told := Liveness.of(self.program)) is not None:
            return told
        found = scheduled(self.program)
        most = 0 if found is None else max(lifetimes_of(found).totals, default=0)
        return found if abs(most - self.account.temp_bytes) <= _NEAR * self.account.temp_bytes else None

    @cached_property
    def lives(self) -> Lifetimes | None:
        """The temporaries alive at each instruction; None where they are not known."""
        return None if self.liveness is None else lifetimes_of(self.liveness)

    def anew(self, function: Callable[..., Any] | None = None, donated: Sequence[int] | None = None) -> Subject:
        """Return the same call traced anew, with another function or other donated arguments where these are given."""
        jitted = self.jitted
        if self.within is not None:
            jitted = self.within.again() if function is None else jitted
            donated = self.within.flat(self.donated if donated is None else donated)
        return replace(self, jitted=jitting.rejitted(jitted, function or jitted.__wrapped__, donated))

    @property
    def donated(self) -> tuple[int, ...]:
        """The positions of the arguments that are donated."""
        flat = jitting.donated_positions(self.jitted)
        return flat if self.within is None else self.within.grouped(flat)

    def is_large(self, size: int) -> bool:
        """Whether a number of bytes is worth to be told beside those that the program takes."""
        return size >= _WORTH_IT * self.account.peak_bytes

    def result_types(self) -> Counter[Any]:
        """Return the types of the results, with the number of each."""
        return Counter(map(type_of, jax.tree.leaves(self.traced.out_info)))

    def arguments(self) -> Iterator[tuple[int, list[tuple[str, Any, bool]]]]:
        """Yield the positions of the arguments without Python values, and of each array path, type and donation."""
        if self.within is not None:
            yield from self.within.arguments(self.traced.args_info[0], self.parameter)
            return
        static = {i % len(self.args) for i in jitting.static_positions(self.jitted)}
        places = [i for i in range(len(self.args)) if i not in static]
        for position, info in zip(places, self.traced.args_info[0], strict=True):
            leaves = jax.tree.leaves_with_path(info, is_leaf=lambda leaf: hasattr(leaf, "donated"))
            name = self.parameter(position)
            yield position, [(f"{name}{keystr(path)}", jitting.aval_of(leaf), leaf.donated) for path, leaf in leaves]

    def parameter(self, position: int) -> str:
        """Return the name of the parameter at a position."""
        try:
            function = self.jitted if self.within is None else self.within.function
            known = list(inspect.signature(function).parameters.values())
        except ValueError:  # a builtin without a signature
            known = []
        named = [each.name for each in known if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        rest = next((each.name for each in known if each.kind is each.VAR_POSITIONAL), "args")
        return named[position] if position < len(named) else f"{rest}[{position - len(named)}]"


def _refuse(function: Any) -> None:
    """Refuse what cannot be traced, before JAX does in words of its own."""
    if isinstance(function, jax.stages.Compiled):
        cure = "Give the function that it was compiled from, and the same arguments."
        raise CallError(message("the function", "is a compiled program, which cannot be traced.", cure))
    refuse_unfinished(inspect.unwrap(function))


def types_of(args: Sequence[Any], kwargs: Mapping[str, Any], goal: Target | None) -> tuple[Any, Any]:
    """Return the arguments of a call with types in place of arrays, so that no array is kept."""
    return jax.tree.map(lambda leaf: _type(leaf, goal), (tuple(args), dict(kwargs)))


def _type(leaf: Any, goal: Target | None) -> Any:
    """Return the type of an array, on the devices of a target if there is one; a Python value is returned unchanged."""
    if not is_array(leaf):
        return leaf
    placed = given_devices("An argument", struct(leaf), goal)
    return placed if goal is None else goal.placed(placed)


def _named_bytes(jaxpr: jaxprs.Jaxpr) -> int:
    values = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    inside = sum(_named_bytes(inner) for eqn in jaxpr.eqns for inner in jaxprs.inner_jaxprs(eqn))
    return sum(abstract.aval_bytes(v.aval) for v in values) + inside


def type_of(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape and dtype of an array or of its type."""
    return tuple(leaf.shape), leaf.dtype
