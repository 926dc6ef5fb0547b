"""Let every `lax.while_loop` of a program run backwards, and so every `fori_loop` with dynamic bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jointcut.aot.loops import lanes
from jointcut.aot.loops.counters import number_in
from jointcut.aot.loops.expected import expected_trips
from jointcut.aot.loops.interned import same
from jointcut.aot.loops.memory import Memory
from jointcut.aot.loops.parts import Parts, chosen, traced
from jointcut.aot.loops.rules import LOOP, Loop
from jointcut.partition.errors import DerivativeError, message
from jointcut.partition.program.bodies import LOOP_OF_JAX
from jointcut.partition.program.jax import abstract, jaxprs, runtime, side_effects, user_source
from jointcut.partition.rewrite import simplify
from jointcut.wrappers.built_in.autograd import CALL
from jointcut.wrappers.built_in.programs import Plain

_JAX_ON_LOOPS = "Reverse-mode differentiation does not work for lax.while_loop"


def looped(closed: Any, guards: str = "jax") -> Any:
    """Return the same program with our loops instead of JAX's, also in the bodies of other equations.

    `guards` is as in `rules.Loop`.
    A loop that reads or writes a reference stays JAX's, and so without a reverse mode.
    """

    def change(eqn: jaxprs.Equation, scope: str) -> jaxprs.Equation:
        return eqn if _has_references(eqn) else _loop(eqn, scope, guards)

    return simplify.replaced(closed, "while", change)


def count_trips(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> dict[str, int]:
    """Run a function once; return how often each of its loops runs, by name, the most where it is run several times.

    They are the loops that keep checkpoints: ours, and every `lax.while_loop`, those of libraries too. Pass the largest
    number to `aot.trips`, and the loops keep as many checkpoints as pay for so many trips.

    >>> print(*count_trips(lambda x: lax.while_loop(lambda y: y < 100.0, lambda y: 2 * y, x), 1.0).values())
    7
    """
    flat, tree = jax.tree.flatten((args, kwargs))

    def called(*leaves: Any) -> Any:
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return function(*args, **kwargs)

    found: dict[str, int] = {}

    def told(name: str, trips: Any) -> None:
        found[name] = max(found.get(name, 0), int(trips))

    jax.block_until_ready(runtime.evaluate(_telling(jax.make_jaxpr(called)(*flat), told), *flat))
    jax.effects_barrier()
    return found


def _telling(closed: Any, told: Callable[[str, Any], None]) -> Any:
    """Return the same program, whose loops tell their name and their trips when they are done."""

    def telling(eqn: jaxprs.Equation, _: str) -> jaxprs.Equation:
        loop = eqn.params["rules"]
        if not isinstance(loop, Loop):  # it tells already
            return eqn
        parts = Parts(loop.parts.cond, _telling(loop.parts.body, told), loop.parts.num_consts).counted()

        def run(*flat: Any) -> list[Any]:
            *outs, trips = parts.run(*flat, jnp.int32(0))
            jax.debug.callback(partial(told, loop.name), trips)
            return outs

        return calling(eqn, traced(run, loop.parts.avals))

    def calling(eqn: jaxprs.Equation, program: Any) -> jaxprs.Equation:
        return eqn.replace(params={"jaxpr": program, "rules": Plain(program)})

    opened = simplify.replaced(closed, CALL, lambda eqn, _: calling(eqn, _telling(eqn.params["jaxpr"], told)))
    return simplify.replaced(looped(opened), LOOP, telling)


def is_about_loops(error: ValueError) -> bool:
    """Whether JAX raised an error because a `lax.while_loop` has no reverse mode."""
    return _JAX_ON_LOOPS in str(error)


@contextmanager
def refusing(closed: Any) -> Iterator[None]:
    """Raise `DerivativeError` where JAX raises that error for a program whose other loops are ours already."""
    try:
        yield
    except ValueError as error:
        if not is_about_loops(error):
            raise
        left: list[jaxprs.Equation] = []
        simplify.replaced(closed, "while", lambda eqn, _: left.append(eqn) or eqn if _has_references(eqn) else eqn)
        what = "reads or writes a jax.Ref from outside of the loop; so the loop has no derivative."
        cure = "Carry its value, and write it to the reference after the loop."
        raise DerivativeError(message(_name(left[0]), what, cure)) from None


def _has_references(eqn: jaxprs.Equation) -> bool:
    return any(abstract.is_reference(v.aval) for v in eqn.invars)


def _name(eqn: jaxprs.Equation) -> str:
    return f"{LOOP_OF_JAX} at {user_source.source_of(eqn)}"


def _loop(eqn: jaxprs.Equation, scope: str, guards: str) -> jaxprs.Equation:
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    count = num_cond + num_body
    own = [v.aval for v in jaxprs.opened(cond)[0].invars[:num_cond]]
    rest = [v.aval for v in jaxprs.opened(body)[0].invars]
    carry = rest[num_body:]

    def alive(*flat: Any) -> list[Any]:
        return runtime.evaluate(cond, *flat[:num_cond], *flat[count:])

    def step(*flat: Any) -> list[Any]:
        outs = runtime.evaluate(body, *flat[num_cond:])
        return [abstract.typed(x, aval) if abstract.is_plain(aval) else x for x, aval in zip(outs, carry, strict=True)]

    avals = [*own, *rest]
    parts = Parts(side_effects.pure(traced(alive, avals)), side_effects.pure(traced(step, avals)), count)
    if jaxprs.opened(cond)[0].outvars[0].aval.shape:
        return _mapped(eqn, parts, expected_trips(scope), guards)
    numbers = ((i, number_in(v)) for i, v in enumerate(eqn.invars))
    known = {i: n for i, n in numbers if n is not None}
    return _program(eqn, eqn.invars, Loop(parts, Memory(), _name(eqn), known, expected_trips(scope), guards))


def _program(eqn: jaxprs.Equation, operands: Sequence[Any], loop: Loop) -> jaxprs.Equation:
    loop = same(loop)
    params = {"jaxpr": loop.closed, "rules": loop}
    return eqn.replace(invars=list(operands), primitive=loop.prim, params=params)


def _mapped(eqn: jaxprs.Equation, parts: Parts, trips: int | None, guards: str) -> jaxprs.Equation:
    """Rewrite a loop that `jax.vmap` has mapped: lanes go on while their predicate is true, and then keep values.

    The body runs on for a lane that has finished. If lanes are apart, it does so on the first values of that lane. If
    the lane makes no trip, it does so on all values of another lane. So no infinity or NaN arises that would be
    multiplied by zero in a derivative. If lanes are not apart, the products of the derivative are guarded.
    """
    count, carry = parts.num_consts, parts.carry
    is_one_axis = len(jaxprs.opened(parts.cond)[0].outvars[0].aval.shape) == 1
    dims = lanes.of_inputs((parts.cond, parts.body), parts.avals, count) if is_one_axis else None
    first = [] if dims is None else parts.avals[count:]
    if dims is None or any(dims[i] is None for i in lanes.may_have(parts.avals, count)):
        guards, parts = "everywhere", Parts(parts.cond, _guarded(parts.body), count)
    shift = count + len(first)

    def alive(*flat: Any) -> list[Any]:
        return [jnp.any(parts.alive(flat[:count], flat[shift:]))]

    def step(*flat: Any) -> list[Any]:
        consts, safe, old = flat[:count], flat[shift:], flat[shift:]
        lives = parts.alive(consts, old)
        if dims is not None:
            begins = parts.alive(consts, flat[count:shift])
            starts = [lax.stop_gradient(x) for x in flat[count:shift]]
            starts = _filled(begins, [*consts, *starts], dims)
            consts, safe = starts[:count], [chosen(lives, *pair) for pair in zip(old, starts[count:], strict=True)]
        return [chosen(lives, new, x) for new, x in zip(parts.step(consts, safe), old, strict=True)]

    avals = [*parts.avals[:count], *first, *carry]
    over = Parts(traced(alive, avals), traced(step, avals), shift)
    operands = [*eqn.invars[:count], *(eqn.invars[count:] if first else ()), *eqn.invars[count:]]
    return _program(eqn, operands, Loop(over, Memory(), _name(eqn), None, trips, guards))


def _guarded(body: Any) -> Any:
    """Return a body whose inner loops are guarded as well."""

    def change(eqn: jaxprs.Equation, _: str) -> jaxprs.Equation:
        loop = eqn.params["rules"].under("everywhere", _guarded)
        return _program(eqn, eqn.invars, loop)

    return simplify.replaced(body, LOOP, change)


def _filled(begins: Any, values: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """Return the values, where lanes that do not begin have the values of one that does."""
    one = jnp.argmax(begins)
    spares = (
        x if d is None else lax.stop_gradient(lax.dynamic_index_in_dim(x, one, 0))
        for x, d in zip(values, dims, strict=True)
    )
    pairs = zip(values, spares, dims, strict=True)
    return [x if d is None else chosen(begins, x, jnp.broadcast_to(spare, x.shape)) for x, spare, d in pairs]
