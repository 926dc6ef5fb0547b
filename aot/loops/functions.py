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
from jointcut.aot.loops.plain import HANDS_REFERENCE, reversible
from jointcut.partition.errors import TraceError, message
from jointcut.partition.program.cells import call_text
from jointcut.partition.program.jax import abstract, jaxprs, runtime, side_effects
from jointcut.wrappers.built_in import refs


@dataclass(frozen=True)
class TracedLoop:
    """A loop of flat arrays: its parts, the constants they take first, the first carry, and the tree of the carry.

    `name` is the name of the body, for errors. `known` are the known integers among constants and carry. `written` are
    the references that the body writes. What they hold is the last part of the carry; what references hold that are
    read alone is the last part of the constants.
    """

    parts: Parts
    consts: list[Any]
    init: list[Any]
    tree: Any
    name: str
    known: dict[int, int]
    written: Sequence[Any]

    def finished(self, carry: list[Any]) -> Any:
        """Return the last carry in the user's tree, and write to the references what they hold after the loop."""
        count = len(carry) - len(self.written)
        for ref, state in zip(self.written, carry[count:], strict=True):
            ref[...] = state
        return jax.tree.unflatten(self.tree, carry[:count])


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
    cond = _traced_cond(cond_fun, tree, leaves)
    written = _written(out)
    if among := _written(cond):
        what = f"writes a jax.Ref, {jax.typeof(among[0]).str_short()}."
        raise TraceError(message(place_of("cond_fun", cond_fun), what, "Write it in the body."))
    outer = _same([*_consts(cond), *_consts(out)])
    read = [x for x in outer if _is_reference(x) and not any(x is ref for ref in written)]
    plain = [x for x in outer if not _is_reference(x)]
    consts, states = [*plain, *(ref[...] for ref in read)], [ref[...] for ref in written]
    order, avals = [*plain, *read], [*map(jax.typeof, [*consts, *leaves, *states])]
    carry = avals[len(consts) :]
    body = reversible(_lifted(out, where, order, written, avals, carry))
    test = _lifted(cond, place_of("cond_fun", cond_fun), order, written, avals, None)
    known = {i: n for i, n in known_numbers([*consts, *given]).items() if not len(plain) <= i < len(consts)}
    return TracedLoop(Parts(test, body, len(consts)), consts, [*leaves, *states], tree, where, known, written)


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
            is_ref = aval is not None and abstract.is_reference(aval)
            what = "is a jax.Ref, not an array." if is_ref else f"is of type {type(leaf).__name__}, not an array."
            raise TraceError(message(f"init{keystr(keys[depth:])}", what, cure))


def _traced_body(
    function: Callable[[Any], Any], where: str, init: Any, leaves: list[Any], depth: int
) -> tuple[Any, list[Any]]:
    """Return the jaxpr of the body, and the first carry with the dtypes to which the body promotes Python numbers."""
    tree = jax.tree.structure(init)

    def flat(*xs: Any) -> Any:
        out = function(jax.tree.unflatten(tree, xs))
        differs[:] = [] if jax.tree.structure(out) == tree else [_structures(init, out, depth)]
        found = tree_flatten_with_path(out)[0]
        returned[:] = [keystr(keys[depth:]) for keys, x in found if _is_reference(x)]
        return [] if returned else [jnp.asarray(x) for _, x in found]

    differs: list[str] = []
    returned: list[str] = []
    closed = jax.make_jaxpr(flat)(*map(_struct, leaves))
    if returned:
        raise TraceError(message(where, f"returns a jax.Ref as carry{returned[0]}.", "Return what it holds: ref[...]."))
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


def _is_reference(x: Any) -> bool:
    return isinstance(x, jax.Ref) or (runtime.is_tracer(x) and abstract.is_reference(jax.typeof(x)))


def _written(closed: Any) -> list[Any]:
    """Return the references among the constants of a jaxpr that it writes."""
    jaxpr, consts = jaxprs.opened(closed)
    changed = {var for eqn in jaxpr.eqns for var in refs.written(eqn)}
    return _same([x for var, x in zip(jaxpr.constvars, consts, strict=True) if var in changed])


def _lifted(
    closed: Any, where: str, order: Sequence[Any], written: Sequence[Any], avals: Sequence[Any], outs: Any
) -> Any:
    """Return the jaxpr with what its constants are or hold, and the carry, as inputs.

    The constants have this `order`. The carry ends with what the references `written` hold. If the types `outs` of the
    next carry are given, the jaxpr returns it.
    """
    place = {id(const): i for i, const in enumerate(order)}
    place |= {id(ref): len(avals) - len(written) + i for i, ref in enumerate(written)}
    jaxpr, own = jaxprs.opened(closed)
    open_, held = jaxprs.constants_first(jaxpr), [x for x in own if _is_reference(x)]
    if held:
        open_ = _discharged(open_, where)

    def flat(*xs: Any) -> list[Any]:
        results = runtime.evaluate(open_, *(xs[place[id(c)]] for c in own), *xs[len(order) : len(xs) - len(written)])
        if outs is None:
            return results[:1]
        count = len(results) - len(held)
        after = {id(ref): x for ref, x in zip(held, results[count:], strict=True)}
        results = [*results[:count], *(after[id(ref)] for ref in written)]
        return [abstract.typed(x, a) if abstract.is_plain(a) else x for x, a in zip(results, outs, strict=True)]

    return side_effects.pure(jax.make_jaxpr(flat)(*map(abstract.struct, avals)))


def _discharged(closed: Any, where: str) -> Any:
    try:
        return side_effects.discharged(closed)
    except NotImplementedError:
        what, cure = HANDS_REFERENCE
        raise TraceError(message(where, f"{what}.", cure)) from None
