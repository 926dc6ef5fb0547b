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
# # Inside loops
#
# Deep models and long sequences are written as loops: `jax.lax.scan` over the layers, `jax.lax.scan` over
# time. A loop is a few lines of program, but whatever its body keeps for the backward is kept once for
# *every step*. Of most large models this is nearly all the memory. So the place to cut is inside the body.
#
# This notebook shows how that is done, what it saves, how far one can come by hand with `jax.checkpoint`,
# and what to do when there are ten thousand steps.

# %%
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jointcut import aot
from jointcut.partition import Roofline, show
from matplotlib import pyplot as plt

plt.rcParams.update({"figure.dpi": 85, "font.size": 10})
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8a8f98"

# %% [markdown]
# Two remarks before we begin. Arguments are *shapes* here: to trace, cut and compile, jointcut asks for no
# numbers. And jointcut usually measures how fast your device is. We say it instead, so that this notebook
# comes to the same plans wherever it runs: 50 Gflop/s in matrix products, 5 in everything else, 10 GB/s.


# %%
def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


cost = Roofline(flops_per_s=50e9, elementwise_per_s=5e9, bytes_per_s=10e9)

# %% [markdown]
# ## 1. What a loop keeps
#
# Eight layers of a network whose large matrices are frozen. To each `up` belongs an adapter, a product of
# two thin matrices `a` and `b`, and only those are trained (this is LoRA).


# %%
def layer(x, w):
    s = x @ w["up"] + x @ w["a"] @ w["b"]
    y = x + jax.nn.gelu(s) @ w["down"]
    return y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)


def model(layer):
    def loss(adapters, frozen, x):
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, adapters | frozen)
        return jnp.mean(x**2 * jnp.cos(x))

    return loss


loss = model(layer)
adapters = {"a": array(8, 128, 8), "b": array(8, 8, 512)}
frozen = {"up": array(8, 128, 512), "down": array(8, 512, 128)}
x = array(512, 128)

# %% [markdown]
# `jax.value_and_grad` turns the one scan into two: the first runs the layers, the second runs their
# derivatives, last layer first. Whatever the second needs of a layer, the first gives out as a *stack*: an
# array with one more dimension, in which each step fills one row.

# %%
jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(adapters, frozen, x).jaxpr
scans = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
stacks = [variable for variable in scans[0].outvars if variable.aval.shape[0] == 8]

print(len(scans), "scans; the first gives out")
for stack in stacks:
    print(f"{stack.aval.size * stack.aval.dtype.itemsize:12,} bytes  {stack.aval.str_short()}")
print(f"{sum(stack.aval.size * stack.aval.dtype.itemsize for stack in stacks):12,} bytes in all")

# %% [markdown]
# Look at the shapes. Five stacks are as wide as `s`, and all of them stand around *one* GELU. Nobody
# decided that. Each rule of differentiation asks for what it needs, and the scan stacks it.
#
# Could we not look at the two scans as they are, and leave out a stack? No: seen from outside, a scan is
# *one* equation. It cannot be cut through, and running it again means to run all of it again.
#
# ## 2. Two loops, one body
#
# But both loops have eight steps, and row 3 of a stack is written in step 3 of the first loop and read in
# step 3 of the second. Whatever the order of the steps, for one layer it is simply this: *a value is
# computed, and later it is read.* A stack is no array with a dimension of eight. It is a value of the
# layer, of which there happen to be eight copies.
#
# So jointcut opens both bodies and reads them as one program for one layer. Of its text, these are the
# lines that say where a body begins, what its next step is handed, and what it stacks; `8x` says that
# there are eight copies.

# %%
cut = aot.function(loss, cost=cost).trace(adapters, frozen, x).partition()
graph = cut.traced.graph

for line in show(graph).splitlines():
    if "loop" in line or line.strip().startswith(("next", "stacks")):
        print(line)

# %% [markdown]
# Body 1 is of the forward, body 2 of the backward; both are of one loop. What body 1 stacks, operations of
# body 2 read, with nothing in between:

# %%
forward, backward = graph.bodies.values()
inside = graph.regions[backward.regions[0]].ops
for v in forward.stacks:
    readers = [graph.ops[i].name for i in graph.consumers[v] if i in inside]
    maker = graph.ops[graph.values[v].maker].name
    print(f"%{v:<3} {graph.values[v].saved_bytes:10,} bytes, made by {maker:12} read by {', '.join(readers)}")

# %% [markdown]
# From here on everything goes as in [00_from_scratch](00_from_scratch.ipynb): what is heavy must not run
# twice, each value costs its bytes (times eight), and a minimum cut finds the cheapest set to save.
#
# Here is the joined body, drawn from the graph. The forward of a layer runs down on the left, the backward
# up on the right; squares are matrix products. What is stacked crosses the green line, in a stroke as wide
# as its bytes. Hollow dots are run again, at the height of their twins.


# %%
def draw_body(axes, graph, plan, title):
    first, second = graph.regions[1], graph.regions[2]
    ops = [[graph.ops[i] for i in region.ops if graph.ops[i].name != "step"] for region in (first, second)]
    depth, again = max(map(len, ops)) - 1, set(plan.recomputed)
    heights = [np.linspace(0, -depth, len(side)) for side in ops]
    left = {op.id: height for op, height in zip(ops[0], heights[0])}
    right = {op.id: height for op, height in zip(ops[1], heights[1][::-1])}
    place = {i: (2.9, h) for i, h in right.items()} | {i: (1.75, left[i]) for i in again if i in left}
    saved = [v for v in plan.values if graph.values[v].loop == 1]
    for op in [*(graph.ops[i] for i in again if i in left), *ops[1]]:
        for v in op.inputs:
            maker = graph.values[v].maker
            start = (1.15, left.get(maker, 1.0)) if v in saved else place.get(maker)
            if start:
                colour = GREEN if v in saved else GREY
                axes.plot(*zip(start, place[op.id]), color=colour, lw=0.8, alpha=0.6, zorder=0)
    for v in saved:
        height, mega = left.get(graph.values[v].maker, 1.0), graph.values[v].saved_bytes / 1e6
        axes.plot([0, 1.15], [height] * 2, color=GREEN, lw=1 + mega, solid_capstyle="butt", zorder=1)
        axes.text(0.58, height + 0.3 + 0.035 * mega, f"{mega:.2f} MB", fontsize=7.5, ha="center")
    axes.plot([1.15, 1.15], [2, -depth - 1], color=GREEN, lw=2.5)
    for op in ops[0]:
        mark = "s" if op.name == "dot_general" else "o"
        axes.plot(0, left[op.id], mark, ms=5, color=BLUE)
        axes.text(-0.12, left[op.id], op.name, ha="right", va="center", fontsize=7.5, color=BLUE)
    for i, at in place.items():
        mark, colour = "s" if graph.ops[i].name == "dot_general" else "o", BLUE if i in left else ORANGE
        axes.plot(*at, mark, ms=5, color=colour, mfc="white" if i in left else colour)
    for op in ops[1]:
        axes.text(3.02, right[op.id], op.name, va="center", fontsize=7.5, color=ORANGE)
    axes.text(-0.12, 1, "x, from the layer before", ha="right", va="center", fontsize=7.5, style="italic")
    axes.text(3.02, 1.2, "to the layer before", va="center", fontsize=7.5, style="italic", color=ORANGE)
    axes.set_title(f"{title}\n{sum(graph.values[v].saved_bytes for v in saved) / 1e6:.1f} MB stacked")
    axes.set(xlim=(-2.2, 4.6), ylim=(-depth - 1.2, 2.4))
    axes.axis("off")


plain = aot.function(loss, strategy="save_all").trace(adapters, frozen, x).partition()
figure, (one, other) = plt.subplots(1, 2, figsize=(10, 8.6), dpi=78, layout="constrained")
draw_body(one, plain.traced.graph, plain.plan, "What JAX stacks")
draw_body(other, graph, cut.plan, "The minimum cut of the body")
plt.show()

# %% [markdown]
# ## 3. The report of it
#
# `explain` tells what was decided and why. Compare the first lines with the list of section 1: of the five
# wide stacks one is left, and it is neither of the two products of `s`, but their sum.

# %%
report = aot.function(loss, cost=cost).explain(adapters, frozen, x)
print(report)

# %% [markdown]
# In Jupyter a report is a page, which shows the same step over time, as XLA has compiled it: the bytes
# that it holds at each instruction, forward then backward. A loop counts as one run of its body here, with
# all its stacks in place.

# %%
report

# %% [markdown]
# ## 4. By hand
#
# JAX has a tool for this, which you apply to the body: `jax.checkpoint(layer)` saves nothing but what enters
# the layer and runs the layer again; with a *policy* it saves what the policy says. How far does one come?
# We compile each, and ask XLA for two figures: the bytes of the step beyond arguments and results, and how
# many matrix products there are in the program of one layer, forward and backward together.


# %%
def figures(compiled):
    return compiled.memory_analysis().temp_size_in_bytes, compiled.as_text().count(" dot(")


def compiled(layer):
    return jax.jit(jax.value_and_grad(model(layer))).lower(adapters, frozen, x).compile()


policies = jax.checkpoint_policies
methods = {
    "plain JAX": compiled(layer),
    "checkpoint": compiled(jax.checkpoint(layer)),
    "checkpoint, dots": compiled(jax.checkpoint(layer, policy=policies.dots_saveable)),
    "jointcut": cut.compile().programs[0],
}
known = {name: figures(program) for name, program in methods.items()}
for name, (size, products) in known.items():
    print(f"{name:24} {size / 1e6:5.1f} MB  {products} products")

# %% [markdown]
# `checkpoint` as it comes holds the least, and pays with four products of fourteen. `dots_saveable` computes
# no product twice, but it goes by the *name* of an operation: both products in `s` are dots, both are wide,
# and it saves both. Their sum, which is all that the backward needs, is no dot.
#
# Whoever knows that can say so, and names the sum. That is the way to write it by hand:


# %%
def named(x, w):
    s = checkpoint_name(x @ w["up"] + x @ w["a"] @ w["b"], "s")
    y = checkpoint_name(x + jax.nn.gelu(s) @ w["down"], "y")
    return y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)


by_name = jax.checkpoint(named, policy=policies.save_only_these_names("s", "y"))
known["checkpoint, s and y by name"] = figures(compiled(by_name))

for fraction in (0.2, 0.15):
    smaller = aot.function(loss, cost=cost, budget=fraction).trace(adapters, frozen, x).partition()
    known[f"jointcut, budget={fraction}"] = figures(smaller.compile().programs[0])

figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
for row, (name, (size, products)) in enumerate(known.items()):
    axes.barh(row, size / 1e6, color=BLUE if "jointcut" in name else GREY)
    axes.text(size / 1e6 + 0.4, row, f"{size / 1e6:.1f} MB, {products} products", va="center")
axes.set_yticks(range(len(known)), known)
axes.invert_yaxis()
axes.set(xlabel="MB beyond arguments and results, by XLA's account", xlim=(0, 66))
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# With the right names one comes to the same memory (and forgets the thin product `x @ a`, which then runs
# twice). The minimum cut finds these names by itself, and finds others when the layer changes. And with a
# budget it goes on to where products run twice: with two of them, to half; with four, to what `checkpoint`
# holds.
#
# ## 5. Ten thousand steps
#
# A recurrent network has small steps, and many. Per step it keeps little, but it keeps that for each step,
# so that memory grows with the length of the sequence, however good the cut.


# %%
def cell(params, h, x):
    w, u = params
    gate, new = jnp.split(x @ w + h @ u, 2, -1)
    gate = jax.nn.sigmoid(gate)
    return gate * h + (1 - gate) * jnp.tanh(new)


def recurrent(cell):
    def loss(params, xs):
        h, _ = jax.lax.scan(lambda h, x: (cell(params, h, x), None), jnp.zeros((16, 32)), xs)
        return jnp.mean(h**2)

    return loss


params = array(8, 64), array(32, 64)

# %% [markdown]
# There is a way out. Cut the sequence into **segments**. The forward keeps the state `h` only where a
# segment begins. The backward takes the segments from the last to the first, runs each one forward again
# from its state, this time with its stacks, and then runs that segment's backward. With $n$ steps in
# segments of $k$, memory holds $n/k$ states and the stacks of $k$ steps. That is least where both are about
# equal: near $k = \sqrt n$, and then it grows with $\sqrt n$ as well. The price is one more forward.
#
# jointcut does so where a budget asks for it. `budget=0.0` asks for the least memory that it finds.

# %%
lengths = [100, 1_000, 10_000]
curves = {"plain JAX": [], "jointcut": [], "checkpoint on the cell": [], "jointcut, budget=0.0": []}
for n in lengths:
    xs = array(n, 16, 8)
    ours = aot.function(recurrent(cell), cost=cost).trace(params, xs)
    by_hand = jax.jit(jax.value_and_grad(recurrent(jax.checkpoint(cell)))).lower(params, xs).compile()
    least = ours.partition(budget=0.0)
    curves["plain JAX"].append(ours.plain_memory.temp_bytes)
    curves["jointcut"].append(ours.partition().compile().activation_bytes)
    curves["checkpoint on the cell"].append(by_hand.memory_analysis().temp_size_in_bytes)
    curves["jointcut, budget=0.0"].append(least.compile().activation_bytes)
    for loop, steps in least.plan.segments:
        print(f"{n:6,} steps: loop {loop} runs in segments of {steps}")

figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
for (name, sizes), colour, mark in zip(curves.items(), [GREY, BLUE, ORANGE, GREEN], "osD^"):
    axes.loglog(lengths, sizes, color=colour, marker=mark, label=name)
    axes.annotate(f"{sizes[-1] / 1e6:.2f} MB", (lengths[-1], sizes[-1]), (8, -3), textcoords="offset points")
root = curves["jointcut, budget=0.0"][0] * np.sqrt(np.array(lengths) / lengths[0])
axes.loglog(lengths, root, ":", color="black", lw=1, label="√ of the length, for comparison")
axes.set(xlabel="steps", ylabel="bytes beyond arguments and results", xlim=(80, 25_000))
axes.set_title("Three lines of slope 1, and one of less than ½")
axes.grid(alpha=0.25)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# A better cut moves the line down; only segments change its *slope*. At ten thousand steps, plain JAX
# needs nearly three hundred times as much.
#
# Segments run the cell once more, and so does `checkpoint` on the cell. So as soon as a budget forces the
# cell to run again, jointcut takes segments, for as many of the steps as the budget asks for:

# %%
for fraction in (None, 0.3, 0.0):
    found = ours.partition(budget=fraction)
    again = ", ".join(f"in segments of {steps}" for _, steps in found.plan.segments) or "in one piece"
    size = found.compile().activation_bytes
    print(f"budget {fraction!s:4} {size / 1e6:6.2f} MB  {len(found.plan.saved)} values, {again}")

# %% [markdown]
# `budget=0.0` saves two values of a step where the other saves four, computes the rest again inside the
# segment, and with smaller steps can afford longer segments.
#
# Is it still the same gradient? We run the longest with numbers in it: same value, same gradients, up to
# the rounding of a sum taken in another order.

# %%
keys = jax.random.split(jax.random.key(0), 3)
weights = tuple(0.2 * jax.random.normal(key, p.shape) for key, p in zip(keys, params))
sequence = jax.random.normal(keys[2], (10_000, 16, 8))

value, gradients = least.compile().value_and_grad(weights, sequence)
expected = jax.jit(jax.value_and_grad(recurrent(cell)))(weights, sequence)
pairs = zip(jax.tree.leaves((value, gradients)), jax.tree.leaves(expected), strict=True)
print("as jax.value_and_grad:", all(np.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs))

# %% [markdown]
# ## 6. Loops in loops
#
# Four recurrent layers on top of each other: a scan over the layers, whose body is a scan over time. The
# same reading works at each level. First the two outer scans are joined; inside their joined body two inner
# scans are found, and joined in turn. A value of the innermost body has 4 × 500 copies.


# %%
def deep(params, xs):
    def over_layers(xs, w):
        def over_time(h, x):
            h = jnp.tanh(x @ w[0] + h @ w[1])
            return h, h

        _, hs = jax.lax.scan(over_time, jnp.zeros(xs.shape[1:]), xs)
        return jax.nn.gelu(hs), None

    xs, _ = jax.lax.scan(over_layers, xs, params)
    return jnp.mean(xs**2)


arguments = (array(4, 32, 32), array(4, 32, 32)), array(500, 16, 32)
nested = aot.function(deep, cost=cost).trace(*arguments).partition()
for loop in nested.traced.graph.loops[1:]:
    around = f"loop {loop.parent}" if loop.parent else "the program"
    print(f"loop {loop.id}: {loop.length} steps, inside {around}")
print(nested.plan)

# %% [markdown]
# `4 x float32[500, 16, 32]` is a value of the outer body: what enters each layer. `2000 x float32[16, 32]`
# is a value of the inner one: the state after a step. The state before a step is the same, one step earlier.
# JAX keeps both, and jointcut one of them: see the second line.
# The GELU between the layers is computed again, and of the inner body no product and no sum is kept.

# %%
memory = nested.explain().data["sections"][0]
by_line = next(grouping["groups"] for grouping in memory["groupings"] if grouping["name"] == "source line")
names = [group["name"][-40:] for group in by_line]
figure, axes = plt.subplots(figsize=(10, 4.4), layout="constrained")
axes.stackplot(range(len(memory["total"])), *(group["bytes"] for group in by_line), labels=names, step="mid")
axes.axvline(memory["boundary"] - 0.5, color="black", lw=0.8)
axes.set(xlabel="operations as they run: forward, then backward", ylabel="bytes alive")
figure.legend(loc="outside right upper", frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## Where to look
#
# - `partition/bodies/read.py` finds the scans that belong together and joins their bodies.
# - `partition/lower/reruns.py` says which loops can run in segments.
# - What else a budget does, and what it costs in time, is told in [03_budgets](03_budgets.ipynb).
# - Branches of `cond` are cut like loop bodies, and a `while_loop` runs backwards from checkpoints.
