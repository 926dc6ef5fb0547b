"""Measure what an update inside the backward spares, by XLA's account of whole steps.

    python -m benchmarks.release          # all networks and optimisers; two minutes on two cores
    python -m benchmarks.release --quick  # narrower networks

Each network is trained by one `jax.jit` of `value_and_grad` and the update, with parameters and state donated, by
`aot.tape` and by `aot.function`. Nothing runs. A row says what one jit's temporaries hold in arrays as large as a
weight at their peak, by XLA's buffer assignment, and how much of the gradients' bytes anyone could save: all but the
largest gradient, or the largest slice of one where the layers are in a scan. The mark is 0.8 of the gradients less, or
half of what can be saved; where that is less than a tenth of the gradients, the row counts as reached.

On a CPU one jit updates each parameter as soon as its gradient is there, by itself, in a plain stack of layers. It does
not where a global norm joins all gradients, where a parameter is used in several places, and where layers are in a
scan, which makes the gradients of all of them before any is used. Ours updates there slice by slice, inside the scan.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

from benchmarks.measure import wide_console
from jointcut import aot
from jointcut.aot.report.liveness import Liveness

MARK, NOTHING = 0.8, 0.1
DEPTH, BATCH = 12, 16


def layers(count: int, width: int) -> list[Any]:
    """Weights and biases of layers of one width."""
    keys = jax.random.split(jax.random.key(0), count)
    return [(jax.random.normal(key, (width, width)) / width**0.5, jnp.zeros(width)) for key in keys]


def stacked(count: int, width: int) -> Any:
    """The same as one array of weights, and one of biases."""
    return tuple(map(jnp.stack, zip(*layers(count, width), strict=True)))


def mlp(params: Any, x: Any) -> Any:
    """A perceptron, and the mean of its squared output."""
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return jnp.mean(x**2)


def gated(params: Any, x: Any) -> Any:
    """A residual network with gates."""
    for w, b in params:
        h = x @ w + b
        x = x + jax.nn.gelu(h) * jax.nn.sigmoid(h)
    return jnp.mean(x**2)


def shared(params: Any, x: Any) -> Any:
    """A perceptron whose layers are run through three times."""
    for _ in range(3):
        for w, b in params:
            x = jnp.tanh(x @ w + b)
    return jnp.mean(x**2)


def tied(params: Any, x: Any) -> Any:
    """Layers between an embedding and its transpose."""
    x = params["table"][jnp.zeros(x.shape[0], jnp.int32)]
    for w, b in params["layers"]:
        x = jnp.tanh(x @ w + b)
    return jnp.mean(jax.nn.logsumexp(x @ params["table"].T, -1))


def scanned(params: Any, x: Any) -> Any:
    """A perceptron whose weights are one array, as are its biases, scanned over."""
    return jnp.mean(jax.lax.scan(lambda x, p: (jnp.tanh(x @ p[0] + p[1]), None), x, params)[0] ** 2)


class Network(NamedTuple):
    """A network, its parameters for a width, and how many slices of each a scan takes."""

    function: Callable[[Any, Any], Any]
    params: Callable[[int], Any]
    slices: int = 1


def _tied(width: int) -> Any:
    return {"table": jax.random.normal(jax.random.key(1), (8 * width, width)), "layers": layers(DEPTH // 2, width)}


NETWORKS = {
    "12 layers": Network(mlp, functools.partial(layers, DEPTH)),
    "12 gated layers": Network(gated, functools.partial(layers, DEPTH)),
    "12 layers, each used three times": Network(shared, functools.partial(layers, DEPTH)),
    "6 layers and tied embeddings": Network(tied, _tied),
    "12 layers in a scan": Network(scanned, functools.partial(stacked, DEPTH), DEPTH),
}


class Optimiser(NamedTuple):
    """An Optax transformation, and how often it needs the backward."""

    update: Any
    sweeps: int


def _clipped(inner: Any) -> Optimiser:
    return Optimiser(optax.chain(optax.clip_by_global_norm(0.01), inner), 2)


OPTIMISERS = {
    "SGD": Optimiser(optax.sgd(0.1), 1),
    "Adam": Optimiser(optax.adam(1e-3), 1),
    "clipped SGD": _clipped(optax.sgd(0.1)),
    "clipped Adam": _clipped(optax.adam(1e-3)),
}


class Found(NamedTuple):
    """Bytes of one step.

    Attributes:
        kept: of parameters, state and batch, which every step needs.
        gradients, largest: of all gradients, and of the largest one, or of a slice of it.
        one, tape, cut: of temporaries, in one jit, in `aot.tape` and in `aot.function`.
        held: of one jit's temporaries, in arrays as large as a weight, when most is alive.
        told: the peak that the plan of `aot.function` tells, arguments included.
    """

    kept: int
    gradients: int
    largest: int
    one: int
    tape: int
    cut: int
    held: int
    told: int

    @property
    def most(self) -> int:
        """The most that anyone could save of one jit's temporaries: gradients that wait beside the largest."""
        return max(min(self.one, self.held) - self.largest, 0)

    def saved(self, ours: int) -> float:
        """The part of the gradients' bytes by which temporaries are fewer than one jit's."""
        return (self.one - ours) / self.gradients

    @property
    def is_reached(self) -> bool:
        """Whether both of ours save enough, or half of what can be saved, or there is less than a tenth to save."""
        little = self.most < NOTHING * self.gradients
        return little or all(self.saved(x) >= MARK or self.one - x >= self.most / 2 for x in (self.tape, self.cut))


def found(network: Network, optimiser: Optimiser, width: int) -> Found:
    """The bytes of one step of a network of some width."""
    params, x = network.params(width), jnp.ones((BATCH, width))
    state, (update, sweeps), function = optimiser.update.init(params), optimiser, network.function
    taped, made = aot.tape(function), aot.function(function)

    def plain(params: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(function)(params, x)
        changes, state = update.update(gradients, state, params)
        return value, optax.apply_updates(params, changes), state

    def released(params: Any, state: Any, x: Any) -> Any:
        return taped.value_and_update(params, state, x, update=update, sweeps=sweeps)

    one, ours = (jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x).compile() for step in (plain, released))
    traced = made.trace_update(params, state, x, update=update, sweeps=sweeps)
    cut = traced.partition()
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
    chosen = cut.pareto().chosen
    assert chosen is not None, "the front marks the plan"
    return Found(
        kept=sum(leaf.nbytes for leaf in jax.tree.leaves((params, state, x))),
        gradients=sum(sizes),
        largest=max(sizes) // network.slices,
        one=temporaries(one),
        tape=temporaries(ours),
        cut=cut.compile().activation_bytes,
        held=held_in(one, min(size for size in sizes if size >= max(sizes) // 16) // 2),  # biases are smaller
        told=chosen.peak_bytes,
    )


def returned(network: Network, width: int) -> int:
    """XLA's bytes of temporaries of a program that returns all gradients, without an update."""
    args = network.params(width), jnp.ones((BATCH, width))
    return temporaries(jax.jit(jax.value_and_grad(network.function)).lower(*args).compile())


def temporaries(compiled: Any) -> int:
    """XLA's bytes of temporaries of a compiled program."""
    return compiled.memory_analysis().temp_size_in_bytes


def held_in(compiled: Any, least: int) -> int:
    """The bytes of temporaries in arrays of at least so many bytes, when the most temporaries are alive."""
    life = Liveness.of(compiled)
    if life is None:
        return 0
    times = range(len(life.order.instructions))
    alive = [{(v.offset, v.size) for v in life.values if v.start <= time <= v.end} for time in times]
    top = max(alive, key=lambda places: sum(size for _, size in places), default=set())
    return sum(size for _, size in top if size >= least)


def table(width: int) -> Table:
    """A row for each network and optimiser, red where the mark is missed."""
    made = Table(
        "network, optimiser", "gradients", "one jit's temporaries", "to save", "aot.tape", "aot.function", "told"
    )
    for name, network in NETWORKS.items():
        for by, optimiser in OPTIMISERS.items():
            row = found(network, optimiser, width)
            of = row.gradients
            peak = row.kept + row.cut
            made.add_row(
                f"{name}, {by}",
                f"{of / 2**20:.2f} MiB",
                f"{row.one / 2**20:.2f} MiB, {row.held / of:.2f} in such arrays",
                f"{row.most / of:.2f}",
                f"{row.tape / 2**20:.2f} MiB, {row.saved(row.tape):+.2f}",
                f"{row.cut / 2**20:.2f} MiB, {row.saved(row.cut):+.2f}",
                f"{row.told / peak:.3f} of the peak",
                style=None if row.is_reached else "red",
            )
    return made


def main() -> None:
    """Measure, and print one table; its fractions are of the gradients' bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="narrower networks")
    width = 128 if parser.parse_args().quick else 512
    console: Console = wide_console(150)
    with jax.numpy_dtype_promotion("standard"):
        console.print(table(width))


if __name__ == "__main__":
    main()
