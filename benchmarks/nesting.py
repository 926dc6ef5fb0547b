"""Nest `jax.checkpoint` by square roots, as by hand: blocks in groups, scans of scans.

A loss whose blocks or bodies are wrapped in `jax.checkpoint` is traced, and each wrapped call is a mark. Where n marks
stand one after the other, about sqrt(n) groups of them are wrapped once more, each with what stands between its marks.
Where a mark is the body of a scan of n steps, the scan becomes a scan of about sqrt(n) wrapped scans. So no program
needs to know of it.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.methods import POLICIES, Method, Step, forms, step_of
from benchmarks.programs import Program
from jointcut.partition.program.jax import jaxprs, runtime

FEWEST = 4  # blocks or steps that are worth nesting
MARKS = {"remat2", "checkpoint"}  # what JAX calls the primitive of `jax.checkpoint`, by version

Values = dict[Any, Any]


def nested_for(program: Program) -> dict[str, Method]:
    """The methods that nest at the places of a program, by name.

    `in groups` wraps groups alone, `nested` the blocks or bodies in them too.
    """
    return {
        f"checkpoint {place} {name}: nothing{form}": partial(build, place=place, twice=twice, keep_barriers=keep)
        for place in program.places
        for name, twice in (("in groups", False), ("nested", True))
        for form, keep in forms()
    }


def build(program: Program, place: str, twice: bool, keep_barriers: bool) -> Step:
    """`jax.jit(jax.value_and_grad(loss))` with groups of blocks in `jax.checkpoint`, and the blocks too if `twice`."""
    return step_of(program, nested(program.wrapped(place, checkpoint), twice), keep_barriers)


def checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.checkpoint` that saves nothing but what a function is given."""
    return jax.checkpoint(function, policy=POLICIES["nothing"])


def nested(function: Callable[..., Any], twice: bool) -> Callable[..., Any]:
    """The same function, its marks in groups; they stay if `twice`, else they are taken off."""

    def call(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = run(closed, jax.tree.leaves(arguments), twice)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def run(closed: Any, arguments: Sequence[Any], twice: bool) -> list[Any]:
    """The results of a jaxpr, its marks in groups."""
    jaxpr, consts = jaxprs.opened(closed)
    values: Values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    start = 0
    for first, end in groups(jaxpr.eqns):
        follow(jaxpr.eqns[start:first], values, twice)
        later = [*jaxpr.outvars, *(v for eqn in jaxpr.eqns[end:] for v in eqn.invars)]
        values |= group(jaxpr.eqns[first:end], values, later, twice)
        start = end
    follow(jaxpr.eqns[start:], values, twice)
    return [read(values, v) for v in jaxpr.outvars]


def groups(eqns: Sequence[Any]) -> list[tuple[int, int]]:
    """Where each group starts and ends: at a mark, and right before the next group, or after the last mark."""
    marks = [i for i, eqn in enumerate(eqns) if is_mark(eqn)]
    if len(marks) < FEWEST:
        return []
    size = math.ceil(len(marks) / round(math.sqrt(len(marks))))
    starts = marks[::size]
    return list(zip(starts, [*starts[1:], marks[-1] + 1], strict=True))


def group(eqns: Sequence[Any], values: Values, later: Sequence[Any], twice: bool) -> Values:
    """The results of one group in `jax.checkpoint`, as far as they are read later."""
    made = {v for eqn in eqns for v in eqn.outvars}
    given = list(dict.fromkeys(v for eqn in eqns for v in eqn.invars if not is_literal(v) and v not in made))
    kept = list(dict.fromkeys(v for v in later if not is_literal(v) and v in made))

    @checkpoint
    def together(inputs: list[Any]) -> list[Any]:
        own = dict(zip(given, inputs, strict=True))
        follow(eqns, own, twice)
        return [own[v] for v in kept]

    return dict(zip(kept, together([values[v] for v in given]), strict=True))


def follow(eqns: Sequence[Any], values: Values, twice: bool) -> None:
    """Add the results of equations to `values`."""
    for eqn in eqns:
        results = answer(eqn, [read(values, v) for v in eqn.invars], twice)
        values |= dict(zip(eqn.outvars, results, strict=True))


def answer(eqn: Any, operands: list[Any], twice: bool) -> list[Any]:
    """The results of one equation: a mark, a scan over marks, a call with marks inside, or any other."""
    if is_mark(eqn) and not twice:
        return runtime.evaluate(eqn.params["jaxpr"], *operands)
    if MARKS & jaxprs.inner_primitives(eqn):
        if eqn.primitive.name == "scan" and any(map(is_mark, jaxprs.scan_layout(eqn).body.eqns)):
            return scan(eqn, operands, twice)
        if eqn.primitive.name in ("jit", "pjit"):
            return run(eqn.params["jaxpr"], operands, twice)
    inputs = [jaxprs.fresh(v.aval) for v in eqn.invars]
    outputs = [jaxprs.fresh(v.aval) for v in eqn.outvars]
    return runtime.evaluate(jaxprs.build(inputs, outputs, [jaxprs.rebound(eqn, inputs, outputs)]), *operands)


def scan(eqn: Any, operands: list[Any], twice: bool) -> list[Any]:
    """A scan as a scan of wrapped scans of about the square root of the steps each, and one of the rest."""
    layout = jaxprs.scan_layout(eqn)
    consts, carry, sequences = parts(operands, layout.num_consts, layout.num_carry)

    def step(carry: Any, slices: Any) -> tuple[Any, Any]:
        results = run(eqn.params["jaxpr"], [*consts, *carry, *slices], twice)
        return results[: layout.num_carry], results[layout.num_carry :]

    @checkpoint
    def several(carry: Any, slices: Any) -> tuple[Any, Any]:
        return lax.scan(step, carry, slices, reverse=layout.reverse, length=inner)

    outer = round(math.sqrt(layout.length)) if layout.length >= FEWEST else 1
    inner = layout.length // outer
    rest = layout.length - outer * inner
    first = slice(rest, None) if layout.reverse else slice(0, outer * inner)
    last = slice(0, rest) if layout.reverse else slice(outer * inner, None)
    grouped = [x[first].reshape(outer, inner, *x.shape[1:]) for x in sequences]
    carry, found = lax.scan(several, carry, grouped, reverse=layout.reverse, length=outer)
    found = [y.reshape(outer * inner, *y.shape[2:]) for y in found]
    if rest:
        inner = rest
        carry, more = several(carry, [x[last] for x in sequences])
        pairs = zip(more, found, strict=True) if layout.reverse else zip(found, more, strict=True)
        found = [jnp.concatenate(pair) for pair in pairs]
    return [*carry, *found]


def parts(operands: list[Any], num_consts: int, num_carry: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Constants, carry and sequences among the operands of a scan."""
    start = num_consts + num_carry
    return operands[:num_consts], operands[num_consts:start], operands[start:]


def is_mark(eqn: Any) -> bool:
    """Whether an equation is a wrapped call."""
    return eqn.primitive.name in MARKS


def read(values: Values, variable: Any) -> Any:
    """The value of a variable or of a literal."""
    return variable.val if is_literal(variable) else values[variable]


def is_literal(variable: Any) -> bool:
    """Whether a value stands in the jaxpr itself."""
    return hasattr(variable, "val")
