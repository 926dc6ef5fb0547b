"""Let ops run backwards that do not in JAX: each `lax.while_loop`, and products of sparse matrices."""

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
from jointcut.partition.program.primitives import SPARSE_PRODUCT, SPARSE_SCOPE, WHILE
from jointcut.partition.rewrite import simplify
from jointcut.wrappers.built_in.autograd import CALL
from jointcut.wrappers.built_in.programs import Plain
from jointcut.wrappers.built_in.refs import written

#: What JAX says where a `lax.while_loop` has no reverse mode, and where it holds another that has a reference.
_JAX_ON_LOOPS = (
    "Reverse-mode differentiation does not work for lax.while_loop",
    "traced for while_body returned a mutable array reference",
)
_JAX_ON_TRANSPOSES = "Transpose rule (for reverse-mode differentiation) for"
#: What a loop cannot do with a reference, and what helps.
HANDS_REFERENCE = (
    "hands a jax.Ref from outside of the loop to a function with a derivative rule of its own",
    "Give the function what the reference holds: ref[...].",
)


def reversible(closed: Any, guards: str = "jax") -> Any:
    """Return the same program with our loops instead of JAX's, also in the bodies of other equations.

    `guards` is as in `rules.Loop`. What references hold that a loop reads or writes is carried by the loop. One that
    hands a reference to a derivative's rule stays JAX's, and so without a reverse mode. A product of two sparse
    matrices becomes the ops that JAX runs for it, each of which has a reverse mode.
    """
    closed = simplify.replaced(closed, SPARSE_PRODUCT, _opened)

    def change(eqn: jaxprs.Equation, scope: str) -> jaxprs.Equation:
        return _carrying(eqn, scope, change) if _has_references(eqn) else _loop(eqn, scope, guards)

    changed = simplify.replaced(closed, WHILE, change)
    jaxpr, _ = jaxprs.opened(changed)
    has_calls = any(eqn.primitive.name == "jit" and _has_references(eqn) for eqn in jaxpr.eqns)
    return simplify.inlined(changed) if changed is not closed and has_calls else changed


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
    return simplify.replaced(reversible(opened), LOOP, telling)


def can_be_reversible(error: ValueError | NotImplementedError) -> bool:
    """Whether JAX raised an error because an op has no reverse mode that has one in a program made `reversible`."""
    return _is_about_loops(error) or f"{_JAX_ON_TRANSPOSES} '{SPARSE_PRODUCT}'" in str(error)


def _is_about_loops(error: Exception) -> bool:
    return any(text in str(error) for text in _JAX_ON_LOOPS)


@contextmanager
def refusing(closed: Any) -> Iterator[None]:
    """Raise `DerivativeError` where JAX raises that error for a program whose other loops are ours already."""
    try:
        yield
    except ValueError as error:
        left: list[jaxprs.Equation] = []
        simplify.replaced(closed, WHILE, lambda eqn, _: left.append(eqn) or eqn if _has_references(eqn) else eqn)
        if not _is_about_loops(error) or not left:
            raise
        what = f"{HANDS_REFERENCE[0]}; so the loop has no derivative."
        raise DerivativeError(message(_name(left[0]), what, HANDS_REFERENCE[1])) from None


def _opened(eqn: jaxprs.Equation, _: str) -> jaxprs.Equation:
    def sparse_product(*operands: Any) -> list[Any]:  # the ops of JAX's own kernel; the plan finds them by this name
        return eqn.primitive.impl(*operands, **eqn.params)

    assert sparse_product.__name__ == SPARSE_SCOPE
    return simplify.instead(eqn, sparse_product)


def _has_references(eqn: jaxprs.Equation) -> bool:
    return any(abstract.is_reference(v.aval) for v in eqn.invars)


def _carrying(
    eqn: jaxprs.Equation, scope: str, change: Callable[[jaxprs.Equation, str], jaxprs.Equation]
) -> jaxprs.Equation:
    """Return a call that reads references, runs a loop that carries what they hold, and writes it back to them."""
    refs = [i for i, v in enumerate(eqn.invars) if abstract.is_reference(v.aval)]
    own = set(map(id, written(eqn)))
    invars, outvars = ([jaxprs.fresh(v.aval) for v in these] for these in (eqn.invars, eqn.outvars))
    try:
        pure = side_effects.discharged(jaxprs.build(invars, outvars, [jaxprs.rebound(eqn, invars, outvars)]))
    except NotImplementedError:
        return eqn
    pure = simplify.replaced(pure, WHILE, lambda inner, inside: change(inner, f"{scope}/{inside}"))

    def run(*operands: Any) -> list[Any]:
        outs = runtime.evaluate(pure, *(x[...] if i in refs else x for i, x in enumerate(operands)))
        for i, state in zip(refs, outs[len(outvars) :], strict=True):
            if id(eqn.invars[i]) in own:
                operands[i][...] = state
        return outs[: len(outvars)]

    return simplify.instead(eqn, run)


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
