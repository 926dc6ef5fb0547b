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
# # From scratch
#
# A training step runs a function forward, then its gradient backward. In between, memory holds what the
# forward computed and the backward will read. Often this is most of the memory of the step.
#
# Must it be? A value that the backward reads can be *saved*, or it can be *computed again* from something
# smaller. Which to save and which to compute again is a question with an exact answer, and this notebook
# builds the program that finds it: trace, cut, write, run. It takes about two hundred lines, a good third
# of which draw. They need JAX, numpy, scipy and matplotlib. You need to know JAX; no graph theory is
# assumed.

# %%
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var, jaxpr_as_fun
from matplotlib import pyplot as plt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

plt.rcParams.update({"figure.dpi": 100, "font.size": 10})

# %% [markdown]
# ## 1. A function and its gradient, as one program
#
# Our function is a small autoencoder: a layer with GELU, a softmax in the middle, and the squared error of
# what comes out again. It knows nothing of what we are going to do with it.


# %%
def loss(params, x):
    w1, w2, w3 = params
    hidden = jax.nn.gelu(x @ w1)
    code = jax.nn.softmax(hidden @ w2)
    return jnp.mean((code @ w3 - x) ** 2)


keys = jax.random.split(jax.random.key(0), 4)
sizes = [(64, 512), (512, 128), (128, 64)]
params = [jax.random.normal(key, size) / size[0] ** 0.5 for key, size in zip(keys, sizes)]
x = jax.random.normal(keys[3], (256, 64))

# %% [markdown]
# `jax.vjp` gives the value and a `pullback`, which takes the cotangent of the value (for a loss: 1) to the
# gradients. Put both into one function, and `jax.make_jaxpr` writes down forward *and* backward as one list
# of equations: the **joint program**. `jax.disable_jit` opens the calls inside, such as that of `gelu`, so
# that the list is flat.


# %%
def joint(params, x, cotangent):
    value, pullback = jax.vjp(lambda params: loss(params, x), params)
    return value, *pullback(cotangent)


with jax.disable_jit():
    jaxpr = jax.make_jaxpr(joint)(params, x, jnp.ones(())).jaxpr

*inputs, cotangent = jaxpr.invars
value, *gradients = jaxpr.outvars
print(len(jaxpr.eqns), "equations")

# %% [markdown]
# One small function will serve us throughout. It walks through a list of equations from the end, and keeps
# those that lead from the values we have to the values we want. Its first use is to drop what nobody reads.


# %%
def variables(atoms):
    return {atom for atom in atoms if isinstance(atom, Var)}


def steps(equations, given, wanted):
    """The equations, in order, that compute `wanted` from `given`."""
    given, wanted, kept = set(given), variables(wanted), []
    for equation in reversed(equations):
        if (wanted - given) & set(equation.outvars):
            kept.append(equation)
            wanted |= variables(equation.invars)
    return kept[::-1]


equations = steps(jaxpr.eqns, jaxpr.invars, jaxpr.outvars)
print(len(equations), "of them lead to the value or to a gradient")

# %% [markdown]
# ## 2. Forward, backward
#
# No label in the program says which equation belongs to which half. None is needed: what depends on the
# cotangent, directly or through other equations, can only run in the backward. We call it *late*. All the
# rest is *early*: it can be computed before the cotangent is known.

# %%
late = {cotangent}
for equation in equations:
    if late & variables(equation.invars):
        late |= set(equation.outvars)

backward_part = [equation for equation in equations if late & set(equation.outvars)]
early_part = [equation for equation in equations if not late & set(equation.outvars)]
maker = {v: equation for equation in early_part for v in equation.outvars}


def text(v):
    shape = ",".join(map(str, v.aval.shape))
    return f"{v.aval.dtype}[{shape}]".ljust(18) + maker[v].primitive.name


print(len(early_part), "equations are early,", len(backward_part), "are late")

# %% [markdown]
# Where late equations read an early value, something has to cross from the forward to the backward.
# Arguments such as `x` and the weights cross for free, since the caller holds them anyway. These are the
# values that do not:


# %%
def nbytes(v):
    return v.aval.size * v.aval.dtype.itemsize


wanted = variables(v for equation in backward_part for v in equation.invars) & set(maker)
wanted = [v for v in maker if v in wanted]  # in program order
for v in wanted:
    print(f"{nbytes(v):8,} bytes  {text(v)}")
print(f"{sum(map(nbytes, wanted)):8,} bytes in all")

# %% [markdown]
# This is what JAX keeps: the forward of `jax.vjp` computes each of these arrays and holds on to it. There
# is no need to take our word for it. A pullback is a tree, and its leaves are the arrays that it holds.
# Trace the making of a pullback, and they are the outputs:

# %%
with jax.disable_jit():
    made = jax.make_jaxpr(lambda p, x: jax.vjp(lambda p: loss(p, x), p)[1])(params, x).jaxpr

held = variables(made.outvars) - set(made.invars)
print(f"{sum(map(nbytes, held)):,} bytes in {len(held)} arrays")

# %% [markdown]
# The same arrays. The largest of them all stand around one GELU: if only what goes into the GELU were kept,
# the others could be computed again from it, by some multiplications and one `tanh`.
#
# But computing again must have a limit. Without one, the best answer is to save nothing, and to run the
# whole forward a second time. So we set a rule: **what is heavy runs once**. Heavy are matrix products,
# which are most of the work, and reductions, which read a whole array to return a small one, so that saving
# the result costs next to nothing. Everything else is a few operations for each element.

# %%
HEAVY = {"dot_general", "reduce_sum", "reduce_max"}
heavy = {v for v in maker if maker[v].primitive.name in HEAVY}
print("\n".join(text(v) for v in maker if v in heavy))

# %% [markdown]
# Now the question is exact. *Choose early values to save, as few bytes as possible, such that the backward
# can compute all that it reads from them and from the arguments, and runs nothing heavy of the forward
# again.*
#
# ## 3. Five values, by hand
#
# There are $2^n$ ways to choose among $n$ values, so let us first look at five of them. Here is a layer
# with a gate:
#
# ```python
# g    = x @ v               # 8 MB, a matrix product
# keep = g > 0               # 2 MB, one byte for each element
# h    = x @ w               # 8 MB, a matrix product
# t    = tanh(h)             # 8 MB
# s    = 1 - t * t           # 8 MB, the derivative of tanh
# y    = where(keep, t * t, 0)  # its gradient reads keep, t and s
# ```
#
# As data, that is: what each value costs to keep, what it is computed from, which are heavy, and which the
# backward reads.

# %%
cost = {"g": 8, "keep": 2, "h": 8, "t": 8, "s": 8}
reads = {"g": [], "keep": ["g"], "h": [], "t": ["h"], "s": ["t"]}
products = ["g", "h"]
asked = ["keep", "t", "s"]


def can_have(v, saved):
    """Whether the backward can have a value: it is saved, or can be computed again from what it can have."""
    return v in saved or (v not in products and all(can_have(u, saved) for u in reads[v]))


choices = [{v for i, v in enumerate(cost) if number >> i & 1} for number in range(2 ** len(cost))]
enough = [saved for saved in choices if all(can_have(v, saved) for v in asked)]
enough.sort(key=lambda saved: (sum(cost[v] for v in saved), len(saved)))
for saved in enough[:5]:
    print(sum(cost[v] for v in saved), "MB:", ", ".join(v for v in cost if v in saved))
print(f"... {len(enough)} of {len(choices)} choices are enough; JAX's own, {', '.join(asked)}, takes 18 MB")

# %% [markdown]
# So 10 MB are enough, where JAX keeps 18. Note where the choice falls: of the gate we save `keep`, *after*
# the comparison, since a mask is four times smaller than the product it came from. Of the other branch we
# save `t`, or `h` *before* it, and not `s`, which can be had from either.
#
# Trying all sets is hopeless for fifty values. Instead, think of **water**.
#
# - Every value is a pipe, and the pipe is as wide as the value has bytes.
# - Water comes in at the *source*, the forward, and enters the pipe of each heavy value.
# - From there it flows to all that is computed from it, and leaves to the *sink*, the backward, wherever
#   the backward reads a value. These connections have no limit; only pipes do.
#
# To save a value is to block its pipe. Suppose that some water still gets through, and follow it upwards
# from the sink: the backward reads a value that was not saved, so it must be computed again, from one that
# was not saved either, and so on, up to a heavy value that was not saved. It would have to be computed
# twice, which is against the rule. And if no water gets through, no such chain exists, and all that the
# backward reads can be had. Therefore:
#
# > **A set of values is enough if, and only if, blocking their pipes stops the water.**
#
# We want the cheapest. Here are the pipes.

# %%
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8a8f98"
SOURCE, SINK, LENGTH = np.array([0.0, 1.0]), np.array([12.3, 0.8]), np.array([2.0, 0.0])
corner = {"g": (1.8, 2.0), "keep": (5.2, 2.0), "h": (1.8, 0.0), "t": (5.2, 0.0), "s": (8.7, -1.1)}
corner = {v: np.array(at) for v, at in corner.items()}
links = {("source", (v, "in")): (SOURCE, corner[v]) for v in products}
links |= {((u, "out"), (v, "in")): (corner[u] + LENGTH, corner[v]) for v in cost for u in reads[v]}
links |= {((v, "out"), "sink"): (corner[v] + LENGTH, SINK) for v in asked}


def draw_pipes(title, flow={}, cut=()):
    axes = plt.figure(figsize=(9, 3.8), layout="constrained").add_subplot(title=title)
    for v, megabytes in cost.items():
        carried = flow.get(((v, "in"), (v, "out")), 0)
        for height, colour in [(megabytes / 14, "#d4d9df"), (carried / 14, "#4095c6")]:
            axes.add_patch(plt.Rectangle(corner[v] - (0, height / 2), LENGTH[0], height, color=colour, lw=0))
        label = f"{v}: {carried} of {megabytes} MB" if flow else f"{v}: {megabytes} MB"
        axes.text(*corner[v] + (0, megabytes / 28 + 0.1), label, fontsize=9.5)
    for arc, (start, end) in links.items():
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": GREY, "shrinkB": 8})
        axes.text(*(start + end) / 2 + (0, 0.14), flow.get(arc, ""), color=BLUE, ha="center", fontsize=9)
    for at, name, colour in [(SOURCE, "forward", BLUE), (SINK, "backward", ORANGE)]:
        axes.plot(*at, "o", ms=13, color=colour, zorder=5)
        axes.text(*at + (0, 0.3), name, ha="center", color=colour, weight="bold")
    if cut:
        axes.plot(*zip(*[corner[v] + 0.93 * LENGTH + (0, out) for v, out in zip(cut, (0.6, -0.75))]),
                  color=GREEN, lw=3, ls=(0, (3, 1)))
        axes.text(*corner[cut[-1]] + 0.93 * LENGTH - (0, 0.85), f"the cut: {sum(cost[v] for v in cut)} MB",
                  color=GREEN, ha="center", va="top", weight="bold")
    axes.set(xlim=(-0.8, 13.2), ylim=(-1.7, 2.7))
    axes.axis("off")
    plt.show()


draw_pipes("Each value is a pipe as wide as its bytes")

# %% [markdown]
# Now pour in as much water as will go through, and count: 10 MB at a time. That is the whole secret.
# Whichever pipes we block, all of those 10 must be stopped, so no blocking can be narrower than 10. And we
# know one of exactly 10. So it is the cheapest there is, and we know it without having looked at any other.
#
# That the two always meet, that *the most that flows equals the narrowest blocking*, is the theorem of Ford
# and Fulkerson (1956), and the reason why we need not try all sets. A program finds the largest flow in far
# fewer steps, and the blocking can be read from it: start at the sink, go back wherever more water could
# still come from, and stop at the pipes that are full. The full pipes where we stop are the **minimum
# cut**.
#
# In the network of the program a pipe is an arc between two nodes, *in* and *out*; a connection is an arc
# without a limit. (The same construction cuts the graphs of PyTorch's compiler.) scipy does the pouring.
# (Its numbers have 32 bits, and wider ones lose their upper bits without a word, hence the `assert`.)


# %%
def minimum_cut(cost, reads, heavy, wanted):
    """The cheapest values to save, and the flow that proves it, as {(tail, head): amount}."""
    endless = sum(cost.values()) + 1
    assert endless < 2**30
    arcs = {((v, "in"), (v, "out")): cost[v] for v in cost}
    arcs |= {((u, "out"), (v, "in")): endless for v in cost for u in reads[v]}
    arcs |= {("source", (v, "in")): endless for v in heavy}
    arcs |= {((v, "out"), "sink"): endless for v in wanted}

    nodes = dict.fromkeys(["source", "sink", *(node for arc in arcs for node in arc)])
    number = {node: i for i, node in enumerate(nodes)}
    tails, heads = np.array([[number[tail], number[head]] for tail, head in arcs]).T
    network = csr_array((np.array([*arcs.values()], np.int32), (tails, heads)), shape=(len(nodes),) * 2)
    flow = maximum_flow(network, number["source"], number["sink"]).flow

    room = csr_array(csr_array(network - flow).T)  # by how much each arc could carry more, turned round
    room.eliminate_zeros()
    found = set(breadth_first_order(room, number["sink"], return_predecessors=False).tolist())
    saved = [v for v in cost if number[v, "in"] not in found and number[v, "out"] in found]
    return saved, {arc: int(flow[number[arc[0]], number[arc[1]]]) for arc in arcs}


saved, flow = minimum_cut(cost, reads, products, asked)
print("save", " and ".join(saved), "for", sum(cost[v] for v in saved), "MB")
draw_pipes("10 MB flow, and the two blocked pipes are 10 MB wide: neither can be improved", flow, saved)

# %% [markdown]
# `h` is as wide as `t`, and blocking it would do as well. Of several cheapest cuts ours is the one nearest
# to the sink, since we start looking there: less has to be computed again behind it.
#
# ## 4. The cut of the joint program
#
# The same function, given the real program. Arguments have no pipe: the caller holds them, so they are
# always at hand.

# %%
read_by = {v: variables(maker[v].invars) & set(maker) for v in maker}
saved, flow = minimum_cut({v: nbytes(v) for v in maker}, read_by, heavy, wanted)

for v in saved:
    print(f"{nbytes(v):8,} bytes  {text(v)}")
print(f"{sum(map(nbytes, saved)):8,} bytes in all, instead of {sum(map(nbytes, wanted)):,}")
print(f"{sum(flow['source', (v, 'in')] for v in heavy):8,} bytes flow: no choice is smaller")

# %% [markdown]
# Each layer is cut at another place. Of the GELU, what goes in is saved. Of the softmax, the exponentials
# and the sum of each row: they stand in the middle, and one division gives what comes out. Of the squared
# error, what the derivative of the square multiplies by.
#
# ## 5. Writing the two programs
#
# `steps` already does the choosing. The forward leads from the arguments to the value and to what is saved.
# The backward leads from the arguments, what is saved, and the cotangent to the gradients; where it needs
# an early value that is not saved, the walk goes on through that value's equation, which is thereby
# computed again.
#
# What is left is to write equations down as a jaxpr. An interpreter of a jaxpr is a dictionary and a loop;
# let `make_jaxpr` trace the interpreter, and what comes out is a jaxpr again.


# %%
def evaluate(equations, given, wanted, arrays):
    held = dict(zip(given, arrays))

    def read(atom):
        return held[atom] if isinstance(atom, Var) else atom.val

    for equation in equations:
        results = equation.primitive.bind(*map(read, equation.invars), **equation.params)
        held.update(zip(equation.outvars, results if equation.primitive.multiple_results else [results]))
    return [read(atom) for atom in wanted]


def program(given, wanted):
    """The jaxpr that computes `wanted` from `given`."""
    chosen = steps(equations, given, wanted)
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in given]
    return jax.make_jaxpr(lambda *arrays: evaluate(chosen, given, wanted, arrays))(*shapes)


forward = program(inputs, [value, *saved])
backward = program([*inputs, *saved, cotangent], gradients)
first = steps(equations, inputs, [value, *saved])
again = [e for e in steps(equations, [*inputs, *saved, cotangent], gradients) if not late & set(e.outvars)]
twice = [equation.primitive.name for equation in again if equation in first]
print(len(forward.eqns), "equations forward,", len(backward.eqns), "backward")
print(len(twice), "run in both:", ", ".join(twice))

# %% [markdown]
# Run one, then the other, and compare with `jax.vjp`. Not nearly the same: the same bits. The halves do
# what the joint program does, to the same numbers, only some of it twice.

# %%
with jax.disable_jit():
    expected, pullback = jax.vjp(lambda params: loss(params, x), params)
    expected = [expected, *pullback(jnp.ones(()))[0]]

arrays = [*params, x]
result, *residuals = jaxpr_as_fun(forward)(*arrays)
computed = jaxpr_as_fun(backward)(*arrays, *residuals, jnp.ones(()))

for name, ours, jaxs in zip(["value", "w1", "w2", "w3"], [result, *computed], expected, strict=True):
    same = np.asarray(ours).tobytes() == np.asarray(jaxs).tobytes()
    print(f"{name:6}", "equal, bit for bit" if same else "NOT EQUAL")
print(f"{sum(array.nbytes for array in residuals):,} bytes in {len(residuals)} arrays between the halves")

# %% [markdown]
# Here is the whole of it, as JAX does it and as we do. The forward runs down on the left of the green line,
# the backward up on its right; squares are heavy. What is saved crosses the line, in a stroke as wide as
# its bytes. A hollow dot is an equation that does not need the cotangent, and yet runs in the backward, at
# the height of its twin in the forward; where that has no dot, it runs in the backward alone. Thin lines
# lead from each value to what reads it.


# %%
def draw_program(axes, saved, title):
    first = steps(equations, inputs, [value, *saved])
    second = steps(equations, [*inputs, *saved, cotangent], gradients)
    depth, mark = len(early_part) - 1, {False: "o", True: "s"}
    left = {v: (0, -row) for row, e in enumerate(early_part) for v in e.outvars}
    right = {v: (1.75, -row) for row, e in enumerate(early_part) if e in second for v in e.outvars}
    right |= {v: (2.8, depth * (row / (len(backward_part) - 1) - 1))
              for row, e in enumerate(backward_part) for v in e.outvars}
    axes.plot([0, 0], [0, -depth], color=GREY, lw=0.9, alpha=0.7, zorder=0)
    axes.plot([1.15, 1.15], [1, -depth - 1], color=GREEN, lw=2.5)
    for v in saved:
        axes.plot([0, 1.15], [left[v][1]] * 2, color=GREEN, lw=1 + nbytes(v) / 100_000, solid_capstyle="butt")
        axes.text(0.6, left[v][1] + 0.28, f"{nbytes(v) / 1e3:,.0f} kB", fontsize=7.5, ha="center")
    for e in second:
        for v in [v for v in dict.fromkeys([*saved, *right]) if v in e.invars]:
            start = (1.15, left[v][1]) if v in saved else right[v]
            colour = GREEN if v in saved else GREY
            axes.plot(*zip(start, right[e.outvars[0]]), color=colour, lw=0.9, alpha=0.7, zorder=0)
    for e in early_part:
        at, colour = left[e.outvars[0]], BLUE if e in first else GREY
        axes.text(-0.12, at[1], e.primitive.name, ha="right", va="center", fontsize=8, color=colour)
        if e in first:
            axes.plot(*at, mark[e.primitive.name in HEAVY], ms=6, color=colour)
    for e in second:
        at, anew = right[e.outvars[0]], e in early_part
        colour = BLUE if anew else ORANGE
        axes.plot(*at, mark[e.primitive.name in HEAVY], ms=6, color=colour, mfc="white" if anew else colour)
        if not anew:
            axes.text(2.92, at[1], e.primitive.name, va="center", fontsize=8, color=ORANGE)
    axes.set_title(f"{title}\n{sum(map(nbytes, saved)) / 1e3:,.0f} kB cross", fontsize=11)
    axes.set(xlim=(-1.5, 4.2), ylim=(-depth - 1.8, 2))
    for at, colour, name, end in [(0, BLUE, "forward ↓", "value"), (2.8, ORANGE, "backward ↑", "cotangent")]:
        axes.text(at, 1, name, color=colour, ha="center", weight="bold")
        axes.text(at, -depth - 1.5, end, color=colour, ha="center", style="italic")
    axes.axis("off")


figure, (one, other) = plt.subplots(1, 2, figsize=(10, 7.8), layout="constrained")
draw_program(one, wanted, "What JAX saves")
draw_program(other, saved, "The minimum cut")
plt.show()

# %% [markdown]
# ## 6. Where the toy falls short
#
# That is all that is needed for a program like ours. It is not all that is needed.
#
# - **Loops.** To the toy a `lax.scan` is one equation that must not run twice. But what a scan saves is a
#   stack, one copy for each step, and that is where most of the memory of a deep model goes. The cut has to
#   look inside: join the body of the forward loop with the body of the backward loop, and cut that. See
#   [04_inside_loops](04_inside_loops.ipynb) and `partition/bodies/read.py`.
# - **The peak.** Bytes saved are what lies between the halves. What does not fit into memory is the *peak*,
#   which may lie in the middle of the backward, where the arrays that are computed again are alive as well.
#   And a budget may be so small that matrix products have to run twice. See [03_budgets](03_budgets.ipynb),
#   `partition/lower/memory/levels.py` and `partition/search/budget.py`.
# - **The compiler hoists.** Nothing in our backward says *when* to compute again. XLA sees equations that
#   need no cotangent, may run them all at the very start, and then has in memory what we did not save. Each
#   has to be tied to the cotangent for which it is needed: `partition/lower/order.py` and
#   `partition/lower/emit.py`.
#   What is left of the saving once XLA has compiled it is measured in [01_first_cut](01_first_cut.ipynb).
# - **The compiler fuses.** Cheap operations are merged with those that read them, and never reach memory; a
#   product always does. Among cuts of equal bytes it is therefore better to save the product. And not all
#   that is elementwise is cheap: a chain of many `exp` and `tanh` costs more than it saves. See
#   [02_read_a_plan](02_read_a_plan.ipynb), `partition/prices/rules.py` and `partition/search/mincut.py`,
#   which also
#   finds exact cuts of more than 32 bits.
# - **What else is in a program.** Branches, custom derivatives, effects that must happen once, writes to
#   references, the same array passed twice. The file `partition/program/sides.py` begins where our `late`
#   ends.
#
# ## 7. The real thing
#
# The idea stays the same, and for our function so does the answer. This is jointcut, on the same `loss`:

# %%
from jointcut import aot

cut = aot.function(loss).trace(params, x).partition()
for found in cut.plan.saved:
    print(f"{found.bytes:8,} bytes  {found.dtype}{list(found.shape)} {found.op}")
print(f"{cut.plan.bytes_saved:8,} bytes in all; the toy saves {sum(map(nbytes, saved)):,}")

# %% [markdown]
# As many bytes. Of the last layer it takes another value of the same size, the product itself: that is
# written to memory in any case, while XLA fuses what follows into its readers. The gradients are those of
# `jax.vjp`:

# %%
result, computed = aot.function(loss).value_and_grad(params, x)
close = [np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip([result, *computed], expected, strict=True)]
print("the same, up to the rounding of a compiler that fuses:", all(close))

# %%
bars = {
    "jax.vjp": [nbytes(v) for v in wanted],
    "the toy": [nbytes(v) for v in saved],
    "jointcut": [found.bytes for found in cut.plan.saved],
}
figure, axes = plt.subplots(figsize=(9, 2.2), layout="constrained")
for (name, amounts), colour in zip(bars.items(), [GREY, GREEN, BLUE]):
    amounts = np.sort(amounts)[::-1] / 1e6
    axes.barh(name, amounts, left=np.cumsum(amounts) - amounts, color=colour, ec="white", lw=1.2)
    axes.text(amounts.sum() + 0.03, name, f"{amounts.sum():.2f} MB in {len(amounts)} arrays", va="center")
axes.invert_yaxis()
axes.set(xlim=(0, 4.4), xlabel="MB saved from the forward for the backward")
axes.spines[["top", "right", "left"]].set_visible(False)
axes.tick_params(left=False)
plt.show()

# %% [markdown]
# From here, [01_first_cut](01_first_cut.ipynb) shows how to use it, and what it is worth once it is
# compiled. To read the source, begin with `partition/__init__.py`: it lists the files in the order in which
# to read them, which is nearly that of this notebook.
