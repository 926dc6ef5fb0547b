"""Model-agnostic meta-learning: few-shot classifiers are trained by gradient steps, and these are differentiated.

The network is the one without convolutions of Finn et al. (2017), with a smooth activation. The inner learning rates,
one for each step and layer, are learned too, as in MAML++ (Antoniou et al., 2019).
"""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs.program import Program, Size, Wrap, identity

Layers = list[dict[str, Array]]
Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Tasks in a batch, classes and examples per class in each, pixels, hidden widths, inner steps.

    There are `shots` examples per class to train on, and as many to judge by.
    """

    tasks: int
    ways: int
    shots: int
    pixels: int
    widths: tuple[int, ...]
    steps: int


SIZES: dict[Size, Config] = {
    "tiny": Config(tasks=2, ways=3, shots=2, pixels=10, widths=(8, 6), steps=2),
    "small": Config(tasks=8, ways=5, shots=5, pixels=784, widths=(256, 128, 64, 64), steps=5),
    "medium": Config(tasks=8, ways=20, shots=5, pixels=784, widths=(1024, 1024, 1024, 1024), steps=10),
    "large": Config(tasks=64, ways=20, shots=5, pixels=784, widths=(1024, 1024, 1024, 1024), steps=10),
}


def init(key: Array, config: Config) -> Params:
    """Draw the layers, and set all inner learning rates (steps, layers) to 0.1; the last layer gives the logits."""
    sizes = [config.pixels, *config.widths]
    *keys, last_key = jax.random.split(key, len(sizes))
    hidden: Layers = [
        {"w": a**-0.5 * jax.random.normal(k, (a, b)), "scale": jnp.ones(b), "shift": jnp.zeros(b)}
        for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]
    logits = jax.random.normal(last_key, (sizes[-1], config.ways)) * sizes[-1] ** -0.5
    layers = [*hidden, {"w": logits, "b": jnp.zeros(config.ways)}]
    return {"layers": layers, "rates": jnp.full((config.steps, len(layers)), 0.1)}


def apply(layers: Layers, images: Array) -> Array:
    """The logits (examples, ways) of `images` (examples, pixels), normalised over the examples in each layer."""
    *hidden, last = layers
    x = images
    for layer in hidden:
        x = x @ layer["w"]
        centred = x - jnp.mean(x, axis=0)
        variance = jnp.mean(centred * centred, axis=0)
        x = jax.nn.silu(centred * lax.rsqrt(variance + 1e-3) * layer["scale"] + layer["shift"])
    return x @ last["w"] + last["b"]


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Mean cross-entropy in nats."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1))


def adapt(params: Params, images: Array, labels: Array, body: Wrap = identity) -> Layers:
    """Train on one task by gradient descent from the shared layers; `body` wraps each step."""

    def step(layers: Layers, rates: Array) -> tuple[Layers, None]:
        grads = jax.grad(lambda p: cross_entropy(apply(p, images), labels))(layers)
        pairs = zip(layers, grads, rates, strict=True)
        return [jax.tree.map(lambda p, g, r=rate: p - r * g, layer, grad) for layer, grad, rate in pairs], None

    return lax.scan(body(step), params["layers"], params["rates"])[0]


def loss(
    params: Params, support: tuple[Array, Array], query: tuple[Array, Array], body: Wrap = identity
) -> tuple[Array, Array]:
    """Mean over tasks of the cross-entropy on the query set after training on the support set; and the accuracy.

    Both sets are images (tasks, examples, pixels) and labels (tasks, examples).
    """

    def judge(support: tuple[Array, Array], query: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = apply(adapt(params, *support, body), query[0])
        return cross_entropy(logits, query[1]), jnp.mean(jnp.argmax(logits, axis=-1) == query[1])

    losses, accuracies = jax.vmap(judge)(support, query)
    return jnp.mean(losses), jnp.mean(accuracies)


def draw(key: Array, classes: Array, shots: int) -> tuple[Array, Array]:
    """Draw `shots` noisy copies of each class image of each task; `classes` is (tasks, ways, pixels)."""
    tasks, ways, pixels = classes.shape
    noise = jax.random.normal(key, (tasks, ways, shots, pixels))
    images = (classes[:, :, None] + 2.0 * noise).reshape(tasks, ways * shots, pixels)
    return images, jnp.tile(jnp.repeat(jnp.arange(ways), shots), (tasks, 1))


def program(size: Size) -> Program:
    """One step on random classes."""
    config = SIZES[size]
    keys: Any = jax.random.split(jax.random.key(0), 4)
    classes = jax.random.normal(keys[1], (config.tasks, config.ways, config.pixels))
    support, query = draw(keys[2], classes, config.shots), draw(keys[3], classes, config.shots)
    title = f"{config.steps} inner steps on {config.tasks} tasks, {config.ways}-way {config.shots}-shot"
    arguments = (init(keys[0], config), support, query)
    return Program("maml", title, loss, arguments, has_aux=True, places=("body",), sizes=asdict(config))
