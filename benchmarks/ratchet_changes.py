"""List changes of `ratcheted/`: thirty that take more memory, and thirty that take no more.

A change is a file, a name, and texts with what takes their place. The first group is what makes memory grow unseen: a
donation, a `jax.checkpoint` or a dtype lost, an array more. The second is what people do to code that works.
"""

from __future__ import annotations

from dataclasses import dataclass

T, C, P = "transformer", "convnet", "perceptron"


@dataclass(frozen=True)
class Edit:
    """A change of one file: its name, and pairs of texts, each of which stands in the file once."""

    file: str
    name: str
    pairs: tuple[tuple[str, str], ...]


def _edits(file: str, *changes: tuple[str, ...]) -> list[Edit]:
    """Each change is a name, then texts in pairs."""
    return [Edit(file, name, tuple(zip(texts[::2], texts[1::2], strict=True))) for name, *texts in changes]


_STEP = "@partial(jax.jit, donate_argnums=(0, 1))"
_BLOCK = "@jax.checkpoint\ndef block"
_RETURN = "    return params, momentum, value\n"

REGRESSIONS = [
    *_edits(
        T,
        ("no donation", _STEP, "@jax.jit"),
        ("momentum not donated", _STEP, "@partial(jax.jit, donate_argnums=0)"),
        ("no checkpoint", _BLOCK, "def block"),
        (
            "checkpoint keeps everything",
            _BLOCK,
            "@partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)\ndef block",
        ),
        (
            "checkpoint keeps products",
            _BLOCK,
            "@partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)\ndef block",
        ),
        ("one layer more", "LAYERS, WIDTH, HEADS, ROWS, LENGTH, WORDS = 3,", "LAYERS, WIDTH, HEADS, ROWS, LENGTH, WORDS = 4,"),
        ("more words", "= 3, 64, 4, 8, 64, 256", "= 3, 64, 4, 8, 64, 320"),
        ("longer rows", "= 3, 64, 4, 8, 64, 256", "= 3, 64, 4, 8, 72, 256"),
        ("wider mlp", '"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH', '"up": (WIDTH, 5 * WIDTH), "down": (5 * WIDTH'),
        ("scores in float64", "    mask = jnp.tril", "    scores = scores.astype(jnp.float64)\n    mask = jnp.tril",
         "mixed = jnp.einsum(\"bhqk,bkhd->bqhd\", weights, v)", "mixed = jnp.einsum(\"bhqk,bkhd->bqhd\", weights, v).astype(x.dtype)"),
        ("logits in float64", "logits = x @ params[\"embed\"].T", "logits = (x @ params[\"embed\"].T).astype(jnp.float64)"),
        ("momentum in float64", "    return params, params,", "    wide = jax.tree.map(lambda x: shape(x.shape, jnp.float64), params)\n    return params, wide,",
         "p - 0.1 * m, params", "(p - 0.1 * m).astype(p.dtype), params"),
        ("masks drawn before the scan, as numbers", "    keep = jax.random.bernoulli(key, RATE, x.shape)\n    return jnp.where(keep, x / RATE, 0.0)", "    return x * key / RATE",
         "    keys = jax.random.split(key, LAYERS)\n", "    keys = jax.random.bernoulli(key, RATE, (LAYERS, ROWS, LENGTH, WIDTH)).astype(jnp.float32)\n"),
        ("attention weights handed back", "    return mixed.reshape(ROWS, LENGTH, WIDTH) @ p[\"out\"]", "    return mixed.reshape(ROWS, LENGTH, WIDTH) @ p[\"out\"], weights",
         "    x = x + attention(norm(x, p[\"first\"]), p)\n", "    more, seen = attention(norm(x, p[\"first\"]), p)\n    x = x + more\n",
         "    return x\n\n\ndef loss", "    return x, seen\n\n\ndef loss",
         "return block(x, p, k), None", "return block(x, p, k)",
         "x, _ = lax.scan", "x, seen = lax.scan",
         "- picked)\n", "- picked) + 1e-4 * jnp.mean(seen**2)\n"),
        ("logits returned", "return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)", "return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked), logits",
         "jax.value_and_grad(loss)", "jax.value_and_grad(loss, has_aux=True)"),
        ("labels as one-hot vectors", "jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]", "jnp.sum(logits * jnp.asarray(jax.nn.one_hot(labels, WORDS) * 0.999), axis=-1) + 0.001 * jnp.max(logits, axis=-1)"),
        ("old parameters returned", _RETURN, "    return params, momentum, value, before\n", "    value, grads = jax", "    before = params\n    value, grads = jax"),
        ("gradients returned", _RETURN, "    return params, momentum, value, grads\n"),
        ("blocks unrolled", "    x, _ = lax.scan(body, x, (params[\"blocks\"], keys))\n", "    for i in range(LAYERS):\n        x, _ = body(x, jax.tree.map(lambda a: a[i], (params[\"blocks\"], keys)))\n"),
        ("activations of all layers kept", "return block(x, p, k), None", "return (y := block(x, p, k)), y", "x, _ = lax.scan", "x, all_of_them = lax.scan",
         "- picked)\n", "- picked) + 1e-3 * jnp.mean(jnp.abs(all_of_them))\n"),
    ),
    *_edits(
        C,
        ("stride lost", "params[\"stem\"], stride=2)", "params[\"stem\"], stride=1)"),
        ("bfloat16 lost", "images.astype(jnp.bfloat16)", "images", "jnp.bfloat16)", "jnp.float32)"),
        ("norm in float64", "    mean = jnp.mean(x, axis=(0, 1, 2))", "    x = x.astype(jnp.float64)\n    mean = jnp.mean(x, axis=(0, 1, 2))",
         "    return scale * (x - mean) * lax.rsqrt(variance + jnp.bfloat16(1e-3))", "    return (scale * (x - mean) * lax.rsqrt(variance + 1e-3)).astype(jnp.bfloat16)"),
        ("more channels", "CHANNELS, LAYERS, ROWS, SIZE, CLASSES = 16", "CHANNELS, LAYERS, ROWS, SIZE, CLASSES = 24"),
        ("patches as an array", "    y = normed(conv(x, p[\"w\"]), p[\"scale\"])", "    wide = lax.conv_general_dilated_patches(x, (3, 3), (1, 1), \"SAME\", dimension_numbers=(\"NHWC\", \"HWIO\", \"NHWC\"))\n    y = normed(wide @ p[\"w\"].reshape(-1, CHANNELS), p[\"scale\"])"),
        ("one layer more", "LAYERS, ROWS, SIZE, CLASSES = 16, 3,", "LAYERS, ROWS, SIZE, CLASSES = 16, 4,"),
    ),
    *_edits(
        P,
        ("nothing cut", "aot.function(value)", "aot.function(value, strategy=\"save_all\")"),
        ("an activation in float64", "return jnp.tanh(x)", "return jnp.tanh(x.astype(jnp.float64))"),
        ("more rows", "LAYERS, WIDTH, ROWS, RATE = 4, 64, 512", "LAYERS, WIDTH, ROWS, RATE = 4, 64, 640"),
        ("one layer more", "LAYERS, WIDTH, ROWS, RATE = 4", "LAYERS, WIDTH, ROWS, RATE = 5"),
    ),
]  # fmt: skip

REFACTORINGS = [
    *_edits(
        T,
        ("a comment", "def norm(", "# The norm of Ba et al.\n# It has no bias.\ndef norm("),
        ("a docstring", "def mlp(x, p):\n", "def mlp(x, p):\n    \"\"\"Two layers.\"\"\"\n\n"),
        ("a function renamed", "def dropped(x, key)", "def dropout(x, key)", "x + dropped(", "x + dropout("),
        ("the block renamed", "def block(x", "def transformer_block(x", "return block(", "return transformer_block("),
        ("the loss renamed", "def loss(", "def objective(", "value_and_grad(loss)", "value_and_grad(objective)"),
        ("the step renamed", "def step(", "def train_step(", "def arguments", "step = train_step\n\n\ndef arguments"),
        ("a variable renamed", "    centred = x - jnp.mean(x, axis=-1, keepdims=True)\n    variance = jnp.mean(centred**2", "    d = x - jnp.mean(x, axis=-1, keepdims=True)\n    variance = jnp.mean(d**2",
         "scale * centred * ", "scale * d * "),
        ("a helper extracted", "    q, k, v = (a.reshape(ROWS, LENGTH, HEADS, WIDTH // HEADS) for a in (q, k, v))", "    q, k, v = map(heads, (q, k, v))",
         "def attention(", "def heads(a):\n    return a.reshape(ROWS, LENGTH, HEADS, WIDTH // HEADS)\n\n\ndef attention("),
        ("a helper inlined", "dropped(mlp(norm(x, p[\"second\"]), p), key)", "dropped(jax.nn.gelu(norm(x, p[\"second\"]) @ p[\"up\"]) @ p[\"down\"], key)"),
        ("the head extracted", "    labels = batch[:, 1:]\n    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]\n    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)\n",
         "    return cross_entropy(logits, batch[:, 1:])\n\n\ndef cross_entropy(logits, labels):\n    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]\n    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)\n"),
        ("statements in another order", "    x = params[\"embed\"][batch[:, :-1]]\n    keys = jax.random.split(key, LAYERS)\n", "    keys = jax.random.split(key, LAYERS)\n    x = params[\"embed\"][batch[:, :-1]]\n"),
        ("labels taken first", "    labels = batch[:, 1:]\n", "", "    x = params[\"embed\"]", "    labels = batch[:, 1:]\n    x = params[\"embed\"]"),
        ("a square as a product", "jnp.mean(centred**2", "jnp.mean(centred * centred"),
        ("jnp.square", "jnp.mean(centred**2", "jnp.mean(jnp.square(centred)"),
        ("jnp.matmul", "jax.nn.gelu(x @ p[\"up\"]) @ p[\"down\"]", "jnp.matmul(jax.nn.gelu(jnp.matmul(x, p[\"up\"])), p[\"down\"])"),
        ("slices for split", "q, k, v = jnp.split(x @ p[\"qkv\"], 3, axis=-1)", "wide = x @ p[\"qkv\"]\n    q, k, v = (wide[..., i * WIDTH : (i + 1) * WIDTH] for i in range(3))"),
        ("jnp.tri", "jnp.tril(jnp.ones((LENGTH, LENGTH), bool))", "jnp.tri(LENGTH, dtype=bool)"),
        ("softmax written out", "weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)",
         "scores = jnp.where(mask, scores, -1e9)\n    weights = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))\n    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)"),
        ("jit by a call", _STEP + "\n", "", "def arguments", "step = jax.jit(step, donate_argnums=(0, 1))\n\n\ndef arguments"),
        ("checkpoint by a call", "@jax.checkpoint\n", "", "return block(x, p, k), None", "return jax.checkpoint(block)(x, p, k), None"),
        ("a lambda as a function", "jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)", "jax.tree.map(moved, momentum, grads)",
         "@partial(jax.jit", "def moved(m, g):\n    return 0.9 * m + g\n\n\n@partial(jax.jit"),
        ("a scope named", "    x = x + attention(norm(x, p[\"first\"]), p)\n", "    with jax.named_scope(\"attention\"):\n        x = x + attention(norm(x, p[\"first\"]), p)\n"),
        ("shapes asserted", "    q, k, v = jnp.split", "    assert x.shape == (ROWS, LENGTH, WIDTH), x.shape\n    q, k, v = jnp.split"),
        ("constants written out", "(WIDTH // HEADS) ** 0.5", "4.0"),
    ),
    *_edits(
        C,
        ("the layer moved down", "def layer(x, p):\n    y = normed(conv(x, p[\"w\"]), p[\"scale\"])\n    return x + jax.nn.relu(y)\n\n\n", "",
         "@jax.jit\n", "def layer(x, p):\n    y = normed(conv(x, p[\"w\"]), p[\"scale\"])\n    return x + jax.nn.relu(y)\n\n\n@jax.jit\n"),
        ("jnp.maximum", "jax.nn.relu(y)", "jnp.where(y > 0, y, jnp.bfloat16(0))"),
        ("imports in another way", "from jax import lax\n", "import jax.lax as lax\n"),
    ),
    *_edits(
        P,
        ("the activation inlined", "activation(x @ w)", "jnp.tanh(x @ w)"),
        ("arguments renamed", "def value(weights, x, key):\n    for i, w in enumerate(weights):", "def value(layers, x, key):\n    for i, w in enumerate(layers):"),
        ("a mean as a sum", "jnp.mean(x**2)", "jnp.sum(x**2) / x.size"),
    ),
]  # fmt: skip
