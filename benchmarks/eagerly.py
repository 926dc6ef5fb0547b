"""Run a jaxpr op by op, its loops and branches in Python, so that nothing is compiled but single ops.

A random program is run a few times and never again: compiling it would take a hundred times as long as running it. The
ops are those of a few shapes, and XLA's programs for them are kept by JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.partition.program.jax import abstract, jaxprs

_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def evaluate(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """The results of a closed jaxpr for flat arguments."""
    jaxpr, consts = jaxprs.opened(closed)
    return _run(jaxpr, consts, arguments)


def _run(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jaxprs.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _results(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _results(eqn: Any, values: list[Any]) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _loop(eqn, values)
    if name == "while":
        return _while(params, values)
    if name == "cond":
        branches = params["branches"]
        return evaluate(branches[min(max(int(values[0]), 0), len(branches) - 1)], values[1:])
    body = next((params[key] for key in _BODIES if key in params), None)
    if body is not None:
        return evaluate(body, values) if hasattr(body, "consts") else _run(body, (), values)
    bind = functools.partial(eqn.primitive.bind, **eqn.params)
    if any(abstract.extends_floats(getattr(v.aval, "dtype", None)) for v in (*eqn.invars, *eqn.outvars)):
        bind = jax.jit(bind)  # JAX has no such op by itself
    found = bind(*values)
    return list(found) if eqn.primitive.multiple_results else [found]


def _loop(eqn: Any, values: list[Any]) -> list[Any]:
    layout, length = jaxprs.scan_layout(eqn), eqn.params["length"]
    count, carried = layout.num_consts, layout.num_carry
    consts, carry, rows = values[:count], values[count : count + carried], values[count + carried :]
    stacks: list[list[Any]] = []
    order = range(length)[::-1] if eqn.params["reverse"] else range(length)
    for i in order:
        out = evaluate(eqn.params["jaxpr"], [*consts, *carry, *(row[i] for row in rows)])
        carry = out[:carried]
        stacks.append(out[carried:])
    if eqn.params["reverse"]:
        stacks.reverse()
    if not length:
        return [*carry, *(jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars[carried:])]
    return [*carry, *(jnp.stack(ys) for ys in zip(*stacks, strict=True))]


def _while(params: dict[str, Any], values: list[Any]) -> list[Any]:
    a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry = values[b:]
    while bool(evaluate(params["cond_jaxpr"], [*values[:a], *carry])[0]):
        carry = evaluate(params["body_jaxpr"], [*values[a:b], *carry])
    return carry


def traced(function: Any, arguments: Sequence[Any]) -> Any:
    """What a function answers, traced once and run op by op."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    flat = evaluate(closed, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shape), flat)
