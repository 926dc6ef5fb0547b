"""Write a program of symbolic sizes as one for padded arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.aot.stages.padding.extents import Extents, PaddedOp
from jointcut.aot.stages.padding.joined import JOINING
from jointcut.aot.stages.padding.moved import MOVING
from jointcut.aot.trace.joint import Joint, joined
from jointcut.partition.program.bodies import SCAN
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.jax.jaxprs import Equation, Literal, Var
from jointcut.partition.program.jax.own_primitives import CallRules
from jointcut.partition.program.primitives import CALLS, COND, ELEMENTWISE, REGION, SERIES, WHILE
from jointcut.partition.program.roles import Role
from jointcut.partition.program.sizes import AS_VALUE, grows, holds_sizes, is_symbolic, with_numbers
from jointcut.partition.program.ties import ties
from jointcut.partition.rewrite import simplify


def padded_joint(program: Joint, names: Sequence[str], bucket: Mapping[str, int]) -> Joint:
    """Return a joint program for arrays padded to a bucket; after the constants it takes the true size of each name.

    Raises `TraceError` for an equation that needs a size as a number.
    """
    jaxpr, sized = (jaxprs.opened(x)[0] for x in (program.closed, with_numbers(program.closed, bucket)))
    count, outputs = len(program.consts), len(program.results.avals)
    primals = sum(role is Role.PRIMAL for role in program.roles.inputs)
    border = len(jaxpr.eqns) if program.roles.forward_ops is None else program.roles.forward_ops
    late = {v for eqn in jaxpr.eqns[border:] for v in jaxprs.variables(eqn.invars)}
    late.update(jaxprs.variables(jaxpr.outvars[outputs:]))
    early = [*jaxpr.invars[:primals], *(v for eqn in jaxpr.eqns[:border] for v in eqn.outvars)]
    kept = [v for v in early if v in late]

    def front(consts: Sequence[Any], sizes: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        run = _Run.of(bucket, names, sizes, jaxpr.invars[:primals], (*consts, *given))
        run.equations(jaxpr.eqns[:border], sized.eqns[:border])
        return [*map(run.read, jaxpr.outvars[:outputs]), *sizes, *map(run.read, kept)]

    def back(sizes: Sequence[Any], given: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        run = _Run.of(bucket, names, sizes, (*kept, *jaxpr.invars[primals:]), (*given, *cotangents))
        run.equations(jaxpr.eqns[border:], sized.eqns[border:])
        return list(map(run.read, jaxpr.outvars[outputs:]))

    structs = [abstract.struct(v.aval) for v in sized.invars]
    scalars = [jax.ShapeDtypeStruct((), np.int32)] * len(names)
    first = jax.make_jaxpr(front)(structs[:count], scalars, structs[count:primals])
    held = list(map(abstract.struct, first.out_avals[outputs + len(names) :]))
    second = jax.make_jaxpr(back)(scalars, held, structs[primals:])
    paths = [program.roles.input_path(i) for i in range(primals)]
    ends = (simplify.inlined(first), simplify.inlined(second))
    made = joined(*ends, (), program.results, [*paths[:count], *names, *paths[count:]])
    return replace(made, consts=(*made.consts, *program.consts))


@dataclass
class _Run:
    """One run of a program of symbolic sizes on padded arrays, by equation."""

    extents: Extents
    env: dict[Var, Any]

    @classmethod
    def of(
        cls, bucket: Mapping[str, int], names: Sequence[str], sizes: Sequence[Any], ends: Sequence[Var], xs: Any
    ) -> _Run:
        """Start with the true sizes and the inputs."""
        return cls(Extents(bucket, dict(zip(names, sizes, strict=True))), dict(zip(ends, xs, strict=True)))

    def read(self, atom: Any) -> Any:
        """Return the array of a variable or literal."""
        return atom.val if isinstance(atom, Literal) else self.env[atom]

    def equations(self, eqns: Sequence[Equation], sized: Sequence[Equation]) -> None:
        """Run equations for symbolic sizes, given the same equations with padded sizes."""
        for eqn, other in zip(eqns, sized, strict=True):
            op = PaddedOp(eqn, other, self.extents, self.inside)
            results = _results(op, list(map(self.read, eqn.invars)))
            self.env.update(zip(eqn.outvars, results, strict=True))

    def inside(self, program: Any, sized: Any, values: Sequence[Any]) -> list[Any]:
        """Run a program inside an equation."""
        (jaxpr, consts), (other, _) = jaxprs.opened(program), jaxprs.opened(sized)
        run = _Run(self.extents, dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True)))
        run.equations(jaxpr.eqns, other.eqns)
        pairs = zip(map(run.read, jaxpr.outvars), other.outvars, strict=True)
        return [abstract.typed(x, v.aval) if isinstance(v, Literal) else x for x, v in pairs]


def _results(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    eqn, name = op.eqn, op.eqn.primitive.name
    shapes = [*op.shapes, *(tuple(getattr(v.aval, "shape", ())) for v in eqn.outvars)]
    if not all(grows(str(n)) for shape in shapes for n in shape if is_symbolic([n])):
        raise op.refuse("has a size that may be larger where the others are smaller")
    if name == AS_VALUE:
        size = op.extents.of(eqn.params["dim"])
        return [abstract.typed(jnp.asarray(size), op.eqn.outvars[0].aval)]
    is_ours = isinstance(eqn.params.get("rules"), CallRules)  # such as a loop with checkpoints, or its way back
    if is_ours or name in _WITH_BODIES:
        return _WITH_BODIES.get(name, _called)(op, values)
    if not any(map(is_symbolic, shapes)) and not holds_sizes(tuple(eqn.params.values())):
        return op.plain(values)
    if name in _RULES:
        return _RULES[name](op, values)
    if not holds_sizes(tuple(eqn.params.values())) and _leaves_rows_apart(op):
        return op.plain(op.filled(values))
    raise op.refuse("has no rule for padded arrays")


def _leaves_rows_apart(op: PaddedOp) -> bool:
    """Whether an equation treats each row alone along each axis that is padded."""
    known = list(ties(op.eqn))
    return all(
        any(tie.operands[i] == axis and None not in tie.results for tie in known)
        for i, shape in enumerate(op.shapes)
        for axis, size in enumerate(shape)
        if is_symbolic([size])
    )


_RULES: dict[str, Callable[[PaddedOp, Sequence[Any]], list[Any]]] = {
    **dict.fromkeys(ELEMENTWISE | SERIES, PaddedOp.plain),
    **MOVING,
    **JOINING,
}


# -------------------------------------------------------------------------------------------------- programs inside


def _called(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    key = "call_jaxpr" if "call_jaxpr" in op.eqn.params else "jaxpr"
    if key not in op.eqn.params:
        raise op.refuse("is a call that stays closed")
    return op.run(op.eqn.params[key], op.sized.params[key], values)


def _scanned(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    """Scan over the padded steps; a step behind the true end leaves the carry as it is."""
    layout, sized = jaxprs.scan_layout(op.eqn), jaxprs.scan_layout(op.sized)
    consts, carry, xs = layout.parts(values)
    body, other = op.eqn.params["jaxpr"], op.sized.params["jaxpr"]
    inputs = sized.parts(sized.body.invars)[1]
    ends = op.extents.of(layout.length) if is_symbolic([layout.length]) else None
    first = [abstract.typed(jnp.asarray(x), v.aval) for x, v in zip(carry, inputs, strict=True)]

    def step(held: list[Any], given: Any) -> Any:
        number, own = given
        made = op.run(body, other, [*consts, *held, *own])
        after = [abstract.typed(x, v.aval) for x, v in zip(made[: len(held)], inputs, strict=True)]
        if ends is not None:
            goes = number < ends
            after = [jnp.where(goes, x, y) for x, y in zip(after, held, strict=True)]
        return after, made[len(held) :]

    length, unroll = sized.length, op.eqn.params.get("unroll", 1)
    steps = jnp.arange(length, dtype=np.int32), list(xs)
    last, ys = lax.scan(step, first, steps, length, layout.reverse, unroll)
    return [*last, *ys]


def _while(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    params, sized = op.eqn.params, op.sized.params
    one, two = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def goes_on(held: list[Any]) -> Any:
        return op.run(params["cond_jaxpr"], sized["cond_jaxpr"], [*values[:one], *held])[0]

    def body(held: list[Any]) -> list[Any]:
        return op.run(params["body_jaxpr"], sized["body_jaxpr"], [*values[one:two], *held])

    return list(lax.while_loop(goes_on, body, list(values[two:])))


def _branched(op: PaddedOp, values: Sequence[Any]) -> list[Any]:
    which, *given = values
    pairs = zip(op.eqn.params["branches"], op.sized.params["branches"], strict=True)
    branches = [lambda *xs, a=a, b=b: op.run(a, b, xs) for a, b in pairs]
    return list(lax.switch(which, branches, *given))


_WITH_BODIES: dict[str, Callable[[PaddedOp, Sequence[Any]], list[Any]]] = {
    **dict.fromkeys(CALLS, _called),
    REGION: _called,
    SCAN: _scanned,
    WHILE: _while,
    COND: _branched,
}
