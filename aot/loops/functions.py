"""Trace the predicate and the body of a loop, and say where they do not fit each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from jointcut.aot.loops.counters import known_numbers
from jointcut.aot.loops.parts import Parts
from jointcut.aot.loops.plain import looped
from jointcut.partition.errors import TraceError, message
from jointcut.partition.program.cells import call_text
from jointcut.partition.program.jax import abstract, jaxprs, runtime, side_effects


@dataclass(frozen=True)
class TracedLoop:
    """A loop of flat arrays: its parts, the constants they take first, the first carry, and the tree of the carry.

    `name` is the name of the body, for errors. `known` are the known integers among constants and carry.
    """

    parts: Parts
    consts: list[Any]
    init: list[Any]
    tree: Any
    name: str
    known: dict[int, int]


def traced_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init: Any,
    blamed: Callable[..., Any],
    depth: int = 0,
    called: str = "body_fun",
) -> TracedLoop:
    """Trace both functions. Raises `TraceError`, which blames the user's function `blamed` for the body's errors.

    `depth` is how many keys the user's carry lies below the body's carry. `called` is the argument that holds `blamed`.
    """
    for name, function in (("cond_fun", cond_fun), (called, blamed)):
        if not callable(function):
            cure = "Pass a function of the carry."
            raise TraceError(message(name, f"is {function!r}, which cannot be called.", cure))
    _check_arrays(init, depth)
    leaves, tree = jax.tree.flatten(init)
    given, leaves = leaves, [jnp.asarray(x) for x in leaves]
    where = place_of(called, blamed)
    out, leaves = _traced_body(body_fun, where, init, leaves, depth)
    out = looped(out)
    cond = _traced_cond(cond_fun, tree, leaves)
    consts = _same([*_consts(cond), *_consts(out)])
    for name, closed in ((place_of("cond_fun", cond_fun), cond), (where, out)):
        for const in _consts(closed):
            if abstract.is_reference(jax.typeof(const)):
                cure = "Carry its value, and write it to the reference after the loop."
                what = "reads or writes a jax.Ref from outside of the loop."
                raise TraceError(message(name, what, cure))
    avals = [*map(jax.typeof, consts), *map(jax.typeof, leaves)]
    carry = avals[len(consts) :]
    parts = Parts(_lifted(cond, consts, avals, None), _lifted(out, consts, avals, carry), len(consts))
    return TracedLoop(parts, consts, leaves, tree, where, known_numbers([*consts, *given]))


def place_of(name: str, function: Callable[..., Any]) -> str:
    """Return the name of a function in an error: the argument it was passed as, and where it is defined."""
    inner = inspect.unwrap(getattr(function, "func", function))
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    if code is None:
        return f"{name} ({type(function).__name__})"
    return f"{name} at {call_text(code.co_filename, code.co_firstlineno, code.co_name)}"


def _check_arrays(init: Any, depth: int) -> None:
    for keys, leaf in tree_flatten_with_path(init)[0]:
        try:
            aval = jax.typeof(leaf)
        except TypeError:
            aval = None
        if aval is None or not hasattr(aval, "shape") or abstract.is_reference(aval):
            cure = "Carry arrays and numbers only; close over everything else."
            raise TraceError(
                message(f"init{keystr(keys[depth:])}", f"is of type {type(leaf).__name__}, not an array.", cure)
            )


def _traced_body(
    function: Callable[[Any], Any], where: str, init: Any, leaves: list[Any], depth: int
) -> tuple[Any, list[Any]]:
    """Return the jaxpr of the body, and the first carry with the dtypes to which the body promotes Python numbers."""
    tree = jax.tree.structure(init)

    def flat(*xs: Any) -> Any:
        out = function(jax.tree.unflatten(tree, xs))
        differs[:] = [] if jax.tree.structure(out) == tree else [_structures(init, out, depth)]
        return [jnp.asarray(x) for x in jax.tree.leaves(out)]

    differs: list[str] = []
    closed = jax.make_jaxpr(flat)(*map(_struct, leaves))
    if differs:  # said here, since JAX adds notes to errors that are raised above
        raise TraceError(message(where, differs[0], "Return a carry of the same structure."))
    avals = _out_avals(closed)
    widened = [promoted(x, aval) for x, aval in zip(leaves, avals, strict=True)]
    if any(jax.typeof(a) != jax.typeof(b) for a, b in zip(leaves, widened, strict=True)):
        leaves, closed = widened, jax.make_jaxpr(flat)(*map(_struct, widened))
    for (keys, _), x, aval in zip(tree_flatten_with_path(init)[0], leaves, _out_avals(closed), strict=True):
        given, keys = jax.typeof(x), keys[depth:]
        if given.shape != aval.shape or given.dtype != aval.dtype:
            what = f"takes carry{keystr(keys)} as {_type_text(given)} and returns it as {_type_text(aval)}."
            cure = f"Return it as {_type_text(given)}, or start with init{keystr(keys)} as {_type_text(aval)}."
            raise TraceError(message(where, what, cure))
    return closed, leaves


def promoted(x: Any, aval: Any) -> Any:
    """Return a first value that came from a Python number, in the dtype that the body gives it."""
    given: Any = jax.typeof(x)
    if not given.weak_type or given.shape != aval.shape or (given.dtype == aval.dtype and aval.weak_type):
        return x
    return jax.lax.convert_element_type(x, jnp.result_type(x, jax.ShapeDtypeStruct(aval.shape, aval.dtype)))


def _traced_cond(function: Callable[[Any], Any], tree: Any, leaves: Sequence[Any]) -> Any:
    where = place_of("cond_fun", function)
    cure = "Return one boolean array of shape (), such as `jnp.all(...)` or `x < y` of numbers."
    trees: list[Any] = []

    def flat(*xs: Any) -> Any:
        out = function(jax.tree.unflatten(tree, xs))
        trees.append(jax.tree.structure(out))
        return jax.tree.leaves(out)

    closed = jax.make_jaxpr(flat)(*map(_struct, leaves))
    avals = _out_avals(closed)
    if trees[-1] != jax.tree.structure(0):
        raise TraceError(message(where, f"returns {trees[-1]}, not one boolean.", cure))
    if avals[0].shape != () or avals[0].dtype != jnp.bool_:
        raise TraceError(message(where, f"returns {_type_text(avals[0])}, not one boolean.", cure))
    return closed


def _structures(init: Any, out: Any, depth: int) -> str:
    """Return where the structure of the new carry first differs from the old one's."""
    old, new = ([keystr(keys[depth:]) for keys, _ in tree_flatten_with_path(tree)[0]] for tree in (init, out))
    for path in old:
        if path and path not in new:
            return f"takes a carry with carry{path} and returns one without it."
    for path in new:
        if path and path not in old:
            return f"takes a carry without carry{path} and returns one with it."
    return f"takes a carry of the structure {jax.tree.structure(init)} and returns {jax.tree.structure(out)}."


def _struct(x: Any) -> Any:
    return abstract.struct(jax.typeof(x))


def _type_text(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def _out_avals(closed: Any) -> list[Any]:
    return [v.aval for v in jaxprs.opened(closed)[0].outvars]


def _consts(closed: Any) -> list[Any]:
    return jaxprs.opened(closed)[1]


def _same(values: Sequence[Any]) -> list[Any]:
    """Return the distinct objects among some values."""
    return list({id(x): x for x in values}.values())


def _lifted(closed: Any, consts: Sequence[Any], avals: Sequence[Any], outs: Sequence[Any] | None) -> Any:
    """Return the jaxpr with all constants and the carry as inputs, which returns arrays of the types `outs`."""
    place = {id(const): i for i, const in enumerate(consts)}
    jaxpr, own = jaxprs.opened(closed)
    open_ = jaxprs.constants_first(jaxpr)

    def flat(*xs: Any) -> list[Any]:
        results = runtime.evaluate(open_, *(xs[place[id(c)]] for c in own), *xs[len(consts) :])
        if outs is None:
            return results
        return [abstract.typed(x, a) if abstract.is_plain(a) else x for x, a in zip(results, outs, strict=True)]

    return side_effects.pure(jax.make_jaxpr(flat)(*map(abstract.struct, avals)))
