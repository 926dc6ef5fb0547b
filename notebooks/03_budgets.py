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
# # Budgets
#
# Without being asked, jointcut takes the fewest bytes with which no matrix product runs twice. On a CPU it
# looks further: if the model finds a plan that is clearly smaller and no slower, it takes that one, also with
# products that run twice. If that is not enough, say how much memory there is.
# This notebook states budgets in bytes and as fractions, looks at how they are met, and measures what each
# of them costs.

# %%
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot as plt

from jointcut import aot
from jointcut.partition import Roofline

plt.rcParams.update({"figure.dpi": 100, "font.size": 10})
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#8c939c"

# %% [markdown]
# The model is eight layers of an MLP with dropout. Dropout is here on purpose: random numbers and computing
# again are an old quarrel, and we shall see how it is settled.


# %%
def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def layer(p, key, x):
    h = jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
    return x + jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0)


def loss(layers, key, x, y):
    for i, p in enumerate(layers):
        x = layer(p, jax.random.fold_in(key, i), x)
    return jnp.mean((x - y) ** 2)


def draw(key):
    sizes = {"up": (128, 512), "down": (512, 128)}
    keys = jax.random.split(key, len(sizes))
    return {n: jax.random.normal(k, s) * s[0] ** -0.5 for k, (n, s) in zip(keys, sizes.items())}


layers = [draw(key) for key in jax.random.split(jax.random.key(0), 8)]
key = jax.random.key(2)
x, y = jax.random.normal(jax.random.key(1), (2, 1024, 128))

# %% [markdown]
# A budget is met at the least cost in time, so the time of each operation has to be known. By default it is
# measured, once for each kind of device. Here we write it down, so that every computer finds the same plans.

# %%
rates = Roofline(flops_per_s=1e11, elementwise_per_s=1e10, bytes_per_s=1e10)
ours = aot.function(loss, cost=rates)
traced = ours.trace(layers, key, x, y)

plain = traced.plain_memory
free = traced.partition().compile()
for name, temporaries, peak in [("plain JAX", plain.temp_bytes, plain.peak_bytes),
                                ("the cut", free.activation_bytes, free.peak_bytes)]:
    print(f"{name:10} {temporaries / 1e6:5.1f} MB of temporaries, {peak / 1e6:5.1f} MB at the peak")

# %% [markdown]
# ## 1. So many bytes
#
# A number of bytes is the peak of the whole step on one device: arguments, results, and all in between. It
# is what you compare with the memory that you have. Say it as an int, or as a text with a unit.

# %%
tight = traced.partition(budget="28 MB")
print(*str(tight.plan).splitlines()[:2], sep="\n")

# %% [markdown]
# In your own program this is `@aot.function(budget="28 MB")`, and that is all.
#
# How is it met? A model of the memory proposes, and XLA decides. Plans are *weighed*: XLA assigns their
# memory, and on a CPU it is stopped before it makes code. If a plan does not fit, the model is corrected by
# what was learnt. The fastest plan that fits is compiled. All that was tried is on record:

# %% tags=["varies"]
print(*tight.compile().trail, sep="\n")

# %% [markdown]
# *Promised* is what the model expected, *takes* is XLA's word. The two may differ. That is why a plan counts
# only once it was weighed or compiled: whatever you get holds its budget, by the account of the compiler that
# will run it.
#
# ## 2. Such a share
#
# A float from 0 to 1 is a share of what plain JAX takes beyond arguments and results. A quarter of that:

# %%
quarter = traced.partition(budget=0.25).compile()
share = quarter.activation_bytes / plain.temp_bytes
print(f"{quarter.activation_bytes / 1e6:.1f} MB, {share:.0%} of plain JAX's")

# %% [markdown]
# A share travels well, from one batch size to another, and bytes are what a device has. The share counts
# activations only: parameters, batch and gradients are left out, and so a large embedding table cannot spoil
# it. And `0.0` asks for the least that is found:

# %%
least = traced.partition(budget=0.0).compile()
share = least.activation_bytes / plain.temp_bytes
print(f"{least.activation_bytes / 1e6:.1f} MB, {share:.0%} of plain JAX's")

# %% [markdown]
# ## 3. All budgets at once
#
# `cut.pareto()` lists the plans that no other betters in both memory and time, by the model. Nothing is
# compiled for it. The star is the plan that we have without a budget.

# %%
front = traced.partition().pareto()
front

# %%
print(front)

# %% [markdown]
# Read the curve from the right. At the right end most is saved. To the left value after value is given up,
# in the order of what a byte costs. Plans called `front` are minimum cuts as well, one for each price of a
# second in bytes, and all of them are found at once. Plans called `division` divide the chain of layers into
# pieces. Of some pieces nothing inside is kept, and all of it is made again when the backward comes to it.
# (The star need not lie on the curve: it takes the fewest bytes with which no product runs twice, and saves
# itself the look at everything else.)
#
# Then comes the knee.
#
# ## 4. Below the knee
#
# What stands in the plans?

# %%
beyond = min(front.points, key=lambda point: point.peak_bytes).plan
kinds = {"without a budget": traced.partition().plan, "the least": least.cut.plan, "beyond the knee": beyond}
for name, plan in kinds.items():
    again = [traced.graph.ops[i].name for i in plan.recomputed]
    print(f"{name:20} {plan.bytes_saved / 1e6:5.1f} MB saved,", len(plan.saved), "arrays;",
          again.count("dot_general"), "products and", again.count("random_bits"), "masks run again")

# %% [markdown]
# In the least plan about three arrays are left of each layer: what it adds to the stream, its mask, and a
# mean square for each row. From these each layer can be run again by itself. While it is, its inside is
# alive, and now it is this, and no longer what is saved, that makes the peak.
#
# Beyond the knee not even the masks are kept. Random numbers are dear to make, and so the curve goes up like
# a wall. The model promises that the plan at its top takes the least. XLA has the last word:

# %%
wall = traced.partition(plan=beyond).compile()
for name, step in {"the least": least, "beyond the knee": wall}.items():
    print(f"{name:16} {step.activation_bytes / 1e6:.1f} MB of temporaries")

# %% [markdown]
# ## 5. What a budget costs
#
# So far by the model. Now by the clock: some budgets, each run in turn with plain JAX, as ratios of time.

# %%
steps = {"none": free, "25%": quarter, "0.0": least}
reference = jax.jit(jax.value_and_grad(loss)).lower(layers, key, x, y).compile()
for name, step in steps.items():
    share = step.activation_bytes / plain.temp_bytes
    print(f"budget {name:5} {step.activation_bytes / 1e6:5.1f} MB   {share:.2f}")


# %% tags=["varies"]
def seconds(run):
    start = time.perf_counter()
    jax.block_until_ready(run(layers, key, x, y))
    return time.perf_counter() - start


def ratio(run):
    seconds(run), seconds(reference)  # the first calls, which do not count
    return statistics.median(seconds(run) / seconds(reference) for _ in range(3))


times = {name: ratio(step.value_and_grad) for name, step in steps.items()}
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
axes.plot(plain.temp_bytes / 1e6, 1, "s", color=GREY, ms=9)
axes.annotate("plain JAX", (plain.temp_bytes / 1e6, 1), (0, 9), textcoords="offset points", ha="center")
for name, step in steps.items():
    at = step.activation_bytes / 1e6, times[name]
    is_free = name == "none"
    axes.plot(*at, "o", color=ORANGE if is_free else BLUE, ms=8)
    place = (0, 8) if is_free else (0, -17)
    axes.annotate("no budget" if is_free else name, at, place, textcoords="offset points", ha="center")
axes.set(xlabel="temporaries of the step, XLA's account (MB)", ylabel="time ÷ plain JAX",
         xlim=(0, None), ylim=(0, 1.25 * max(1, *times.values())), title="Less memory, and what it takes")
axes.spines[["top", "right"]].set_visible(False)
axes.grid(alpha=0.25)
plt.show()

# %% [markdown]
# What is not written to memory takes no time to write: that is why a plan that saves less is often faster
# than plain JAX. At the left end most products of the forward run twice, and part of that gain is given back.
#
# ## 6. Rows in blocks
#
# At the least plan one layer's inside makes the peak, and no choice of values helps against that. But the
# rows of the batch do not meet before the loss adds them up. So under a smaller budget they run in blocks,
# one block after the other in a loop, while gradients of parameters add up.

# %%
blocks = traced.partition(budget="12 MB").compile()
steps["blocks"] = blocks
for tile in blocks.cut.plan.tiles:
    print(tile.blocks, "blocks of", tile.array)
print(f"{blocks.peak_bytes / 1e6:.1f} MB at the peak, {blocks.activation_bytes / 1e6:.1f} MB of temporaries")

# %% [markdown]
# What is left above the arguments and gradients is little. `aot.function(tiles={"args[2]": 8})` asks for
# blocks without a budget, and `tiles=False` forbids them.
#
# ## 7. Too little
#
# A budget that cannot be met is an error, not a warning, and not a plan that quietly takes more. It names
# the smallest peak that was found, and what is alive there, so that you know what to change:

# %% tags=["raises-exception"]
traced.partition(budget="9.5 MB")

# %% [markdown]
# ## 8. The masks
#
# Where dropout runs again in the backward, it must drop the same elements, or the gradient belongs to
# another function, and nothing tells you. In JAX a key is a value like any other: what is computed again from
# the same key is the same mask. So the gradients agree at every budget, and also with the plan beyond the
# knee, which makes masks again. As a control, here is how far off they would be with other masks:

# %%
_, expected = reference(layers, key, x, y)
_, others = reference(layers, jax.random.key(3), x, y)


def distance(gradients):
    """The largest distance, as a share of the largest gradient."""
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True)
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)


steps["wall"] = wall
for name, step in steps.items():
    print(f"{name:5} within 0.001 %:", distance(step.value_and_grad(layers, key, x, y)[1]) < 1e-5)
print(f"other masks: {distance(others):.0%}")

# %% [markdown]
# ## 9. If you come from PyTorch
#
# There is a budget in PyTorch's compiler too, `activation_memory_budget`, a float from 0 to 1. Some things
# to know when you move, as of PyTorch 2.13:
#
# - It bounds the bytes that are *saved*, and not the peak. The two differ, as we saw, and the peak may even
#   rise as the budget falls. A budget here is the peak, or all temporaries, by XLA's account.
# - It takes no number of bytes. Its scale runs from the bytes of the graph's inputs, which include parameters
#   that are never saved, to what is saved without a budget. With large inputs, such as the table of an
#   embedding, every value above 0 does the same: nothing.
# - Below 1 it may run dropout again *with new masks*, and the gradients are wrong without a word.
# - At 0 it runs again even what the user marked to be saved.
#
# ## 10. What now
#
# - A `scan` over many steps can also be run in segments: [04_inside_loops](04_inside_loops.ipynb).
# - A search weighs a few plans. With `JOINTCUT_CACHE_DIR` set its result is kept for the next process.
# - How to price operations by a model of your own: [07_write_your_own](07_write_your_own.ipynb).
