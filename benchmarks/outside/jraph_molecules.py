"""A graph network in jraph: batched molecules, whose edges, atoms and totals are updated in rounds.

Each round updates every edge from its ends, every atom from the edges around it, weighed by attention, and the total of
each graph from both; all are residual and normalised. Graphs are padded to one size, as `jit` wants it. The MLPs are
Linen's. Several properties of each molecule are predicted at once, some of which are not known.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph
import numpy as np
from jax import Array

from benchmarks.programs.program import Program, Size


@dataclass(frozen=True)
class Config:
    """Molecules in a batch, atoms in each, bonds and near pairs of each atom, properties, and the model."""

    graphs: int
    atoms: int
    degree: int
    properties: int
    width: int
    rounds: int
    kinds: int = 16


SIZES: dict[Size, Config] = {
    "tiny": Config(2, 4, 2, 3, 4, 1),
    "small": Config(24, 20, 10, 32, 64, 4),
}


class Update(nn.Module):
    """A residual MLP with layer norm, on what is concatenated."""

    width: int

    @nn.compact
    def __call__(self, own: Array, *others: Array) -> Array:
        """Map `(n, width)` and what belongs to the same rows to `(n, width)`."""
        x = nn.LayerNorm()(jnp.concatenate([own, *others], axis=-1))
        return own + nn.Dense(self.width)(nn.relu(nn.Dense(2 * self.width)(x)))


class Network(nn.Module):
    """Encode, pass messages in rounds, and read each graph's total."""

    config: Config

    @nn.compact
    def __call__(self, graph: jraph.GraphsTuple) -> Array:
        """Logits `(graphs, properties)`."""
        config, width = self.config, self.config.width
        encode = jraph.GraphMapFeatures(nn.Dense(width), nn.Embed(config.kinds, width), nn.Dense(width))
        graph = encode(graph)
        for _ in range(config.rounds):
            graph = self.round()(graph)
        return nn.Dense(config.properties)(nn.LayerNorm()(graph.globals))

    def round(self) -> Any:
        """One round of messages, as a function of a graph."""
        edge, node, total = (Update(self.config.width) for _ in range(3))
        score = nn.Dense(1)

        def logits(edges: Array, sent: Array, received: Array, totals: Array) -> Array:
            del totals  # the same for all edges of a graph
            return nn.leaky_relu(score(jnp.concatenate([edges, sent, received], axis=-1)))

        return jraph.GraphNetwork(
            update_edge_fn=edge,
            update_node_fn=node,
            update_global_fn=lambda nodes, edges, totals: total(totals, nodes, edges),
            attention_logit_fn=logits,
            attention_reduce_fn=lambda edges, weights: edges * weights,
        )


def loss(params: Any, graph: jraph.GraphsTuple, labels: Array, known: Array, model: Network) -> Array:
    """Mean binary cross-entropy in nats of the properties that are known, of the graphs that are no padding."""
    logits: Any = model.apply({"params": params}, graph)
    counts = known & jraph.get_graph_padding_mask(graph)[:, None]
    each = jax.nn.softplus(jnp.where(labels, -logits, logits))
    return jnp.sum(jnp.where(counts, each, 0.0)) / jnp.sum(counts)


def molecule(draws: np.random.Generator, config: Config) -> jraph.GraphsTuple:
    """Atoms at random places, of random kinds, and an edge from each to those near it."""
    count = int(draws.integers(config.atoms // 2, config.atoms + 1))
    places = draws.normal(size=(count, 3)).astype(np.float32)
    apart = places[:, None] - places
    distances = np.linalg.norm(apart, axis=-1)
    degree = min(config.degree, count - 1)
    senders = np.argsort(distances, axis=1)[:, 1 : degree + 1].reshape(-1)
    receivers = np.repeat(np.arange(count), degree)
    edges = np.concatenate([apart[receivers, senders], distances[receivers, senders][:, None]], axis=1)
    return jraph.GraphsTuple(
        nodes=draws.integers(0, config.kinds, count),
        edges=edges,
        senders=senders,
        receivers=receivers,
        globals=np.ones((1, 1), np.float32),
        n_node=np.array([count]),
        n_edge=np.array([count * degree]),
    )


def program(size: Size) -> Program:
    """One step on random molecules and properties, three quarters of them known."""
    config, draws = SIZES[size], np.random.default_rng(0)
    most_atoms = config.graphs * config.atoms
    batch = jraph.batch_np([molecule(draws, config) for _ in range(config.graphs)])
    padded = jraph.pad_with_graphs(batch, most_atoms + 1, most_atoms * config.degree, config.graphs + 1)
    graph = jax.tree.map(jnp.asarray, padded)
    shape = (config.graphs + 1, config.properties)
    labels, known = jnp.asarray(draws.random(shape) < 0.5), jnp.asarray(draws.random(shape) < 0.75)
    model = Network(config)
    params = jax.jit(model.init)(jax.random.key(0), graph)["params"]
    edges = most_atoms * config.degree
    title = f"{config.rounds} rounds of width {config.width}, {config.graphs} graphs, at most {edges} edges"
    function = partial(loss, model=model)
    return Program("jraph-molecules", title, function, (params, graph, labels, known), sizes=asdict(config))
