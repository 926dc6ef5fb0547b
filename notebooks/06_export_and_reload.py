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
# # Export and reload
#
# A model usually lives as long as its source: the Python file, the library that defined its layers, the
# versions of both. What trains it is none of that, but two programs, a forward and a backward, and a few
# arrays between them. This notebook writes these to a folder, **deletes the source**, and goes on training:
# first with jointcut, then without it.
#
# You need to have seen [01_first_cut](01_first_cut.ipynb).

# %%
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from matplotlib import pyplot as plt

from jointcut import aot

plt.rcParams.update({"figure.dpi": 90, "font.size": 10})
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8a8f98"
temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)

# %% [markdown]
# ## 1. A model, in a file of its own
#
# The task is an old one: two spirals lie in each other, and a network has to tell from the coordinates of a
# point to which it belongs. The model is a residual network: waves, three blocks in a `scan`, two logits.

# %%
SOURCE = """
import jax
import jax.numpy as jnp


def loss(params, points, labels):
    def block(hidden, weights):
        up, down = weights
        return hidden + jax.nn.gelu(hidden @ up) @ down, None

    waves = jnp.sin(points @ params["in"])
    hidden, _ = jax.lax.scan(block, waves, (params["up"], params["down"]))
    logits = hidden @ params["out"]
    return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(logits), axis=1)), logits
"""
(folder / "spirals.py").write_text(SOURCE)
sys.path.insert(0, str(folder))
import spirals

draws = np.random.default_rng(7)


def normal(*shape, scale=1.0):
    return (scale * draws.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)


arm = np.arange(512) % 2
turn = np.sqrt(draws.uniform(0.04, 1, 512))
angle = 3.5 * np.pi * turn + np.pi * arm
points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], 1) + 0.03 * draws.standard_normal((512, 2))
points, labels = points.astype(np.float32), np.eye(2, dtype=np.float32)[arm]
start = {
    "in": normal(2, 64, scale=4.0),
    "up": normal(3, 64, 128),
    "down": normal(3, 128, 64, scale=0.3),
    "out": normal(64, 2, scale=0.3),
}

# %% [markdown]
# We train it by plain gradient descent, 180 steps. This is the run that all others will be held against.

# %%
RATE, STEPS = 0.05, 60
loss = aot.function(spirals.loss, has_aux=True)


def train(function, params, steps):
    losses = []
    for _ in range(steps):
        (value, _), gradients = function.value_and_grad(params, points, labels)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, gradients)
        losses.append(float(value))
    return params, losses


first, first_losses = train(loss, start, STEPS)
live, live_losses = train(loss, first, 2 * STEPS)
live_losses = first_losses + live_losses
print(f"loss {live_losses[0]:.2f} at the start, {live_losses[-1]:.2f} after {len(live_losses)} steps")

# %% [markdown]
# ## 2. One call, one folder
#
# `export` traces for these arguments, cuts, and writes. Without `platforms` it writes for four, and needs
# none of them: lowering is a translation, and a laptop can translate for a TPU.

# %% tags=["varies"]
artefact = loss.export(folder / "artefact", start, points, labels)


def run(*command, **environment):
    """Run a command in the folder, as a process of its own; what it prints."""
    shell = {"JAX_PLATFORMS": "cpu", **os.environ, **environment}
    done = subprocess.run(command, cwd=folder, env=shell, capture_output=True, text=True)
    return done.stdout + done.stderr


JOINTCUT = str(Path(sysconfig.get_path("scripts")) / "jointcut")
print(run(JOINTCUT, "show", "artefact"))

# %% [markdown]
# That is the command `jointcut show artefact`. Everything has a name and a place: six arguments go in, two
# results come out, and twelve arrays are what the backward reads. Of those only the ones called `saved` are
# new; inputs and outputs are in the caller's hands already, and the artefact does not store them twice.
#
# The table is not kept anywhere: it is read from `signature.json`, which is the contract of the folder. It
# is made for other people's programs, so let us be one, and read it with nothing but `json`.

# %%
signature = json.loads((artefact / "signature.json").read_text())
for r in signature["residuals"]:
    where = f"{r['op']} at {Path(r['source']).name.partition(' (')[0]}" if r["op"] else "-"
    print(f"{r['kind']:7}{r['bytes']:>8,}  {r['dtype']}{r['shape']!s:15}{where:34}{r['reason']}")

plain = loss.trace(start, points, labels).partition("save_all").plan
print(f"\n{signature['plan']['bytes_saved']:,} bytes are saved; jax.vjp keeps {plain.bytes_saved:,}")

# %% [markdown]
# Each residual tells why it is there. A result of a matrix product is saved because products are not run
# twice. Of the first layer the `cos` is saved and not the product below it: both are equally large, and the
# cosine is what the backward asks for.
#
# `forward.mlir` and `backward.mlir` are the programs as StableHLO text, for reading and for other compilers.
# `forward.stablehlo` and `backward.stablehlo` are what `jax.export` reads, for all four platforms at once:

# %%
for name in ("forward", "backward"):
    program = export.deserialize(bytearray((artefact / f"{name}.stablehlo").read_bytes()))
    print(f"{name}, for {', '.join(program.platforms)}")
    print("  takes", "\n        ".join(map(str, program.in_avals)))
    print("  gives", "\n        ".join(map(str, program.out_avals)))

# %% [markdown]
# ## 3. Without the source
#
# Now the source goes. A new process has never seen `spirals.py`, and could not import it.

# %%
np.savez(folder / "first.npz", points=points, labels=labels, **first)
(folder / "spirals.py").unlink()
shutil.rmtree(folder / "__pycache__", ignore_errors=True)

WITH_JOINTCUT = """
import jax
import numpy as np
from jointcut import aot

loss = aot.load("artefact")
state = dict(np.load("first.npz"))
points, labels = state.pop("points"), state.pop("labels")
losses = []
for _ in range(60):
    (value, logits), gradients = loss.value_and_grad(state, points, labels)
    state = jax.tree.map(lambda p, g: p - 0.05 * g, state, gradients)
    losses.append(float(value))
named = {f"args[0]['{name}']": array for name, array in state.items()}
np.savez("second.npz", losses=losses, **named, **{"args[1]": points, "args[2]": labels})
print(loss)
try:
    import spirals
except ModuleNotFoundError as error:
    print(error)
"""
print(run(sys.executable, "-c", WITH_JOINTCUT))

# %% [markdown]
# `aot.load` gives back a function: `value_and_grad`, `grad` and `vjp` are there, and `jax.grad` and
# `jax.jit` work around it. It knows its arguments by the paths in the signature.
#
# For the last 60 steps we take jointcut away as well. `jax.export` reads the two programs, the signature
# says what goes where, and that is all that a training loop needs:

# %%
WITH_JAX_ALONE = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax import export

def program(name):
    with open(f"artefact/{name}.stablehlo", "rb") as file:
        return jax.jit(export.deserialize(bytearray(file.read())).call)

signature = json.load(open("artefact/signature.json"))
forward, backward = program("forward"), program("backward")
given = np.load("second.npz")
leaves = [given[i["path"]] for i in signature["inputs"]]
place = {i["name"]: at for at, i in enumerate(signature["inputs"])}
count, losses = len(signature["outputs"]), []
for _ in range(60):
    results = forward(*leaves)
    held = {"input": leaves, "output": results[:count], "saved": results[count:]}
    residuals = [held[r["kind"]][r["index"]] for r in signature["residuals"]]
    for gradient, value in zip(signature["gradients"], backward(*residuals, jnp.ones(()))):
        leaves[place[gradient["of"]]] -= 0.05 * value
    losses.append(float(results[0]))
np.savez("third.npz", losses=losses, **{i["path"]: leaf for i, leaf in zip(signature["inputs"], leaves)})
print("jointcut was imported:", "jointcut" in sys.modules)
"""
print(run(sys.executable, "-c", WITH_JAX_ALONE))

# %% [markdown]
# Three owners, one run. Is it the run that the live function made?

# %%
second, third = np.load(folder / "second.npz"), np.load(folder / "third.npz")
last = {name: third[f"args[0]['{name}']"] for name in live}
relayed = [*first_losses, *second["losses"], *third["losses"]]
print("the same losses:    ", np.allclose(relayed, live_losses, rtol=1e-4))
print("the same parameters:", all(np.allclose(last[name], live[name], atol=1e-4) for name in live))

figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
axes.plot(live_losses, color=GREY, lw=6, alpha=0.45, label="the live function, throughout")
owners = {
    "the live function, then": BLUE,
    "aot.load, without the source, then": ORANGE,
    "jax.export, without jointcut": GREEN,
}
for turn, (name, colour) in enumerate(owners.items()):
    steps = slice(turn * STEPS, (turn + 1) * STEPS)
    axes.plot(range(len(relayed))[steps], relayed[steps], color=colour, lw=1.8, label=name)
axes.set(xlabel="step", ylabel="loss", ylim=(0, None), xlim=(0, 3 * STEPS))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## 4. Any number of points, and a second derivative
#
# The artefact above takes 512 points, no more and no fewer. A size that is a *name* stays open. The plan
# still has to be made for some number, since it weighs bytes: `sizes` says which. And `order=2` writes the
# derivatives of the backward as well. (An export traces, so it needs the function; this process still has
# it.)

# %%
any_points = aot.shapes("b, 2", "float32")
anywhere = loss.export(
    folder / "any-batch", start, any_points, any_points, sizes={"b": 512}, platforms="cpu", order=2
)
again = aot.load(anywhere)
for info in json.loads((anywhere / "signature.json").read_text())["inputs"]:
    print(f"{info['path']:16} {info['shape']}")

# %% [markdown]
# So we can ask it about 6,400 points on a grid, and see what it believes of the plane at each stage. The
# function returns its logits beside the loss; the labels of the grid do not matter for those.

# %%
side = np.linspace(-1.15, 1.15, 80, dtype=np.float32)
grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
figure, row = plt.subplots(1, 3, figsize=(9, 3.3), layout="constrained")
stages = {"at the start": start, "after 60 steps": first, "after 180 steps": last}
for axes, (title, params) in zip(row, stages.items()):
    _, logits = again(params, grid, np.zeros_like(grid))
    belief = jax.nn.softmax(logits)[:, 1].reshape(80, 80)
    axes.imshow(belief, extent=(-1.15, 1.15) * 2, origin="lower", cmap="PuOr_r", vmin=0, vmax=1, alpha=0.5)
    axes.scatter(*points.T, c=arm, s=14, cmap="PuOr_r", vmin=-0.1, vmax=1.1, ec="white", lw=0.4)
    value, _ = again(params, points, labels)
    axes.set(title=f"{title}: loss {value:.2f}", xticks=[], yticks=[], aspect="equal")
plt.show()

# %% [markdown]
# A second derivative answers a question that anybody who trains has asked: could the rate be higher?
# Gradient descent at rate $r$ is stable where the sharpest curvature of the loss, the largest eigenvalue of
# its Hessian, is below $2/r$. Power iteration finds it, with one product of Hessian and vector per round: the
# gradient of a gradient, here of a function whose source is gone.


# %%
@jax.jit
def hessian_times(params, direction):
    def slope(params):
        gradient, _ = jax.grad(again, has_aux=True)(params, points, labels)
        return sum(jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction)))

    return jax.grad(slope)(params)


def sharpness(params, rounds=20):
    direction = jax.tree.map(np.ones_like, params)
    for _ in range(rounds):
        size = jnp.sqrt(sum(jnp.vdot(d, d) for d in jax.tree.leaves(direction)))
        direction = hessian_times(params, jax.tree.map(lambda d: d / size, direction))
    return float(jnp.sqrt(sum(jnp.vdot(d, d) for d in jax.tree.leaves(direction))))


for title, params in stages.items():
    sharp = sharpness(params)
    print(f"{title:16} sharpest curvature {sharp:5.1f}, so a rate below {2 / sharp:.2f}")

# %% [markdown]
# We went at 0.05 and could have gone three times as fast. So, from where the first 60 steps led:

# %%
for rate in (0.05, 0.15):
    params = first
    for _ in range(STEPS):
        (value, _), gradients = again.value_and_grad(params, points, labels)
        params = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
    print(f"60 more steps at {rate}: loss {again(params, points, labels)[0]:.3f}")

# %% [markdown]
# The first artefact was exported with `order=1`, and says so when it is asked for more:

# %% tags=["raises-exception"]
once = aot.load(artefact)


def steepness(params):
    gradient, _ = jax.grad(once, has_aux=True)(params, points, labels)
    return sum(jnp.vdot(g, g) for g in gradient.values())


jax.grad(steepness)(first)

# %% [markdown]
# ## 5. A folder that was changed
#
# Reading an artefact unpickles nothing and runs no Python of its own, and the signature holds the SHA-256 of
# every file, and of itself. We flip one bit of the backward, and in another copy let the signature say that
# something else is saved.


# %%
def damaged(name, file, change):
    copy = shutil.copytree(artefact, folder / name)
    (copy / file).write_bytes(change((copy / file).read_bytes()))
    return copy


def flip(data):
    return data[:1000] + bytes([data[1000] ^ 1]) + data[1001:]


flipped = damaged("flipped", "backward.stablehlo", flip)
rewritten = damaged("rewritten", "signature.json", lambda data: data.replace(b'"saved_2"', b'"saved_9"'))
for copy in (flipped, rewritten):
    try:
        aot.load(copy)
    except aot.ArtefactError as error:
        print(error, end="\n\n")

# %% [markdown]
# ## 6. The other way to start fast
#
# An artefact is for those who do not have the source. Those who have it can let jointcut keep what it
# compiled. Give `aot.function` a `cache`, or set `JOINTCUT_CACHE_DIR`: the next process traces the function,
# finds the program under the fingerprint of all that could change it (what was traced, the options, versions,
# flags, the processor), and does not cut or compile at all.

# %%
(folder / "spirals.py").write_text(SOURCE)
A_STEP = """
import time
import jax, numpy as np
from jointcut import aot
import spirals

state = dict(np.load("first.npz"))
points, labels = state.pop("points"), state.pop("labels")
jax.block_until_ready(jax.numpy.zeros(8) + 1)
began = time.perf_counter()
loss = aot.function(spirals.loss, has_aux=True)
jax.block_until_ready(loss.value_and_grad(state, points, labels))
print(time.perf_counter() - began)
"""

# %% tags=["varies"]
cache = {"JOINTCUT_CACHE_DIR": str(folder / "cache")}
seconds = {
    "first process": float(run(sys.executable, "-c", A_STEP, **cache)),
    "second process": float(run(sys.executable, "-c", A_STEP, **cache)),
}
figure, axes = plt.subplots(figsize=(7, 1.3), layout="constrained")
for (name, taken), colour in zip(seconds.items(), [BLUE, GREEN]):
    axes.barh(name, taken, color=colour)
    axes.text(taken, name, f"  {taken:.2f} s", va="center")
axes.invert_yaxis()
axes.set(xlabel="seconds from decorating the function to the end of its first step")
axes.spines[["top", "right"]].set_visible(False)
axes.margins(x=0.15)
plt.show()

# %% [markdown]
# The command line says what lies there, and `jointcut cache clear` clears it. An executable is pickled, so
# every entry is signed with a key that was made for this folder; without that key an entry does not count.

# %% tags=["varies"]
held = json.loads(run(JOINTCUT, "cache", "ls", "--json", **cache))
for entry in held["entries"]:
    print(f"{entry['bytes']:,} bytes: {entry['label']}")

# %% [markdown]
# Without the variable nothing is kept; `cache=True` keeps programs in `~/.cache/jointcut/programs`, and
# `JOINTCUT_CACHE_SIZE` says how much may lie there.
#
# What is left: the README inside each artefact, which tells a stranger all of this without this notebook,
# and `tests/clients/`, where an artefact is trained from by JAX alone and run by IREE.

# %%
temporary.cleanup()
