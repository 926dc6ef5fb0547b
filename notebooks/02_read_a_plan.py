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
# # Read a plan
#
# A plan says which values the forward hands to the backward, which the backward computes again, and why. In
# this notebook we read one, line by line, compare it with another, write a third by hand, get one refused,
# and put one into a file.

# %%
import tempfile
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot as plt

from jointcut import aot
from jointcut.partition import Plan, Roofline, diff, show
from jointcut.partition.errors import PlanError
from jointcut.partition.plans import planfile

plt.rcParams.update({"figure.dpi": 100, "font.size": 10})
jax.config.update("jax_pprint_use_color", False)

# %% [markdown]
# The program is a stack of gated layers, as modern language models have one in each block: normalise, take
# two products side by side, let one open and close the other, and take a third product back.


# %%
def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def gated(p, x):
    gate = x @ p["gate"]
    return (jax.nn.sigmoid(gate) * gate * (x @ p["up"])) @ p["down"]


def loss(layers, x, y):
    for p in layers:
        x = x + gated(p, norm(x))
    return jnp.mean((x - y) ** 2)


def draw(key):
    sizes = {"gate": (64, 256), "up": (64, 256), "down": (256, 64)}
    keys = jax.random.split(key, len(sizes))
    return {n: jax.random.normal(k, s) * s[0] ** -0.5 for k, (n, s) in zip(keys, sizes.items())}


layers = [draw(key) for key in jax.random.split(jax.random.key(0), 4)]
x, y = jax.random.normal(jax.random.key(1), (2, 1024, 64))

# %% [markdown]
# (`cost` says what the computer does in a second, so that predicted times are the same on every computer.
# Without it, they are measured.)

# %%
rates = Roofline(flops_per_s=1e11, elementwise_per_s=1e10, bytes_per_s=1e10)
ours = aot.function(loss, cost=rates)
traced = ours.trace(layers, x, y)
cut = traced.partition()

# %% [markdown]
# ## 1. The plan as text

# %%
print(cut.plan)

# %% [markdown]
# The first line is the balance. *No plan under the same rules*: as long as nothing heavy may run twice, this
# is not a good plan but a best one, and the flow through the network proves it.
#
# Each further line is a saved value: its bytes, its type, the primitive that makes it, the line of ours
# behind it, and the reason; equal values of several layers share a line. There are two kinds of reason.
#
# - *Not recomputed: dot_general is heavy.* There was no choice. The backward reads the value, directly or
#   through others, and to compute it again a matrix product would have to run twice.
# - *No larger than what it would be recomputed from.* It could be computed again, but then something else
#   would have to be saved in its place, and that would be as many bytes or more.
#
# ## 2. The report
#
# The same plan, with all that is known of it:

# %%
report = cut.explain()
print(report)

# %% [markdown]
# Row by row. What reads alike in several layers shares a row, so `4 ×` is once for each layer.
#
# - **Which values cost most?** The two products of a layer, of the gate and of `up`: four times each, they
#   are nearly nine tenths of all. *Needed by* names the ops of the backward that read them.
# - **What is left of the stream `x`?** Not the stream itself, but what each layer adds to it: the product of
#   `down`. From these the backward adds the stream up again. And of `norm`, which divides by the root of a
#   mean square, one number for each row. Its reason names what would be kept if this were not.
# - **What is computed again, and why is that cheap?** The sigmoid and the multiplications around it: a little
#   arithmetic for each element, with numbers that the backward reads anyway. What XLA computes within the
#   loop of its reader has no time of its own: nothing of it is written to memory.
# - **What would less memory cost?** *With less memory* lists the fastest plan for smaller peaks, and the
#   smallest that was found: how much longer a step would take, how much less it would save, and what would
#   be run again instead. Here matrix products begin to run twice. The first row costs less than nothing, by
#   the model: to write an array to memory and read it back takes time too, and a product with as few terms
#   as ours is done sooner.
#
# And the picture, this time by source line. A line of a notebook is named by its cell, `In[3]:7`.

# %%
memory = report.data["sections"][0]
by_line = next(grouping["groups"] for grouping in memory["groupings"] if grouping["name"] == "source line")
names = [group["name"][-40:] for group in by_line]
figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
axes.stackplot(range(len(memory["total"])), *(group["bytes"] for group in by_line), labels=names, step="mid")
axes.axvline(memory["boundary"] - 0.5, color="black", lw=0.8)
axes.set(xlabel="operations as they run: forward, then backward", ylabel="bytes alive")
figure.legend(loc="outside right upper", frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## 3. The two programs
#
# A plan is only a choice. What runs are two jaxprs, and they can be read. For that, take a single layer; here
# is its forward.

# %%
single = ours.trace(layers[:1], x, y)
one = single.partition()
print(one.forward)

# %% [markdown]
# Plain JAX, as you would have written it, but for the last line: after the loss come the residuals. The
# backward takes them back, among its first inputs, and `residuals` says where each comes from:

# %%
for residual, variable in zip(one.residuals, one.backward.jaxpr.invars):
    print(f"{residual.kind:6} {residual.index:2}  {variable.aval.str_short()}")
print()
print(textwrap.fill(" ".join(equation.primitive.name for equation in one.backward.eqns), 100))

# %% [markdown]
# *Input* means that the caller has it: for weights and batch, nothing is stored. Among the equations look for
# `logistic`. It belongs to the forward, and runs here again. The `optimization_barrier`s before it tie it to
# the gradient that is about to need it. Without them XLA would notice that it can be computed at once, or
# that the forward computed it already, and all would be kept that we took care not to keep.
#
# ## 4. The graph
#
# Between the two programs and the joint one that they are cut from stands the graph. It has a text of its
# own, one line for each op, and `partition.parse` reads it back. The forward, and the beginning of the
# backward:

# %%
forward, backward = show(single.graph).split("backward:")
print(forward + "backward:" + "\n".join(backward.splitlines()[:6]) + "\n...")

# %% [markdown]
# The numbers are the values' ids. A plan, in the end, is a list of such numbers:

# %%
print(one.plan.values)

# %% [markdown]
# ## 5. Two plans
#
# Plain JAX's choice is a plan as well: `save_all`. What did the cut change?

# %%
everything = single.partition("save_all").plan
print(diff(everything, one.plan))

# %% [markdown]
# Minus is what only plain JAX saves, plus what only the cut does. Six arrays go. In their place come the
# product of `down`, from which the error `x - y` is computed again, and the sums of `norm`. The products of
# gate and `up` do not appear: both plans save them.
#
# ## 6. A plan by hand
#
# You think you know better? `Plan.of` takes your list of values and completes it: what has to be computed
# again follows from what is saved. Here are two ideas. The first: save the matrix products and nothing
# else. The second: save nothing at all.

# %%
everything = traced.partition("save_all").plan
products = {s.value for plan in (everything, cut.plan) for s in plan.saved if s.op == "dot_general"}
plans = {
    "everything": everything,
    "the cut": cut.plan,
    "products": Plan.of(traced.graph, products),
    "nothing": Plan.of(traced.graph, []),
}
for name, plan in plans.items():
    heavy = sum(traced.graph.ops[i].name == "dot_general" for i in plan.recomputed)
    print(f"{name:11} {plan.bytes_saved / 1e6:5.2f} MB saved, {len(plan.recomputed):3} ops run again,",
          f"{heavy} of them products")

# %% [markdown]
# Whatever a plan says, the gradients are the same. A wrong choice costs memory or time, never correctness.
# We compile each, check it against JAX, and ask XLA what the whole step takes.

# %%
expected = jax.tree.leaves(jax.jit(jax.grad(loss))(layers, x, y))
peaks = {}
for name, plan in plans.items():
    step = traced.partition(plan=plan).compile()
    _, gradients = step.value_and_grad(layers, x, y)
    pairs = zip(jax.tree.leaves(gradients), expected, strict=True)
    assert all(np.allclose(a, b, rtol=1e-3, atol=1e-5 * abs(b).max()) for a, b in pairs), name
    peaks[name] = step.activation_bytes

figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
rows = np.arange(len(plans))
saved = [plan.bytes_saved / 1e6 for plan in plans.values()]
axes.barh(rows - 0.18, saved, 0.34, color="#e69f00", label="saved between the halves")
axes.barh(rows + 0.18, [peak / 1e6 for peak in peaks.values()], 0.34, color="#0072b2",
          label="all temporaries of the step, XLA's account")
for row, (ours_mb, peak) in enumerate(zip(saved, peaks.values())):
    axes.text(ours_mb + 0.3, row - 0.18, f"{ours_mb:.1f}", va="center", fontsize=9)
    axes.text(peak / 1e6 + 0.3, row + 0.18, f"{peak / 1e6:.1f}", va="center", fontsize=9)
axes.set(yticks=rows, yticklabels=plans, xlabel="MB")
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# The first idea is nearly the cut, which keeps the few bytes of each sum as well. The second closes too, for
# every value of this program can be computed again: all products run twice. But look at its blue bar. It
# saves nothing, and yet the step takes *more* than with the cut: what is computed again has to lie somewhere,
# and with nothing saved that is much at once.
#
# So *saved* is not *taken*. (Plain JAX shows it the other way round: of what is "saved" XLA computes some
# within its readers, and never stores it.) What has to fit into memory is the blue bar, and a budget is
# about that one: [03_budgets](03_budgets.ipynb).
#
# ## 7. A plan that does not close
#
# Some things are not computed again whatever is asked. One of them is a loop: its own values would all be
# alive again in the backward, which is what was to be avoided. Ask for it, and you are told which value is
# missing:


# %% tags=["raises-exception"]
def rolled(w, x):
    def step(h, _):
        return jnp.tanh(h @ w), None

    return jnp.sum(jax.lax.scan(step, x, None, length=10)[0])


Plan.of(aot.function(rolled).trace(jnp.eye(8), jnp.ones((4, 8))).graph, [])

# %% [markdown]
# ## 8. A plan in a file
#
# A plan can be written to JSON, looked at in a review, put under version control, and read back for the same
# program. There it is checked before it is followed.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "plan.json"
    path.write_text(planfile.dumps(one.plan, single.graph))
    starts = ('  "bytes', '  "recomputed', '  "strategy')
    print(*(line for line in path.read_text().splitlines() if line.startswith(starts)), sep="\n")
    again = planfile.loads(path.read_text(), single.graph)

print(again.values == one.plan.values)

# %% [markdown]
# The text can also be given to the decorator: `aot.function(loss, plan=text)`. And if the model has changed
# since? Then the plan is refused, and the error says where the two programs part:

# %%
text = planfile.dumps(one.plan, single.graph)
try:
    ours.trace(layers[:1], x[:512], y[:512]).partition(plan=text)
except PlanError as error:
    print(error)
