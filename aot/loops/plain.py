"""Let every `lax.while_loop` of a program run backwards, and so every `fori_loop` with dynamic bounds."""

from __future__ import annotations

from typing import Any

from jointcut.aot.loops.buffers import number_in
from jointcut.aot.loops.expected import expected_trips
from jointcut.aot.loops.memory import Memory
from jointcut.aot.loops.parts import Parts, traced
from jointcut.aot.loops.rules import Loop
from jointcut.partition.program import jaxprs
from jointcut.partition.rewrite import simplify

_JAX_ON_LOOPS = "Reverse-mode differentiation does not work for lax.while_loop"


def looped(closed: Any) -> Any:
    """The same program with our loops in the place of JAX's, also in the bodies of other equations."""
    return simplify.replaced(closed, "while", _loop)


def is_about_loops(error: ValueError) -> bool:
    """Whether JAX raised an error because a `lax.while_loop` has no reverse mode."""
    return _JAX_ON_LOOPS in str(error)


def _loop(eqn: jaxprs.Equation, scope: str) -> jaxprs.Equation:
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    count = num_cond + num_body
    own = [v.aval for v in jaxprs.opened(cond)[0].invars[:num_cond]]
    rest = [v.aval for v in jaxprs.opened(body)[0].invars]
    carry = rest[num_body:]

    def alive(*flat: Any) -> list[Any]:
        return jaxprs.evaluate(cond, *flat[:num_cond], *flat[count:])

    def step(*flat: Any) -> list[Any]:
        outs = jaxprs.evaluate(body, *flat[num_cond:])
        return [jaxprs.typed(x, aval) if jaxprs.is_plain(aval) else x for x, aval in zip(outs, carry, strict=True)]

    avals = [*own, *rest]
    parts = Parts(traced(alive, avals), traced(step, avals), count)
    numbers = ((i, number_in(v)) for i, v in enumerate(eqn.invars))
    known = {i: n for i, n in numbers if n is not None}
    program = Loop(parts, Memory(), f"the lax.while_loop at {jaxprs.source_of(eqn)}", known, expected_trips(scope))
    return eqn.replace(primitive=program.prim, params={"jaxpr": program.closed, "rules": program})
