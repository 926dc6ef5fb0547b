"""Programs with loops of any number of steps, cut, put in segments, and run one op at a time."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.partition import Plan, Roles, split
from jointcut.partition.lower.emit import emit
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.lower.verify import verify_structure
from jointcut.partition.plans.backend import PORTABLE
from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.partition.program.roles import Side
from jointcut.partition.program.sides import classify
from jointcut.partition.rewrite import simplify


def normal(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


# ------------------------------------------------------------------------------------ programs, by number of steps


def cell(steps):
    """Constants, scanned inputs, stacked outputs that the loss reads."""

    def loss(matrix, start, sequence):
        def step(h, x):
            h = jnp.tanh(h @ matrix + x)
            return h, jnp.sin(h)

        last, seen = lax.scan(step, start, jnp.exp(sequence))  # what it scans over is no argument
        return jnp.sum(last) + jnp.sum(seen**2)

    return loss, (normal(0, 3, 3), normal(1, 2, 3), normal(2, steps, 2, 3))


def dropout(steps):
    """A counter, a random key, a carry handed on unchanged, and one that nothing reads."""

    def loss(matrix, start, rate):
        def step(carry, _):
            h, count, key, rate, spare = carry
            key, own = jax.random.split(key)
            kept = jax.random.bernoulli(own, 0.7, h.shape).astype(h.dtype)
            h = jnp.sin(h @ matrix) * kept * rate + h / (1 + count.astype(h.dtype))
            return (h, count + 1, key, rate, spare * 2), count

        first = (start, jnp.int32(0), jax.random.key(7), jnp.exp(rate), start)
        (h, *_), counts = lax.scan(step, first, None, length=steps)
        return jnp.sum(h**2) * counts.sum().astype(jnp.float32)

    return loss, (0.3 * normal(3, 3, 3), normal(4, 2, 3), jnp.float32(0.3))


def reverse(steps):
    """From the end of the stacks; the carry begins as a literal and as something computed."""

    def loss(weight, sequence):
        def step(carry, x):
            h, g = carry
            h = jnp.tanh(weight * h + x * g)
            return (h, jnp.cos(g) * h), h * jnp.exp(x)

        (last, _), seen = lax.scan(step, (jnp.zeros(3), jnp.sin(weight)), sequence, reverse=True)
        return jnp.sum(last**2) + jnp.sum(seen[0] * sequence)

    return loss, (normal(5, 3), normal(6, steps, 3))


def half(steps):
    """In 16 bits."""

    def loss(matrix, sequence):
        def step(h, x):
            return jnp.tanh(h @ matrix + x) * jnp.sin(h), None

        last, _ = lax.scan(step, sequence[0], sequence)
        return jnp.sum(last.astype(jnp.float32) ** 2)

    return loss, (normal(7, 3, 3, dtype=jnp.bfloat16), normal(8, steps, 2, 3, dtype=jnp.bfloat16))


def nested(steps):
    """A loop inside the body, whose stack the body reads, too."""

    def loss(start, sequence):
        def row(h, x):
            h, inside = lax.scan(lambda g, e: (jnp.tanh(g * e + h), jnp.sin(g * h)), h, x)
            return h, inside.sum()

        last, sums = lax.scan(row, start, sequence)
        return jnp.sum(last**2) + jnp.sum(sums**2)

    return loss, (normal(9, 3), normal(10, steps, 2, 3))


def mapped(steps):
    """No carry."""

    def loss(weight, rows):
        return jnp.sum(lax.map(lambda row: jnp.exp(jnp.sin(row * weight)) * row, rows) ** 2)

    return loss, (normal(11, 3), normal(12, steps, 3))


def two_loops(steps):
    """A second loop that reads the first's stack as a constant, and is unrolled by two."""

    def loss(weight, sequence):
        last, seen = lax.scan(lambda h, x: (jnp.sin(h * x) + h, jnp.cos(h) * x), weight, sequence)

        def step(h, _):
            return jnp.tanh(h * weight + seen.sum(0)) * jnp.exp(h), None

        end, _ = lax.scan(step, last, None, length=steps + 1, unroll=2)
        return jnp.sum(end**2)

    return loss, (normal(13, 3), normal(14, steps, 3))


def fixed(steps):
    """A carry that is the same from the second step on, made outside of the loop."""

    def loss(weight, sequence):
        def step(carry, x):
            h, at = carry
            h = jnp.tanh(h * weight[at] + x)
            return (h, jnp.argmax(jnp.sin(weight))), jnp.sin(h)

        (last, _), seen = lax.scan(step, (weight, jnp.argmin(weight)), jnp.exp(sequence))
        return jnp.sum(last) + jnp.sum(seen**2)

    return loss, (normal(15, 3), normal(16, steps, 3))


PROGRAMS = (cell, dropout, reverse, half, nested, mapped, two_loops, fixed)


# ------------------------------------------------------------------------------------ cut them, and run them


def cut(program, strategy):
    """The split of a function with its arguments, differentiated in all of these, and its flat inputs."""
    function, args = program

    def joint(*given):
        out, pullback = jax.vjp(function, *given[:-1])
        return out, *pullback(given[-1])

    closed = simplify.inlined(jax.make_jaxpr(joint)(*args, jnp.float32(1)))
    jaxpr, consts = jaxprs.opened(closed)
    lifted = jaxprs.build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)
    return split(lifted, Roles.simple(len(consts) + len(args), 1, 1, len(args)), strategy), [*consts, *args]


def carry_alone(graph):
    """The plan that keeps what loops carry and what is read outside them, and computes the rest again."""
    carried = [v for op in graph.ops if op.origin is Side.FORWARD and op.name == "loop" for v in op.outputs]
    sides = classify(graph)
    return Plan.of(graph, {*carried, *(v for v in sides.escaping if not sides.is_late(v))})


def in_segments(made, lengths, backend=PORTABLE, kept_steps=None):
    """The halves with loops in segments, but for some of their last steps."""
    new = emit(made.graph, schedule(replace(made.problem, backend=backend), made.plan, lengths, kept_steps))
    verify_structure(made.graph, new)
    return new


def stepwise(closed, args):
    """Run a jaxpr one op at a time, also within loops, so that XLA fuses nothing: equal programs give equal bits."""
    jaxpr, _ = jaxprs.opened(closed)
    env = dict(zip(jaxpr.invars, args, strict=True))

    def read(v):
        return v.val if isinstance(v, jaxprs.Literal) else env[v]

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            outs = scanned(jaxprs.scan_layout(eqn), list(map(read, eqn.invars)))
        else:
            invars = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jaxprs.Literal)))
            outs = runtime.evaluate(jaxprs.build(invars, eqn.outvars, [eqn]), *map(read, invars))
        env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def scanned(layout, given):
    a, b = layout.num_consts, layout.num_consts + layout.num_carry
    carry, rows, stacks = given[a:b], [pieces(x) for x in given[b:]], []
    steps = range(layout.length)
    for i in reversed(steps) if layout.reverse else steps:
        results = stepwise(layout.body, [*given[:a], *carry, *(row[i] for row in rows)])
        carry, ys = results[: len(carry)], results[len(carry) :]
        stacks.append(ys)
    stacks = stacks[::-1] if layout.reverse else stacks
    return [*carry, *map(stacked, zip(*stacks, strict=True))]


def is_key(x):
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def pieces(x):
    return list(map(jax.random.wrap_key_data, jax.random.key_data(x))) if is_key(x) else list(np.asarray(x))


def stacked(ys):
    if is_key(ys[0]):
        return jax.random.wrap_key_data(np.stack(list(map(jax.random.key_data, ys))))
    return np.stack(list(map(np.asarray, ys)))


def results(made, halves, flat, run=stepwise):
    """Outputs and gradients, from an evaluation of jaxprs."""
    ends = run(halves.forward, flat)
    count = 1
    places = {"input": flat, "output": ends[:count], "saved": ends[count:]}
    residuals = [places[r.kind][r.index] for r in halves.residuals]
    return [*ends[:count], *run(halves.backward, [*residuals, jnp.float32(1)])]


def assert_same(got, want):
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x).astype(np.float64), np.asarray(y).astype(np.float64))


def kept_bytes(halves):
    return sum(abstract.aval_bytes(v.aval) for v in jaxprs.opened(halves.forward)[0].outvars[1:])


def temp_bytes(function, *args):
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes
