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
# # Metadata and wrappers
#
# A partitioner likes simple programs: plain arrays go in, each of them once, plain arrays come out, and
# nothing else happens. Functions that people write are not like that. They take dictionaries and sparse
# matrices, the same array twice, a reference that they write to; they return an argument as it is.
#
# Between the two stand *wrappers*. Before a function is traced for cutting, jointcut looks at it once and
# writes down what it sees: the **metadata**. Each wrapper takes one peculiarity away before the program is
# compiled, and puts it back after each call. This notebook shows what is seen, and what comes of it.

# %%
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from jax.extend.core import jaxpr_as_fun
from jointcut import aot
from matplotlib import pyplot as plt

plt.rcParams.update({"figure.dpi": 100, "font.size": 10})
np.set_printoptions(precision=3, suppress=True)
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8a8f98"

# %% [markdown]
# ## 1. One look
#
# Here is a function with something of everything. It writes to a reference, returns its input and a view of
# it, and returns the hidden layer in two shapes.


# %%
def loss(params, x, target, weight, highest):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    highest[...] = jax.lax.stop_gradient(jnp.max(hidden, 0))
    value = jnp.mean(weight * (hidden - target) ** 2)
    return value, (hidden, hidden.reshape(-1), x, x.T)


x = jax.random.normal(jax.random.key(0), (5, 4))
params = {"w": jax.random.normal(jax.random.key(1), (4, 3)), "b": jnp.zeros(3)}
ones = jnp.ones((5, 3))
highest = jax.new_ref(jnp.zeros(3))

# %% [markdown]
# We call it with the same array `ones` as target and as weight, and look at what was seen.

# %%
function = aot.function(loss, has_aux=True)
cut = function.trace(params, x, ones, ones, highest).partition()
print(cut.metadata)

# %% [markdown]
# A line for each array: its number, its type, how you reach it, and what is known of it. `args[0]` holds
# two arrays, so that `args[2]` is input 3. Of an input: is it read, is it differentiated, is it written,
# is it the same array as another? Of an output: does a gradient flow back from it, and does it share
# something with an input or with another output? These are the questions that PyTorch's AOTAutograd asks,
# and the records bear its names (`InputAliasInfo`, `OutputAliasInfo`, `MutationType`), so that whoever
# knows those will find their way. They are plain data:

# %%
reference = cut.metadata.input_info[-1]
print(reference.path, reference.mutation_type)
transposed = cut.metadata.output_info[-1]
print(transposed.path, transposed.output_type, "of input", transposed.base_idx)
print(transposed.view_meta_sequence)

# %% [markdown]
# What is it good for? The program in the middle is simpler than the function, and the metadata says how.
# Let us draw that.


# %%
def draw_wrapping(metadata, title):
    inputs, outputs = metadata.input_info, metadata.output_info
    entering = [i for i, info in enumerate(inputs) if info.duplicate_of is None]
    leaving = [i for i, info in enumerate(outputs) if info.output_type.name != "is_input"]
    rows, dark = max(len(inputs), len(outputs)), "#555b66"
    axes = plt.subplots(figsize=(10, 0.52 * rows + 1.2), layout="constrained")[1]
    axes.add_patch(plt.Rectangle((4, -rows + 0.5), 2.4, rows, fc="#eef3f8", ec=GREY))
    counted = f"{len(entering)} arrays in\n{len(leaving)} arrays out"
    axes.text(5.2, -rows / 2 + 0.5, counted, ha="center", va="center")
    for i, info in enumerate(inputs):
        slot = entering.index(i if info.duplicate_of is None else info.duplicate_of)
        colour = ORANGE if info.mutates_data else GREEN if info.requires_grad else BLUE
        style = "--" if info.duplicate_of is not None else "-"
        axes.plot([2.2, 4], [-i, -slot], style, color=colour, lw=1.8)
        axes.text(2.1, -i, info.path, ha="right", va="center", family="monospace", fontsize=9)
        if info.mutates_data:
            arrow = {"arrowstyle": "->", "color": ORANGE}
            axes.annotate("", (2.25, -i - 0.16), (4, -slot - 0.16), arrowprops=arrow)
    for i, info in enumerate(outputs):
        axes.text(8.4, -i, info.path, va="center", family="monospace", fontsize=9)
        axes.text(10.2, -i, info.output_type.name, va="center", fontsize=8, color=dark)
        if i in leaving:
            colour = GREEN if info.requires_grad else BLUE
            axes.plot([6.4, 8.3], [-leaving.index(i), -i], color=colour, lw=1.8)
        else:
            around = [2.2, 3.3, 3.7, 6.7, 7.1, 8.3], [-info.base_idx, 0.1, 0.8, 0.8, 0.1, -i]
            axes.plot(*around, color=GREY, lw=1.8)
            axes.text(5.2, 0.95, "handed back by the wrapper, as it is", ha="center", fontsize=8, color=dark)
    axes.set(xlim=(0, 14.2), ylim=(-rows + 0.3, 1.4), title=title)
    axes.axis("off")
    plt.show()


draw_wrapping(cut.metadata, "What the caller gives and gets, and what the program in the middle does")

# %% [markdown]
# Green is differentiated, orange is written. The two places that hold the same array (dashed: the second of
# them) share one input. `result[1][2]` is `x` itself, and goes around the program. What this means for a
# caller we look at piece by piece.
#
# ## 2. The same array twice
#
# Weights are tied, a target is its own input: the same array stands at two places. It enters once, so that
# it takes its memory once and is read once. Both places get a gradient of their own, as in JAX.


# %%
def both(a, b):
    return jnp.sum(a * jnp.sin(b))


two = aot.function(both, argnums=(0, 1))
a = jnp.arange(3.0)
for name, gradients in {"jointcut": two.grad(a, a), "jax.grad": jax.grad(both, argnums=(0, 1))(a, a)}.items():
    print(name, *gradients)

# %% [markdown]
# A program that was compiled for this would be wrong for two different arrays. `two(a, b)` itself sees the
# difference and compiles again. A program that you compile yourself refuses:

# %% tags=["raises-exception"]
run = two.trace(a, a).partition().compile()
run.value_and_grad(a, a + 1)

# %% [markdown]
# ## 3. An output that is an input
#
# A compiled program makes new arrays. When it returns an argument as it is, XLA has to copy it. Since the
# metadata says so beforehand, the copy need not be made: you get back the very array that you gave.

# %%
_, (_, _, same, _) = function(params, x, ones, ones, highest)
_, (_, _, copy, _) = jax.jit(loss)(params, x, ones, ones, highest)
print("jointcut: the same array?", same is x)
print("jax.jit:  the same array?", copy is x)
print("jax.jit:  the same memory?", copy.unsafe_buffer_pointer() == x.unsafe_buffer_pointer())

# %% [markdown]
# ## 4. A reference is written once
#
# A `jax.Ref` is an array that a function may write to: statistics, a counter, a cache. Now a subtle point.
# Whoever saves memory by running the forward again also runs again what the forward *writes*. Let a
# function count how often it is called:


# %%
def counted(w, x, calls):
    calls[...] += 1
    return jnp.sum(jnp.sin(jnp.sin(x @ w)) ** 2)


gradients = {
    "jax.value_and_grad": jax.value_and_grad(counted),
    "with jax.checkpoint": jax.value_and_grad(jax.checkpoint(counted)),
    "jointcut": aot.function(counted).value_and_grad,
}
for name, gradient in gradients.items():
    calls = jax.new_ref(jnp.zeros(()))
    gradient(params["w"], x, calls)
    print(f"{name:20} one step, counted {int(calls[...])} time{'s' if calls[...] > 1 else ''}")

# %% [markdown]
# `jax.checkpoint` counts each step twice: once in the forward, and once when the backward runs it again.
# In a running mean, you would hardly notice, and it would be wrong. jointcut recomputes single operations,
# and a write is never one of them: it stands in the forward, and there alone. (`mutates_data` in the
# metadata says which inputs are written, `mutation_type` where: in the compiled program itself, or, inside
# somebody's `jax.grad`, after it.)

# %%
cut = aot.function(counted).trace(params["w"], x, calls).partition()
for name, half in {"forward": cut.forward, "backward": cut.backward}.items():
    writes = sum(equation.primitive.name in ("swap", "addupdate") for equation in half.jaxpr.eqns)
    print(f"{name:9} {len(half.jaxpr.eqns):2} equations, {writes} of them write{'s' if writes == 1 else ''}")

# %% [markdown]
# ## 5. Donated arguments
#
# The caller may give up an argument: `donate_argnums`, as in `jax.jit`. Then its memory is free for
# results. Weights are a good example if the optimiser's step is part of the function, or as here, where the
# gradient may take the place of the weights that it belongs to.


# %% tags=["varies"]
def step(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


w, batch = jax.random.normal(jax.random.key(2), (512, 512)), jax.random.normal(jax.random.key(3), (64, 512))
for donated in ((), 0):
    function = aot.function(step, donate_argnums=donated)
    cut = function.trace(w, batch).partition()
    peak = cut.compile().peak_bytes
    print(f"donate_argnums={donated!s:3} {peak / 1e6:.2f} MB;", cut.metadata.input_info[0])

given = jnp.array(w)
function.value_and_grad(given, batch)
print("what was given up is gone:", given.is_deleted())

# %% [markdown]
# ## 6. Containers: arrays made of arrays
#
# A sparse matrix *is* two arrays, numbers and their places, and stands for one. In the metadata it is one
# record that holds others:

# %%
matrix = sparse.BCOO.fromdense(jnp.diag(jnp.arange(1.0, 6.0))[:, :4])


def product(matrix, v):
    return jnp.sum(jnp.sin(matrix @ v))


v = jnp.ones(4)
cut = aot.function(product).trace(matrix, v).partition()
for record in cut.metadata.subclass_inp_meta:
    print(record)

# %% [markdown]
# `jax.grad` of this function is an error: it asks for the gradient of the places too, and those are
# integers. Here the gradient comes in the class of the argument, at the same places.

# %%
try:
    jax.grad(product)(matrix, v)
except TypeError as error:
    print("jax.grad:", str(error).splitlines()[0][:94])

gradient = aot.function(product).grad(matrix, v)
print("jointcut:", gradient)
print("the places are those of the argument:", np.array_equal(gradient.indices, matrix.indices))
print(gradient.data)

# %% [markdown]
# A class of your own becomes a container as soon as it is a pytree with a `shape` and a `dtype`;
# `aot.register_container` names those parts of it that are places and not numbers.
#
# ## 7. A gradient of rows
#
# Now the other way round: an argument that is dense, whose gradient is not. A table of 20,000 words, of
# which a batch reads a few hundred. The gradient is a table as large, and nearly all of it is zero.
# `sparse_gradients` names such a table by its path (the one that the metadata shows), and its gradient
# comes as the rows that were read.


# %% tags=["varies"]
def words(params, ids):
    return jnp.mean(jnp.tanh(params["table"][ids] @ params["w"]) ** 2)


weights = {
    "table": jax.random.normal(jax.random.key(4), (20_000, 64)),
    "w": jax.random.normal(jax.random.key(5), (64, 64)) / 8,
}
ids = jax.random.randint(jax.random.key(6), (256,), 0, 20_000)
table = weights["table"]

peaks = {}
for name, paths in {"a table": (), "rows": "args[0]['table']"}.items():
    function = aot.function(words, sparse_gradients=paths)
    run = function.trace(weights, ids).partition().compile()
    peaks[name] = run.peak_bytes - table.nbytes
gradient = function.grad(weights, ids)["table"]
dense = jax.grad(words)(weights, ids)["table"]
print(gradient)
print("the same, as a table:", bool(jnp.allclose(gradient.todense(), dense, rtol=1e-4, atol=1e-7)))

figure, axes = plt.subplots(figsize=(8, 1.7), layout="constrained")
for row, (name, size) in enumerate(peaks.items()):
    axes.barh(row, size / 1e6, color=[GREY, BLUE][row])
    axes.text(size / 1e6 + 0.1, row, f"{size / 1e6:.2f} MB", va="center")
axes.set_yticks(range(2), [f"gradient as {name}" for name in peaks])
axes.invert_yaxis()
axes.set(xlabel=f"peak of the step beside the table of {table.nbytes / 1e6:.1f} MB", xlim=(0, 6.2))
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# No array as large as the table was made at any time. An optimiser adds the rows where they belong:
# `table.at[gradient.indices[:, 0]].add(-rate * gradient.data)`.
#
# ## 8. Static arguments
#
# Some arguments are no arrays at all: a number of layers, a mode. As in `jax.jit`, they are named static;
# the function is traced for each value anew, and each has a cut of its own.


# %%
def powers(w, x, depth, activation="tanh"):
    for _ in range(depth):
        x = getattr(jnp, activation)(x @ w)
    return jnp.mean(x**2)


ours = aot.function(powers, static_argnums=2, static_argnames="activation")
square = jnp.eye(64) * 0.9
for depth, activation in ((1, "tanh"), (4, "tanh"), (4, "sin")):
    cut = ours.trace(square, jnp.ones((32, 64)), depth, activation=activation).partition()
    made_by = ", ".join(saved.op for saved in cut.plan.saved)
    print(f"{depth} × {activation:4}: {cut.plan.bytes_saved:6,} bytes saved, made by {made_by}")

# %% [markdown]
# The derivative of `tanh` is computed from its result, that of `sin` from its operand: so it is another
# array that is saved.
#
# ## 9. Names and positions
#
# Whoever drives the two halves with other tools asks: which input of the program is which? `cut.signature`
# says so by names. Inputs are `primals_1` and so on, as the exported programs have them
# (see [06_export_and_reload](06_export_and_reload.ipynb)).

# %%
cut = aot.function(loss, has_aux=True).trace(params, x, ones, ones, highest).partition()
print(cut.signature)

# %% [markdown]
# There are two other inputs, not three: `target` and `weight` are the same array. The record says so by
# path, and has the rest as plain dicts, too:

# %%
print(cut.signature.same_arrays, cut.signature.inputs_to_parameters)

# %% [markdown]
# And `cut.gradient` is the bare pair: two jaxprs, `f` and `df`, with lists of positions that say how to
# connect them. Here is a training step by hand, for a function without references: run `f`, pick what `df`
# wants, run `df`.


# %%
def plain(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


pair = aot.function(plain).trace(params["w"], x).partition().gradient
inputs = [params["w"], x]
outputs = jaxpr_as_fun(pair.f)(*inputs)
cotangents = [jnp.ones(())]
results = jaxpr_as_fun(pair.df)(
    *(cotangents[i] for i in pair.df_input_vjps),
    *(inputs[i] for i in pair.df_input_captured_inputs),
    *(outputs[i] for i in pair.df_input_captured_outputs),
)
print(pair)
print("as jax.grad:", bool(jnp.allclose(results[0], jax.grad(plain)(*inputs), rtol=1e-5)))

# %% [markdown]
# ## 10. Who made the NaN?
#
# The last wrapper is for bad days. A well-known trap: a square root is guarded by `where`, the value is
# fine, and the gradient is not a number.


# %%
def norm(x):
    squares = jnp.sum(x * x, -1)
    lengths = jnp.where(squares > 0, jnp.sqrt(squares), 0.0)
    return jnp.sum(lengths)


points = jnp.array([[3.0, 4.0], [0.0, 0.0]])
print(aot.function(norm)(points))
print(aot.function(norm).grad(points))

# %% [markdown]
# In debug mode each half is checked after it has run. Where one makes a NaN or an infinity, its equations
# are run again one by one, and the first to blame is named: the operation, the line that it comes from, and
# what it was given. `aot.first_nonfinite(norm, points)` returns the same as a record, and
# `aot.function(check="nonfinite")` looks at every call at full speed.

# %% tags=["raises-exception"]
with aot.debug():
    aot.function(norm).grad(points)

# %% [markdown]
# The root of zero is fine; its derivative, one divided by twice the root, is not, and it stands in the
# *backward*, at the line of the `sqrt`. `where` took the bad value out of the forward, and multiplied the
# bad derivative by zero, which makes NaN of infinity. The cures stand in the message, and each was tried
# by running the call with it. By hand the same is done by guarding what goes *in*.


# %%
def norm_guarded(x):
    squares = jnp.sum(x * x, -1)
    lengths = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)
    return jnp.sum(lengths)


with aot.debug():
    print(aot.function(norm_guarded).grad(points))

# %% [markdown]
# ## Where to look
#
# - `wrappers/metadata/schemas.py` holds the records; `aot/trace/analyse.py` is the one look that fills them.
# - `wrappers/wrapper.py` says what a wrapper is: one half before compiling, one half after. `alias.py`,
#   `refs.py`, `containers.py` and `checks.py` beside it are those of sections 2 to 10.
# - To write a wrapper of your own, see [07_write_your_own](07_write_your_own.ipynb).
