"""Find out whether a gradient can flow through a function, and where it stops.

The function is traced, and JAX differentiates the whole program. If the gradient does not reach every differentiated
array, JAX differentiates one op after another, also in the bodies of loops and branches, to find the ops that stop it.
JAX's own rules decide which op has a derivative; there is no table here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jointcut.aot.options.options import Options, name_of
from jointcut.aot.stages import tracing
from jointcut.aot.trace.analyse import depending
from jointcut.aot.trace.blame import explained
from jointcut.aot.trace.differentiated import differentiated, places_of
from jointcut.aot.trace.primal import primal
from jointcut.partition.errors import TraceError
from jointcut.partition.program.jax import abstract, jaxprs, runtime, user_source
from jointcut.partition.program.primitives import RULED
from jointcut.partition.rewrite import simplify
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.metadata.convention import is_inexact

_NO_DERIVATIVE = (NotImplementedError, ValueError, TraceError)  # for a missing derivative
_WHOLE = RULED | {"while_loop"}  # their bodies are not searched: the op itself stops it
_RAISES, _IS_ZERO, _IS_INTEGER = range(3)  # ranks of stops, worst first


@dataclass(frozen=True)
class Stop:
    """An op that stops a gradient.

    Attributes:
        op: JAX's name of the operation; empty for an argument that cannot be differentiated.
        source: the user's line, `model.py:12 (loss)`.
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

    It is true if the reverse-mode derivative exists and reaches a differentiated array.

    Attributes:
        name: the function's name.
        reached: paths of the differentiated arrays that a gradient reaches.
        unreached: paths of the others, whose gradients are zero or do not exist.
        stops: the ops between these and the outputs that stop the gradient, in the order of the program.
    """

    name: str
    reached: tuple[str, ...]
    unreached: tuple[str, ...]
    stops: tuple[Stop, ...]

    def __bool__(self) -> bool:
        """Whether a gradient reaches a differentiated array."""
        return bool(self.reached)

    def __str__(self) -> str:
        """The answer, the unreached arrays, and a line for each stop."""
        lines = [f"{self.name} is {'' if self else 'not '}differentiable."]
        if self.unreached:
            lines.append(
                f"No gradient reaches {', '.join(self.unreached)}{'' if self.stops else ': no output reads it'}."
            )
        return "\n".join([*lines, *(f"  {stop}" for stop in self.stops)])


def differentiability(function: Callable[..., Any], options: Options, bound: Bound) -> Differentiability:
    """Whether a gradient can flow from the outputs of a call to the arguments in `argnums`."""
    name, paths = name_of(function), bound.paths()
    places_of(bound, options.chosen, options)  # raises for a missing argument
    try:
        wanted = differentiated(bound, options.chosen, options)
    except TraceError as error:
        return Differentiability(name, (), (), (Stop("", "", str(error).splitlines()[0]),))
    with explained(name, function, paths, bound), runtime.paused_collection():
        shapes = bound.abstract()
        target = tracing.wrapped_for(function, shapes, shapes.input_info(wanted), options).target
        source = primal(target.function, shapes.leaves, options.has_aux)
    program = jaxprs.constants_first(jaxprs.opened(simplify.inlined(source.reversible()))[0])
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


def _stops(jaxpr: Any, starts: Sequence[Any], outputs: Sequence[Any], error: str) -> tuple[Stop, ...]:
    """Return the stops of the worst rank between inputs and outputs; JAX's `error` if no op explains it."""
    ranked = list(_StopSearch(set(starts)).through(jaxpr, outputs)) if starts else []
    if error and all(rank != _RAISES for rank, _ in ranked):
        return (Stop("", "", error),)
    worst = min((rank for rank, _ in ranked), default=None)
    return tuple(dict.fromkeys(stop for rank, stop in ranked if rank == worst))


# ------------------------------------------------------------------------------------------------- asking JAX


@dataclass(frozen=True)
class _Pulled:
    """The inputs that a derivative reaches, and the outputs that it starts from; or JAX's `error` if there is none."""

    reached: frozenset[int] = frozenset()
    carrying: frozenset[int] = frozenset()
    error: str = ""


def _pulled(closed: Any, wanted: Sequence[int], outputs: Sequence[int]) -> _Pulled:
    """Follow the reverse-mode derivative of a program from `outputs` to the inputs `wanted`."""
    jaxpr, _ = jaxprs.opened(closed)
    carrying = [i for i in outputs if is_inexact(jaxpr.outvars[i].aval.dtype)]
    if not carrying or not wanted:
        return _Pulled()

    def pull(inputs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def chosen(*xs: Any) -> list[Any]:
            primals = dict(zip(wanted, xs, strict=True))
            results = runtime.evaluate(closed, *(primals.get(i, x) for i, x in enumerate(inputs)))
            return [results[i] for i in carrying]

        return jax.vjp(chosen, *(inputs[i] for i in wanted))[1](list(cotangents))

    seeds = [abstract.struct(abstract.cotangent_aval(jaxpr.outvars[i].aval)) for i in carrying]
    try:
        with explained("It"):
            traced = jax.make_jaxpr(pull)(abstract.input_structs(closed), seeds)
    except _NO_DERIVATIVE as error:
        return _Pulled(error=_first_sentence(str(error)))
    backward, _ = jaxprs.opened(simplify.inlined(traced))
    flows = [depending(backward.eqns, [v]) for v in backward.invars[-len(seeds) :]]
    gradients = [(i, v) for i, v in zip(wanted, backward.outvars, strict=True) if not isinstance(v, jaxprs.Literal)]
    return _Pulled(
        frozenset(i for i, v in gradients if any(v in flow for flow in flows)),
        frozenset(i for i, flow in zip(carrying, flows, strict=True) if any(v in flow for _, v in gradients)),
    )


def _first_sentence(text: str) -> str:
    """Return the first sentence of JAX's message, without its advice."""
    line = (text.splitlines() or ["JAX has no derivative of it"])[0]
    return f"{line.partition('. ')[0].rstrip('.')}."


# --------------------------------------------------------------------------------------------------- searching


@dataclass
class _StopSearch:
    """Searches a program for stops, op by op; `active` are the variables that carry the differentiated arrays."""

    active: set[Any]

    def through(self, jaxpr: Any, outputs: Sequence[Any]) -> Iterator[tuple[int, Stop]]:
        """Yield the stops among the ops that lead to `outputs`, each with its rank."""
        needed = simplify.live(jaxpr.eqns, outputs).places
        return (stop for i, eqn in enumerate(jaxpr.eqns) if i in needed for stop in self._at(eqn))

    def _at(self, eqn: Any) -> Iterator[tuple[int, Stop]]:
        """Yield the stops in one equation; its differentiated results become active."""
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
        source = user_source.source_of(eqn)
        inner = [(r, stop) for r, stop in _inside(eqn, places) if r <= rank]
        if not inner and not pulled.carrying:
            inner = [(rank, Stop(eqn.primitive.name, source, why))]
        yield from ((r, stop if stop.source else replace(stop, source=source)) for r, stop in inner)


def _derivative(eqn: Any, places: Sequence[int], outputs: Collection[int]) -> _Pulled:
    """Follow the derivative of one equation from `outputs` to the operands at `places`."""
    if jaxprs.touches_references(eqn):
        return _Pulled(error="it touches a reference, through which no gradient flows.")
    invars = [jaxprs.fresh(v.aval) for v in eqn.invars]
    outvars = [jaxprs.fresh(v.aval) for v in eqn.outvars]
    alone = jaxprs.build(invars, outvars, [jaxprs.rebound(eqn, invars, outvars)])
    return _pulled(alone, places, sorted(outputs))


def _inside(eqn: Any, places: Sequence[int]) -> Iterator[tuple[int, Stop]]:
    """Yield the stops in the bodies of an equation whose operands at `places` are differentiated."""
    if eqn.primitive.name in _WHOLE:
        return
    for body in jaxprs.inner_jaxprs(eqn):
        offset = len(eqn.invars) - len(body.invars)  # a branch does not take the index
        if offset in (0, 1):
            active = {body.invars[i - offset] for i in places if i >= offset}
            yield from _StopSearch(active).through(body, body.outvars)
