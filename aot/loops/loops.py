"""Make loops like those of `jax.lax` that run backwards too."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.aot.loops.expected import expected_trips
from jointcut.aot.loops.functions import TracedLoop, traced_loop
from jointcut.aot.loops.interned import same
from jointcut.aot.loops.memory import MOST_TRIPS, Memory
from jointcut.aot.loops.parts import Parts
from jointcut.aot.loops.rules import Loop
from jointcut.partition.errors import CallError, TraceError, message
from jointcut.partition.figures import human_bytes
from jointcut.partition.program.jax import abstract, runtime, user_source
from jointcut.wrappers.boundary import bounded


class Stacked(NamedTuple):
    """The result of `while_loop_stack_output`.

    Attributes:
        carries: the carry after each trip, stacked; zeros behind the last.
        trips: the number of trips that the loop makes in all.
        exceeded: whether that is more than `max_trips`, so that the later carries are not in the stack.
    """

    carries: Any
    trips: Any
    exceeded: Any


@bounded
def while_loop(
    cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init: Any,
    *, max_trips: int | None = None, memory: int | str | None = None,
) -> Any:  # fmt: skip
    """Run `body_fun` while `cond_fun` is true, as `lax.while_loop`; differentiable in reverse and forward mode.

    Reverse mode keeps some of the carries and runs the steps between them again. Its memory does not depend on the
    number of trips, which need not be known. Where nothing is differentiated, and in forward mode, the program is a
    `lax.while_loop`. Everything works to second and higher orders and under `jit`, `vmap`, `scan` and `jax.checkpoint`.
    Values that the functions close over get their gradients. With `c` checkpoints, up to `c` trips run no step again,
    less than `(c + 1) (c + 2) / 2` trips each step at most once, and `n` trips each step about `r` times, where
    `r` is the least number for which `c + r` over `r` is at least `n` (Griewank and Walther 2000; Wang, Moin and
    Iaccarino 2009; Stumm and Walther 2010).

    What a `jax.Ref` holds that the body reads or writes is carried, and written back after the loop. The predicate may
    read one. The body prints (`jax.debug.print`) as often as the forward runs: steps that run again are silent. A body
    with other effects has no reverse mode.

    Args:
        cond_fun: a function of the carry that returns one boolean.
        body_fun: a function of the carry that returns the next, of the same structure, shapes and dtypes.
        init: the first carry, any tree of arrays; integers, booleans and random keys among them are carried along.
        max_trips: the most trips that the loop makes, where that is known. If the loop makes more, `CallError` is
            raised where it runs at once: outside of JAX's transformations, under `jax.grad` and `jax.jvp`, on a tape.
            Where it is compiled, results and gradients are right nevertheless, and the backward takes longer.
        memory: the memory of reverse mode: a number of checkpoints; bytes, as a text such as `"64MiB"`; `"stack"`,
            which is `max_trips` checkpoints; `"sqrt"`, their square root. By default there are as many as fit into
            32 KiB, at least 10 and at most 1024. If the number of trips is known, by a predicate that only compares a
            counter with a known number or by `aot.trips`, as many as fit into 2 MiB, or as many as it takes to run
            each step again at most once, within 64 MiB. There are never more than trips, known or `max_trips`. A large
            budget of `aot.function` gives more, to a loop of unknown trips 64 or as many as fit into 2 MiB.

    >>> def halved(x):
    ...     return while_loop(lambda x: x > 1.0, lambda x: x / 2, x)
    >>> print(*jax.value_and_grad(halved)(6.0))
    0.75 0.125
    """
    _check_trips(max_trips, is_needed=False)
    loop = traced_loop(cond_fun, body_fun, init, body_fun)
    program = _program(loop, loop.parts, max_trips, memory)
    if max_trips is None or not runtime.runs_at_once([*loop.consts, *loop.init]):
        return loop.finished(program(*loop.consts, *loop.init))
    counting = _program(loop, loop.parts.counted(), max_trips, memory)
    *out, trips = counting(*loop.consts, *loop.init, jnp.int32(0))
    _refuse(loop, trips, max_trips)
    return loop.finished(out)


@bounded
def fori_loop(
    lower: Any, upper: Any, body_fun: Callable[[Any, Any], Any], init: Any,
    *, max_trips: int | None = None, memory: int | str | None = None,
) -> Any:  # fmt: skip
    """Run `body_fun(i, carry)` for `i` from `lower` to `upper - 1`, as `lax.fori_loop`; see `while_loop`.

    The bounds may be arrays. Where both are Python integers, `max_trips` follows from them.

    >>> power = lambda x, n: fori_loop(0, n, lambda i, y: x * y, 1.0)
    >>> print(jax.grad(power)(2.0, 3))
    12.0
    """
    _check_trips(max_trips, is_needed=False)
    if isinstance(lower, numbers.Integral) and isinstance(upper, numbers.Integral) and max_trips is None:
        max_trips = max(int(upper) - int(lower), 0)
    kind = jnp.result_type(lower, upper)
    if not jnp.issubdtype(kind, jnp.integer):
        raise CallError(message("lower and upper", f"are of type {kind}.", "Give integers."))
    start, end = (
        np.asarray(n, kind) if isinstance(n, numbers.Integral) else jnp.asarray(n, kind) for n in (lower, upper)
    )
    loop = traced_loop(lambda c: c[0] < end, lambda c: (c[0] + 1, body_fun(*c)), (start, init), body_fun, 1)
    if max_trips is not None and runtime.runs_at_once([start, end]):
        _refuse(loop, max(int(end) - int(start), 0), max_trips)
    return loop.finished(_program(loop, loop.parts, max_trips, memory)(*loop.consts, *loop.init))[1]


@bounded
def while_loop_stack_output(
    cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init: Any, *, max_trips: int
) -> Stacked:
    """Run a loop as `while_loop`, and return the carries after each trip, the trips, and whether they fit.

    The stack has `max_trips` rows. A loop that makes more trips runs on: `trips` counts them all, and `exceeded` says
    so. Where it runs at once, as also under `jax.grad`, `CallError` is raised instead.

    >>> stack = while_loop_stack_output(lambda x: x > 1.0, lambda x: x / 2, 6.0, max_trips=5)
    >>> print(stack.carries, stack.trips, stack.exceeded)
    [3.   1.5  0.75 0.   0.  ] 3 False
    """
    _check_trips(max_trips, is_needed=True)
    loop = traced_loop(cond_fun, body_fun, init, body_fun)
    if loop.written:
        what = "writes a jax.Ref from outside of the loop, of which no row would be in the stack."
        raise TraceError(message(loop.name, what, "Carry its value, and write it to the reference after the loop."))
    once = same(Loop(loop.parts.once(), Memory(1), loop.name))
    stack = once.stacks.of(max_trips, lambda: jax.jit(partial(_stack, loop.parts, once, max_trips)))
    try:
        rows, trips, exceeded = stack(loop.consts, loop.init)
        _refuse(loop, trips, max_trips)
    except jax.errors.JaxRuntimeError as error:
        row_bytes = sum(map(abstract.aval_bytes, loop.parts.carry))
        error.add_note(f"The stack of {loop.name} has {max_trips} rows of {human_bytes(row_bytes)}: max_trips.")
        raise
    return Stacked(jax.tree.unflatten(loop.tree, rows), trips, exceeded)


def _stack(parts: Parts, once: Loop, max_trips: int, consts: list[Any], init: list[Any]) -> tuple[list[Any], Any, Any]:
    """Return the rows of the stack, the number of trips, and whether it is more than `max_trips`."""

    def trip(carry: list[Any], _: None) -> tuple[list[Any], Any]:
        *carry, waits = once(*consts, *carry, jnp.bool_(True))
        rows = [jnp.where(waits, jnp.zeros_like(x), x) if abstract.is_plain(jax.typeof(x)) else x for x in carry]
        return carry, (rows, ~waits)

    carry, (rows, made) = lax.scan(trip, init, length=max_trips)
    rest = parts.counted().run(*map(lax.stop_gradient, [*consts, *carry]), jnp.int32(0))[-1]
    return rows, jnp.sum(made, dtype=jnp.int32) + rest, rest > 0


def _program(loop: TracedLoop, parts: Parts, max_trips: int | None, memory: int | str | None) -> Loop:
    carry_bytes = sum(abstract.aval_bytes(aval) for aval in loop.parts.carry)
    trips = expected_trips(user_source.scope_here())
    return same(Loop(parts, Memory.read(memory, max_trips, carry_bytes), loop.name, loop.known, trips))


def _refuse(loop: TracedLoop, trips: Any, max_trips: int) -> None:
    """Raise `CallError` if a loop made too many trips; their number is not known where the loop is only traced."""
    if not runtime.is_tracer(trips) and trips > max_trips:
        what = f"is run {trips} times, and max_trips is {max_trips}."
        raise CallError(message(loop.name, what, f"Give max_trips={trips} or more, or leave it out."))


def _check_trips(max_trips: int | None, is_needed: bool) -> None:
    if max_trips is None and not is_needed:
        return
    if isinstance(max_trips, bool) or not isinstance(max_trips, numbers.Integral) or max_trips < 0:
        cure = "Give a whole number of trips." if is_needed else "Give a whole number of trips, or leave it out."
        raise CallError(message("max_trips", f"is {max_trips!r}.", cure))
    if max_trips > MOST_TRIPS:
        raise CallError(message("max_trips", f"is {max_trips}.", f"Give at most {MOST_TRIPS}: trips are int32."))
