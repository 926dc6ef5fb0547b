"""Compare the order of a tape's hooks with that of eager PyTorch, all kinds at once.

    python -m benchmarks.tape_hooks

It needs PyTorch 2.13: `pip install torch==2.13.0`. One network is written for both: two leaves with hooks on their
gradients and after them, two hooks on one value, hooks before and after the backward of a call, and hooks on what one
op saved. It ends with an error where the two logs differ.
"""

import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp

from jointcut import aot

W, B, X = [[0.2, 0.5], [0.3, -0.4]], [0.1, -0.2], [[1.0, 2.0], [0.5, -1.0]]
MISSING = "benchmarks.tape_hooks compares with PyTorch, which is not installed. pip install torch==2.13.0"

Note = Callable[[str], Callable[..., None]]


def ours() -> list[str]:
    """The hooks of a tape, as they are called."""
    log, note = noting()

    def unpack(x: jax.Array) -> jax.Array:
        note("unpack")()
        return x

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

    def unpack(x: Any) -> Any:
        note("unpack")()
        return x

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


if __name__ == "__main__":
    main()
