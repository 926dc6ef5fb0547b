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
# # A first cut
#
# We write a small transformer in plain JAX, decorate its loss, look at what is kept for the backward, and
# then measure: the memory, the time, the gradients, and a few steps of training. The model never learns
# that it was cut.

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
BLUE, GREY = "#0072b2", "#8c939c"

# %% [markdown]
# ## 1. A model that knows nothing
#
# Two blocks of attention and an MLP, which guess the next character of a text. No `jax.checkpoint`, no
# annotation, no scan.

# %%
LAYERS, WIDTH, HEADS, LENGTH, BATCH = 2, 128, 4, 128, 6


def norm(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(p, x):
    batch, length, width = x.shape
    q, k, v = jnp.moveaxis((x @ p["qkv"]).reshape(batch, length, 3, HEADS, width // HEADS), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["out"]


def mlp(p, x):
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def loss(params, tokens):
    x = params["embed"][tokens[:, :-1]] + params["place"]
    for p in params["blocks"]:
        x = x + attention(p, norm(x))
        x = x + mlp(p, norm(x))
    logits = norm(x) @ params["embed"].T
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def draw(key, sizes):
    keys = jax.random.split(key, len(sizes))
    return {name: jax.random.normal(k, s) * s[0] ** -0.5 for k, (name, s) in zip(keys, sizes.items())}


square, wide, tall = (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": square, "up": wide, "down": tall}
keys = jax.random.split(jax.random.key(0), LAYERS + 1)
params = draw(keys[0], {"embed": (256, WIDTH), "place": (LENGTH, WIDTH)})
params["blocks"] = [draw(key, sizes) for key in keys[1:]]

# %% [markdown]
# The text is the numbers in order, `1 2 3 4 ...`, so that there is something to learn: how to count.

# %%
text = jnp.asarray(list(" ".join(map(str, range(1, 4000))).encode()))


def batch(step):
    starts = jax.random.randint(jax.random.key(step), (BATCH, 1), 0, text.size - LENGTH)
    return text[starts + jnp.arange(LENGTH + 1)]


tokens = batch(0)
print(bytes(tokens[0].tolist()).decode())

# %% [markdown]
# ## 2. What does plain JAX keep?
#
# `aot.explain` looks at any function, one of ours or not. Of `loss` it tells what the forward of `jax.vjp`
# hands to the backward:

# %%
plain = aot.explain(loss, params, tokens)
print(f"{plain.totals.saved_bytes / 1e6:.1f} MB in {plain.totals.num_saved} arrays")
print(f"{sum(x.nbytes for x in jax.tree.leaves(params)) / 1e6:.1f} MB of parameters")

# %% [markdown]
# That is twenty times the parameters. None of it is a result; all of it is there because some equation of
# the backward reads it.
#
# ## 3. Decorate, and look
#
# One line. In your own program it is the decorator `@aot.function` above the `def`; here we keep the plain
# function as well, to compare.
#
# (`cost` says what the computer does in a second. Leave it out, and it is measured once. It decides nothing
# about this cut, but some of the figures below are predicted by it, and this page shall read the same on
# every computer.)

# %%
rates = Roofline(flops_per_s=1e11, elementwise_per_s=1e10, bytes_per_s=1e10)
ours = aot.function(loss, cost=rates)

cut = ours.trace(params, tokens).partition()
report = cut.explain()
report

# %% [markdown]
# This is the memory of one training step: from left to right, what XLA runs, in its own order; upwards, the
# bytes that are alive, coloured by the function of ours that made them. (In a running notebook this is a
# page to point at and to click through. `report.save("report.html")` keeps that page.)
#
# - The dashed line is plain JAX. It climbs throughout the forward: two blocks, two flights of stairs,
#   nothing is let go. At the vertical line the backward begins, and the stairs lead down again.
# - The coloured mountain is ours, and has the same shape, but each block leaves less behind.
# - The backward of ours has more steps, and small teeth: something is computed again, read, and dropped at
#   once. That is all the price there is, and we shall measure it.
# - *No module known* are copies that XLA makes of values as they pass from the forward to the backward.
#
# The same as text, with the figures:

# %%
print(report)

# %% [markdown]
# From the top: what is saved is a third. Arguments and results have to be there in any case, so the *peak*
# of the step, which has to fit into the memory of your device, falls by less than that. Below stands each
# saved array with the line that makes it, and why it was chosen; what reads alike in several blocks shares
# a row.
# [02_read_a_plan](02_read_a_plan.ipynb) reads such a table row by row.
#
# ## 4. Measure the memory
#
# A report that praises itself proves nothing. So ask the compiler, first of plain JAX, without any of our
# code, and then of ours. `temp` is what a program needs beyond its arguments and results.

# %%
reference = jax.jit(jax.value_and_grad(loss)).lower(params, tokens).compile()
step = cut.compile()

before = reference.memory_analysis().temp_size_in_bytes
after = step.activation_bytes

for name, taken in [("plain JAX", before), ("ours", after)]:
    print(f"{name:10} {taken / 1e6:6.1f} MB   {taken / before:.2f}")

# %% [markdown]
# ## 5. Measure the time
#
# Something is computed twice, so it must be slower? Run the two in turn, so that whatever else this
# computer does meets both, and take the median of the ratios.


# %% tags=["varies"]
def seconds(run):
    start = time.perf_counter()
    jax.block_until_ready(run(params, tokens))
    return time.perf_counter() - start


seconds(reference), seconds(step.value_and_grad)  # the first calls, which do not count
pairs = [(seconds(reference), seconds(step.value_and_grad)) for _ in range(3)]
ratio = statistics.median(b / a for a, b in pairs)
print(f"plain JAX {1e3 * statistics.median(a for a, _ in pairs):.0f} ms,",
      f"ours {1e3 * statistics.median(b for _, b in pairs):.0f} ms, median ratio {ratio:.2f}")

# %% [markdown]
# These figures differ from run to run and from one computer to the next. That the ratio is seldom above 1
# has a plain reason: an array that is not saved is neither written to memory nor read from it, and for
# anything but a matrix product the memory, not the arithmetic, is what takes the time.
#
# ## 6. The gradients
#
# Nothing is approximated. Both halves run the equations that JAX wrote, and run one at a time they give the
# same bits, as [00_from_scratch](00_from_scratch.ipynb) shows. Once compiled they agree up to rounding, since
# XLA merges the loops of two programs in two ways:

# %%
value, gradients = step.value_and_grad(params, tokens)
expected, wanted = reference(params, tokens)


def is_close(a, b):
    return np.allclose(a, b, rtol=1e-3, atol=1e-5 * float(jnp.abs(b).max()))


print("loss:", np.isclose(value, expected, rtol=1e-6))
print("gradients:", all(jax.tree.leaves(jax.tree.map(is_close, gradients, wanted))))

# %% [markdown]
# ## 7. Train
#
# `ours` can stand wherever `loss` did: below, under `jax.value_and_grad`, in a training step under
# `jax.jit`. There XLA sees one large program and may do with it as it likes; what was saved has to survive
# that too.


# %%
def descend(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


@jax.jit
def train(params, tokens):
    value, gradients = jax.value_and_grad(ours)(params, tokens)
    return value, descend(params, gradients)


train = train.lower(params, tokens).compile()
within = train.memory_analysis().temp_size_in_bytes
print(f"{within / 1e6:.1f} MB, the descent included")

# %% [markdown]
# Now run it. Beside it runs the same descent by plain JAX, batch for batch.

# %%
mine = theirs = params
curves = {"plain JAX": [], "ours": []}
for i in range(8):
    expected, gradients = reference(theirs, batch(i))
    theirs = descend(theirs, gradients)
    value, mine = train(mine, batch(i))
    curves["plain JAX"].append(float(expected))
    curves["ours"].append(float(value))

print(f"loss at the first step {curves['ours'][0]:.1f}, at the last {curves['ours'][-1]:.1f}")
print("the same with plain JAX, to 1 %:", np.allclose(*curves.values(), rtol=0.01))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", width_ratios=[3, 2])
left.plot(curves["plain JAX"], color=GREY, lw=6, alpha=0.5, label="plain JAX")
left.plot(curves["ours"], color=BLUE, lw=1.5, label="ours, in jax.jit")
left.set(xlabel="step", ylabel="loss (nats per character)", ylim=(0, None), title="The same learning")
left.legend(frameon=False)
amounts = [amount / 1e6 for amount in (before, after, within)]
right.bar(["plain JAX", "ours", "ours in\njax.jit"], amounts, color=[GREY, BLUE, BLUE], width=0.6)
for place, amount in enumerate(amounts):
    right.text(place, amount, f"{amount:.0f} MB", ha="center", va="bottom")
right.set(ylabel="temporaries (MB)", ylim=(0, 1.15 * amounts[0]), title="Less memory")
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## 8. What now
#
# - A third of the bytes saved, with no matrix product run twice: that is what comes without asking. To ask
#   for less, state a budget: [03_budgets](03_budgets.ipynb).
# - A deep model is better written as a `scan` over its layers, which compiles faster. The cut then goes
#   through the loop: [04_inside_loops](04_inside_loops.ipynb).
# - To know why just these arrays: [02_read_a_plan](02_read_a_plan.ipynb).
