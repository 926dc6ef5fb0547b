# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A model that does not fit
#
# A step ends in `RESOURCE_EXHAUSTED`. This notebook goes from there to a training run: it asks what fills the
# memory, holds a budget, finds the largest batch, splits the batch in the step, trains, and plans the same
# model in its real size for a GPU that is not here.

# %%
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot as plt

from jointcut import aot

plt.rcParams.update({"figure.dpi": 90, "font.size": 10})
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#8c939c"

# %% [markdown]
# The model is a small language model without attention: each word is to say the next one. What is large in it
# is what is large in most of them: a vocabulary. The step has an optimiser with a momentum for each weight.


# %%
def block(weights, x):
    up, down = weights
    return x + jax.nn.gelu(x @ up) @ down


def loss(params, words, following):
    x = params["embed"][words]
    for weights in params["blocks"]:
        x = block(weights, x)
    logits = x @ params["head"]  # a row for each word of the batch, a column for each word there is
    right = jnp.take_along_axis(logits, following[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - right)


def step(params, momentum, words, following):
    grads = jax.grad(loss)(params, words, following)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.03 * m, params, momentum), momentum


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def weights_of(width, vocabulary, depth):
    blocks = [(struct(width, 4 * width), struct(4 * width, width))] * depth
    return {"embed": struct(vocabulary, width), "blocks": blocks, "head": struct(width, vocabulary)}


params = weights_of(width=64, vocabulary=8192, depth=4)
words = struct(2048, dtype=jnp.int32)

# %% [markdown]
# ## 1. The error
#
# This is how it begins. No machine has room for the logits of a billion words, so the step below fails on
# yours as well. It tells how many bytes it asked for, and nothing else: not which array, not which line.


# %%
@jax.jit
def too_large(head):
    x = jnp.ones((2**30, 1)) * jnp.arange(4.0)
    return jax.nn.softmax(x @ head, axis=1)


# %% tags=["raises-exception", "varies"]
jax.block_until_ready(too_large(jnp.ones((4, 2**15))))

# %% [markdown]
# From here on we pretend that the device has **64 MB**, so that all of this runs anywhere. Every figure is
# XLA's own account of a compiled step, and would be so with 80 GB. Only on a GPU there is nothing to
# pretend: `with aot.doctor():` around the training loop asks the device itself.
#
# ## 2. What fills the memory?
#
# The doctor compiles the step, and runs nothing: shapes are enough.

# %%
doctor = aot.doctor(memory="64MB")
print(doctor.check(jax.jit(step), params, params, words, words))

# %% [markdown]
# It names three causes, and each has a line to type. Each line was tried by compiling the step with it. We
# take both lines that help: the loss gets a budget, and the old parameters and momenta are given up to the
# new ones.

# %%
thrifty = aot.function(loss, budget="59.2 MB")


def thrifty_step(params, momentum, words, following):
    value, grads = thrifty.value_and_grad(params, words, following)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return value, jax.tree.map(lambda p, m: p - 0.03 * m, params, momentum), momentum


fitting = jax.jit(thrifty_step, donate_argnums=(0, 1))
print(doctor.check(fitting, params, params, words, words))

# %% [markdown]
# What did it cost? The plan says what is computed twice, and which rows run in blocks.

# %%
cut = thrifty.trace(params, words, words).partition()
print(cut.plan.summary()[0])
for tile in cut.plan.tiles:
    print(tile)

# %% [markdown]
# ## 3. How large a batch?
#
# Give the number of words a name, and ask. First with all rows together, then in blocks. (The sizes may
# differ a little on your machine: the fastest plan within a budget depends on what it computes in a second.)

# %% tags=["varies"]
batch = aot.shapes("b", jnp.int32)
whole = aot.largest(loss, "b", "59.2 MB", params, batch, batch, tiles=False)
in_blocks = aot.largest(loss, "b", "59.2 MB", params, batch, batch)
for found in (whole, in_blocks):
    blocks = next(row.blocks for row in found.tried if row.size == found.size)
    print(f"{found.size:>8,} words in {blocks:>3} blocks: {found.peak_bytes / 1e6:.1f} MB")

# %% [markdown]
# Blocks decide here, since the logits are most of the memory: they are made, read and thrown away block by
# block. The table of `print(in_blocks)` has all sizes that were tried.
#
# ## 4. The batch in parts
#
# A large batch is often split by hand: four passes, and the gradients are added up. `tiles` does it in one
# compiled step. The gradient is that of the whole batch.

# %%
draws = np.random.default_rng(0)
normal = lambda s: jnp.asarray(draws.standard_normal(s.shape) / s.shape[0] ** 0.5, s.dtype)
params = jax.tree.map(normal, params)
params["embed"] = params["embed"] * 8192**0.5  # which is read by rows


def drawn(count):
    """Words, and the words that follow them: by a rule that the model has to find."""
    words = draws.integers(0, 64, count)
    return jnp.asarray(words, jnp.int32), jnp.asarray((words * 7 + 3) % 64, jnp.int32)


in_four = aot.function(loss, tiles={"args[1]": 4})
small = drawn(1024)
ours, plain = in_four.grad(params, *small), jax.grad(loss)(params, *small)
worst = max(float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain)))
print("the largest difference is below 1e-6:", worst < 1e-6)
for tile in in_four.trace(params, *small).partition().plan.tiles:
    print(tile)

# %% [markdown]
# ## 5. A training run
#
# The step that fits, beside the one that does not. Both see the same words.

# %%
def train(one, count=20):
    state = jax.tree.map(jnp.copy, params), jax.tree.map(jnp.zeros_like, params)
    losses = []
    for words, following in batches[:count]:
        value, *state = one(*state, words, following)
        losses.append(float(value))
    return losses


def plain_step(params, momentum, words, following):
    return loss(params, words, following), *step(params, momentum, words, following)


batches = [drawn(2048) for _ in range(20)]
ours, plain = train(fitting), train(jax.jit(plain_step))
print(f"loss {ours[0]:.1f} -> {ours[-1]:.1f}")
print("the same as plain JAX's to 1e-3:", np.allclose(ours, plain, rtol=1e-3))

# %%
figure, axes = plt.subplots(figsize=(6, 2.6))
axes.plot(plain, color=ORANGE, linewidth=5, alpha=0.4, label="plain JAX")
axes.plot(ours, color=BLUE, label="within 64 MB")
axes.set(xlabel="step", ylabel="loss")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## 6. On a target
#
# The same model in a size that is worth a GPU: width 1,024 and 128,256 words, 16,384 of them in a batch. The
# plan for an H100 follows from its rates, and needs neither the GPU nor its compiler. Nobody asked for blocks
# here: the model of the GPU finds that they take less memory and no more time.

# %%
real, many = weights_of(1024, 128_256, 6), struct(16_384, dtype=jnp.int32)
planned = aot.function(loss, target="h100").trace(real, many, many).partition()
print(planned.plan.summary()[0])
for tile in planned.plan.tiles:
    print(tile)

# %% [markdown]
# With XLA's compiler for it (`pip install 'jointcut[cuda]'`), which needs no GPU either, all of the above has
# an answer for the H100:
#
# ```sh
# jointcut doctor train:step --example train:batch --target h100
# jointcut largest train:loss --example train:any_batch --axis b --target h100
# ```
#
# What to try in which order, in short: [Out of memory](../docs/out-of-memory.md).
