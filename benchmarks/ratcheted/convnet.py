"""Train a small convolutional network in bfloat16."""

import jax
import jax.numpy as jnp
from jax import lax

CHANNELS, LAYERS, ROWS, SIZE, CLASSES = 16, 3, 8, 32, 10


def conv(x, w, stride=1):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def normed(x, scale):
    mean = jnp.mean(x, axis=(0, 1, 2))
    variance = jnp.mean((x - mean) ** 2, axis=(0, 1, 2))
    return scale * (x - mean) * lax.rsqrt(variance + jnp.bfloat16(1e-3))


def layer(x, p):
    y = normed(conv(x, p["w"]), p["scale"])
    return x + jax.nn.relu(y)


def pooled(x):
    rows, height, width, channels = x.shape
    return jnp.max(x.reshape(rows, height // 2, 2, width // 2, 2, channels), axis=(2, 4))


def loss(params, images, labels):
    x = conv(images.astype(jnp.bfloat16), params["stem"], stride=2)
    for p in params["layers"]:
        x = layer(x, p)
    x = pooled(x)
    features = jnp.mean(x, axis=(1, 2))
    logits = (features @ params["head"]).astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))


@jax.jit
def step(params, images, labels):
    grads = jax.grad(loss)(params, images, labels)
    return jax.tree.map(lambda p, g: p - jnp.bfloat16(0.1) * g, params, grads)


def arguments():
    shape = jax.ShapeDtypeStruct
    each = {"w": shape((3, 3, CHANNELS, CHANNELS), jnp.bfloat16), "scale": shape((CHANNELS,), jnp.bfloat16)}
    params = {
        "stem": shape((3, 3, 3, CHANNELS), jnp.bfloat16),
        "layers": [each] * LAYERS,
        "head": shape((CHANNELS, CLASSES), jnp.bfloat16),
    }
    return params, shape((ROWS, SIZE, SIZE, 3), jnp.float32), shape((ROWS,), jnp.int32)
