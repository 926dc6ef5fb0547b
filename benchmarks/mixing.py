"""Run random programs block by block along every axis that the analysis allows, and compare with plain JAX.

    python -m benchmarks.mixing                       # 2,000 programs
    python -m benchmarks.mixing --count 1 --seed 1234 # one that failed, alone

Each program takes a batch of rows, and mixes them in subtle ways, or not at all: cumulative sums, sorts, batch
statistics, rolls, gathers across the batch, scatters with shared places, a softmax over the batch, `x - x[::-1]`, keys
split by example. Its joint program is tiled around its largest values, along each axis, with forward and backward of a
block together and apart, in blocks that divide the rows and in blocks that do not, some of which compute values again;
every other program is for a CPU and adds products in pieces. Values and gradients must equal `jax.vjp` in float64.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks.random_programs import Program
from jointcut import aot
from jointcut.aot.trace.joint import Joint
from jointcut.partition.plans.backend import CPU, PORTABLE, Backend
from jointcut.partition.program.jax import abstract, jaxprs, jitting, runtime
from jointcut.partition.program.roles import Tile
from jointcut.partition.tiles import pieces
from jointcut.partition.tiles.tile import grown, variables

ROWS, WIDTH = 6, 4
MOST = 6  # tilings of each program
RTOL = 1e-9

#: Lines that make an array of rows and features from others: `{a}` and `{b}`.
APART = (
    "jnp.tanh({a} @ w)",
    "{a} * {b}",
    "jnp.where({b} > 0, {a}, 0.5 * {a})",
    "{a} / (1 + jnp.abs({b}))",
    "jax.nn.softmax({a}, axis=1)",
    "{a} - jnp.mean({a}, axis=1, keepdims=True)",
    "jnp.cumsum({a}, axis=1)",
    "jnp.sort({a}, axis=1)",
    "{a}[:, ::-1]",
    "jnp.roll({a}, 1, axis=1)",
    "jnp.concatenate([{a}[:, 1:], {b}[:, :1]], axis=1)",
    "jnp.take_along_axis({a}, places % 4, axis=1)",
    "{a} * jnp.arange(6.0)[:, None]",
    "{a} * jax.random.normal(key, (6, 4), {a}.dtype)",
    "{a} * jax.random.bernoulli(key, 0.5, (6, 4))",
    "{a} + jax.vmap(lambda k: jax.random.normal(k, (4,), {a}.dtype))(jax.random.split(key, 6))",
    "jax.vmap(lambda r: jnp.outer(r, v) @ r)({a})",
    "jax.nn.relu({a}) + v",
    "jax.lax.scan(lambda c, r: (jnp.tanh(c * r[:, None] + {a}), c.sum(1)), {a}, {b}.T)[0]",
    "jax.lax.cond(v[0] > 0, lambda a: jnp.sin(a), lambda a: a * v, {a})",
    "jax.checkpoint(lambda a: jnp.sin(a @ w) * a)({a})",
    "jnp.einsum('nd,de->ne', {a}, w, precision='highest')",
)
#: The same, but rows meet.
MIXED = (
    "jnp.cumsum({a}, axis=0)",
    "jnp.sort({a}, axis=0)",
    "{a} - jnp.mean({a}, axis=0)",
    "({a} - jnp.mean({a}, axis=0)) / jnp.sqrt(jnp.var({a}, axis=0) + 1e-3)",
    "jnp.roll({a}, 1, axis=0)",
    "{a} - {b}[::-1]",
    "{a}[order]",
    "{a}.at[places[:, 0]].add({b})",
    "jax.ops.segment_sum({a}, places[:, 0], 6)",
    "jax.nn.softmax({a}, axis=0)",
    "jnp.concatenate([{a}[1:], {b}[:1]])",
    "({a} @ {b}.T) @ {a} / 10",
    "{a} @ ({b}.T @ {b}) / 10",
    "{a} / (1 + jnp.max(jnp.abs({b})))",
    "jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), v, {a})[1]",
    "jax.lax.associative_scan(jnp.add, {a} * {b})",
    "jnp.broadcast_to({a}[2], (6, 4)) * {b}",
    "{a}.at[::2].set({b}[::2])",
    "jnp.reshape({a}.reshape(3, 2, 4).sum(1, keepdims=True) * jnp.ones((1, 2, 1)), (6, 4))",
)
#: Losses of an array of rows.
LOSSES = (
    "jnp.sum({a})",
    "jnp.mean({a} ** 2)",
    "jnp.sum(weights * jnp.sum({a}, axis=1)) / jnp.sum(weights)",
    "jnp.sum(jnp.where(weights > 0.5, jnp.sum({a} ** 2, axis=1), 0)) / jnp.maximum(jnp.sum(weights > 0.5), 1)",
    "jax.nn.logsumexp({a})",
    "jnp.max(jnp.sum({a}, axis=1))",
    "jnp.sqrt(jnp.sum({a} ** 2) + 1)",
    "jnp.mean(jax.nn.logsumexp({a}, axis=1) - jnp.take_along_axis({a}, places[:, :1] % 4, axis=1)[:, 0])",
)


class Rows(Program):
    """One random program of rows."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Two weights and a batch, which are differentiated; then weights of rows, places, an order and a key."""
        draws = np.random.default_rng(self.seed)
        w, v, x = (draws.normal(size=shape) for shape in ((WIDTH, WIDTH), (WIDTH,), (ROWS, WIDTH)))
        places = draws.integers(0, ROWS, (ROWS, WIDTH)).astype(np.int32)
        data = draws.uniform(size=ROWS), places, draws.permutation(ROWS).astype(np.int32)
        return *map(jnp.asarray, (w, v, x, *data)), jax.random.key(self.seed)


def program(seed: int) -> Rows:
    """The program of a seed."""
    draws = random.Random(seed)
    lines, names = ["def loss(w, v, x, weights, places, order, key):"], ["x"]
    for n in range(draws.randint(2, 5)):
        form = draws.choice(MIXED if draws.random() < 0.3 else APART)
        lines.append(f"    a{n} = {form.format(a=names[-1], b=draws.choice(names))}")
        names.append(f"a{n}")
    total = draws.choice(LOSSES).format(a=names[-1])
    if draws.random() < 0.3:
        total += f" + 0.1 * {draws.choice(LOSSES).format(a=draws.choice(names))}"
    text = "\n".join([*lines, f"    return {total}"]) + "\n"
    space: dict[str, Any] = {"jax": jax, "jnp": jnp}
    exec(compile(text, f"<program {seed}>", "exec"), space)
    return Rows(seed, text, space["loss"])


def joint_of(rows: Rows) -> tuple[Joint, list[Any]]:
    """The joint program, and its arguments with a cotangent of one."""
    program = aot.function(rows.loss, argnums=(0, 1, 2)).trace(*rows.arguments).program
    return program, [*program.consts, *rows.arguments, jnp.ones(())]


def tilings(program: Joint, backend: Backend) -> Iterator[tuple[Tile, Any]]:
    """Tiled programs around the largest values, each way once, with their tiles."""
    numbered = variables(program.closed)
    order = sorted(range(len(numbered)), key=lambda n: -abstract.aval_bytes(numbered[n].aval))
    seen = set[Any]()
    for n in order:
        shape = getattr(numbered[n].aval, "shape", ())
        for axis, size in enumerate(shape):
            for is_early in (True, False):
                block_bytes = 0 if is_early and len(seen) % 4 < 2 else None
                tile = Tile(n, axis, 0, min(2 + len(seen) % 3, max(size, 1)), is_early, block_bytes=block_bytes)
                found = grown(program.closed, program.roles, tile) if size > 1 else None
                if found is None or (is_early, found.tiling.eqns) in seen:
                    continue
                seen.add((is_early, found.tiling.eqns))
                yield tile, program.with_tile(tile, backend).closed
                if len(seen) >= MOST:
                    return


def check(rows: Rows) -> int:
    """Compare all tilings of a program with `jax.vjp`; returns their number."""
    loss, arguments = rows.loss, rows.arguments
    value, pull = jax.vjp(lambda *given: loss(*given, *arguments[3:]), *arguments[:3])
    expected = [value, *pull(jnp.ones((), value.dtype))]
    program, given = joint_of(rows)
    count = 0
    with jitting.replaced(pieces, "LEAST_BYTES", 1):
        made = [*tilings(program, CPU if rows.seed % 2 else PORTABLE)]
    for tile, closed in made:
        count += 1
        for got, want in zip(runtime.evaluate(closed, *given), expected, strict=True):
            error = float(jnp.max(jnp.abs(got - want)) / (1 + jnp.max(jnp.abs(want))))
            if not error <= RTOL and bool(jnp.all(jnp.isfinite(want))):
                raise AssertionError(f"{tile}: a result differs by {error:.1e} of its largest number\n{rows.text}")
        jaxprs.check(closed)
    return count


def main() -> None:
    """Check programs, and print the number of tilings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    total, failed = 0, list[int]()
    for seed in tqdm(range(given.seed, given.seed + given.count)):
        try:
            total += check(program(seed))
        except (AssertionError, TypeError, ValueError) as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}")
        if seed % 50 == 49:
            jax.clear_caches()
    print(f"{given.count} programs, {total} tilings, {len(failed)} failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
