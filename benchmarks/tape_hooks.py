"""Compare the order of a tape's hooks with that of eager PyTorch, all kinds at once.

    python -m benchmarks.tape_hooks

It needs PyTorch 2.13: `pip install torch==2.13.0`. One network is written for both: two leaves with hooks on their
gradients and after them, two hooks on one value, hooks before and after the backward of a call, and hooks on what one
op saved. Then graphs are drawn, with several branches and outputs, and hooks at random places. It ends with an error
where two logs differ.

`by_rule` needs no PyTorch: it is the documented order of PyTorch's engine. Of the nodes that are ready, the last one
made runs first; nodes that store a gradient run before all others.
"""

import heapq
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, groupby
from random import Random
from typing import Any

import jax
import jax.numpy as jnp

from jointcut import aot

W, B, X = [[0.2, 0.5], [0.3, -0.4]], [0.1, -0.2], [[1.0, 2.0], [0.5, -1.0]]
MISSING = "benchmarks.tape_hooks compares with PyTorch, which is not installed. pip install torch==2.13.0"

Note = Callable[[str], Callable[..., None]]

#: The number of graphs that are drawn.
GRAPHS = 100

LEAVES = "abcd"

#: The number of operands of each op of a drawn graph, and whether it saves an array.
OPS = {
    "tanh": (1, True), "sin": (1, True), "neg": (1, False), "twice": (1, False), "turned": (1, False),
    "add": (2, False), "mul": (2, True), "matmul": (2, True), "row": (2, False), "cat": (3, False),
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """One op of a graph: its name, the values that it reads, and whether it has packed residuals and a hook."""

    op: str
    read: tuple[int, ...]
    packed: bool
    hooked: bool


@dataclass(frozen=True)
class DrawnGraph:
    """Ops on leaves: values 0 to 3 are the leaves.

    Attributes:
        ops: the ops, in running order.
        outputs: the values that have a cotangent, which may be leaves.
        leaf_hooks: for each leaf, whether it has a hook on its gradient, and one after it.
    """

    ops: tuple[Drawn, ...]
    outputs: tuple[int, ...]
    leaf_hooks: tuple[tuple[bool, bool], ...]

    @classmethod
    def of(cls, seed: int) -> "DrawnGraph":
        """Draw a graph."""
        draw, ops = Random(seed), list[Drawn]()
        for i in range(draw.randint(3, 12)):
            op = draw.choice(list(OPS))
            read = tuple(draw.randrange(len(LEAVES) + i) for _ in range(OPS[op][0]))
            ops.append(Drawn(op, read, draw.random() < 0.5, draw.random() < 0.6))
        outputs = tuple(draw.randrange(len(LEAVES) + len(ops)) for _ in range(draw.randint(1, 4)))
        return cls(tuple(ops), outputs, tuple((draw.random() < 0.7, draw.random() < 0.7) for _ in LEAVES))


def ours_of(graph: DrawnGraph) -> list[str]:
    """The hooks of a tape on a drawn graph, as they are called."""
    log, note = noting()
    run: dict[str, Callable[..., Any]] = {
        "tanh": jnp.tanh, "sin": jnp.sin, "neg": jnp.negative, "twice": lambda a: 2.0 * a, "turned": lambda a: a.T,
        "add": jnp.add, "mul": jnp.multiply, "matmul": jnp.matmul, "row": lambda a, b: a + b[0],
        "cat": lambda a, b, c: jnp.concatenate([a, b, c])[1:3],
    }  # fmt: skip

    def values(*leaves: jax.Array) -> list[jax.Array]:
        made: list[jax.Array] = []
        for x, name, (hooked, after) in zip(leaves, LEAVES, graph.leaf_hooks, strict=True):
            x = aot.on_cotangent(x, note(f"leaf {name}")) if hooked else x
            made.append(aot.post_accumulate(x, note(f"done {name}")) if after else x)
        for i, drawn in enumerate(graph.ops):
            pack = aot.saved_arrays(lambda x: x, passing(note(f"unpack{i}"))) if drawn.packed else nullcontext()
            with pack:
                y = run[drawn.op](*(made[j] for j in drawn.read))
            made.append(aot.on_cotangent(y, note(f"h{i}")) if drawn.hooked else y)
        return [made[j] for j in graph.outputs]

    out, pull = aot.tape(values).vjp(*(jnp.eye(2) * (i + 1) / 4 + 0.1 for i in range(len(LEAVES))))
    pull([jnp.ones_like(x) for x in out])
    return once(log)


def theirs_of(torch: Any, graph: DrawnGraph) -> list[str]:
    """The hooks of eager PyTorch on a drawn graph."""
    log, note = noting()
    run = {
        "tanh": torch.tanh, "sin": torch.sin, "neg": torch.neg, "twice": lambda a: 2.0 * a, "turned": lambda a: a.T,
        "add": torch.add, "mul": torch.mul, "matmul": torch.matmul, "row": lambda a, b: a + b[0],
        "cat": lambda a, b, c: torch.cat([a, b, c])[1:3],
    }  # fmt: skip
    made = [(torch.eye(2) * (i + 1) / 4 + 0.1).requires_grad_() for i in range(len(LEAVES))]
    for x, name, (hooked, after) in zip(made, LEAVES, graph.leaf_hooks, strict=True):
        if hooked:
            x.register_hook(note(f"leaf {name}"))
        if after:
            x.register_post_accumulate_grad_hook(note(f"done {name}"))
    for i, drawn in enumerate(graph.ops):
        saved = torch.autograd.graph.saved_tensors_hooks(lambda x: x, passing(note(f"unpack{i}")))
        with saved if drawn.packed else nullcontext():
            y = run[drawn.op](*(made[j] for j in drawn.read))
        if drawn.hooked:
            y.register_hook(note(f"h{i}"))
        made.append(y)
    torch.autograd.backward([made[j] for j in graph.outputs], [torch.ones(2, 2) for _ in graph.outputs])
    return once(log)


def by_rule(graph: DrawnGraph) -> list[str]:
    """The hooks of a drawn graph in the order of PyTorch's engine."""
    first, log, pushed = len(LEAVES), list[str](), count()

    def reads(v: int) -> Sequence[int]:
        return graph.ops[v - first].read if v >= first else ()

    reached, todo = set[int](), list(graph.outputs)
    while todo:
        if (v := todo.pop()) not in reached:
            reached.add(v)
            todo.extend(reads(v))
    waits = Counter([*graph.outputs, *(u for v in reached for u in reads(v))])
    ready: list[tuple[float, int, int]] = []

    def came(v: int) -> None:
        waits[v] -= 1
        if not waits[v]:
            heapq.heappush(ready, (-v if v >= first else -float("inf"), next(pushed), v))

    for v in graph.outputs:
        came(v)
    while ready:
        v = heapq.heappop(ready)[2]
        if v < first:
            hooked, after = graph.leaf_hooks[v]
            log += [f"leaf {LEAVES[v]}"] * hooked + [f"done {LEAVES[v]}"] * after
            continue
        drawn = graph.ops[v - first]
        log += [f"h{v - first}"] * drawn.hooked + [f"unpack{v - first}"] * (drawn.packed and OPS[drawn.op][1])
        for u in drawn.read:
            came(u)
    return once(log)


def passing(note: Callable[..., None]) -> Callable[[Any], Any]:
    """A function that notes a call, and returns its argument."""

    def unpack(x: Any) -> Any:
        note()
        return x

    return unpack


def ours() -> list[str]:
    """The hooks of a tape, as they are called."""
    log, note = noting()
    unpack = passing(note("unpack"))

    def loss(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        w = aot.post_accumulate(aot.on_cotangent(w, note("w")), note("w is complete"))
        b = aot.post_accumulate(aot.on_cotangent(b, note("b")), note("b is complete"))
        with aot.saved_arrays(lambda x: x, unpack):
            h = jnp.tanh(x @ w + b)
        h = aot.on_cotangent(aot.on_cotangent(h, note("h")), note("h again"))
        layer = aot.hooked(lambda h, w: jnp.sin(h @ w), pre_hook=note("pre"), post_hook=note("post"))
        return jnp.sum(aot.on_cotangent(layer(h, w), note("y")) ** 2)

    aot.tape(loss, argnums=(0, 1)).grad(*map(jnp.asarray, (W, B, X)))
    return once(log)


def theirs(torch: Any) -> list[str]:
    """The hooks of eager PyTorch."""
    log, note = noting()

    class Layer(torch.nn.Module):
        def forward(self, h: Any, w: Any) -> Any:
            return torch.sin(h @ w)

    unpack = passing(note("unpack"))
    w, b = (torch.tensor(x, requires_grad=True) for x in (W, B))
    for leaf, name in ((w, "w"), (b, "b")):
        leaf.register_hook(note(name))
        leaf.register_post_accumulate_grad_hook(note(f"{name} is complete"))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        h = torch.tanh(torch.tensor(X) @ w + b)
    h.register_hook(note("h"))
    h.register_hook(note("h again"))
    layer = Layer()
    layer.register_full_backward_pre_hook(note("pre"))
    layer.register_full_backward_hook(note("post"))
    y = layer(h, w)
    y.register_hook(note("y"))
    (y**2).sum().backward()
    return once(log)


def noting() -> tuple[list[str], Note]:
    """A log, and a maker of hooks that write their name into it."""
    log: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            log.append(name)

        return hook

    return log, note


def once(log: Iterable[str]) -> list[str]:
    """The log with equal neighbours once: how many arrays an op saves is not the same in both."""
    return [name for name, _ in groupby(log)]


def main() -> None:
    """Print both logs."""
    try:
        import torch
    except ImportError:
        sys.exit(MISSING)
    logs = {"aot.tape": ours(), "PyTorch": theirs(torch)}
    for name, log in logs.items():
        print(f"{name:>9}: {', '.join(log)}")
    if logs["aot.tape"] != logs["PyTorch"]:
        sys.exit("The orders differ.")
    for seed in range(GRAPHS):
        graph = DrawnGraph.of(seed)
        both = [ours_of(graph), by_rule(graph)]
        if any(log != theirs_of(torch, graph) for log in both):
            sys.exit(f"The orders differ on graph {seed}: {graph}\n{both}\n{theirs_of(torch, graph)}")
    print(f"{GRAPHS} graphs: aot.tape, PyTorch and the rule of its engine call all hooks in one order.")


if __name__ == "__main__":
    main()
