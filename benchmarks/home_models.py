"""Models in their libraries' own idiom: a loss, what it is called with, and the ways in which people take its gradient.

A *way* makes a training step of a loss. It is given the loss as plain JAX has it or as `aot.function` made it, so that
both run through the same code of the library.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

Loss = Callable[..., Any]
Step = Callable[[], float]  # trains one step more, and gives its loss
Start = Callable[[], Step]  # makes a fresh model
RATE = 0.05


@dataclass(frozen=True)
class Home:
    """One model.

    Attributes:
        name, title: of the model.
        loss: `loss(model or parameters, step's key, batch)`.
        ways: by name, what starts training with a loss.
        pure: the gradient step as a function of arrays, for XLA's account: called with a loss.
        arguments: of that function.
    """

    name: str
    title: str
    loss: Loss
    ways: Mapping[str, Callable[[Loss], Start]]
    pure: Callable[[Loss], Callable[..., Any]]
    arguments: tuple[Any, ...]


def training(
    value_and_grad: Callable[..., Any], fresh: Callable[[], Any], batch: Array, wrap: Callable[..., Any] = lambda f: f
) -> Start:
    """Train a model that is a tree, made by `fresh`, with Optax; `wrap` compiles a whole step."""
    optimizer = optax.sgd(RATE)

    @wrap
    def once(model: Any, state: Any, key: Array) -> Any:
        value, gradient = value_and_grad(model, key, batch)
        updates, state = optimizer.update(gradient, state)
        return eqx.apply_updates(model, updates), state, value

    def start() -> Step:
        model = fresh()
        state, key = optimizer.init(eqx.filter(model, eqx.is_inexact_array)), jax.random.key(2)

        def step() -> float:
            nonlocal model, state, key
            key, now = jax.random.split(key)
            model, state, value = once(model, state, now)
            return float(value)

        return step

    return start


# ------------------------------------------------------------------------------------------------------------- NNX


class Stage(nnx.Module):
    """Two convolutions, each normalised over the batch, and dropout between them."""

    def __init__(self, taken: int, given: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(taken, given, (3, 3), rngs=rngs)
        self.first_norm = nnx.BatchNorm(given, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.second = nnx.Conv(given, given, (3, 3), rngs=rngs)
        self.second_norm = nnx.BatchNorm(given, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Map `(rows, side, side, taken)` to `(rows, side, side, given)`."""
        x = nnx.gelu(self.first_norm(self.first(x)))
        return nnx.gelu(self.second_norm(self.second(self.drop(x))))


class UNet(nnx.Module):
    """Halve the side twice, double it twice, and pass each stage's output across."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.down = nnx.List([Stage(3, width, rngs), Stage(width, 2 * width, rngs)])
        self.bottom = Stage(2 * width, 4 * width, rngs)
        self.up = nnx.List([Stage(6 * width, 2 * width, rngs), Stage(3 * width, width, rngs)])
        self.last = nnx.Conv(width, 3, (1, 1), rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Map images `(rows, side, side, 3)` to images of the same shape."""
        passed = []
        for stage in self.down:
            x = stage(x)
            passed.append(x)
            x = nnx.avg_pool(x, (2, 2), (2, 2))
        x = self.bottom(x)
        for stage, across in zip(self.up, reversed(passed), strict=True):
            x = jax.image.resize(x, (*across.shape[:3], x.shape[3]), "nearest")
            x = stage(jnp.concatenate([x, across], axis=-1))
        return self.last(x)


def trained(once: Callable[[UNet, nnx.Optimizer], Array]) -> Start:
    """Train a fresh U-Net by `once`, which writes to the model and to its optimiser."""

    def start() -> Step:
        model = UNet(32, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(RATE), wrt=nnx.Param)
        return lambda: float(once(model, optimizer))

    return start


def unet() -> Home:
    """The U-Net of NNX on random images."""
    images = jax.random.normal(jax.random.key(1), (8, 32, 32, 3))

    def loss(model: UNet, images: Array) -> Array:
        return jnp.mean(jnp.square(model(images) - images))

    def updating(value_and_grad: Callable[..., Any]) -> Callable[[UNet, nnx.Optimizer], Array]:
        def once(model: UNet, optimizer: nnx.Optimizer) -> Array:
            value, gradient = value_and_grad(model, images)
            optimizer.update(model, gradient)
            return value

        return once

    def within(loss: Loss) -> Start:
        return trained(nnx.jit(updating(nnx.value_and_grad(lambda model, x: 1.0 * loss(model, x)))))

    ways = {
        "nnx.jit(nnx.value_and_grad(loss))": lambda loss: trained(nnx.jit(updating(nnx.value_and_grad(loss)))),
        "called within nnx.value_and_grad": within,
        "nnx.value_and_grad(nnx.jit(loss))": lambda loss: trained(updating(nnx.value_and_grad(nnx.jit(loss)))),
        "loss.value_and_grad, compiled by itself": lambda loss: trained(
            updating(getattr(loss, "value_and_grad", None) or nnx.jit(nnx.value_and_grad(loss)))
        ),
    }
    graph, state = nnx.split(UNet(32, nnx.Rngs(0)))

    def pure(loss: Loss) -> Callable[..., Any]:
        def step(state: nnx.State) -> Any:
            model = nnx.merge(graph, state)
            return (*nnx.value_and_grad(loss)(model, images), nnx.state(model))

        return step

    return Home("nnx U-Net", "BatchNorm and dropout, batch 8 of side 32", loss, ways, pure, (state,))


# --------------------------------------------------------------------------------------------------------- Equinox


class Block(eqx.Module):
    """Causal self-attention and an MLP, each on the normalised stream and added to it."""

    first_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    second_norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    drop: eqx.nn.Dropout

    def __init__(self, width: int, key: Array) -> None:
        attention, mlp = jax.random.split(key)
        self.first_norm, self.second_norm = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(4, width, key=attention)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, depth=1, activation=jax.nn.gelu, key=mlp)
        self.drop = eqx.nn.Dropout(0.1)

    def __call__(self, x: Array, key: Array) -> Array:
        """Map `(tokens, width)` to the same."""
        y = jax.vmap(self.first_norm)(x)
        x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((x.shape[0],) * 2, bool)))
        return x + self.drop(jax.vmap(self.mlp)(jax.vmap(self.second_norm)(x)), key=key)


class GPT(eqx.Module):
    """Tokens to logits."""

    tokens: eqx.nn.Embedding
    places: Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, width: int, layers: int, key: Array) -> None:
        tokens, head, *blocks = jax.random.split(key, 2 + layers)
        self.tokens = eqx.nn.Embedding(256, width, key=tokens)
        self.places = jnp.zeros((128, width))
        self.blocks = [Block(width, k) for k in blocks]
        self.head = eqx.nn.Linear(width, 256, key=head)

    def __call__(self, text: Array, key: Array) -> Array:
        """Logits `(tokens, 256)` of one text `(tokens,)`."""
        x = jax.vmap(self.tokens)(text) + self.places
        for block, block_key in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            x = block(x, block_key)
        return jax.vmap(self.head)(x)


def equinox_gpt() -> Home:
    """A GPT of Equinox on random bytes."""
    texts = jax.random.randint(jax.random.key(1), (16, 128), 0, 256)

    def loss(model: GPT, key: Array, texts: Array) -> Array:
        logits = jax.vmap(model)(texts, jax.random.split(key, len(texts)))
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], texts[:, 1:]))

    def fresh() -> GPT:
        return GPT(128, 4, jax.random.key(0))

    ways = {
        "eqx.filter_jit(eqx.filter_value_and_grad(loss))": lambda loss: training(
            eqx.filter_value_and_grad(loss), fresh, texts, eqx.filter_jit
        ),
        "called within eqx.filter_value_and_grad": lambda loss: training(
            eqx.filter_value_and_grad(lambda model, key, x: 1.0 * loss(model, key, x)), fresh, texts, eqx.filter_jit
        ),
        "eqx.filter_value_and_grad(eqx.filter_jit(loss))": lambda loss: training(
            eqx.filter_value_and_grad(eqx.filter_jit(loss)), fresh, texts
        ),
        "loss.value_and_grad, compiled by itself": lambda loss: training(
            getattr(loss, "value_and_grad", None) or eqx.filter_jit(eqx.filter_value_and_grad(loss)), fresh, texts
        ),
    }
    arrays, rest = eqx.partition(fresh(), eqx.is_array)

    def pure(loss: Loss) -> Callable[..., Any]:
        return lambda arrays, key, x: eqx.filter_value_and_grad(loss)(eqx.combine(arrays, rest), key, x)

    arguments = (arrays, jax.random.key(2), texts)
    return Home("Equinox GPT", "4 blocks of width 128, batch 16 of 128 bytes", loss, ways, pure, arguments)


# ----------------------------------------------------------------------------------------------------- HuggingFace


def flax_gpt2() -> Home:
    """FlaxGPT2 of transformers 4 on random tokens."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(vocab_size=256, n_positions=128, n_embd=128, n_layer=4, n_head=4)
    model = FlaxGPT2LMHeadModel(config, seed=0)
    texts = jax.random.randint(jax.random.key(1), (8, 128), 0, 256)

    def loss(params: Any, key: Array, texts: Array) -> Array:
        logits = model(texts, params=params, dropout_rng=key, train=True).logits
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], texts[:, 1:]))

    def fresh() -> Any:
        return model.params

    ways = {
        "jax.jit(jax.value_and_grad(loss))": lambda loss: training(jax.value_and_grad(loss), fresh, texts, jax.jit),
        "called within jax.value_and_grad": lambda loss: training(
            jax.value_and_grad(lambda params, key, x: 1.0 * loss(params, key, x)), fresh, texts, jax.jit
        ),
        "jax.value_and_grad(jax.jit(loss))": lambda loss: training(jax.value_and_grad(jax.jit(loss)), fresh, texts),
        "loss.value_and_grad, compiled by itself": lambda loss: training(
            getattr(loss, "value_and_grad", None) or jax.jit(jax.value_and_grad(loss)), fresh, texts
        ),
    }
    arguments = (model.params, jax.random.key(2), texts)
    return Home("FlaxGPT2", "4 blocks of width 128, batch 8 of 128 tokens", loss, ways, jax.value_and_grad, arguments)


HOMES: tuple[Callable[[], Home], ...] = (unet, equinox_gpt, flax_gpt2)
