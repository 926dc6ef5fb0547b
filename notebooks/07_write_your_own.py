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
# # Write your own
#
# jointcut takes no flags for what it cannot foresee. It takes functions. Four kinds of them stand between
# your model and the compiled step, and each is a few lines of Python:
#
# | what | what it is | given as |
# |---|---|---|
# | a cost model | how long an op takes | `aot.function(cost=...)` |
# | a rule | this value must be saved, or must not | a demand, in a strategy |
# | a wrapper | another calling convention, and back | around the function, or by `register_container` |
# | a strategy | a function from a graph to a plan | `aot.function(strategy=...)` |
#
# None of them can make a gradient wrong. A plan that does not hold together is refused, and one that does
# computes what `jax.vjp` computes, only at another price. We check it every time all the same.

# %%
import math
from collections import Counter
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot as plt

from jointcut import aot
from jointcut.partition import (
    CheckpointPolicy, Constraint, Graph, Plan, Planner, Problem, Roofline,
    Side, diff, min_cut, parse, save_all, show,
)
from jointcut.partition.errors import PlanError
from jointcut.partition.program.primitives import DEAR

plt.rcParams.update({"figure.dpi": 90, "font.size": 10})
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8a8f98"

# %% [markdown]
# Our model: three blocks, each with a normalisation, a matrix product, a softplus, another product and a
# `tanh`.


# %%
def block(weights, h):
    up, down = weights
    with jax.named_scope("norm"):
        centred = h - h.mean(-1, keepdims=True)
        h = h + centred / jnp.sqrt(1e-5 + (centred**2).mean(-1, keepdims=True))
    with jax.named_scope("gate"):
        return h + jnp.tanh(jax.nn.softplus(h @ up) @ down)


def loss(params, x):
    h = x
    for weights in params["blocks"]:
        h = block(weights, h)
    return jnp.mean((h @ params["out"] - x) ** 2)


draws = np.random.default_rng(0)


def normal(*shape):
    return (draws.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)


x = normal(1024, 64)
params = {"blocks": [(normal(64, 256), normal(256, 64)) for _ in range(3)], "out": normal(64, 64)}


def check(function, *arguments, of=loss):
    """Hold value and gradients against those of JAX."""
    ours, jaxs = function.value_and_grad(*arguments), jax.value_and_grad(of)(*arguments)
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(jaxs), strict=True)
    same = all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)
    print("value and gradients are JAX's" if same else "WRONG")


def tell(before, after):
    """Say what changes from one plan to another; what is the same in every block, once."""
    totals, *values = str(diff(before, after)).splitlines()
    print(totals)
    for line, count in Counter(values).items():
        print(f"{count} x  {line}")
    print()


# %% [markdown]
# ## 1. A cost model
#
# Which is cheaper: to keep an array, or to compute it again? That depends on the machine, and by default
# jointcut measures it. Here we state what a usual machine does in a second, so that this page reads the same
# everywhere. And then there is the **Abacus 3000**. It multiplies matrices as fast as any, but has no circuit
# for `exp`, `log` or `tanh`: a clerk looks each number up in a book, and takes three nanoseconds for it.
#
# A cost model answers two questions: how long does this op take, and how long does it take to write so many
# bytes and read them again?


# %%
usual = Roofline(flops_per_s=1e11, elementwise_per_s=2e11, bytes_per_s=5e10)


@dataclass(frozen=True)
class Abacus:
    book_seconds: float = 3e-9  # to look up one number

    def seconds(self, graph, op):
        lookups = len(DEAR & {op.name, *op.inner})
        elements = max((math.prod(graph.values[v].shape) for v in op.outputs), default=0)
        return usual.seconds(graph, op) + self.book_seconds * lookups * elements

    def saving_seconds(self, num_bytes):
        return usual.saving_seconds(num_bytes)


on_usual = aot.function(loss, cost=usual).trace(params, x)
on_abacus = aot.function(loss, cost=Abacus()).trace(params, x)
print(on_abacus.pareto())

# %% [markdown]
# Does it matter for which machine one plans? Each traced function has a `planner`, and its `front` holds the
# fewest seconds of computing again for every number of bytes saved. Below, both fronts are priced on the
# Abacus: the plans that were made for it, and those that were made for the usual machine and run there by
# mistake.

# %%
usual_planner, abacus_planner = on_usual.planner, on_abacus.planner
fronts = [(usual_planner, "planned for the usual machine", ORANGE)]
fronts += [(abacus_planner, "planned for the Abacus", BLUE)]
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for planner, name, colour in fronts:
    plans = [planner.plan(choice, name) for choice in planner.front.choices]
    milliseconds = [1e3 * abacus_planner.priced(plan).seconds for plan in plans]
    axes.plot([plan.bytes_saved / 1e6 for plan in plans], milliseconds, "o-", ms=4, color=colour, label=name)
axes.set(xlabel="saved for the backward (MB)", ylabel="computing again on the Abacus (ms)", ylim=(0, None))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# What is it that they do differently? Take 5 MB, and let `diff` say.

# %%
hasty, wise = (
    abacus_planner.priced(planner.plan(planner.front.best(5_000_000), name)) for planner, name, _ in fronts
)
tell(hasty, wise)
for plan in (hasty, wise):
    again = [on_abacus.graph.ops[i] for i in plan.recomputed]
    lookups = sum(bool(DEAR & {op.name, *op.inner}) for op in again)
    products = sum(op.name == "dot_general" for op in again)
    print(f"{plan.strategy}: {lookups} ops of the book again, {products} matrix products")

check(aot.function(loss, plan=wise), params, x)

# %% [markdown]
# ## 2. A rule
#
# A strategy may take demands on single values: this one must be saved, that one must be computed again. Say
# that one day we want to store what is saved in few bits. An `exp` is bad at that, since its numbers range so
# widely; what goes into it is better. And while we debug, we want to look at what flows from block to block.
# A rule says so of the whole graph. Each `Constraint` has a value, a demand and a reason, which later stands
# in the plan.


# %%
def demands(graph):
    for op in graph.ops:
        for v in op.outputs if op.origin is Side.FORWARD else ():
            if op.name == "exp":
                yield Constraint(v, CheckpointPolicy.MUST_RECOMPUTE, "its range is too wide")
            if op.name == "add" and op.scope.endswith("gate)"):
                yield Constraint(v, CheckpointPolicy.MUST_SAVE, "somebody looks at it")


def ruled(graph):
    return replace(min_cut(Problem.of(graph, constraints=demands(graph))), strategy="min_cut with demands")


tell(on_usual.partition().plan, on_usual.partition(ruled).plan)
check(aot.function(loss, strategy=ruled), params, x)

# %% [markdown]
# Demands are kept or refused, never half kept. They go before the rules of cost, such as `min_cut`'s own that
# a chain of transcendental functions is not run twice. Who demands two things of one value leaves nothing:


# %% tags=["raises-exception"]
def of_softplus(graph, demand, reason):
    for op in graph.ops:
        if op.origin is Side.FORWARD and "exp" in op.inner:
            yield Constraint(op.outputs[0], demand, reason)


def torn(graph):
    yield from of_softplus(graph, CheckpointPolicy.MUST_SAVE, "every softplus is kept")
    yield from of_softplus(graph, CheckpointPolicy.MUST_RECOMPUTE, "no softplus is kept")


on_usual.partition(lambda graph: min_cut(Problem.of(graph, constraints=torn(graph))))

# %% [markdown]
# One demand alone has an answer: the softplus runs again. A `Planner` knows prices where `min_cut` knows
# rules, so its plan says what that takes. (`aot.function(policy=...)` makes such demands by name, for every
# strategy.)


# %%
def without_softplus(graph):
    demands = of_softplus(graph, CheckpointPolicy.MUST_RECOMPUTE, "no softplus is kept")
    planner = Planner(Problem.of(graph, usual, demands))
    return planner.plan(planner.front.best(10_000_000), "no softplus")


tell(usual_planner.priced(on_usual.partition().plan), on_usual.partition(without_softplus).plan)
check(aot.function(loss, strategy=without_softplus), params, x)

# %% [markdown]
# ## 3. A wrapper
#
# Between your arguments and the compiled program stand wrappers. Each has two halves: `pre_compile` takes a
# function and makes one with a simpler convention, `post_compile` takes the compiled call and puts back what
# was taken away. The law: *if the compiled call is the simpler function itself, the result behaves as the
# original*.
#
# Some accelerators know no complex numbers. So let us hand them pairs of real ones. The function is a filter
# that is learned in the frequency domain: a complex number for each frequency.


# %%
from jointcut.wrappers import Convention, Slot, Target, pre_compile, slots


def is_complex(array):
    return jnp.issubdtype(array.dtype, jnp.complexfloating)


class RealPairs:
    """Give each complex argument to the compiler as two real ones."""

    def pre_compile(self, target):
        given = target.convention.inputs
        real = [slot for s in given for slot in (self.halves(s) if is_complex(s) else [s])]

        def function(*arrays):
            left = iter(arrays)
            return target.function(*[jax.lax.complex(next(left), next(left)) if is_complex(s) else next(left)
                                     for s in given])

        return Target(function, Convention(tuple(real), target.convention.outputs))

    def halves(self, slot):
        dtype = np.dtype(np.float32 if slot.dtype == np.complex64 else np.float64)
        return [Slot(f"{slot.path}.{part}", slot.shape, dtype) for part in ("real", "imag")]

    def post_compile(self, call, target):
        def complex_call(*arrays):
            return call(*[part for a in arrays for part in ([a.real, a.imag] if is_complex(a) else [a])])

        return complex_call


def filtered(response, signal, wanted):
    heard = jnp.fft.irfft(jnp.fft.rfft(signal) * response, n=signal.shape[-1])
    return jnp.mean((jnp.tanh(heard) - wanted) ** 2)


signal, wanted = normal(32, 256), normal(32, 256)
response = jnp.ones(129, jnp.complex64) * (0.6 + 0.3j)
arguments = [response, signal, wanted]

convention = Convention(slots(["response", "signal", "wanted"], arguments), ())
wrapped = pre_compile([RealPairs()], Target(filtered, convention))
print("\n".join(map(str, wrapped.target.convention.inputs)))

# %% [markdown]
# The simpler function has four real arguments. Around it the other half of the wrapper makes the function
# that the caller knows. With `wrappers=` both are part of a function of ours, in every way of calling:
# what is traced, cut and compiled is the simpler function with the wrapper around it, and the gradient
# goes through both.

# %%
plain = wrapped.post_compile(wrapped.target.function)
ours = aot.function(filtered, wrappers=[RealPairs()])
print("the law:     ", np.array_equal(plain(*arguments), filtered(*arguments)))
print("the gradient:", np.allclose(ours.grad(*arguments), jax.grad(filtered)(*arguments), atol=1e-7))
print("around it:   ", np.allclose(jax.grad(ours)(*arguments), jax.grad(filtered)(*arguments), atol=1e-7))
print(ours.trace(*arguments))

# %% [markdown]
# On the other side of the cut, a wrapper with `pre_lower` is given each half as a jaxpr before XLA
# compiles it, and may return another one with the same inputs and outputs. This one only looks:


# %%
class Counting:
    """Count the equations of each half."""

    def pre_lower(self, half, jaxpr):
        print(f"{half}: {len(jaxpr.eqns)} equations")
        return jaxpr


_ = aot.function(filtered, wrappers=[RealPairs(), Counting()]).trace(*arguments).partition()

# %% [markdown]
# Often it takes less. If the arrays that belong together are a class of yours, a *container*, jointcut opens
# and closes it by itself. Here is a symmetric matrix that stores one triangle only. `register_container` says
# which of its parts are structure, that is, say where the numbers stand: these a gradient has in common with
# its matrix.


# %%
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Symmetric:
    numbers: jax.Array
    rows: jax.Array
    columns: jax.Array

    @property
    def shape(self):
        return (16, 16)

    @property
    def dtype(self):
        return self.numbers.dtype

    def __jax_array__(self):
        upper = jnp.zeros(self.shape, self.dtype).at[self.rows, self.columns].set(self.numbers)
        return upper + jnp.triu(upper, 1).T


aot.register_container(Symmetric, structure=["rows", "columns"])


def energy(matrix, states):
    return jnp.mean(jnp.tanh(states @ jnp.asarray(matrix)) * states)


rows, columns = np.triu_indices(16)
matrix, states = Symmetric(jnp.asarray(normal(136, 1)[:, 0]), rows, columns), normal(64, 16)
gradient = aot.function(energy).grad(matrix, states)
expected = jax.grad(energy, allow_int=True)(matrix, states)
print(type(gradient).__name__, "with the same rows:", np.array_equal(gradient.rows, rows))
print("the numbers are JAX's:", np.allclose(gradient.numbers, expected.numbers, atol=1e-6))

# %% [markdown]
# ## 4. A strategy
#
# A strategy is a function from a `Graph` to a `Plan`. `Plan.of` needs a list of values to save; what has to
# be computed again follows from it. The rule of thumb that `jax.checkpoint_policies` knows as
# `dots_saveable`, keep the matrix products and compute all else again, is three lines:


# %%
def products_only(graph: Graph) -> Plan:
    makers = [op for op in graph.ops if op.name == "dot_general" and op.origin is Side.FORWARD]
    saved = {op.outputs[0]: "a matrix product" for op in makers}
    return Plan.of(graph, saved, strategy="products only", reasons=saved)


check(aot.function(loss, strategy=products_only), params, x)
report = on_usual.partition(products_only).explain()

# %% tags=["varies"]
report

# %% [markdown]
# The dashed line is plain JAX. The minimum cut runs no product twice either; and it runs no chain of
# transcendental functions twice, which costs it 3 MB:

# %%
tell(report.plan, on_usual.partition().plan)

# %% [markdown]
# The other extreme is a strategy that knows nothing and throws darts. It begins with what JAX keeps, adds or
# drops one value at random, and goes there if the plan holds together and is no worse. (A megabyte counts as
# much as 0.1 ms.) It notes each dart that closes.

# %%
thrown = []


def worth(plan):
    return plan.seconds + 1e-10 * plan.bytes_saved


def darts(graph: Graph, tries: int = 1500) -> Plan:
    problem, random = Problem.of(graph, usual), np.random.default_rng(3)
    planner = Planner(problem)
    early = [v.id for v in graph.values if v.maker is not None and not problem.sides.is_late(v.id)]
    best = planner.priced(save_all(graph))
    for _ in range(tries):
        try:
            saved = {*best.values} ^ {int(random.choice(early))}
            plan = planner.priced(Plan.of(problem, saved, strategy="darts"))
        except PlanError:
            continue
        thrown.append((plan.bytes_saved, plan.seconds))
        best = min(plan, best, key=worth)
    return best


lucky = on_usual.partition(darts)
check(aot.function(loss, plan=lucky.plan), params, x)
choices = [usual_planner.plan(choice, "front") for choice in usual_planner.front.choices]
best = min(choices, key=worth)
for plan in (lucky.plan, best):
    print(f"{plan.strategy:6}{plan.bytes_saved:>10,} bytes, {1e3 * plan.seconds:.2f} ms again")

# %%
saved, seconds = np.array(thrown).T
bytes_along = np.linspace(0, saved.max(), 300)
bound = [usual_planner.front.bound_seconds(int(b)) for b in bytes_along]
marks = [("where the darts end", lucky.plan, ORANGE, "v"), ("products only", report.plan, GREEN, "s")]
marks += [("the best of the front", best, BLUE, "*")]

figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
nowhere = {"color": BLUE, "alpha": 0.15, "lw": 0, "label": "no plan is here (proved)"}
axes.fill_between(bytes_along / 1e6, 1e3 * np.array(bound), **nowhere)
axes.plot(saved / 1e6, 1e3 * seconds, ".", ms=4, color=GREY, alpha=0.5, label="darts")
for name, plan, colour, shape in marks:
    at = plan.bytes_saved / 1e6, 1e3 * usual_planner.priced(plan).seconds
    axes.plot(*at, shape, ms=9, color=colour, mec="black", mew=0.6, label=name)
axes.set(xlabel="saved for the backward (MB)", ylabel="computing again (ms)", ylim=(0, None), xlim=(0, None))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# The darts come as far as the minimum cut, and stick. To get further, a product has to be saved in the place
# of two values that are made of it: three changes at once, and no single one of them is an improvement. The
# rule of thumb is much better here, and still not on the edge. That no plan lies in the shaded region is not
# a matter of trying. It is proved, as the water proved it in [00_from_scratch](00_from_scratch.ipynb).
#
# ## 5. No JAX at all
#
# A graph has a text. `show` writes it, `parse` reads it back, and a text can come from anywhere: another
# framework, a profiler, a sheet of paper.

# %%
text = show(on_usual.graph)
print("\n".join(text.splitlines()[10:16]), "\n...")
print("read back equal:", parse(text) == on_usual.graph)

# %% [markdown]
# So here is a program that JAX has never seen: eight layers of somebody's network for photographs, with the
# sizes and the times that their profiler reported. `takes` is what one run of an op takes. The gradient of
# each layer reads what went into it and what came out.

# %%
megabytes, milliseconds = [32, 32, 16, 16, 8, 8, 4, 4], [5, 9, 5, 9, 5, 9, 5, 9]
elements = [n * 250_000 for n in [4, *megabytes]]
lines = [f'primal %0:float32[{elements[0]}] "photo"', f"cotangent %9:float32[{elements[8]}]"]
for i in range(1, 9):
    lines.append(f"%{i}:float32[{elements[i]}] = layer{i} %{i - 1} takes {milliseconds[i - 1]}e-3s")
lines.append("backward:")
for i in range(8, 0, -1):
    lines.append(f"%{18 - i}:float32[{elements[i - 1]}] = gradient{i} %{17 - i} %{i} %{i - 1}")
lines += ["output %8", "gradient %17"]
print("\n".join(lines[:6]), "...", *lines[10:14], "...", sep="\n")
photographs = parse("\n".join(lines))

# %% [markdown]
# The planner needs no more than that. It finds the whole front at once, with its proof.

# %%
planner = Planner(Problem.of(photographs, usual))
everything = planner.priced(save_all(photographs))
print(f"saving all takes {everything.bytes_saved / 1e6:.0f} MB\n")
for megabytes_left in (100, 60, 30, 10):
    plan = planner.plan(planner.front.best(megabytes_left * 1_000_000), "front")
    names = ", ".join(saved.op for saved in plan.saved)
    print(f"within {megabytes_left:>3} MB: {1e3 * plan.seconds:4.0f} ms again; saves {names}")

# %%
tell(everything, planner.plan(planner.front.best(30_000_000), "front"))

# %% [markdown]
# Each of these was a function of ten or fifteen lines. If yours turns out well, the places where ours stand
# are `partition/prices/cost.py`, `partition/prices/rules.py`, `wrappers/` and `partition/search/mincut.py`;
# each folder lists its
# files in the order in which to read them.
