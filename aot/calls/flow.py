"""Ask whether a gradient can flow through a function, and where it stops.

The function is traced without its derivative, and JAX is asked for the derivative of the whole. Where a gradient does
not reach all that is differentiated, JAX is asked for the derivative of one op after the other, in the bodies of loops
and branches too, until the ops are found that stop it. No table says which op has a derivative: JAX's own rules do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jointcut.aot.options import Options, name_of
from jointcut.aot.stages import pipeline
from jointcut.aot.trace.analyse import depending
from jointcut.aot.trace.blame import explained
from jointcut.aot.trace.joint import primal
from jointcut.aot.trace.wanted import differentiated, places_of
from jointcut.partition.errors import TraceError
from jointcut.partition.program import jaxprs
from jointcut.partition.rewrite import simplify
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.metadata.convention import is_inexact

_NO_DERIVATIVE = (NotImplementedError, ValueError, TypeError, AssertionError)  # what JAX raises where there is none
_WHOLE = ("custom_jvp_call", "custom_vjp_call", "while")  # whose bodies are not what has no derivative
_RAISES, _IS_ZERO, _IS_INTEGER = range(3)  # how bad a stop is: what raises is told before what is zero


@dataclass(frozen=True)
class Stop:
    """Something that lets no gradient through.

    Attributes:
        op: the operation, as JAX calls it; for an argument that cannot be differentiated, nothing.
        source: the user's line that made it, `model.py:12 (loss)`.
        why: the reason, as a sentence.
    """

    op: str
    source: str
    why: str

    def __str__(self) -> str:
        """`round at model.py:12 (loss): its derivative is zero.`."""
        where = " at ".join(text for text in (self.op, self.source) if text)
        return f"{where}: {self.why}" if where else self.why


@dataclass(frozen=True)
class Differentiability:
    """Whether a gradient can flow through a function: true or false, and why.

    It is true where the reverse-mode derivative exists and reaches an array that is differentiated.

    Attributes:
        name: of the function.
        reached: paths of the differentiated arrays that a gradient reaches.
        unreached: paths of those that none reaches: their gradients are zero, or do not exist.
        stops: the ops on the way from these to the outputs that let no gradient through, in the order of the program.
    """

    name: str
    reached: tuple[str, ...]
    unreached: tuple[str, ...]
    stops: tuple[Stop, ...]

    def __bool__(self) -> bool:
        """Whether a gradient reaches an array that is differentiated."""
        return bool(self.reached)

    def __str__(self) -> str:
        """The answer, what no gradient reaches, and a line for each op that stops it."""
        lines = [f"{self.name} is {'' if self else 'not '}differentiable."]
        if self.unreached:
            lines.append(
                f"No gradient reaches {', '.join(self.unreached)}{'' if self.stops else ': no output reads it'}."
            )
        return "\n".join([*lines, *(f"  {stop}" for stop in self.stops)])


def differentiability(function: Callable[..., Any], options: Options, bound: Bound) -> Differentiability:
    """Whether a gradient can flow from the outputs of a call to the arguments in `argnums`."""
    name, paths = name_of(function), bound.paths()
    _ = places_of(bound, options.chosen, options)
    try:
        wanted = differentiated(bound, options.chosen, options)
    except TraceError as error:
        return Differentiability(name, (), (), (Stop("", "", str(error).splitlines()[0]),))
    with explained(name, function, paths, bound), jaxprs.paused_collection():
        shapes = bound.abstract()
        target = pipeline.wrapped_for(function, shapes, shapes.input_info(wanted), options.around).target
        source = primal(target.function, shapes.leaves, options.has_aux)
    program = _closed(simplify.inlined(source.closed))
    jaxpr, _ = jaxprs.opened(program)
    start, main = len(jaxpr.invars) - len(bound.leaves), len(source.results.main)
    places = {start + i: paths[i] for i in wanted}
    pulled = _pulled(program, list(places), range(main))
    unreached = [i for i in places if i not in pulled.reached]
    return Differentiability(
        name,
        tuple(path for i, path in places.items() if i in pulled.reached),
        tuple(places[i] for i in unreached),
        _stops(jaxpr, [jaxpr.invars[i] for i in unreached], jaxpr.outvars[:main], pulled.error),
    )


def _stops(jaxpr: Any, starts: Sequence[Any], ends: Sequence[Any], error: str) -> tuple[Stop, ...]:
    """The worst ops between some inputs and outputs; JAX's `error` about the whole program where no op is to blame."""
    ranked = list(_Search(set(starts)).through(jaxpr, ends)) if starts else []
    if error and all(rank != _RAISES for rank, _ in ranked):
        return (Stop("", "", error),)
    worst = min((rank for rank, _ in ranked), default=None)
    return tuple(dict.fromkeys(stop for rank, stop in ranked if rank == worst))


def _closed(closed: Any) -> Any:
    """A jaxpr whose constants have become its leading inputs."""
    jaxpr, _ = jaxprs.opened(closed)
    return jaxprs.build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)


# ------------------------------------------------------------------------------------------------- asking JAX


@dataclass(frozen=True)
class _Pulled:
    """How a derivative connects a program: the inputs that it reaches, the outputs that it starts from.

    `error` is what JAX says where there is none.
    """

    reached: frozenset[int] = frozenset()
    carrying: frozenset[int] = frozenset()
    error: str = ""


def _pulled(closed: Any, wanted: Sequence[int], outputs: Sequence[int]) -> _Pulled:
    """How the reverse-mode derivative of a program connects outputs and wanted inputs."""
    jaxpr, _ = jaxprs.opened(closed)
    carrying = [i for i in outputs if is_inexact(jaxpr.outvars[i].aval.dtype)]
    if not carrying or not wanted:
        return _Pulled()

    def pull(given: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def chosen(*xs: Any) -> list[Any]:
            entered = dict(zip(wanted, xs, strict=True))
            results = jaxprs.evaluate(closed, *(entered.get(i, x) for i, x in enumerate(given)))
            return [results[i] for i in carrying]

        return jax.vjp(chosen, *(given[i] for i in wanted))[1](list(cotangents))

    seeds = [jaxprs.struct(jaxprs.cotangent_aval(jaxpr.outvars[i].aval)) for i in carrying]
    try:
        with explained("It"):
            made = jax.make_jaxpr(pull)(jaxprs.input_structs(closed), seeds)
    except _NO_DERIVATIVE as error:
        return _Pulled(error=_first_sentence(str(error)))
    backward, _ = jaxprs.opened(simplify.inlined(made))
    flows = [depending(backward.eqns, [v]) for v in backward.invars[-len(seeds) :]]
    ends = [(i, v) for i, v in zip(wanted, backward.outvars, strict=True) if not isinstance(v, jaxprs.Literal)]
    return _Pulled(
        frozenset(i for i, v in ends if any(v in flow for flow in flows)),
        frozenset(i for i, flow in zip(carrying, flows, strict=True) if any(v in flow for _, v in ends)),
    )


def _first_sentence(text: str) -> str:
    """The first sentence of what JAX says, without its advice."""
    line = (text.splitlines() or ["JAX has no derivative of it"])[0]
    return f"{line.partition('. ')[0].rstrip('.')}."


# --------------------------------------------------------------------------------------------------- searching


@dataclass
class _Search:
    """Follow what is differentiated through a program, op by op; `active` are the variables that depend on it."""

    active: set[Any]

    def through(self, jaxpr: Any, ends: Sequence[Any]) -> Iterator[tuple[int, Stop]]:
        """The ops that stop it, of those that lead to `ends`, each with how bad it is."""
        needed = simplify.live(jaxpr.eqns, ends).places
        return (stop for i, eqn in enumerate(jaxpr.eqns) if i in needed for stop in self._at(eqn))

    def _at(self, eqn: Any) -> Iterator[tuple[int, Stop]]:
        """The stops in one equation; what it lets through becomes active."""
        places = [i for i, v in enumerate(eqn.invars) if not isinstance(v, jaxprs.Literal) and v in self.active]
        outputs = {i for i, v in enumerate(eqn.outvars) if is_inexact(v.aval.dtype)}
        if not places:
            return
        pulled = _derivative(eqn, places, outputs)
        self.active.update(eqn.outvars[i] for i in (outputs if pulled.error else pulled.carrying))
        if outputs and outputs <= pulled.carrying:
            return
        if pulled.error:
            rank, why = _RAISES, pulled.error
        elif outputs:
            rank, why = _IS_ZERO, "its derivative is zero."
        else:
            shown = ", ".join(v.aval.str_short() for v in eqn.outvars)
            rank, why = _IS_INTEGER, f"it returns {shown}, and only floating-point arrays carry a derivative."
        source = jaxprs.source_of(eqn)
        inner = [(r, stop) for r, stop in _inside(eqn, places) if r <= rank]
        if not inner and not pulled.carrying:
            inner = [(rank, Stop(eqn.primitive.name, source, why))]
        yield from ((r, stop if stop.source else replace(stop, source=source)) for r, stop in inner)


def _derivative(eqn: Any, places: Sequence[int], outputs: Collection[int]) -> _Pulled:
    """How the derivative of one equation connects its outputs with the operands at some places."""
    if jaxprs.touches_references(eqn):
        return _Pulled(error="it touches a reference, through which no gradient flows.")
    invars = [jaxprs.fresh(v.aval) for v in eqn.invars]
    outvars = [jaxprs.fresh(v.aval) for v in eqn.outvars]
    alone = jaxprs.build(invars, outvars, [jaxprs.rebound(eqn, invars, outvars)])
    return _pulled(alone, places, sorted(outputs))


def _inside(eqn: Any, places: Sequence[int]) -> Iterator[tuple[int, Stop]]:
    """The stops in the bodies of an equation, of which the operands at some places are differentiated."""
    if eqn.primitive.name in _WHOLE:
        return
    for body in jaxprs.inner_jaxprs(eqn):
        offset = len(eqn.invars) - len(body.invars)  # a branch does not take the index
        if offset in (0, 1):
            active = {body.invars[i - offset] for i in places if i >= offset}
            yield from _Search(active).through(body, body.outvars)
