"""Loops: scans of every kind whose residuals must be cut inside, and loops that only run forward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from corpus.networks import block, block_weights
from corpus.program import integers, normal, program


@program(
    "A scan over three transformer blocks.",
    lambda: (block_weights(100, 3), normal(104, 4, 8)),
    argnums=(0, 1),
    tags="scan",
)
def scan_over_layers(layers, x):
    x, _ = lax.scan(lambda h, layer: (block(layer, h), None), x, layers)
    return jnp.sum(x**2)


@program(
    "A scan whose body reads constants, and computes a thing of the constants alone.",
    lambda: ((normal(105, 3, 3), normal(106, 3)), normal(107, 4, 3)),
    tags="scan",
)
def scan_with_constants(constants, sequence):
    matrix, shift = constants

    def step(h, x):
        return jnp.sin(h @ jnp.tanh(matrix)) + jnp.exp(shift) * x, jnp.cos(h)

    last, seen = lax.scan(step, jnp.ones(3), sequence)
    return jnp.sum(last) + jnp.sum(seen**2)


@program(
    "A scan whose backward selects between a cotangent and zeros of its own.",
    lambda: (normal(170, 3, 3), normal(171, 4, 2, 3)),
    argnums=(0, 1),
    tags="scan",
)
def scan_that_selects(matrix, sequence):
    def step(h, x):
        h = jnp.tanh(h @ matrix + x)
        return jnp.where(h > 0.1, h * jnp.sin(h), 0.0) + jnp.maximum(h, 0.0), jnp.sum(jnp.where(h > 0, h, 0.0))

    return jnp.sum(lax.scan(step, sequence[0], sequence)[1])


@program(
    "A scan without xs that applies one map four times.",
    lambda: (normal(108, 3, 3), normal(109, 3)),
    argnums=(0, 1),
    tags="scan",
)
def scan_without_xs(matrix, x):
    x, _ = lax.scan(lambda h, _: (jnp.sin(matrix @ h), None), x, None, length=4)
    return jnp.sum(x)


@program(
    "A scan with three carries in a tree, one of which goes round unchanged and one of which is never read.",
    lambda: (normal(110, 3), normal(111, 3), normal(112, 4, 3)),
    argnums=(0, 1),
    tags="scan",
)
def scan_with_several_carries(velocity, drag, pushes):
    def step(carry, push):
        place, speed = carry["body"]
        speed = speed * jnp.exp(-carry["drag"]) + jnp.tanh(push * place)
        return {
            "body": (place + 0.1 * speed, speed),
            "drag": carry["drag"],
            "spare": carry["spare"] * 2,
        }, None

    start = {"body": (jnp.ones(3), velocity), "drag": drag**2, "spare": velocity}
    end, _ = lax.scan(step, start, pushes)
    return jnp.sum(end["body"][0] ** 2)


@program(
    "A scan that runs backward over its xs.",
    lambda: (normal(113, 3), normal(114, 4, 3)),
    argnums=(0, 1),
    tags="scan",
)
def reverse_scan(x, sequence):
    last, seen = lax.scan(lambda h, s: (jnp.sin(h * s), h * jnp.exp(s)), x, sequence, reverse=True)
    return jnp.sum(last) + jnp.sum(seen[::-1] * sequence)


@program("A scan unrolled by two over five steps.", lambda: (normal(115, 3, 3), normal(116, 5, 3)), tags="scan")
def unrolled_scan(matrix, sequence):
    last, _ = lax.scan(lambda h, x: (jnp.tanh(h @ matrix + x), None), jnp.zeros(3), sequence, unroll=2)
    return jnp.sum(last**2)


@program("A scan of no steps at all.", lambda: (normal(117, 3), jnp.zeros((0, 3))), argnums=(0, 1), tags="scan")
def scan_of_no_steps(x, sequence):
    last, seen = lax.scan(lambda h, s: (jnp.sin(h * s), jnp.exp(h)), x, sequence)
    return jnp.sum(last**2) + jnp.sum(seen)


@program("A scan of a single step.", lambda: (normal(118, 3), normal(119, 1, 3)), argnums=(0, 1), tags="scan")
def scan_of_one_step(x, sequence):
    last, seen = lax.scan(lambda h, s: (jnp.sin(h * s), jnp.exp(h)), x, sequence)
    return jnp.sum(last**2) + jnp.sum(seen)


@program(
    "A scan inside a scan, the inner one over the outer one's row.",
    lambda: (normal(120, 3), normal(121, 3, 4, 3)),
    argnums=(0, 1),
    tags="scan",
)
def nested_scans(x, table):
    def row(h, entries):
        h, inside = lax.scan(lambda g, e: (jnp.tanh(g * e + h), jnp.sin(g)), h, entries)
        return h, inside.sum()

    last, sums = lax.scan(row, x, table)
    return jnp.sum(last**2) + jnp.sum(sums)


@program(
    "Three scans, each inside the other.",
    lambda: (normal(122, 2), normal(123, 2)),
    argnums=(0, 1),
    tags="scan",
)
def triply_nested_scans(x, weight):
    def times(length, body):
        return lambda h, _: (lax.scan(body, h, None, length=length)[0], None)

    def innermost(h, _):
        return jnp.sin(weight * h) + 0.5 * h, None

    last, _ = lax.scan(times(2, times(2, innermost)), x, None, length=2)
    return jnp.sum(last**2)


@program(
    "A scan whose ys are used outside twice, beside its carry.",
    lambda: (normal(124, 3, 3), normal(125, 4, 3)),
    tags="scan",
)
def scan_with_ys_used_outside(matrix, sequence):
    def step(h, x):
        h = jnp.tanh(h @ matrix + x)
        return h, (h, jnp.sin(h))

    last, (seen, waves) = lax.scan(step, jnp.zeros(3), sequence)
    return jnp.sum(seen * waves) + jnp.sum(jnp.exp(seen)) + jnp.sum(last)


@program(
    "A scan that counts its steps in an integer carry.",
    lambda: (normal(126, 3), normal(127, 4, 3)),
    argnums=(0, 1),
    tags="scan",
)
def scan_with_counter(x, sequence):
    def step(carry, s):
        count, h = carry
        return (count + 1, jnp.sin(h * s) / (1 + count.astype(jnp.float32))), count

    (count, last), counts = lax.scan(step, (jnp.int32(0), x), sequence)
    return jnp.sum(last) * (count + counts.sum()).astype(jnp.float32)


@program("One scan feeding another's xs.", lambda: (normal(128, 3, 3), normal(129, 4, 3)), tags="scan")
def scan_feeding_scan(matrix, sequence):
    _, first = lax.scan(lambda h, x: (jnp.tanh(h @ matrix + x), jnp.sin(h)), jnp.zeros(3), sequence)
    last, _ = lax.scan(lambda h, x: (jnp.tanh(h + x @ matrix), None), jnp.zeros(3), first, reverse=True)
    return jnp.sum(last**2)


@program(
    "A scan without a carry: a map in sequence.",
    lambda: (normal(130, 3), normal(131, 4, 3)),
    argnums=(0, 1),
    tags="scan",
)
def scan_without_carry(weight, rows):
    return jnp.sum(lax.map(lambda row: jnp.exp(jnp.sin(row * weight)).sum(), rows) ** 2)


@program(
    "A scan over integer xs that gathers a row of a constant table at each step.",
    lambda: (normal(132, 5, 3), integers(133, 4, below=5)),
    tags="scan",
)
def scan_over_tokens(table, tokens):
    last, _ = lax.scan(lambda h, t: (jnp.tanh(h + table[t]) * jnp.cos(h), None), jnp.zeros(3), tokens)
    return jnp.sum(last**2)


@program(
    "A scan of which only the integers are used: its gradient is zero.",
    lambda: (normal(134, 3), normal(135, 4, 3)),
    tags="scan",
)
def scan_of_counts_alone(x, sequence):
    count, _ = lax.scan(lambda n, s: (n + jnp.sum(s * x > 0), None), jnp.int32(0), sequence)
    return count.astype(jnp.float32) * jnp.sum(jnp.sin(sequence))


@program(
    "A Python loop over layers, unrolled into one straight line.",
    lambda: (normal(136, 3, 4, 4), normal(137, 2, 4)),
)
def unrolled_layers(layers, x):
    for layer in layers:
        x = x + jnp.tanh(normal_rows(x) @ layer)
    return jnp.sum(x**2)


def normal_rows(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3)


@program("A while loop that finds a count, which is not differentiated.", lambda: (normal(138, 3),))
def while_loop_counts(x):
    start = lax.stop_gradient(jnp.sum(x**2))
    count = lax.while_loop(lambda c: c[1] < 40.0, lambda c: (c[0] + 1, c[1] * 2 + 1), (jnp.int32(0), start))[0]
    return jnp.sum(jnp.sin(x)) * count.astype(jnp.float32)


@program(
    "A fori_loop with static bounds, which JAX turns into a scan.",
    lambda: (normal(139, 3), normal(140, 4, 3)),
    argnums=(0, 1),
    tags="scan",
)
def fori_loop(x, rows):
    return jnp.sum(lax.fori_loop(0, 4, lambda i, h: jnp.sin(h) * rows[i] + h, x))


@program("An associative scan of affine maps.", lambda: (normal(141, 5, 2), normal(142, 5, 2)), argnums=(0, 1))
def associative_scan(factors, terms):
    def compose(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    _, states = lax.associative_scan(compose, (jnp.tanh(factors), terms))
    return jnp.sum(states**2)


@program(
    "A decoder that attends, at each step, to all that an encoder's scan has stacked.",
    lambda: (normal(180, 3, 3), normal(181, 4, 3), normal(182, 3)),
    argnums=(0, 1),
    tags="scan",
)
def scan_that_reads_a_stack(matrix, sequence, x):
    _, seen = lax.scan(lambda h, s: (jnp.tanh(h @ matrix + s), jnp.sin(h)), x, sequence)

    def step(h, _):
        return jnp.tanh(jax.nn.softmax(jnp.sin(seen) @ h) @ seen), None

    return jnp.sum(lax.scan(step, x, None, length=3)[0] ** 2)


@program(
    "A scan at each step of which one inner scan reads what another has stacked.",
    lambda: (normal(183, 3, 3), normal(184, 2, 4, 3)),
    argnums=(0, 1),
    tags="scan",
)
def inner_scan_that_reads_a_stack(matrix, table):
    def row(h, entries):
        _, seen = lax.scan(lambda g, e: (jnp.tanh(g @ matrix + e), jnp.sin(g) * jnp.cos(e)), h, entries)
        h, _ = lax.scan(lambda g, _: (jnp.tanh(jnp.exp(seen @ g) @ seen), None), h, None, length=3)
        return h, jnp.sum(seen)

    last, sums = lax.scan(row, jnp.ones(3), table)
    return jnp.sum(last**2) + jnp.sum(sums)


@program(
    "A scan in a scan that reads, at each inner step, the stacks of stacks of two scans before.",
    lambda: (normal(185, 3), normal(186, 2, 4, 3)),
    argnums=(0, 1),
    tags="scan",
)
def nested_scan_that_reads_stacks(x, table):
    def row(h, entries):
        return lax.scan(lambda g, e: (jnp.sin(g * e), jnp.tanh(g + e)), h, entries)

    h, seen = lax.scan(row, x, table)

    def turn(h, _):
        def inner(g, s):
            return jnp.tanh(g + jnp.sum(jnp.sin(seen) * jnp.cos(s * g), (0, 1))), None

        return lax.scan(inner, h, seen[0])[0], jnp.sum(seen * h)

    last, sums = lax.scan(turn, h, None, length=3)
    return jnp.sum(last**2) + jnp.sum(sums)


@program(
    "A scan over the stack of another, of one length with it, that reads that stack whole as well.",
    lambda: (normal(187, 3, 3), normal(188, 4, 3)),
    argnums=(0, 1),
    tags="scan",
)
def scan_over_a_stack_read_whole(matrix, sequence):
    last, seen = lax.scan(lambda h, s: (jnp.tanh(h @ matrix + s), jnp.sin(h)), jnp.ones(3), sequence)

    def step(h, s):
        return jnp.tanh(jax.nn.softmax(seen @ h) @ jnp.cos(seen)) * s, jnp.sin(h)

    end, waves = lax.scan(step, last, seen)
    return jnp.sum(end**2) + jnp.sum(waves * seen)
