"""A message-passing graph neural network that classifies the nodes of a random sparse graph.

Encode, process, decode: nodes and edges are embedded, then each round forms a message on every edge from its two
ends, sums the messages at their receivers, and updates the nodes; both streams are residual.
"""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs.program import Program, Size, Wrap, identity

Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """The graph, its features, and the model."""

    nodes: int
    edges: int
    node_features: int
    edge_features: int
    width: int
    rounds: int
    classes: int


SIZES: dict[Size, Config] = {
    "tiny": Config(12, 40, 5, 3, 8, 2, 3),
    "small": Config(2048, 12288, 64, 8, 128, 4, 16),
    "medium": Config(16384, 98304, 128, 16, 128, 8, 48),
    "large": Config(131072, 786432, 128, 16, 128, 15, 48),
}


def init(key: Array, config: Config) -> Params:
    """Draw the encoders, one edge and one node network per round, and the decoder."""
    width = config.width
    nodes, edges, decode, rounds = jax.random.split(key, 4)
    return {
        "nodes": init_mlp(nodes, config.node_features, width, width),
        "edges": init_mlp(edges, config.edge_features, width, width),
        "rounds": [init_round(k, config) for k in jax.random.split(rounds, config.rounds)],
        "decode": {
            "w": jax.random.normal(decode, (width, config.classes)) * width**-0.5,
            "b": jnp.zeros(config.classes),
        },
    }


def init_round(key: Array, config: Config) -> Params:
    """Draw one round: the network of the edges and that of the nodes."""
    width = config.width
    edge, node = jax.random.split(key)
    return {"edge": init_mlp(edge, 3 * width, width, width), "node": init_mlp(node, 2 * width, width, width)}


def init_mlp(key: Array, features: int, hidden: int, out: int) -> Params:
    """Draw two linear layers and start the layer norm after them as the identity."""
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (features, hidden)) * (2 / features) ** 0.5,
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(second, (hidden, out)) * hidden**-0.5,
        "b2": jnp.zeros(out),
        "scale": jnp.ones(out),
        "shift": jnp.zeros(out),
    }


def mlp(p: Params, x: Array) -> Array:
    """Linear, silu, linear, layer norm."""
    x = jax.nn.silu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-5) * p["scale"] + p["shift"]


def interact(p: Params, nodes: Array, edges: Array, senders: Array, receivers: Array) -> tuple[Array, Array]:
    """One round: update the `(edges, width)` and the `(nodes, width)` stream."""
    messages = mlp(p["edge"], jnp.concatenate([nodes[senders], nodes[receivers], edges], axis=-1))
    gathered = jax.ops.segment_sum(messages, receivers, nodes.shape[0])
    return nodes + mlp(p["node"], jnp.concatenate([nodes, gathered], axis=-1)), edges + messages


def loss(params: Params, graph: dict[str, Array], labels: Array, known: Array, block: Wrap = identity) -> Array:
    """Mean cross-entropy in nats over the nodes whose label is `known`; `block` wraps each round."""
    nodes, edges = mlp(params["nodes"], graph["nodes"]), mlp(params["edges"], graph["edges"])
    for p in params["rounds"]:
        nodes, edges = block(interact)(p, nodes, edges, graph["senders"], graph["receivers"])
    logits = nodes @ params["decode"]["w"] + params["decode"]["b"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)[:, 0]
    return -jnp.mean(picked, where=known)


def program(size: Size) -> Program:
    """One step on a graph with random ends, features and labels, half of them known."""
    config = SIZES[size]
    keys: Any = jax.random.split(jax.random.key(0), 7)
    graph = {
        "nodes": jax.random.normal(keys[1], (config.nodes, config.node_features)),
        "edges": jax.random.normal(keys[2], (config.edges, config.edge_features)),
        "senders": jax.random.randint(keys[3], (config.edges,), 0, config.nodes),
        "receivers": jax.random.randint(keys[4], (config.edges,), 0, config.nodes),
    }
    labels = jax.random.randint(keys[5], (config.nodes,), 0, config.classes)
    known = jax.random.bernoulli(keys[6], 0.5, (config.nodes,))
    title = f"{config.rounds} rounds of width {config.width}, {config.nodes} nodes, {config.edges} edges"
    arguments = (init(keys[0], config), graph, labels, known)
    return Program("gnn", title, loss, arguments, places=("block",), sizes=asdict(config))
