"""Measure tapes: how much faster a captured backward is than JAX's eager pullback, captures, hits, and release.

    python -m benchmarks.tape          # all parts; some minutes on two cores
    python -m benchmarks.tape --quick  # shorter rows

Times are the medians of interleaved runs. Each line says what the mark is, and whether it is reached.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measure import wide_console
from benchmarks.release import MARK, NETWORKS, OPTIMISERS, found, layers, mlp, returned
from jointcut import aot
from jointcut.aot.stages.padding.named import SizeNames
from jointcut.aot.tape.sweep import Sweep

Row = tuple[str, str, str, bool]
WIDTH = 64


def tree_lstm(params: Any, tree: Any) -> Any:
    """The squared root state of a binary Tree-LSTM; a leaf of the tree is a vector, a node a pair."""

    def cell(node: Any) -> tuple[Any, Any]:
        if not isinstance(node, tuple):
            x = params["in"] @ node
            return jnp.tanh(x), jnp.zeros_like(x)
        (left, c_left), (right, c_right) = map(cell, node)
        gates = params["gates"] @ jnp.concatenate([left, right])
        i, f, g, o, u = jnp.split(gates, 5)
        c = jax.nn.sigmoid(i) * jnp.tanh(u) + jax.nn.sigmoid(f) * c_left + jax.nn.sigmoid(g) * c_right
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    return jnp.sum(cell(tree)[0] ** 2)


def rnn(w: Any, xs: Any) -> Any:
    """A plain recurrent network, unrolled."""
    h = jnp.zeros(w.shape[0])
    for x in xs:
        h = jnp.tanh(w @ h + x)
    return jnp.sum(h**2)


def early_exit(params: Any, x: Any, enough: float) -> Any:
    """A perceptron that stops once its values are small enough."""
    for w, b in params:
        x = jnp.tanh(x @ w + b)
        if float(jnp.max(jnp.abs(x))) < enough:
            break
    return jnp.mean(x**2)


def median_ms(runs: list[Callable[[], Any]], times: int, percent: float = 50) -> list[float]:
    """The median time of each of some functions, run in turns, or another percentile; each has run once before."""
    for run in runs:
        jax.block_until_ready(run())
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(times):
        for run, own in zip(runs, taken, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run())
            own.append(1e3 * (time.perf_counter() - start))
    return [float(np.percentile(own, percent)) for own in taken]


def parse_tree(rng: Any, leaves: int) -> Any:
    """A random binary tree of vectors."""
    if leaves == 1:
        return jnp.asarray(rng.standard_normal(WIDTH), jnp.float32)
    left = int(rng.integers(1, leaves))
    return parse_tree(rng, left), parse_tree(rng, leaves - left)


def lstm_params() -> Any:
    """Weights of the Tree-LSTM."""
    a, b = jax.random.split(jax.random.key(1))
    gates = jax.random.normal(a, (5 * WIDTH, 2 * WIDTH)) / (2 * WIDTH) ** 0.5
    return {"gates": gates, "in": jax.random.normal(b, (WIDTH, WIDTH)) / WIDTH**0.5}


def backwards(quick: bool) -> Iterator[Row]:
    """The backward alone, beside JAX's eager pullback, and beside a jitted function's own backward."""
    times = 5 if quick else 30
    x, tree = jnp.ones((8, WIDTH)), parse_tree(np.random.default_rng(0), 12)
    cases = {
        "MLP of 40 layers": (mlp, layers(40, WIDTH), x),
        "Tree-LSTM of 12 leaves": (tree_lstm, lstm_params(), tree),
    }
    for name, (function, params, data) in cases.items():
        _, ours = aot.tape(lambda p, f=function, d=data: f(p, d)).vjp(params)
        _, eager = jax.vjp(lambda p, f=function, d=data: f(p, d), params)
        out, jitted = jax.vjp(jax.jit(lambda p, f=function, d=data: f(p, d)), params)
        one = jnp.ones_like(out)
        us, them, best = median_ms([functools.partial(p, one) for p in (ours, eager, jitted)], times)
        yield f"{name}: eager jax.vjp's pullback", f"{them:.2f} ms", f"{us:.2f} ms, {them / us:.1f}x", them >= 5 * us
        yield f"{name}: jax.vjp of jax.jit", f"{best:.2f} ms", f"{us:.2f} ms, {us / best:.2f}x", us <= 1.1 * best


def forwards(quick: bool) -> Iterator[Row]:
    """The whole step: eager forward and captured backward, beside plain eager JAX."""
    params, x = layers(40, WIDTH), jnp.ones((8, WIDTH))
    taped = aot.tape(mlp)
    us, them = median_ms(
        [lambda: taped.value_and_grad(params, x), lambda: jax.value_and_grad(mlp)(params, x)], 5 if quick else 30
    )
    yield "MLP of 40 layers: whole eager step", f"{them:.1f} ms", f"{us:.1f} ms, {them / us:.1f}x", us <= them


def shape_of(tree: Any) -> Any:
    """A tree without its vectors."""
    return tuple(map(shape_of, tree)) if isinstance(tree, tuple) else 0


def captures(quick: bool) -> Iterator[Row]:
    """As many captures as structures."""
    rng = np.random.default_rng(1)
    shapes, trees, params = (6, 20, lstm_params()) if quick else (60, 500, lstm_params())
    kinds: dict[Any, Any] = {}
    while len(kinds) < shapes:
        tree = parse_tree(rng, int(rng.integers(2, 8)))
        kinds.setdefault(shape_of(tree), tree)
    taped, drawn = aot.tape(tree_lstm), list(kinds.values())
    for i in range(trees):
        taped.grad(params, jax.tree.map(lambda x, i=i: x * (1 + i), drawn[i % shapes]))
    yield made(f"Tree-LSTM, {trees} trees", f"{shapes} shapes", taped, shapes)
    exits, network = aot.tape(early_exit), layers(8, WIDTH)
    for enough in rng.uniform(0.2, 1.0, 10 if quick else 40):
        exits.grad(network, jnp.ones((2, WIDTH)), float(enough))
    depths = {capture.ops for capture in exits.captures}
    yield made("early exit, 8 layers", f"{len(depths)} depths", exits, len(depths))


def made(what: str, structures: str, taped: aot.Taped, count: int) -> Row:
    """Whether a tape made so many captures."""
    return what, structures, f"{taped.captures.made} captures", taped.captures.made == count


def lengths(quick: bool) -> Iterator[Row]:
    """A capture for each length of a loop, and few for all of them where it is rolled up."""
    most = 10 if quick else 100
    unrolled, rolled, w = aot.tape(rnn), aot.tape(rnn, roll=True), jnp.eye(16)
    for length in range(1, most + 1):
        unrolled.grad(w, list(jnp.ones((length, 16))))
        rolled.grad(w, list(jnp.ones((length, 16))))
    yield made(f"RNN, lengths 1 to {most}", f"{most} lengths", unrolled, most)
    few = rolled.captures.made
    yield f"RNN, lengths 1 to {most}, roll=True", "3 captures", f"{few} captures", few <= 3


def sizes(quick: bool) -> Iterator[Row]:
    """Two captures for all batch sizes, and the seconds with a capture for each."""
    count, rng = 8 if quick else 40, np.random.default_rng(2)
    network = layers(6, WIDTH)
    inputs = [jnp.asarray(rng.standard_normal((n, WIDTH)), jnp.float32) for n in rng.permutation(range(8, 8 + count))]
    taken = []
    for choice in ("dynamic", None):
        taped, start = aot.tape(mlp, sizes=choice), time.perf_counter()
        grads = [jax.block_until_ready(taped.grad(network, x)) for x in inputs]
        taken.append((taped.captures.made, time.perf_counter() - start, grads))
    (made_, seconds, ours), (each, before, theirs) = taken
    apart = max(map(distance, ours, theirs))
    told = f"{made_} captures, {seconds:.1f} s, gradients apart by {apart:.0e}"
    yield f"{count} batch sizes", f"{each} captures, {before:.1f} s", told, made_ <= 2 and apart <= 2e-6


def ragged(quick: bool) -> Iterator[Row]:
    """A batch of sequences of 1 to 200 steps, in a list or padded to the longest, trained for 100 steps."""
    steps, rng = 5 if quick else 100, np.random.default_rng(3)
    kinds: dict[str, Callable[..., Any]] = {"a list of 4": listed_loss, "padded to the longest of 4": padded_loss}
    for kind, loss in kinds.items():
        w, taped, start, apart = jnp.eye(16) / 2, aot.tape(loss, sizes="dynamic"), time.perf_counter(), 0.0
        for step in range(steps):
            found = [jnp.asarray(rng.standard_normal((n, 16)), jnp.float32) for n in rng.integers(1, 201, 4)]
            given = (found,) if loss is listed_loss else padded_batch(found)
            grad = taped.grad(w, *given)
            if step % (steps // 5) == steps // 5 - 1:
                apart = max(apart, distance(grad, jax.grad(loss)(w, *given)))
            w = w - 0.1 * grad
        count, seconds = taped.captures.made, time.perf_counter() - start
        told = f"{count} captures, {seconds:.1f} s, gradients apart by {apart:.0e}"
        yield f"{steps} steps on sequences, {kind}", "4 captures", told, count <= 4 and apart <= 2e-6


def states(w: Any, x: Any) -> Any:
    """The states of a recurrent network over a sequence."""
    return jax.lax.scan(lambda h, y: (jnp.tanh(h @ w + y),) * 2, jnp.zeros(w.shape[0]), x)[1]


def listed_loss(w: Any, sequences: list[Any]) -> Any:
    """The mean square of all states, by sequence."""
    return sum(jnp.mean(states(w, x) ** 2) for x in sequences) / len(sequences)


def padded_loss(w: Any, batch: Any, lengths: Any) -> Any:
    """The same for a batch that is padded to its longest sequence."""
    squares = jnp.sum(jax.vmap(lambda x: states(w, x))(batch) ** 2, axis=-1)
    is_there = jnp.arange(batch.shape[1]) < lengths[:, None]
    return jnp.mean(jnp.sum(jnp.where(is_there, squares, 0), axis=1) / (w.shape[0] * lengths.astype(w.dtype)))


def padded_batch(sequences: list[Any]) -> tuple[Any, Any]:
    """Sequences as one array, and their lengths."""
    most = max(map(len, sequences))
    rows = [np.pad(np.asarray(x), ((0, most - len(x)), (0, 0))) for x in sequences]
    return jnp.asarray(np.stack(rows)), jnp.asarray([len(x) for x in sequences])


def distance(ours: Any, theirs: Any) -> float:
    """The largest difference of two trees of gradients, by the largest number of each array."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


def loops(quick: bool) -> Iterator[Row]:
    """A capture for four calls of a function that makes a loop of ours anew at each, and the time of the last call."""
    del quick
    kinds: dict[str, Callable[[Any], Any]] = {
        "while_loop": lambda w: aot.while_loop(lambda c: c[0] < 8, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, w))[1],
        "fori_loop": lambda w: aot.fori_loop(0, 8, lambda _, c: jnp.sin(c), w),
        "scan": lambda w: aot.scan(lambda c, _: (jnp.sin(c), c), w, length=8)[1],
        "while_loop_stack_output": lambda w: (
            aot.while_loop_stack_output(lambda c: jnp.sum(c) > 1, lambda c: c / 2, w, max_trips=8).carries
        ),
    }
    for name, kind in kinds.items():
        taped, ms = aot.tape(lambda w, kind=kind: jnp.sum(kind(w))), 0.0
        for scale in (1.0, 1.5, 2.0, 2.5):
            start = time.perf_counter()
            jax.block_until_ready(taped.grad(jnp.full(WIDTH, scale)))
            ms = 1e3 * (time.perf_counter() - start)
        count = taped.captures.made
        yield f"aot.{name}, made anew in 4 calls", "1 capture", f"{count} captures, the last {ms:.0f} ms", count == 1


def hits(quick: bool) -> Iterator[Row]:
    """The time to find the program of a structure that is known."""
    del quick
    _, pullback = aot.tape(lambda w, xs: rnn(w, list(xs))).vjp(jnp.eye(16), jnp.ones((124, 16)))
    ran = pullback._tape.ran
    assert ran is not None, "a tape that was just recorded"
    taken = []
    for _ in range(50):
        start = time.perf_counter()
        sweep = Sweep.of([seed for seed in ran.seeds if seed is not None], ran.tape.leaves)
        hash(sweep.key)
        taken.append(1e3 * (time.perf_counter() - start))
    ms = float(np.median(taken))
    yield f"to find the program of {len(sweep.nodes)} ops", "1 ms", f"{ms:.2f} ms", ms <= 1.0
    yield from hits_with_sizes()


def hits_with_sizes() -> Iterator[Row]:
    """What `sizes` adds to a call whose program is known: names on a tape, padded arrays in a function."""
    params, names = layers(40, 16), SizeNames()
    given = [jnp.ones((rows, 16)) for rows in (8, 12, 64)]
    for x in given:
        names.of((params, x), {})
    count = len(jax.tree.leaves((params, given[0])))
    (ms,) = median_ms([lambda: names.of((params, given[1]), {}) and None], 200)
    yield f"names of the sizes of {count} arguments", "0.5 ms", f"{ms:.2f} ms", ms <= 0.5
    plain, sized = aot.function(mlp), aot.function(mlp, sizes="dynamic")
    for x in given:
        jax.block_until_ready((plain.value_and_grad(params, x), sized.value_and_grad(params, x)))
    runs = [lambda f=f, x=x: f.value_and_grad(params, x) for f, x in ((plain, given[2]), (sized, given[1]))]
    alone, padded = median_ms(runs, 400, 10)  # others may use the machine
    told = f"{padded:.2f} ms, padded from 12 rows"
    yield "aot.function of 40 layers, 64 rows", f"{alone:.2f} ms", told, padded <= alone + 0.5


def released(quick: bool) -> Iterator[Row]:
    """XLA's temporaries of a step with an update, and how much of the gradients' bytes it lacks; see `release`."""
    width = 128 if quick else 512
    with jax.numpy_dtype_promotion("standard"):
        for name in list(NETWORKS)[: 1 if quick else None]:
            without = returned(NETWORKS[name], width)
            for by in OPTIMISERS:
                row = found(NETWORKS[name], OPTIMISERS[by], width)
                parts = f"{row.held / row.gradients:.2f} of the gradients in it, {row.most / row.gradients:.2f} to save"
                yield (
                    f"{name}, {by}: one jit",
                    f"{row.one / 2**20:.1f} MiB, {parts}",
                    f"{row.tape / 2**20:.1f} MiB, {row.saved(row.tape):+.2f} of the gradients less",
                    row.is_reached,
                )
                apart = without + row.gradients
                yield (
                    f"{name}, {by}: two programs",
                    f"{apart / 2**20:.1f} MiB",
                    f"{(apart - row.tape) / row.gradients:+.2f} of the gradients less",
                    apart - row.tape >= MARK * (row.gradients - row.largest) or row.one - row.tape >= row.most / 2,
                )


PARTS = (backwards, forwards, captures, lengths, sizes, ragged, loops, hits, released)


def table(rows: list[Row]) -> Table:
    """The rows, red where they miss the mark."""
    made = Table("what", "beside", "aot.tape", "mark")
    for what, beside, ours, reached in rows:
        made.add_row(what, beside, ours, "reached" if reached else "missed", style=None if reached else "red")
    return made


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter rows")
    quick = parser.parse_args().quick
    console: Console = wide_console(140)
    rows = [row for part in PARTS for row in part(quick)]
    console.print(table(rows))


if __name__ == "__main__":
    main()
